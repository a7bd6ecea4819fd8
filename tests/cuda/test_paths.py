"""Attention's path is chosen by the clock, among those that the plain kernel agrees with."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.cuda import attention, cupy_device, ops_bf16, paths
from accel.cuda import device as devices
from accel.cuda.paths import Shapes, choose
from accel.cuda.sources import signature
from reference import ops as reference
from reference.presets import MYLLM_1B
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.cuda_shim.myllm import clocked, install
from tests.helpers.cuda_cases import relative_error
from tests.helpers.models import toy

require.shim()

SMALL = Shapes(2, 9, 2, 1, 8)
SHAPES = (
    SMALL,
    Shapes(1, 1, 1, 1, 8),
    Shapes(1, 301, 2, 1, 64),
    Shapes(1, 150, 2, 2, 128, window=70),
    Shapes(2, 40, 4, 2, 16, alibi=True, dropout=0.2),
    Shapes(1, 140, 2, 1, 64, documents=True),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MYLLM_CACHE_DIR", str(tmp_path))
    before = devices.use(None)
    yield tmp_path / "kernels" / "cuda"
    devices.use(before)


@pytest.mark.parametrize(("wgmma", "mma"), [(0.5, 2.0), (2.0, 0.5)])
def test_the_faster_path_is_taken_and_said(
    wgmma: float, mma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = clocked({"wgmma": wgmma, "mma": mma}, monkeypatch.setattr)
    devices.use(device)
    found = choose(SMALL)
    assert found.path == ("wgmma" if wgmma < mma else "mma")
    said = f"this run's shapes: wgmma {1e3 * wgmma:.2f} ms, mma {1e3 * mma:.2f} ms)"
    assert found.said.startswith(f"attention: {found.path} (") and found.said.endswith(said)
    assert device.attention == ""  # what was tried is not what is taken


def test_one_path_is_checked_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.use(device := ShimDevice())
    monkeypatch.setattr(paths, "measure", lambda *_: pytest.fail("there is nothing to choose"))
    assert choose(SMALL) == ("mma", "attention: mma (the only one here for bf16)")
    assert {source for source, _ in device._libraries} >= {"attention", "attention_mma"}


def test_times_are_kept_for_gpus_of_a_kind_and_shapes_alike(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.use(clocked({"wgmma": 2.0, "mma": 0.5}, monkeypatch.setattr))
    assert choose(SMALL).path == "mma"
    timed = []
    measure = paths.measure
    monkeypatch.setattr(paths, "measure", lambda *given: timed.append(1) or measure(*given))
    assert choose(SMALL).path == "mma"
    assert choose(SMALL).said.endswith("mma 500.00 ms, timed here before)") and not timed
    assert "before" not in choose(SMALL, remember=False).said and timed.pop()
    choose(SMALL._replace(T=8))
    assert timed.pop()
    (one, _) = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for damage in (b"", b"[]", b'{"wgmma": 1}', b'{"wgmma": 1, "mma": "soon"}', b'{"a":NaN}'):
        one.write_bytes(damage)
        choose(SMALL)
        assert timed.pop()
        assert json.loads(one.read_text()) == {"wgmma": 2.0, "mma": 0.5}
    monkeypatch.setattr(ShimDevice, "kind", lambda _: "another")
    choose(SMALL)
    assert timed.pop() and len([*cache.iterdir()]) == 3
    monkeypatch.setattr(paths.sources, "join", lambda parts: "another text of the kernels")
    choose(SMALL)
    assert timed.pop() and len([*cache.iterdir()]) == 4
    other = {"mma": attention.MMA, "wgmma": attention.WGMMA}  # cut in another way
    monkeypatch.setattr(attention, "TILES", other)
    choose(SMALL)
    assert timed.pop() and len([*cache.iterdir()]) == 5


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [(0.001, 2 + 11 * 50), (0.02, 2 + 11 * 2), (0.5, 2 + 4), (9.0, 2 + 3)],
)
def test_timing_takes_a_few_seconds_or_three_rounds(
    seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"wgmma": 0, "mma": 0}

    def counted(*_: Any) -> None:
        asked[devices.current().attention] += 1

    monkeypatch.setattr(attention, "attention_forward", lambda *_, **__: (None, None))
    monkeypatch.setattr(attention, "attention_backward", counted)
    devices.use(clocked({"wgmma": seconds, "mma": seconds / 2}, monkeypatch.setattr))
    found = paths.measure(SMALL, ("wgmma", "mma"))
    assert found == pytest.approx({"wgmma": seconds, "mma": seconds / 2})
    assert asked == {"wgmma": calls, "mma": calls}


def test_a_time_is_of_the_work_and_not_of_asking_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU does what it is asked for later; what is downloaded waits for that."""
    devices.use(device := ShimDevice())
    now, asked, download = [0.0], [0.0], device.download

    def waits(array: Any) -> Any:
        now[0], asked[0] = now[0] + asked[0], 0.0
        return download(array)

    def ask(seconds: float) -> None:
        asked[0] += seconds

    monkeypatch.setattr(device, "download", waits)
    monkeypatch.setattr(paths, "clock", lambda: now[0])
    found = paths.in_turn({"slow": lambda: ask(2.0), "fast": lambda: ask(1.0)}, 9.0, 4.0)
    assert found == pytest.approx({"slow": 2.0, "fast": 1.0})


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_right_kernels_pass_the_check(shapes: Shapes) -> None:
    devices.use(ShimDevice(warpgroups=True))
    for path, results in paths.check(shapes, ("wgmma", "mma")).items():
        assert set(results) == {"out", "dq", "dk", "dv"}
        for name, closeness in results.items():
            assert closeness.ok, (path, name, closeness)


