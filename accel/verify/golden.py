"""Golden vectors: cases with their results, as files that any language can read.

Each file is a safetensors file: eight bytes with the length of a JSON header, the header (name ->
dtype, shape, offsets), then the raw numbers, little-endian and in C order. Inputs are float32 that
bf16 holds exactly, so one set serves every precision; expected results are float64.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from accel.tolerance import Closeness, Magnitude, compare
from accel.verify.contract import Case, draw_case, expected, gradient_names, shape_of
from accel.verify.draw import Draw
from accel.verify.files import UNREADABLE, cotangent_arrays, options_to_json, unreadable
from accel.verify.ops import room
from accel.verify.report import AnyReport, Test
from accel.verify.travel import special_at
from reference import ops as reference
from reference.model import loss_backward, loss_forward
from reference.ops import OPS
from reference.params import decoder_layout
from reference.presets import TINY
from reference.types import Array

CASES = 4  # of each op
MAX_ELEMENTS = 2_000  # of a case
PRECISIONS = ("float64", "float32", "bf16")
STEPS = 5
SUFFIXES = (".safetensors", ".npz")  # of a file of results; the first goes before the other

MODEL = dataclasses.replace(TINY, vocab_size=31, context_length=12)
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
# Roundings on the longest path through the toy model: about 12 ops a block, 12 roundings each,
# forward and backward. AdamW's m̂/√v̂ turns a relative error of the gradient into one of a step.
_MODEL_ROUNDINGS = 2 * 12 * 12 * (MODEL.n_layers + 1)

Tensors = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Golden:
    """One file: what goes in, what should come out and how closely."""

    name: str
    about: dict[str, str]  # the metadata of the file
    inputs: Tensors
    exact: Tensors
    plain: Tensors  # the reference in float32
    magnitudes: dict[str, Magnitude]
    gradients: frozenset[str]

    def close(self, name: str, got: Array, dtype: str) -> Closeness:
        plain = self.plain if dtype == "float32" else self.exact
        return compare(
            got,
            self.exact[name],
            plain[name],
            self.magnitudes[name],
            dtype,
            gradient=name in self.gradients,
        )

    def allowed(self, dtype: str) -> dict[str, float]:
        """Return ‖err‖ that each whole tensor may have."""
        return {
            name: self.close(name, exact, dtype).bound * (float(np.linalg.norm(exact)) or 1.0)
            for name, exact in self.exact.items()
        }


def golden_cases(seed: int = 0, ops: Iterable[str] | None = None) -> list[Golden]:
    """Return the golden vectors of a seed: cases of each op, and the toy model."""
    chosen = [op for op in OPS if room(op).GOLDEN] if ops is None else list(ops)
    found = []
    for op in chosen:
        spec = OPS[op]
        rng = np.random.default_rng([seed, *op.encode()])
        seen: set[str] = set()
        while len(seen) < CASES:
            draw = Draw(
                lambda among, name="", rng=rng: among[int(rng.integers(len(among)))], "bf16"
            )
            case = draw_case(
                spec, draw, has_backward=bool(spec.gradients), backward_offers=lambda name: False
            )
            case = dataclasses.replace(case, dtype="float32", layouts={}, interleaved=False)
            owes = case.cotangent is not None or not spec.gradients
            big = case.size[0] > MAX_ELEMENTS
            if not owes or big or special_at(case) is not None or case.describe() in seen:
                continue
            found.append(_of_case(case, f"{op}-{len(seen)}"))
            seen.add(case.describe())
    if ops is None:
        found.append(_of_model(seed))
    return found


def _of_case(case: Case, name: str) -> Golden:
    want = expected(case)
    inputs = {f"input.{n}": a for n, a in case.arrays.items() if a is not None}
    inputs |= {
        n: a.astype(np.float32) if a.dtype.kind == "f" else a
        for n, a in cotangent_arrays(case.cotangent).items()
    }
    about = {"op": case.op, "options": options_to_json(case.options)}
    return Golden(
        name,
        about,
        inputs,
        {n: np.asarray(a, np.float64) for n, a in want.exact.items()},
        {n: np.asarray(a, np.float64) for n, a in want.plain.items()},
        want.magnitudes,
        frozenset(gradient_names(case)),
    )


def _of_model(seed: int) -> Golden:
    """Return the toy model: its loss and gradient, and five AdamW steps on one batch."""
    rng = np.random.default_rng([seed, 77])
    layout = decoder_layout(MODEL)
    master = layout.init(seed, np.float32) * np.float32(5)  # so that gradients are not tiny
    ids = rng.integers(0, MODEL.vocab_size, (2, MODEL.context_length)).astype(np.int32)
    targets = np.roll(ids, -1, axis=1)
    mask = np.ones(ids.shape, np.bool_)
    mask[:, -1] = False

    def train(dtype: Any) -> Tensors:
        flat = master.astype(dtype)
        m, v, grad = (np.zeros_like(flat) for _ in range(3))
        params, grads = layout.views(flat), layout.views(grad)
        results: Tensors = {}
        losses = []
        for step in range(1, STEPS + 1):
            loss, cache = loss_forward(reference, params, MODEL, ids, targets, mask)
            loss_backward(1.0, cache, grads)
            losses.append(loss.total / loss.n_valid)
            if step == 1:
                results |= {f"dparam.{n}": g.astype(np.float64) for n, g in grads.items()}
            reference.adamw(
                flat,
                m,
                v,
                grad,
                step=step,
                n_decayed=layout.n_decayed,
                grad_scale=1 / loss.n_valid,
                **ADAMW,
            )
        results["loss"] = np.array(losses)
        return results | {f"param.{n}": p.astype(np.float64) for n, p in params.items()}

    exact, plain = train(np.float64), train(np.float32)
    about = {
        "op": "model",
        "config": json.dumps(MODEL.to_dict()),
        "adamw": json.dumps({**ADAMW, "n_decayed": layout.n_decayed, "steps": STEPS}),
    }
    inputs = {f"input.param.{n}": p for n, p in layout.views(master).items()}
    inputs |= {"input.ids": ids, "input.targets": targets.astype(np.int32), "input.mask": mask}
    magnitudes = {}
    for name, value in exact.items():
        s = np.full(value.shape, float(np.sqrt(np.mean(value**2))))
        if name.startswith("param."):
            s = s + STEPS * ADAMW["lr"]
        magnitudes[name] = Magnitude(s, _MODEL_ROUNDINGS)
    gradients = frozenset(n for n in exact if n != "loss")
    return Golden("model", about, inputs, exact, plain, magnitudes, gradients)


def write_golden(folder: Path, *, seed: int = 0, ops: Iterable[str] | None = None) -> int:
    """Write golden vectors and a README into a folder, and return how many files there are."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give --golden the name of a folder to write into")
    folder.mkdir(parents=True, exist_ok=True)
    vectors = golden_cases(seed, ops)
    for golden in vectors:
        tensors = {n: np.asarray(a, order="C") for n, a in golden.inputs.items()}
        tensors |= {f"expected.{n}": np.asarray(a, order="C") for n, a in golden.exact.items()}
        about = {
            **golden.about,
            "seed": str(seed),
            "allowed": json.dumps({d: golden.allowed(d) for d in PRECISIONS}),
        }
        save_file(tensors, str(folder / f"{golden.name}.safetensors"), metadata=about)
    (folder / "README.md").write_text(_readme(vectors, seed), encoding="utf-8")
    return len(vectors)


