"""What is imported is kept as it came: as few bits, and the same ones when it goes out again."""

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dist import checkpoint, cli, manifest
from dist import weights as weights_module
from dist.model import load_model
from dist.numbers import KINDS, converted, from_bf16, size_of, to_bf16
from dist.weights import Weights, load_master, parts
from reference.config import Config
from tests.helpers.weights import FAMILIES, GPT2, LLAMA, QWEN3, write_random

# rows of ours that are rows of theirs, columns that are, and heads whose pairs change places
MODELS = {
    "llama": replace(LLAMA, d_model=64, d_ff=96, tied=False),
    "qwen3": replace(QWEN3, window=0, d_ff=96),
    "gpt2": replace(GPT2, d_ff=64),
}
DTYPES = {"bf16": "BF16", "float16": "F16", "q8_0": "Q8_0"}


def moved(folder: Path, config: Config, suffix: str, dtype: str) -> tuple[Path, Path]:
    """Return a file or folder of theirs, and the checkpoint that it was imported as."""
    write_random(folder / "mine", config)
    theirs, back = folder / f"theirs{suffix}", folder / "back" / "mine"
    assert cli.main(["export", str(folder / "mine"), str(theirs), "--dtype", dtype]) == 0
    assert cli.main(["import", str(theirs), "-o", str(back)]) == 0
    return theirs, back


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gguf_file_comes_back_byte_for_byte(config: Config, dtype: str, tmp_path: Path) -> None:
    theirs, back = moved(tmp_path, config, ".gguf", dtype)
    again = tmp_path / "again.gguf"
    assert cli.main(["export", str(back), str(again), "--dtype", dtype]) == 0
    assert again.read_bytes() == theirs.read_bytes()
    weights = Weights(back)
    for name, (_, spec) in weights.layout.offsets.items():
        kind = weights.kind(name)
        if len(spec.shape) == 1 or name == "position.weight":
            assert kind == "F32"
        else:
            assert kind.removesuffix("T") == DTYPES[dtype]
            assert (kind[-1] == "T") == (dtype == "q8_0" and spec.shape[0] != config.vocab_size)
    size = sum(size_of(s.size, weights.kind(n)) for n, (_, s) in weights.layout.offsets.items())
    assert (back / "kept.bin").stat().st_size == size < 2.2 * weights.layout.size
    assert not (back / "master.bin").exists()


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("dtype", ["bf16", "float16"])
def test_a_folder_comes_back_byte_for_byte(config: Config, dtype: str, tmp_path: Path) -> None:
    theirs, back = moved(tmp_path, config, "", dtype)
    assert cli.main(["export", str(back), str(tmp_path / "again"), "--dtype", dtype]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.parametrize("suffix", [".gguf", ".bin", ""])
def test_what_was_written_in_float32_is_a_checkpoint_like_any(suffix: str, tmp_path: Path) -> None:
    _, back = moved(tmp_path, replace(GPT2, d_ff=128), suffix, "float32")
    assert (back / "master.bin").exists() and not Weights(back).manifest.kinds
    assert not (back / "kept.bin").exists()


@pytest.mark.parametrize("stretch", [1, 3_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ways_of_reading_give_the_same_numbers(
    dtype: str, stretch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LLAMA, d_model=160, d_ff=224, vocab_size=1_000)
    _, back = moved(tmp_path, config, ".gguf", dtype)
    widened = tmp_path / "widened.gguf"  # the same numbers as float32
    assert cli.main(["export", str(back), str(widened)]) == 0
    assert cli.main(["import", str(widened), "-o", str(tmp_path / "wide")]) == 0
    whole, expected = load_master(back), load_master(tmp_path / "wide")
    np.testing.assert_array_equal(whole, expected)
    if dtype == "bf16":
        mine = Weights(tmp_path / "mine")
        for name in mine.layout.offsets:
            ours = mine.read(name)
            rounded = from_bf16(to_bf16(ours)) if ours.ndim > 1 else ours
            np.testing.assert_array_equal(Weights(back).read(name), rounded)
    monkeypatch.setattr(weights_module, "STRETCH", stretch)
    monkeypatch.setattr(weights_module, "PART", 10_000)
    weights = Weights(back)
    for name, view in weights.layout.views(whole).items():
        found = np.full_like(view, np.nan)
        for part in parts(weights.layout, name, whole=False):
            for first, kept in weights.rows(part):
                rows = converted(kept, weights.kind(name), "F32")
                found[part.low + first :][: len(rows)] = rows
        np.testing.assert_array_equal(found, view)
    model = load_model(back, "reference")
    for name, view in weights.layout.views(whole).items():
        np.testing.assert_array_equal(model.params[name], view)


def test_tensors_of_several_kinds_become_float32_where_they_share_a_parameter(
    tmp_path: Path,
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    for name in list(tensors):
        if "k_proj" in name or "layers.1.mlp.up" in name or "o_proj" in name:
            tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, path)
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 0
    back, mine = Weights(tmp_path / "back"), Weights(tmp_path / "mine")
    assert back.manifest.kinds == {f"layers.{i}.attention.wo": "F16" for i in range(2)}
    for name in mine.layout.offsets:
        expected, whole = mine.read(name).copy(), slice(None)
        half = {"wqkv": slice(32, 48), "w_gate_up": slice(48, 96), "wo": whole}
        at = half.get(name.split(".")[-1], slice(0))
        if "0.ffn" not in name:
            expected[..., at] = expected[..., at].astype(np.float16)
        np.testing.assert_array_equal(back.read(name), expected)


# ---- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved(tmp_path_factory.mktemp("kept"), LLAMA, ".gguf", "q8_0")[1]


def test_every_byte_of_what_is_kept_is_under_a_crc(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept, tmp_path / "back")
    file = tmp_path / "back" / "kept.bin"
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in (0, 65_535, 65_536, len(whole) - 1, *rng.integers(0, len(whole), 20)):
        damaged = bytearray(whole)
        damaged[at % len(whole)] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="do not have the CRC"):
            load_master(tmp_path / "back")
    for wrong in (whole[:-1], whole + b"\0"):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match="it is damaged"):
            load_master(tmp_path / "back")


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"embedding.weight": "Q4_0"},
        {"nothing.weight": "BF16"},
        {"final_norm.gain": "Q8_0T"},
        {"embedding.weight": "BF16"},
    ],
)
def test_a_manifest_that_does_not_fit_what_is_kept_is_refused(
    kinds: dict[str, str], kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kept, tmp_path / "back")
    found = checkpoint.read_manifest(kept)
    told = msgspec.structs.replace(found, kinds=kinds)
    manifest.write(tmp_path / "back" / checkpoint.MANIFEST, told)
    assert cli.main(["export", str(tmp_path / "back"), str(tmp_path / "hf")]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "back") in said and said.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_a_run_cannot_go_on_from_what_is_kept(kept: Path) -> None:
    with pytest.raises(ValueError, match=r"holds weights alone.*train\.init"):
        checkpoint.read_resumable(kept)


def test_all_kinds_can_be_kept() -> None:
    assert {kind.removesuffix("T") for kind in KINDS} == {"F32", *DTYPES.values()}