def test_the_magnitudes_are_those_of_the_op_on_absolute_values() -> None:
    """Against P |v|, Pᵀ |dout| and, with ds = P (|dout||v|ᵀ + D), |ds||k| and |ds|ᵀ|q|."""
    shapes = Shapes(1, 37, 4, 2, 16)
    devices.use(ShimDevice())
    q, k, v, dout = paths._drawn(shapes)
    assert (v < 0).any() and (dout < 0).any() and (k < 0).any() and (q < 0).any()
    got = paths._results(shapes, "plain", q, k, np.abs(v), np.abs(dout), bf16=False, plus=True)
    wide = [x.astype(np.float64) for x in (q, k, np.abs(v), np.abs(dout))]
    P = reference.attention_forward(*wide[:3])[1].cache.P[0]  # (Hkv, G, T, S)
    q, k, v, dout = (np.abs(x[0]).reshape(37, 2, -1, 16).transpose(1, 2, 0, 3) for x in wide)
    out = P @ v
    ds = P * (dout @ v.swapaxes(-1, -2) + np.sum(dout * out, -1, keepdims=True))
    wanted = {"out": out, "dq": ds @ k / 4, "dk": ds.swapaxes(-1, -2) @ q / 4}
    wanted["dv"] = P.swapaxes(-1, -2) @ dout
    for name, by_head in wanted.items():
        whole = by_head.sum(1, keepdims=True) if name in ("dk", "dv") else by_head
        flat = whole.transpose(2, 0, 1, 3).reshape(got[name][0].shape)
        assert relative_error(np.abs(got[name][0]), flat) < 1e-5, name


class Mistaken(ShimDevice):
    """A GPU on which kernels of some paths are given another number than they should be."""

    def __init__(self, **mistakes: tuple[str, str, Callable[[Any], Any]]) -> None:
        super().__init__(warpgroups=True)
        self.mistakes = mistakes  # path -> (kernel, parameter, what is made of it)

    def launch(
        self, source: str, kernel: str, grid: Any, threads: int, arguments: Any, **how: Any
    ) -> None:
        wrong, name, change = self.mistakes.get(source.removeprefix("attention_"), ("", "", id))
        names = [name for name, _ in signature(source, kernel).parameters]
        given = [
            change(value) if (kernel, name) == (wrong, of) else value
            for of, value in zip(names, arguments, strict=True)
        ]
        super().launch(source, kernel, grid, threads, given, **how)


