"""PyTorch's own kernels pass ``myllm verify``, and a wrong one among them does not."""

import types

import pytest

from accel.verify import check_module
from accel.verify.load import load_file
from tests.helpers import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
EXAMPLE = ROOT / "accel" / "verify" / "examples" / "torch_kernels.py"


def test_the_example_s_kernels_are_right() -> None:
    check_module(EXAMPLE, examples=25)


def test_a_torch_kernel_without_the_projection_is_caught() -> None:
    example = load_file(EXAMPLE).module

    def rmsnorm_backward(dout: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> object:
        x, gain, rstd = cache
        return dout * gain * rstd, (dout * x * rstd).flatten(0, -2).sum(0)

    wrong = types.SimpleNamespace(**{**vars(example), "rmsnorm_backward": rmsnorm_backward})
    report = check_module(wrong, ops=["rmsnorm"], examples=20, raises=False)
    assert {f.name for f in report.failures} == {"dx"}


def _softmax(change: object) -> types.SimpleNamespace:
    """Return a softmax in PyTorch that does something else as well."""
    example = load_file(EXAMPLE).module

    def softmax(x: torch.Tensor) -> torch.Tensor:
        return change(x, torch.softmax(x, -1))  # type: ignore[operator, no-any-return]

    names = ("from_numpy", "to_numpy")
    return types.SimpleNamespace(softmax=softmax, **{n: getattr(example, n) for n in names})


def test_a_loss_s_count_may_be_a_tensor() -> None:
    def forward(x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, mask: object = None,
                bias: object = None) -> object:  # fmt: skip
        kept = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
        z = torch.nn.functional.linear(x, head, bias).log_softmax(-1)
        target = torch.where(kept, targets, 0).long()[..., None]
        return -(z.gather(-1, target)[..., 0] * kept).sum(), kept.sum()

    names = ("from_numpy", "to_numpy")
    example = load_file(EXAMPLE).module
    offered = {"linear_cross_entropy_forward": forward, **{n: getattr(example, n) for n in names}}
    report = check_module(types.SimpleNamespace(**offered), dtypes=["float32"], examples=10,
                          partial=True)  # fmt: skip
    assert set(report.ops[0].results) == {"total", "n_valid"}


def test_a_torch_generator_that_a_call_seeds_is_found() -> None:
    def seeds(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return out

    report = check_module(_softmax(seeds), examples=6, shrink=False, raises=False)
    assert "torch's global generator was seeded or drawn from" in report.text()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_module(_softmax(lambda x, out: out), examples=6)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_torch_result_kept_by_address_is_found() -> None:
    kept: dict[object, torch.Tensor] = {}
    held: list[torch.Tensor] = []  # so that no address is used again

    def keeps(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        held.append(x)
        key = x.data_ptr(), x.shape, x.stride()
        return kept.setdefault(key, out).clone()

    report = check_module(_softmax(keeps), examples=20, shrink=False, raises=False)
    assert "with other numbers in the same arrays" in report.text()


def test_a_torch_write_behind_an_argument_is_found() -> None:
    def writes(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        behind = x.storage_offset() + x.numel()
        if x.is_contiguous() and behind < x.untyped_storage().nbytes() // x.itemsize:
            torch.as_strided(x, (1,), (1,), behind).zero_()
        return out

    report = check_module(_softmax(writes), examples=20, shrink=False, raises=False)
    assert "elements before, behind or between x were written" in report.text()
