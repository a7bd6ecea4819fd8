"""``myllm eval`` and ``myllm plot``: how good a trained model is."""

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.status import Status

from accel.help import parser
from dist import config as run_file
from dist import monitor
from dist.comm import Solo
from dist.data import Windows
from dist.evaluate import Evaluation, evaluate, load_tokenizer, pooled, token_lengths
from dist.model import Model, load_model
from tokenizer.files import replace_durably
from tokenizer.read import standard_input

if TYPE_CHECKING:
    from tokenizer import Tokenizer


def add_checkpoint(args: Any) -> None:
    """Add the checkpoint."""
    args.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or the folder of a run (its best)"
    )


def add_model(args: Any) -> None:
    """Add the checkpoint and the backend."""
    add_checkpoint(args)
    args.add_argument("--backend", default="cpu", help="cpu (default), cuda or reference")
    args.add_argument("--compute", default="float32", help="float32 (default), bf16 or q8_0")


def load(given: Any) -> tuple[Model, "Tokenizer"]:
    """Return the model that ``add_model``'s arguments name, and its tokenizer.

    Raises
    ------
    ValueError
        When it has no tokenizer, among others.
    """
    model = load_model(given.checkpoint, given.backend, given.compute)
    return model, tokenizer_of(model)


def text_of(given: str) -> str:
    """Return a text of the command line; ``-`` stands for what comes from standard input.

    Raises
    ------
    ValueError
        If there is no standard input, or what comes is not UTF-8.
    """
    if given != "-":
        try:
            given.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{given!r} is not UTF-8 at its character {error.start}") from None
        return given
    try:
        return standard_input().read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 at its byte {error.start}") from None


def tokenizer_of(model: Model) -> "Tokenizer":
    """Return the tokenizer of a model.

    Raises
    ------
    ValueError
        When it has none.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"{model.path} has no tokenizer beside it, so it cannot read or write text"
        )
    return load_tokenizer(model.tokenizer, model.state.tokenizer_sha256)


# ---- eval ----------------------------------------------------------------------------------------


def eval_(argv: Sequence[str]) -> int:
    """``myllm eval``."""
    args = parser(
        "eval",
        "Measure how well a model predicts packed datasets: loss, perplexity, bits per byte.",
        "myllm eval runs/laptop data/mine/heldout",
    )
    add_model(args)
    args.add_argument("data", nargs="*", help="packed folders (default: the run's held-out ones)")
    args.add_argument("--windows", type=int, help="windows of each, at most (default: all)")
    args.add_argument(
        "--tasks",
        action="append",
        type=Path,
        metavar="FILE.jsonl",
        help="answer questions with choices instead: rows of HellaSwag, ARC, PIQA, or "
        '{"context": …, "choices": […], "answer": 0} (may be repeated)',
    )
    args.add_argument("--limit", type=int, metavar="N", help="questions of each file, at most")
    args.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a dataset or file, on a line; of several datasets a last one of all",
    )
    given = args.parse_intermixed_args(argv)
    for name in ("windows", "limit"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(given, name)}")
    model = load_model(given.checkpoint, given.backend, given.compute)
    if given.tasks:
        return _answer(model, given.tasks, given.limit, as_json=given.json)
    tables = model.state.config
    if "data" not in tables:  # imported weights: no run says what they are to be measured on
        train = {"micro_batch": 1, "global_batch": 1, "steps": 1, "lr": 1.0}
        tables = {**tables, "data": {"train": "-"}, "train": train, "run": {"out": "-"}}
    config = run_file.from_tables(tables)
    sets = [Windows(path, config) for path in given.data or config.data.heldout_sets]
    if not sets:
        raise ValueError("the run has no held-out data: name a packed folder")
    for windows in sets:
        theirs, ours = windows.dataset.tokenizer_sha256, model.state.tokenizer_sha256
        if theirs is not None and ours is not None and theirs != ours:
            path = windows.dataset.path
            raise ValueError(f"{path} was packed with another tokenizer than the model's")
    lengths = None
    if model.tokenizer is not None:
        lengths = token_lengths(tokenizer_of(model), config.model.vocab_size)
    results = []
    for windows in sets:
        started = time.perf_counter()
        result = evaluate(
            model.ops,
            model.params,
            model.config,
            windows,
            n_windows=given.windows or windows.dataset.n_windows,
            micro_batch=config.train.micro_batch,
            comm=Solo(),
            lengths=lengths,
        )
        results.append(result)
        taken = monitor.duration(time.perf_counter() - started)
        print(
            _as_json(model, [windows], result)
            if given.json
            else f"{model.path} on {windows.dataset.path}: {result} ({result.n_targets:,} tokens "
            f"in {taken})"
        )
    if len(results) > 1:
        whole = pooled(results)
        print(
            _as_json(model, sets, whole)
            if given.json
            else f"{model.path} on all {len(results)}: {whole}"
        )
    return 0


def _as_json(model: Model, sets: Sequence[Windows], found: Evaluation) -> str:
    paths = [str(windows.dataset.path) for windows in sets]
    return json.dumps({"checkpoint": str(model.path), "data": paths, **found.fields()})


def _answer(model: Model, files: Sequence[Path], limit: int | None, *, as_json: bool) -> int:
    """Answer the questions of files, and print how many rightly."""
    from dist.tasks import answer  # which needs this module

    tokenizer = tokenizer_of(model)
    console = Console(stderr=True)
    for path in files:
        with console.status(f"{path}") as status:

            def tell(done: int, path: Path = path, status: Status = status) -> None:
                status.update(f"{path}: {done} questions")

            score = answer(model, tokenizer, path, limit=limit, tell=tell)
        fields = {"checkpoint": str(model.path), "file": str(path), **score.fields()}
        print(json.dumps(fields) if as_json else f"{path}: {score}")
    return 0


# ---- plot ----------------------------------------------------------------------------------------


def plot(argv: Sequence[str]) -> int:
    """``myllm plot``."""
    args = parser(
        "plot",
        "Draw the loss and the learning rate of one run, or compare several.",
        "myllm plot runs/a runs/b --by tokens -o compared.png",
    )
    args.add_argument("runs", nargs="+", metavar="RUN", help="folders with a metrics.jsonl")
    args.add_argument(
        "-o", "--out", help="a .png, .svg or .pdf (default: loss.png and loss.svg in the first run)"
    )
    args.add_argument(
        "--by", choices=AXES, default="step", help="what runs to the right (default step)"
    )
    given = args.parse_args(argv)
    outs = [Path(given.out)] if given.out else [Path(given.runs[0]) / f"loss.{e}" for e in _KINDS]
    draw([Path(run) for run in given.runs], outs, given.by)
    print(", ".join(map(str, outs)))
    return 0


_KINDS = ("png", "svg")
PICTURES = (".png", ".svg", ".pdf")
AXES = {"step": "step", "tokens": "tokens", "time": "minutes of steps"}
EACH = "bits_per_byte/"  # of one of several held-out sets, in metrics.jsonl
FIRST = 0.1  # of the steps, whose losses may lie above the picture


def figure_class() -> type:
    """Return matplotlib's Figure.

    Raises
    ------
    ImportError
        When matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'myllm[plot]'") from error
    return Figure