class Row(NamedTuple):
    """What one result is worth."""

    file: str
    name: str
    dtype: str
    near: Closeness | None
    why: str  # it is wrong

    @property
    def right(self) -> bool:
        return not self.why and self.near is not None and self.near.ok


@dataclasses.dataclass
class GoldenReport(AnyReport):
    """What a folder of results is worth."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)  # files that were not written
    unread: list[str] = dataclasses.field(default_factory=list)  # no golden vector's

    @property
    def found_right(self) -> bool:
        return all(row.right for row in self.rows)

    @property
    def found_verdict(self) -> str:
        all_right = "all as the reference" if self.right else "not as the reference"
        return f"{len(self.rows)} results: {all_right}"

    @property
    def not_there(self) -> list[str]:
        """What was not written, in a sentence."""
        ops = dict.fromkeys(name.rpartition("-")[0] or name for name in self.missing)
        return [f"{len(self.missing)} files of {', '.join(ops)}"] if self.missing else []

    def found_tests(self) -> Iterator[Test]:
        """Yield a test for each result."""
        for row in self.rows:
            name = f"{row.name} {row.dtype}".strip()
            yield Test(row.file, name, "" if row.right else "failure", row.why)
        for sentence in self.not_there:
            yield Test("", "all is there", "skipped", f"not there: {sentence}")

    def found_facts(self) -> dict[str, Any]:
        rows = [
            {
                "file": row.file,
                "result": row.name,
                "dtype": row.dtype,
                "ok": row.right,
                "error": row.near.error if row.near and math.isfinite(row.near.error) else None,
                "bound": row.near.bound if row.near else None,
                "problem": row.why,
            }
            for row in self.rows
        ]
        return {"results": rows, "missing": self.missing, "unread": self.unread}

    def show(self, console: Console) -> None:
        """Print a table of all results."""
        table = Table(title=f"{escape(self.subject)} against the golden vectors")
        for title in ("file", "result", "dtype", "error", "allowed", "verdict"):
            table.add_column(title)
        for row in self.rows:
            numbers = ("", "")
            if row.near is not None:
                numbers = f"{row.near.error:.1e}", f"{row.near.bound:.1e}"
            verdict = "[green]ok[/]" if row.right else f"[red]FAIL[/] {escape(row.why)}"
            table.add_row(row.file, escape(row.name), row.dtype, *numbers, verdict)
        console.print(table)
        for sentence in self.not_there:
            console.print(f"not there, so not checked: {sentence}", highlight=False)
        for sentence in self.untried:
            said = f"not tried: {sentence}"
            console.print(said, style="yellow", highlight=False, markup=False)
        console.print(self.verdict, highlight=False)


def check_results(
    folder: Path, *, seed: int = 0, dtype: str | None = None, partial: bool = False
) -> GoldenReport:
    """Check a folder of results, one ``.safetensors`` or ``.npz`` for each golden file.

    Raises
    ------
    ValueError
        When the folder holds no results.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give the folder of computed results")
    files = {path.name for path in folder.iterdir() if path.suffix in SUFFIXES}
    report = GoldenReport(str(folder), partial=partial)
    for golden in golden_cases(seed):
        paths = [folder / f"{golden.name}{suffix}" for suffix in SUFFIXES]
        path = next((p for p in paths if p.is_file()), None)
        if path is None:
            report.missing.append(golden.name)
            continue
        files.remove(path.name)
        try:
            results = read_tensors(path)
        except ValueError as error:
            report.rows.append(Row(path.name, "", "", None, str(error)))
            continue
        for name, exact in golden.exact.items():
            row = _one_result(golden, name, exact, results, dtype)
            report.rows.append(Row(path.name, name, *row))
    if files:
        report.unread = sorted(files)
        report.untried = [
            f"{', '.join(report.unread)}: no golden vector has such a name, or it is there in "
            "another form; rename or remove it"
        ]
    if not report.rows:
        raise ValueError(
            f"{folder} holds no results: for a golden file rmsnorm-0.safetensors write "
            "rmsnorm-0.safetensors (or .npz) with the tensors out, dx and dgain"
        )
    return report


