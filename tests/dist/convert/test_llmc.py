"""A GPT-2 out to llm.c's checkpoint and back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dist import cli
from dist.weights import Weights
from tests.helpers.weights import GPT2, LLAMA, write_random

CONFIG = replace(GPT2, vocab_size=150, d_ff=128)  # padded to 256


def test_export_then_import_is_the_identity_bit_for_bit(tmp_path: Path) -> None:
    write_random(tmp_path / "mine", CONFIG)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.bin")]) == 0
    assert cli.main(["import", str(tmp_path / "m.bin"), "-o", str(tmp_path / "back")]) == 0
    whole = [(tmp_path / name / "master.bin").read_bytes() for name in ("mine", "back")]
    assert whole[0] == whole[1] and Weights(tmp_path / "back").config == CONFIG


def test_the_file_is_as_llm_c_reads_it(tmp_path: Path) -> None:
    """Its loader, ``gpt2_build_from_checkpoint`` and ``fill_in_parameter_sizes``, in NumPy."""
    views = write_random(tmp_path / "mine", CONFIG)
    for words, dtype, version in (([], "<f4", 3), (["--dtype", "bf16"], "<u2", 5)):
        path = tmp_path / f"{version}.bin"
        assert cli.main(["export", str(tmp_path / "mine"), str(path), *words]) == 0
        header = np.fromfile(path, "<i4", 256)
        maxT, V, L, NH, C, Vp = header[2:8].tolist()
        assert header[:2].tolist() == [20240326, version]
        assert (maxT, V, L, NH, C, Vp) == (32, 150, 2, 4, 32, 256) and not header[8:].any()
        shapes = {
            **{"wte": (Vp, C), "wpe": (maxT, C), "ln1w": (L, C), "ln1b": (L, C)},
            **{"qkvw": (L, 3 * C, C), "qkvb": (L, 3 * C), "attprojw": (L, C, C)},
            **{"attprojb": (L, C), "ln2w": (L, C), "ln2b": (L, C), "fcw": (L, 4 * C, C)},
            **{"fcb": (L, 4 * C), "fcprojw": (L, C, 4 * C), "fcprojb": (L, C)},
            **{"lnfw": (C,), "lnfb": (C,)},
        }
        data = np.fromfile(path, dtype, offset=1024)
        if version == 5:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        assert data.size == sum(int(np.prod(shape)) for shape in shapes.values())
        found, at = {}, 0
        for name, shape in shapes.items():
            found[name] = data[at : (at := at + int(np.prod(shape)))].reshape(shape)
        rtol = 2.0**-8 if version == 5 else 0
        close = {"rtol": rtol, "atol": 0}
        np.testing.assert_allclose(found["wte"][:V], views["embedding.weight"], **close)
        assert not found["wte"][V:].any()
        for layer in range(L):
            ours = f"layers.{layer}"
            for name, theirs in (("attention.wqkv", "qkvw"), ("ffn.w_down", "fcprojw")):
                np.testing.assert_allclose(found[theirs][layer], views[f"{ours}.{name}"].T, **close)
            np.testing.assert_allclose(
                found["ln2b"][layer], views[f"{ours}.ffn_norm.bias"], **close
            )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "llm.c cannot express"),
        (replace(CONFIG, d_ff=40), "d_ff = 40 (it has 128)"),
        (replace(CONFIG, tied=False), "tied = False"),
        (replace(CONFIG, norm_eps=1e-6), "norm_eps = 1e-06"),
        (replace(CONFIG, ffn="gelu"), "ffn = 'gelu'"),
    ],
)
def test_other_models_are_refused_with_the_field(
    config: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", config)  # type: ignore[arg-type]
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.bin")]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    words = ["export", str(tmp_path / "mine"), str(tmp_path / "m.bin"), "--dtype", "float16"]
    assert cli.main(words) == 1
    assert "float32 or bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 7, "no checkpoint of llm.c"),
        (1, 1, "has version 1"),
        (3, -5, "vocab_size must be"),
        (5, 0, "num_heads must be a positive integer"),
        (6, 33, "asks for"),
        (7, 100, "it pads 150 tokens to 100"),
        (2, 2**31 - 1, "asks for"),
    ],
)
def test_damaged_files_end_in_a_sentence(
    place: int, value: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random(tmp_path / "mine", CONFIG)
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.bin")]) == 0
    data = bytearray((tmp_path / "m.bin").read_bytes())
    data[4 * place : 4 * place + 4] = value.to_bytes(4, "little", signed=True)
    (tmp_path / "m.bin").write_bytes(data)
    assert cli.main(["import", str(tmp_path / "m.bin"), "-o", str(tmp_path / "back")]) == 1
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    (tmp_path / "m.bin").write_bytes(data[:99])
    assert cli.main(["import", str(tmp_path / "m.bin"), "-o", str(tmp_path / "back")]) == 1