def save_figure(figure: Any, path: Path) -> None:
    """Put matplotlib's figure under a name that says its format, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:] or None, dpi=120)
    replace_durably(path, drawn.getvalue())


def draw(runs: Sequence[Path], outs: Sequence[Path], by: str = "step") -> None:
    """Draw curves of loss and learning rate of some runs into files, by a key of ``AXES``.

    The axis of the loss ends above what comes after the first tenth of a run, so that the fall from
    the first step does not press the rest flat. Bits per byte of several held-out sets
    stand between the two.

    Raises
    ------
    ValueError, ImportError
        When a run has no steps, or matplotlib is missing.
    """
    for out in outs:
        if out.suffix.lower() not in PICTURES:
            raise ValueError(f"{out}: the name of a picture ends in {', '.join(PICTURES)}")
    read = [monitor.read_metrics(run) for run in runs]
    several = any(name.startswith(EACH) for records in read for r in records for name in r)
    figure = figure_class()(figsize=(8, 8 if several else 6), layout="constrained")
    heights = [3, 2, 1] if several else [3, 1]
    loss_axes, *middle, lr_axes = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    shown: list[float] = []  # losses that the picture must hold
    for number, (run, records) in enumerate(zip(runs, read, strict=True)):
        steps = [r for r in records if r.get("loss") is not None and "lr" in r]
        evals = [r for r in records if r.get("heldout_loss") is not None]
        if not steps:
            raise ValueError(
                f"{run} has no {monitor.METRICS} with steps in it; is it a run folder?"
            )
        color = f"C{number}"
        places = _places(run, records, by)
        x, y = [places[r["step"]] for r in steps], [r["loss"] for r in steps]
        late = int(FIRST * len(steps))
        shown += smooth(y[late:])
        shown += [r["heldout_loss"] for r in evals if r["step"] >= steps[late]["step"]]
        loss_axes.plot(x, y, color=color, alpha=0.3, linewidth=0.8)
        loss_axes.plot(x, smooth(y), color=color, label=f"{run.name}: training")
        if evals:
            loss_axes.plot(
                [places[r["step"]] for r in evals],
                [r["heldout_loss"] for r in evals],
                "o--",
                color=color,
                markersize=4,
                label=f"{run.name}: held out",
            )
        for key in dict.fromkeys(name for r in evals for name in r if name.startswith(EACH)):
            known = [r for r in evals if r.get(key) is not None]
            name = key.removeprefix(EACH)
            middle[0].plot(
                [places[r["step"]] for r in known],
                [r[key] for r in known],
                "o-",
                markersize=4,
                label=name if len(runs) == 1 else f"{run.name}: {name}",
            )
        lr_axes.plot(x, [r["lr"] for r in steps], color=color)
    margin = 0.05 * (max(shown) - min(shown)) or 0.1
    loss_axes.set_ylim(min(shown) - margin, max(shown) + margin)
    loss_axes.set_ylabel("loss, nats a token")
    loss_axes.legend()
    loss_axes.grid(alpha=0.3)
    for by_set in middle:
        by_set.set_ylabel("bits per byte, held out")
        by_set.legend()
        by_set.grid(alpha=0.3)
    lr_axes.set_ylabel("learning rate")
    lr_axes.set_xlabel(AXES[by])
    lr_axes.grid(alpha=0.3)
    for out in outs:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, out)


def _places(run: Path, records: Sequence[dict[str, Any]], by: str) -> dict[int, float]:
    """Return where each step of a run lies on the axis."""
    each = 1
    if by == "tokens":
        each = run_file.load(run / "config.toml").tokens_per_step
    places: dict[int, float] = {}
    minutes = 0.0
    for r in records:
        if by == "time" and "lr" in r:
            if "ms" not in r:
                raise ValueError(
                    f"step {r['step']} of {run / monitor.METRICS} has no time: its ms is missing"
                )
            minutes += r["ms"] / 60e3
        # its own line comes first; of a checkpoint one may come after the next step's
        places.setdefault(r["step"], minutes if by == "time" else each * r["step"])
    return places


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return running means, each value counting ``weight`` times as much as the next."""
    result, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        result.append(total / norm)
    return result