def _one_result(
    golden: Golden, name: str, exact: Array, results: Tensors, dtype: str | None
) -> tuple[str, Closeness | None, str]:
    got = results.get(name)
    if got is None:
        return "", None, f"{name} is missing; there are {', '.join(sorted(results)) or 'none'}"
    kinds = {"float64": "float64", "float32": "float32", "float16": "bf16"}
    unit = dtype or kinds.get(got.dtype.name, "float64")
    if dtype is None and got.dtype.names == ("bf16",):
        unit, got = "bf16", got["bf16"]
    if got.shape != exact.shape:
        return unit, None, f"shape {shape_of(got)}, should be {shape_of(exact)}"
    if name == "n_valid":
        unit = "float64"
    near = golden.close(name, got, unit)
    return unit, near, "" if near.ok else f"{near.ratio:.3g} times what is allowed"


_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "BOOL": "?",
    "U8": "u1",
}


def read_tensors(path: Path) -> Tensors:
    """Read a ``.npz`` or ``.safetensors``; a BF16 tensor comes as a record with one field bf16.

    Raises
    ------
    ValueError
        When the file is damaged or holds a dtype that is not known here.
    """
    if path.suffix == ".npz":
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except UNREADABLE as error:
            raise ValueError(f"{path.name} is no readable .npz: {unreadable(error)}") from None
    tensors: Tensors = {}
    try:
        for name, entry in deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
            array = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            if entry["dtype"] == "BF16":
                wide = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
                array = np.zeros(wide.shape, [("bf16", "<f4")])
                array["bf16"] = wide
            tensors[name] = array
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} is no readable safetensors file: {error!r}") from None
    return tensors


