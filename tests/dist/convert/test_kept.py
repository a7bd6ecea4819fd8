"""What is imported is kept as it came: as few bits, and the same ones when it goes out again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dist import checkpoint, cli, manifest
from dist import weights as weights_module
from dist.convert import gguf, mapping, tensors
from dist.model import load_model
from dist.numbers import KINDS, converted, from_bf16, size_of, to_bf16
from dist.weights import Part, Weights, load_master, parts, write_weights
from reference.config import Config
from tests.helpers.weights import FAMILIES, GPT2, LLAMA, QWEN3, parts_of, put_together, write_random

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


def foreign(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return Q8_0 blocks (rows, 34 n) uint8 as no quantizer makes them, but a reader must take."""
    rows, columns = shape
    d = rng.choice([0.25, -0.5, 0.0, -0.0, 6e-8, 65504.0, 1e-3], (rows, columns // 32, 1))
    q = rng.integers(-128, 100, (rows, columns // 32, 32)).astype(np.int8)
    q[..., 0] = -128
    return np.concatenate([d.astype("<f2").view(np.uint8).reshape(rows, -1, 2),
                           q.view(np.uint8)], axis=-1).reshape(rows, -1)  # fmt: skip


def rewritten(path: Path, data: dict[str, bytes]) -> None:
    """Put other bytes where tensors of a GGUF file lie."""
    whole = bytearray(path.read_bytes())
    for name, at in gguf.header(path)[1].items():
        if name in data:
            whole[at.offset : at.offset + len(data[name])] = data[name]
    path.write_bytes(whole)


@pytest.mark.parametrize("stretch", [1, 1 << 18])
def test_blocks_that_no_quantizer_makes_are_kept(
    stretch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LLAMA, d_model=64, d_ff=512, vocab_size=700, tied=False)
    write_random(tmp_path / "mine", config)
    path, again = tmp_path / "theirs.gguf", tmp_path / "again.gguf"
    assert cli.main(["export", str(tmp_path / "mine"), str(path), "--dtype", "q8_0"]) == 0
    rng, shapes = np.random.default_rng(0), {n: t.shape for n, t in gguf.header(path)[1].items()}
    blocks = {name: foreign(rng, shape) for name, shape in shapes.items() if len(shape) == 2}  # type: ignore[arg-type]
    rewritten(path, {name: data.tobytes() for name, data in blocks.items()})
    monkeypatch.setattr(weights_module, "STRETCH", stretch)
    monkeypatch.setattr(weights_module, "STRIP", 64 * 512)
    monkeypatch.setattr(weights_module, "PART", 96 * 64)
    assert cli.main(["import", str(path), "-o", str(tmp_path / "mine2" / "mine")]) == 0
    back = Weights(tmp_path / "mine2" / "mine")
    assert cli.main(["export", str(back.path), str(again), "--dtype", "q8_0"]) == 0
    assert again.read_bytes() == path.read_bytes()
    numbers = {}
    for name, raw in blocks.items():
        each = raw.reshape(len(raw), -1, 34)
        d = each[..., :2].copy().view("<f2").astype(np.float32)
        numbers[name] = (d * each[..., 2:].view(np.int8)).reshape(shapes[name])
    found = {
        "embedding.weight": numbers["token_embd.weight"],
        "head.weight": numbers["output.weight"],
        "layers.1.attention.wo": numbers["blk.1.attn_output.weight"].T,
        "layers.0.ffn.w_down": numbers["blk.0.ffn_down.weight"].T,
        "layers.1.ffn.w_gate_up": np.concatenate(
            [numbers["blk.1.ffn_gate.weight"], numbers["blk.1.ffn_up.weight"]]
        ).T,
    }
    for name, expected in found.items():
        np.testing.assert_array_equal(back.read(name).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_strips_of_rows_are_exported_to_where_they_belong(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(LLAMA, d_model=256, d_ff=288, vocab_size=700)
    write_random(tmp_path / "mine", config)
    words = ["export", str(tmp_path / "mine")]
    assert cli.main([*words, str(tmp_path / "one.gguf"), "--dtype", dtype]) == 0
    monkeypatch.setattr(weights_module, "STRETCH", 1)
    monkeypatch.setattr(weights_module, "STRIP", 64 * 576)
    monkeypatch.setattr(weights_module, "PART", 128 * 256)
    assert cli.main([*words, str(tmp_path / "other.gguf"), "--dtype", dtype]) == 0
    one, other = ((tmp_path / f"{name}.gguf").read_bytes() for name in ("one", "other"))
    assert one == other


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.1.ffn_up.weight"])
def test_a_matrix_that_is_not_finite_is_refused(
    tensor: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, _ = moved(tmp_path, MODELS["llama"], ".gguf", dtype)
    nan = {"float32": b"\0\0\xc0\x7f", "bf16": b"\xc0\x7f"}.get(dtype, b"\0\x7e")
    rewritten(theirs, {tensor: nan})
    assert cli.main(["import", str(theirs), "-o", str(tmp_path / "new")]) == 1
    assert f"the tensor {tensor} is not finite everywhere" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_vector_of_blocks_becomes_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one writes such a file, but it can be read; a cut may fall between its blocks alone."""
    monkeypatch.setattr(mapping, "CHUNK", 50)
    theirs, _ = moved(tmp_path, MODELS["llama"], ".gguf", "q8_0")
    whole = theirs.read_bytes()
    name = b"output_norm.weight"
    at = whole.index(name) + len(name) + 4 + 8
    assert whole[at : at + 4] == bytes(4)  # F32
    theirs.write_bytes(whole[:at] + (8).to_bytes(4, "little") + whole[at + 4 :])
    data = foreign(np.random.default_rng(1), (1, 64))
    rewritten(theirs, {name.decode(): data.tobytes()})
    assert cli.main(["import", str(theirs), "-o", str(tmp_path / "new")]) == 0
    weights = Weights(tmp_path / "new")
    assert weights.kind("final_norm.gain") == "F32"
    each = data.reshape(2, 34)
    expected = each[:, :2].copy().view("<f2").astype(np.float32) * each[:, 2:].view(np.int8)
    np.testing.assert_array_equal(weights.read("final_norm.gain"), expected.reshape(-1))


@pytest.mark.parametrize("dtype", ["Q8_0", "Q8_0T", "F64"])
@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.0.self_attn.o_proj.weight"])
def test_kinds_that_a_folder_cannot_have_are_refused(
    tensor: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "hf")]) == 0
    path = tmp_path / "hf" / "model.safetensors"
    header, data = parts_of(path)
    header[tensor]["dtype"] = dtype
    put_together(path, header, data)
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 1
    said = capsys.readouterr().err
    assert f"{tensor} holds '{dtype}'; known are F32, F16, BF16" in said and "Q8_0T;" not in said
    assert said.count("\n") == 1 and not (tmp_path / "back").exists()


def test_a_head_of_another_type_is_not_the_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though its bits are the same."""
    write_random(tmp_path / "mine", LLAMA)
    words = ["export", str(tmp_path / "mine"), str(tmp_path / "hf"), "--dtype", "float16"]
    assert cli.main(words) == 0
    path = tmp_path / "hf" / "model.safetensors"
    header, data = parts_of(path)
    embedding = header["model.embed_tokens.weight"]
    begin, stop = embedding["data_offsets"]
    places = (len(data), len(data) + stop - begin)
    header["lm_head.weight"] = {**embedding, "dtype": "BF16", "data_offsets": places}
    put_together(path, header, data + data[begin:stop])
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err


def test_of_tensors_side_by_side_the_one_that_its_type_cannot_hold_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(part: Part, out: np.ndarray) -> None:
        out[...] = 0.5
        if part.name == "layers.1.attention.wqkv":
            out[3, 33] = 1e5  # of the keys

    write_weights(tmp_path / "mine", LLAMA, fill, None)
    words = ["export", str(tmp_path / "mine"), str(tmp_path / "hf"), "--dtype", "float16"]
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert "model.layers.1.self_attn.k_proj.weight holds 1e+05, and float16 goes to" in said
    assert "q_proj" not in said and "v_proj" not in said


@pytest.mark.parametrize("d_ff", [64, 100_000])
def test_threads_hold_no_more_rows_than_there_is_room_for(
    d_ff: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def counted(function: Any, items: Any, n: int) -> Any:
        taken.append(n)
        return map(function, items)

    write_weights(tmp_path / "mine", replace(LLAMA, d_ff=d_ff), lambda part, out: out.fill(1), None)
    monkeypatch.setattr(tensors, "in_order", counted)
    monkeypatch.setattr(tensors, "threads", lambda: 64)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.gguf")]) == 0
    rows = 32 * 2 * d_ff  # of gate and up
    assert min(taken) == max(1, min(64, tensors.ROOM // (12 * max(rows, tensors.STRETCH))))


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
        with pytest.raises(
            ValueError, match=r"damaged: bytes .* do not have the CRC .* import it again"
        ):
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
        None,
    ],
)
def test_a_manifest_that_does_not_fit_what_is_kept_is_refused(
    kinds: dict[str, str] | None, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kept, tmp_path / "back")
    found = checkpoint.read_manifest(kept)
    told = msgspec.structs.replace(found, parameters=found.parameters + 1)
    if kinds is not None:
        told = msgspec.structs.replace(found, kinds=kinds)
    manifest.write(tmp_path / "back" / checkpoint.MANIFEST, told)
    assert cli.main(["export", str(tmp_path / "back"), str(tmp_path / "hf")]) == 1
    said = capsys.readouterr().err
    assert str(tmp_path / "back") in said and said.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_older_readers_take_what_they_can_and_say_that_they_are_old(
    kept: Path, tmp_path: Path
) -> None:
    write_random(tmp_path / "mine", LLAMA)
    plain = json.loads((tmp_path / "mine" / checkpoint.MANIFEST).read_bytes())
    assert plain["format_version"] == 2 and "kinds" not in plain
    told = json.loads((kept / checkpoint.MANIFEST).read_bytes())
    assert told["format_version"] == 3 and told["kinds"]


def test_a_model_that_no_disk_holds_is_refused_at_once(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kept, tmp_path / "back")
    path = tmp_path / "back" / checkpoint.MANIFEST
    told = json.loads(path.read_bytes())
    told["config"]["model"] |= {"vocab_size": 2**31 - 1, "d_model": 2**20 - 32}
    path.write_bytes(json.dumps({**told, "format_version": 1}).encode())
    assert cli.main(["export", str(tmp_path / "back"), str(tmp_path / "hf")]) == 1
    assert "does not have a CRC for each block" in capsys.readouterr().err


def test_a_run_cannot_go_on_from_what_is_kept(kept: Path) -> None:
    with pytest.raises(ValueError, match=r"holds weights alone.*train\.init"):
        checkpoint.read_resumable(kept)


def test_all_kinds_can_be_kept() -> None:
    assert {kind.removesuffix("T") for kind in KINDS} == {"F32", *DTYPES.values()}
