"""The trainer on the backend cuda: the same run as on a processor, and how its arrays travel."""

import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.cuda import device as devices
from dist import carriers, checkpoint
from dist.carriers import Nccl, Staged, carrier
from dist.comm import AllRanksError, Solo
from dist.config import RunFile
from dist.config import load as load_run_file
from dist.model import load_model
from dist.slices import bounds_of_slices
from dist.stopping import StopRequest
from dist.train import Trainer
from dist.watchdog import Watch
from dist.weights import load_master
from reference.params import Layout, decoder_layout
from reference.types import Array
from tests.cuda_shim import require
from tests.cuda_shim.device import ShimDevice
from tests.cuda_shim.myllm import clocked, install
from tests.helpers.fake_nccl import Wires, module
from tests.helpers.runs import digest, losses, prepare, train, with_run

require.shim()

# windows of two tiles and more, over which the paths of attention add up in another order
LONG = {"model__context_length": 150, "train__global_batch": 4, "train__steps": 2}


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> ShimDevice:
    monkeypatch.setattr("accel.cuda.device._device", None)  # to be set by the run, and forgotten
    return install("none", monkeypatch.setattr)


def on(backend: str, config: RunFile, compute: str = "float32") -> RunFile:
    out = f"{config.run.out}-{backend}-{compute}"
    return with_run(config, backend=backend, compute=compute, out=out)


def weights(config: RunFile) -> Array:
    return load_master(checkpoint.find(config.run.out))


# ---- a run ---------------------------------------------------------------------------------------


def test_a_run_gives_the_loss_and_weights_of_the_cpu_s(tmp_path: Path, shim: ShimDevice) -> None:
    """As far from the cpu backend as, at most, three times NumPy's own float32 is."""
    config = prepare(tmp_path, model__dropout_residual=0.2, run__eval_every=3)
    runs = {backend: on(backend, config) for backend in ("cpu", "reference", "cuda")}
    for run in runs.values():
        assert train(run) == 0
    assert shim.launches
    lost = {backend: losses(run) for backend, run in runs.items()}
    assert lost["cuda"] == pytest.approx(lost["cpu"], rel=1e-6)
    assert lost["cpu"][-1] < 0.97 * lost["cpu"][0]  # it learns
    found = {backend: weights(run) for backend, run in runs.items()}
    plain = np.linalg.norm(found["reference"] - found["cpu"])
    assert 0 < np.linalg.norm(found["cuda"] - found["cpu"]) <= 3 * plain


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_the_same_run_twice_gives_the_same_bits(
    tmp_path: Path, shim: ShimDevice, compute: str
) -> None:
    config = on("cuda", prepare(tmp_path, model__dropout_residual=0.2, train__steps=3), compute)
    again = with_run(config, out=str(tmp_path / "again"))
    assert train(config) == train(again) == 0
    assert digest(config) == digest(again) and losses(config) == losses(again)