MISTAKES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "scores a fiftieth too large": ("attention_forward", "scale", lambda x: x * np.float32(1.02)),
    "a later key seen": ("attention_forward", "ahead", lambda x: x + np.int32(1)),
    "far keys lost in dq": ("attention_dq", "behind", lambda x: x * 0 + np.int32(140)),
    "a later key seen in dk, dv": ("attention_dkv", "ahead", lambda x: x + np.int32(1)),
    "no D taken off": ("attention_dq", "delta", np.zeros_like),
    "no D taken off in dk": ("attention_dkv", "delta", np.zeros_like),
    "keys of one head for all": ("attention_dq", "k_h", lambda x: x * 0),
}


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("wrong", ["wgmma", "mma"])
def test_a_path_that_is_wrong_here_is_left_out_and_said(
    what: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = MISTAKES[what]
    devices.use(Mistaken(**{wrong: mistake}))
    monkeypatch.setattr(paths, "measure", lambda *_: pytest.fail("one is left"))
    path, said = choose(Shapes(1, 160, 2, 2, 64))
    assert path == ({"wgmma", "mma"} - {wrong}).pop()
    # of a wrong lse all gradients are
    name = {"attention_dq": "dq", "attention_dkv": "d[kv]"}.get(mistake[0], "out|d[qkv]")
    found = re.fullmatch(
        rf"attention: {path} \(the only right one here for bf16; {wrong} is left out: its ({name}) "
        r"is [\d.e+]+ times as far from the plain kernel's as allowed\)",
        said,
    )
    assert found, said


# what carries an option of a run -> what is made of it; it is nothing in a run without the option
OPTIONS: dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]] = {
    "window": ("behind", lambda x: np.int32(1000) if x < 160 else x, {"window": 20}),
    "alibi": ("alibi", lambda x: None if x is None else x * np.float32(2), {"alibi": True}),
    "documents": ("documents", lambda _: None, {"documents": True}),
    "dropout": ("sample", lambda x: x + type(x)(1), {"dropout": 0.2}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_path_is_checked_with_the_options_of_the_run(option: str) -> None:
    name, change, given = OPTIONS[option]
    plain = Shapes(1, 160, 2, 2, 64)
    devices.use(Mistaken(wgmma=("attention_forward", name, change)))
    assert not paths._worst(paths.check(plain, ("wgmma",))["wgmma"])
    assert paths._worst(paths.check(plain._replace(**given), ("wgmma",))["wgmma"])


def test_without_a_right_path_nothing_is_chosen() -> None:
    mistake = MISTAKES["no D taken off"]
    devices.use(Mistaken(wgmma=mistake, mma=mistake))
    with pytest.raises(ValueError, match=r"no fast path .* \(wgmma is left out: .*'plain' is slow"):
        choose(Shapes(1, 40, 2, 1, 16))


def test_what_a_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_device, "find_gpu", lambda: 0)
    monkeypatch.setattr("accel.cuda.device._device", None)
    device = install("none", monkeypatch.setattr)
    with pytest.raises(ImportError, match=r"'wgmma' needs a GPU .* this one has 'mma' and 'plain'"):
        accel.load("cuda", compute="bf16", attention="wgmma")
    for path in ("mma", "plain"):
        accel.load("cuda", compute="bf16", attention=path)  # type: ignore[arg-type]
        assert device.attention == path
    with pytest.raises(ValueError, match="no attention 'flash'; known: auto, wgmma, mma, plain"):
        accel.load("cuda", attention="flash")  # type: ignore[arg-type]
    for backend in ("cpu", "reference"):
        with pytest.raises(ValueError, match=f"'mma' is by kernels of GPUs, and .* '{backend}'"):
            accel.load(backend, attention="mma")


@pytest.mark.parametrize("path", attention.PATHS)
def test_a_path_runs_its_own_kernels(path: str) -> None:
    devices.use(device := ShimDevice(warpgroups=True))
    attention.take(path)
    given = [device.upload(np.zeros((1, 3, h, 8), np.uint16)) for h in (2, 1, 1)]
    out, cache = ops_bf16.attention_forward(*given)
    ops_bf16.attention_backward(out, cache)
    sources = {source for source, _ in device._libraries}
    assert sources == {"attention"} | ({f"attention_{path}"} - {"attention_plain"})


def test_the_shapes_are_the_model_s() -> None:
    assert paths.shapes_of(MYLLM_1B, 4) == Shapes(4, 8192, 14, 2, 128) and SMALL.fit
    config = toy(MYLLM_1B, position="alibi", window=(3, 5), dropout_attention=0.1, n_layers=2)
    found = paths.shapes_of(config, 1, documents=True)
    assert found[5:] == (5, True, True, 0.1)
    assert paths.shapes_of(toy(MYLLM_1B, window=(3, 0), n_layers=2), 1).window == 0
    assert not SMALL._replace(d=12).fit and not SMALL._replace(d=136).fit