def _readme(vectors: list[Golden], seed: int) -> str:
    lines = "\n".join(
        f"| {g.name} | {', '.join(n.removeprefix('input.') for n in g.inputs)} "
        f"| {', '.join(g.exact)} |"
        for g in vectors
        if g.name != "model"
    )
    return _README.format(seed=seed, table=lines)


_README = """\
# Golden vectors of MyLLM

Inputs and right answers of every op, for implementations in any language. Written by
`myllm verify --golden` with seed {seed}.

Each file is a [safetensors](https://github.com/huggingface/safetensors) file: eight bytes with the
length n of the header (little-endian), n bytes of JSON (`name -> dtype, shape, data_offsets`), then
the numbers, little-endian, in C order. The header's `__metadata__` holds the `op`, its `options` as
JSON, and `allowed`: for each precision and each result, how large ‖result - expected‖ may be for
the tensor as a whole. An option that is not there has its default; what the options mean stands in
`reference/ops.py`.

| tensors | |
| --- | --- |
| `input.*` | the arguments: F32 (values that bfloat16 holds exactly), I32 or BOOL |
| `dout`, or `dout[0]`, … | the gradient that arrives at the backward; a scalar for the loss |
| `expected.*` | the results in float64: `out` or the arrays written in place; `dx` goes with `x` |

To have your results checked, write for each file you can compute one of the same name, as
safetensors or `.npz`, with the results under their bare names (`out`, `dx`, …) in F64, F32, F16 or
BF16, and run

    myllm verify --against RESULTS --seed {seed}

The dtype of a result says how close it has to be, as a whole, in each row along the last axis and
in each piece of some 256 numbers of a row; `--dtype` overrides that. F16 is held to what BF16 is,
whose range the inputs have. Files you do not write are reported and not held against you; files of
other names are named, and make the status 3.

`model.safetensors` is a toy decoder: `input.param.*`, `ids`, `targets` and `mask`; expected are the
`loss` (the mean over the targets that count) of each of five steps, `dparam.*`, the gradient of the
**sum** of the losses at the first, and `param.*` after the fifth AdamW step, each on the gradient
divided by the number of targets that count. Its metadata has the model's `config` and the `adamw`
options; parameters with two axes or more decay.

| file | inputs | expected |
| --- | --- | --- |
{table}
"""