@pytest.mark.parametrize("compute", ["float32", "bf16"])
def test_resumed_is_uninterrupted(tmp_path: Path, shim: ShimDevice, compute: str) -> None:
    config = prepare(tmp_path, model__dropout_residual=0.2, train__steps=4, run__eval_every=2)
    whole = on("cuda", config, compute)
    assert train(whole) == 0
    parts = with_run(whole, out=str(tmp_path / "parts"))
    for _ in range(4):
        stop = StopRequest()
        stop.signal = 15
        Trainer(parts, Solo()).run(stop)
    assert train(parts) == 0  # which measures what the last signal left out
    assert digest(parts) == digest(whole) and losses(parts) == losses(whole)


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_of_one_backend_goes_on_with_the_other(
    tmp_path: Path,
    shim: ShimDevice,
    first: str,
    then: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = prepare(tmp_path, run__checkpoint_every=3, run__keep=9)
    begun, alone = on(first, config), on(then, config)
    assert train(begun) == train(alone) == 0
    (Path(begun.run.out) / "checkpoints" / "latest").write_text("step-00000003\n")
    assert "the last bits are" not in capsys.readouterr().out
    assert train(with_run(begun, backend=then)) == 0
    said = f"from here on the last bits are those of {then} (float32)"
    assert capsys.readouterr().out.count(said) == 1
    assert losses(begun) == pytest.approx(losses(alone), rel=1e-6)
    state = checkpoint.read_manifest(checkpoint.find(begun.run.out))
    assert (state.step, state.updates) == (6, 6)


def test_a_step_leaves_alone_what_it_was_not_to_touch(tmp_path: Path, shim: ShimDevice) -> None:
    """The master, m and v are three arrays of the device, the optimizer's own and float32."""
    config = on("cuda", prepare(tmp_path), "bf16")
    trainer = Trainer(config, Solo())
    stepper, n = trainer.stepper, decoder_layout(config.model).size
    for array in (stepper.master, stepper.m, stepper.v):
        assert array.shape == (n,) and array.dtype == np.float32
        assert shim.holds(shim.address(array), 4 * n)
    assert stepper.params["embedding.weight"].dtype == np.uint16
    assert trainer.run(StopRequest()) is None


def test_a_start_sends_the_device_one_parameter_at_a_time(
    tmp_path: Path, shim: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host draws or holds of a model is its largest parameter; zeros take no memory."""
    config = on("cuda", prepare(tmp_path, train__global_batch=8), "bf16")
    layout = decoder_layout(config.model)
    upload, sent = shim.upload, []

    def noted(array: Any) -> Any:
        if array.any():
            sent.append(array.size)
        return upload(array)

    drawn = layout.init(config.train.seed)
    monkeypatch.setattr(shim, "upload", noted)
    monkeypatch.setattr(Layout, "init", lambda *_: pytest.fail("all of it was drawn at once"))
    trainer = Trainer(config, Solo())
    np.testing.assert_array_equal(trainer.stepper.master, drawn)
    assert max(sent) == max(spec.size for _, spec in layout.offsets.values()) < layout.size
    monkeypatch.setattr(shim, "upload", lambda array: pytest.fail("a leaf came from the host"))
    for _ in range(3):
        assert trainer.stepper._tree.leaf().shape == (layout.size,)


# ---- attention's path ----------------------------------------------------------------------------


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ShimDevice]:
    """Put a GPU in place that has these paths of attention, and the seconds that each takes."""
    monkeypatch.setenv("MYLLM_CACHE_DIR", str(tmp_path / "cache"))

    def put(**seconds: float) -> ShimDevice:
        monkeypatch.setattr("accel.cuda.device._device", None)
        return install("none", monkeypatch.setattr, clocked(seconds, monkeypatch.setattr))

    return put


def taken(device: ShimDevice) -> set[str]:
    """Return the files of attention's kernels that have run."""
    return {source for source, _ in device._libraries if source.startswith("attention_")}


def go_back(config: RunFile, step: int) -> None:
    latest = Path(config.run.out) / "checkpoints" / "latest"
    latest.write_text(f"step-{step:08d}\n")


def test_a_run_writes_attention_s_path_down_and_keeps_it(
    tmp_path: Path, gpu: Callable[..., ShimDevice], capsys: pytest.CaptureFixture[str]
) -> None:
    often = {"run__checkpoint_every": 1, "run__keep": 9}
    config = on("cuda", prepare(tmp_path, **LONG, **often), "bf16")
    by_hand = {}
    for path in ("wgmma", "mma"):
        run = with_run(config, attention=path, out=str(tmp_path / path))
        device = gpu(wgmma=1.0, mma=1.0)
        assert train(run) == 0 and taken(device) == {f"attention_{path}"}
        by_hand[path] = digest(run)
    assert by_hand["wgmma"] != by_hand["mma"]
    assert "attention: " not in capsys.readouterr().out  # nothing was open

    gpu(wgmma=2.0, mma=1.0)
    assert train(config) == 0
    said = "attention: mma (forward and backward at this run's shapes: wgmma 2000.00 ms, mma 1000"
    assert said in capsys.readouterr().out
    assert load_run_file(Path(config.run.out) / "config.toml").run.attention == "mma"
    saved = [checkpoint.read_manifest(p) for p in sorted(Path(config.run.out).glob("*/step-*"))]
    assert [state.attention for state in saved] == ["mma", "mma"]
    assert digest(config) == by_hand["mma"]

    go_back(config, 1)
    device = gpu(wgmma=1.0, mma=2.0)  # would choose the other one
    shutil.rmtree(tmp_path / "cache")
    assert train(config) == 0
    said = capsys.readouterr().out
    assert "attention: mma, as before" in said and "last bits" not in said
    assert taken(device) == {"attention_mma"} and digest(config) == by_hand["mma"]

    device = gpu(wgmma=1.0, mma=2.0)  # whose first path it is not
    model = load_model(config.run.out, "cuda", "bf16")
    assert model.state.attention == device.attention == "mma"


def test_a_gpu_without_the_run_s_path_is_told_so_and_another_may_be_named(
    tmp_path: Path, gpu: Callable[..., ShimDevice], capsys: pytest.CaptureFixture[str]
) -> None:
    often = {"run__checkpoint_every": 1, "run__keep": 9}
    config = on("cuda", prepare(tmp_path, **LONG, **often), "bf16")
    gpu(wgmma=1.0, mma=2.0)
    assert train(config) == 0
    go_back(config, 1)
    device = gpu(mma=2.0)
    assert load_model(config.run.out, "cuda", "bf16").ops and not device.attention
    assert train(config) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "myllm train: attention by 'wgmma' needs a GPU of compute capability 9.0"
    )
    assert "this one has 'mma' and 'plain': run.attention may name another" in said
    assert said.count("\n") == 1
    assert train(config, "--set", "run.attention=mma") == 0
    assert (
        "was learned by the backend cuda (bf16, attention by wgmma): from here on the last bits "
        "are those of cuda (bf16, attention by mma)"
    ) in capsys.readouterr().out
    assert taken(device) == {"attention_mma"}


def test_a_path_that_a_run_cannot_take_is_one_sentence(
    tmp_path: Path, gpu: Callable[..., ShimDevice], capsys: pytest.CaptureFixture[str]
) -> None:
    config = on("cuda", prepare(tmp_path), "bf16")
    gpu(wgmma=1.0, mma=2.0)
    for words, says in (
        (["run.attention=flash"], "run.attention must be one of auto, wgmma, mma, plain, got 'fla"),
        (["run.attention=mma", "run.backend=cpu"], "names kernels of GPUs, and run.backend 'cpu'"),
        (["run.attention=mma", "run.compute=float32"], "up to 128, and the run has float32 and 8:"),
        (["run.attention=wgmma", "model.d_head=12"], "of 8 up to 128, and the run has bf16 and 12"),
    ):
        assert train(config, *(word for one in words for word in ("--set", one))) == 1
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1


@pytest.mark.parametrize("other", [{"run__compute": "float32"}, {"model__d_head": 12}], ids=str)
def test_where_there_is_one_path_nothing_is_chosen(
    tmp_path: Path,
    gpu: Callable[..., ShimDevice],
    other: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = prepare(
        tmp_path, run__backend="cuda", train__steps=1, **{"run__compute": "bf16"} | other
    )
    device = gpu(wgmma=1.0, mma=2.0)
    assert train(config) == 0
    assert "attention" not in capsys.readouterr().out and not taken(device)
    assert load_run_file(Path(config.run.out) / "config.toml").run.attention == "auto"


# ---- how arrays travel ---------------------------------------------------------------------------


class Control:
    """One of some ranks in this process: what rank 0 broadcasts is kept for the others."""

    library = "no MPI"
    kept: Any = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.watch = rank, size, Watch(rank, size)
        self.levels, self.computing = [self], threading.Event()

    def broadcast(self, value: Any) -> Any:
        if self.rank == 0:
            Control.kept = value
        return Control.kept

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.size


@given(
    st.sampled_from([2, 4, 8]), st.integers(1, 300), st.sampled_from([8, 40]), st.integers(0, 2**32)
)
def test_nccl_moves_slices_as_the_contract_of_ranks_says(
    size: int, n: int, block: int, seed: int
) -> None:
    device, wires = ShimDevice(), Wires()
    nccl = module(device, wires)
    ranks: list[Any] = [Nccl(Control(rank, size), device, nccl) for rank in range(size)]  # type: ignore[arg-type]
    wires.deliver()  # of the start
    [bounds] = bounds_of_slices([0, n], block, size)
    values = np.random.default_rng(seed).standard_normal((size, n)).astype(np.float32)
    flats = [device.upload(row) for row in values]

    parts = [rank.exchange(flat, bounds) for rank, flat in zip(ranks, flats, strict=True)]
    wires.deliver()
    for rank, received in enumerate(parts):
        assert len(received) == size
        for peer, part in enumerate(received):
            np.testing.assert_array_equal(part, values[peer, bounds[rank] : bounds[rank + 1]])
    np.testing.assert_array_equal(flats, values)

    for rank, flat in zip(ranks, flats, strict=True):
        rank.all_gather_slices(flat, bounds)
    wires.deliver()
    whole = np.concatenate([values[r, bounds[r] : bounds[r + 1]] for r in range(size)])
    for flat in flats:
        np.testing.assert_array_equal(flat, whole)


def test_every_rank_sends_its_slice_in_one_group() -> None:
    """Rank 1 of 4, slices of 16, 8, 8 and 3 floats: whose memory, how much, to whom."""
    device, wires = ShimDevice(), Wires()
    control: Any = Control(1, 4)
    Control.kept = bytes(range(128))
    rank = Nccl(control, device, module(device, wires))
    start = wires.groups.pop(1)  # a float from and to each, so that connections are there
    assert [(c.kind, c.count, c.peer) for c in start] == [
        (kind, 1, peer) for peer in (0, 2, 3) for kind in ("send", "recv")
    ]
    flat, bounds = device.upload(np.zeros(35, np.float32)), [0, 16, 24, 32, 35]
    at = device.address(flat)
    parts = rank.exchange(flat, bounds)
    assert device.address(parts[1]) == at + 4 * 16  # its own is not copied
    calls = wires.groups.pop(1)
    sent = [(c.address - at, c.count, c.peer) for c in calls if c.kind == "send"]
    assert sent == [(0, 16, 0), (4 * 24, 8, 2), (4 * 32, 3, 3)]
    got = [(c.address, c.count, c.peer) for c in calls if c.kind == "recv"]
    assert got == [(device.address(parts[peer]), 8, peer) for peer in (0, 2, 3)]
    rank.all_gather_slices(flat, bounds)
    calls = wires.groups.pop(1)
    sent = [(c.address - at, c.count, c.peer) for c in calls if c.kind == "send"]
    assert sent == [(4 * 16, 8, peer) for peer in (0, 2, 3)]
    got = [(c.address - at, c.count, c.peer) for c in calls if c.kind == "recv"]
    assert got == [(0, 16, 0), (4 * 24, 8, 2), (4 * 32, 3, 3)]


@pytest.fixture
def two(shim: ShimDevice) -> Callable[..., tuple[Any, str]]:
    """Choose for the first of two ranks; ``gpus`` are how many they have."""
    devices.use(shim)

    class Pair(Control):
        gpus = 2

        def all_gather(self, value: Any) -> list[Any]:
            (gpu, why), failure = value
            return [value, ((f"{gpu} of the other" if self.gpus == 2 else gpu, why), failure)]

    def choose(how: Any, gpus: int = 2, backend: str = "cuda") -> tuple[Any, str]:
        pair: Any = Pair(0, 2)
        pair.gpus = gpus
        return carrier(pair, backend, how)

    return choose


def test_auto_says_what_it_chose(
    two: Callable[..., tuple[Any, str]], shim: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, said = two("auto")
    assert isinstance(comm.levels[0], Staged)
    assert said.startswith("gradients and weights go by MPI through host memory: NCCL's library")
    assert "pip install nvidia-nccl-cu13" in said
    monkeypatch.setattr(carriers, "_nccl_module", lambda: module(shim, Wires()))
    comm, said = two("auto")
    assert isinstance(comm.levels[0], Nccl) and said == "gradients and weights go by NCCL 2.32.3"
    comm, said = two("mpi")
    assert isinstance(comm.levels[0], Staged) and said.endswith("by MPI through host memory")
    comm, said = two("auto", gpus=1)
    assert isinstance(comm.levels[0], Staged) and "2 ranks share 1" in said
    comm, said = two("auto", backend="cpu")
    assert not isinstance(comm.levels[0], (Nccl, Staged)) and said == ""


def test_nccl_is_not_replaced_by_something_slower(
    two: Callable[..., tuple[Any, str]], shim: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AllRanksError, match=r"run\.comm is 'nccl', but NCCL's library was not fou"):
        two("nccl")
    monkeypatch.setattr(carriers, "_nccl_module", lambda: module(shim, Wires()))
    with pytest.raises(AllRanksError, match="NCCL wants a GPU for each rank and 2 ranks share 1"):
        two("nccl", gpus=1)
    assert isinstance(two("nccl")[0].levels[0], Nccl)


def test_nccl_that_cannot_start_is_told_in_a_sentence(
    two: Callable[..., tuple[Any, str]], shim: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = module(shim, Wires())

    def fails(*arguments: Any) -> Any:
        raise nccl.NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")

    monkeypatch.setattr(carriers, "_nccl_module", lambda: nccl)
    nccl.NcclCommunicator = fails
    with pytest.raises(ValueError, match=r"NCCL could not start \(NCCL_ERR.*run\.comm = 'mpi'"):
        two("auto")


def test_nccl_that_has_no_memory_for_its_first_group_is_told_in_a_sentence(
    two: Callable[..., tuple[Any, str]], shim: ShimDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl = module(shim, Wires())

    def full() -> None:
        raise nccl.NcclError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error")

    nccl.groupEnd = full
    monkeypatch.setattr(carriers, "_nccl_module", lambda: nccl)
    with pytest.raises(
        ValueError, match=r"move the arrays .*UNHANDLED_CUDA.*smaller train\.micro_"
    ):
        two("nccl")


def test_cupy_s_binding_is_asked_whether_the_library_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = SimpleNamespace(available=False)

    class Cuda:
        """What importing ``cupy.cuda.nccl`` does without the library: it warns."""

        @property
        def nccl(self) -> Any:
            warnings.warn("nccl library could not be loaded.", stacklevel=1)
            return nccl

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=Cuda()))
    monkeypatch.setitem(sys.modules, "cupy.cuda", Cuda())  # type: ignore[arg-type]
    assert "pip install nvidia-nccl-cu13" in carriers._why_not_nccl()
    nccl.available = True
    assert carriers._why_not_nccl() == ""


# ---- what is missing -----------------------------------------------------------------------------


def test_what_a_gpu_run_lacks_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = on("cuda", prepare(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    assert train(config) == 1
    said = capsys.readouterr().err
    assert said.startswith("myllm train: the backend 'cuda' needs CuPy") and said.count("\n") == 1
    assert train(with_run(config, backend="cpu"), "--set", "run.comm=nccl") == 1
    said = capsys.readouterr().err
    assert "run.comm 'nccl' moves the arrays of GPUs, and run.backend 'cpu' has none" in said
    assert train(config, "--set", "run.comm=pigeon") == 1
    assert "run.comm must be one of auto, mpi, nccl" in capsys.readouterr().err
