"""``myllm demo``: from nothing to a model that writes, on this machine, in five minutes.

Every stage leaves its result in a folder and is skipped when that is there, so the demo can be
interrupted anywhere and goes on when it is given again. What it does is what the commands do:
``myllm tokenizer train``, ``pack``, ``train``, ``eval``, ``plot`` and ``generate``.
"""

import dataclasses
import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from accel import AUTO
from accel import load as load_backend
from accel.help import minutes, parser
from accel.system import cores
from dist import cli, config, mode, monitor, pack, sizing, warm
from dist.comm import Solo
from dist.corpus import Text, packages, standard_library
from dist.data import Batch, Windows, on_backend
from dist.duplicates import SHARED, Apart, near_duplicates
from dist.evaluate import evaluate, load_tokenizer, token_lengths
from dist.generate import Writer
from dist.heldout import is_held_out
from dist.launch import find_mpirun, launch
from dist.model import Model, load_model
from dist.shards import MANIFEST, read_manifest
from dist.sizing import LEAST_STEPS, Size
from dist.use import draw
from dist.weights import load_master
from reference import ops as reference_ops
from reference.model import loss_backward, loss_forward
from reference.ops import Ops
from reference.params import decoder_layout
from reference.types import Array
from tokenizer.files import replace_durably

if TYPE_CHECKING:
    from tokenizer import Tokenizer

HELDOUT = 0.05  # of the documents
PROSE_COPIES = 4  # of each English document to train on, which are a twentieth of the bytes
READINGS = 2  # of the library, beyond which packages are mixed in: dist/sweep/mixture
FOREIGN = 0.1  # of the runs of eight words of a held-out document, at most, are in these
PROBE_STEPS = 20  # of which the second half tells how fast this machine is
TAIL_SECONDS = 25.0  # for everything after training
EVALUATIONS = 5  # while it trains
PROMPT_SEED = 2026
PROMPT_TOKENS = 48
NEW_TOKENS = 120
# ‖gradient - reference‖ / ‖reference‖ of any parameter; rounding gives about 1e-6 and 1e-2
GRADIENT_BARS = {"float32": 1e-4, "bf16": 1e-1}


class Paths(NamedTuple):
    """Where the demo keeps what."""

    out: Path

    @property
    def corpus(self) -> Path:
        return self.out / "corpus.jsonl"

    @property
    def packages(self) -> Path:
        return self.out / "packages.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer.myllm"

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def package_data(self) -> Path:
        return self.out / "packages"

    @property
    def run_file(self) -> Path:
        return self.out / "run.toml"

    @property
    def run(self) -> Path:
        return self.out / "run"


def main(argv: Sequence[str]) -> int:
    """``myllm demo``."""
    args = parser(
        "demo",
        "Take the sources and documentation of Python's own standard library, train a tokenizer "
        "and a small MyLLM on them, and let it write. Where there is time to read them more than "
        "twice, sources of the installed packages are mixed in. Needs no download and no GPU. "
        "Given again, it goes on where it was.",
        "myllm demo --minutes 5 --ranks 2",
    )
    args.add_argument("--minutes", type=minutes, default=5.0, help="for everything (default 5)")
    args.add_argument("--ranks", type=int, default=2, help="MPI ranks (default 2)")
    args.add_argument("--out", default="demo", help="folder for all results (default demo)")
    args.add_argument(
        "--compute", default=AUTO, help="float32, bf16 or auto: the faster one here (default)"
    )
    given = args.parse_args(argv)
    deadline = time.monotonic() + 60 * given.minutes
    paths = Paths(Path(given.out))
    smallest = settings_of(paths, given.ranks, sizing.SIZES[0], 1, paths.run, "float32")
    smallest.accumulation(given.ranks)
    if given.ranks > 1:
        find_mpirun()  # now rather than after a minute of preparation
    paths.out.mkdir(parents=True, exist_ok=True)
    if paths.run_file.exists():
        begun = config.load(paths.run_file).run.compute
        if given.compute not in (AUTO, begun):
            raise ValueError(
                f"the run in {paths.out} was begun with --compute {begun}: leave --compute out to "
                "go on with it, or name another folder by --out"
            )
        given.compute = begun
        say(
            f"{paths.run_file} is there: going on with its run, for which --minutes was asked "
            "when it began; --out names a folder for another"
        )
    if given.compute != AUTO:
        load_backend("cpu", compute=given.compute)  # which says so if it is not to be had
    typical = settings_of(paths, given.ranks, sizing.TYPICAL, 1, paths.run, given.compute)
    with warm.helpers(max(1, cores() - 1)) as begin:
        finish_compiling = begin(typical)
        prepare_corpus(paths)
        typical, chosen = mode.settled(typical, None, finish_compiling)
        if chosen:
            given.compute = typical.run.compute
            say(chosen)
            finish_compiling = begin(typical)
        prepare_tokenizer(paths)
        packed(paths, paths.corpus, paths.data, HELDOUT)
        finish_compiling()  # nothing else shall run beside what follows
    if not paths.run_file.exists():
        choose_run(paths, deadline, given.ranks, given.compute)
    say(f"training: myllm train {paths.run_file} --ranks {given.ranks}")
    status = train(paths.run_file, given.ranks)
    if status:
        return status
    with warm.helpers(1) as begin:
        begin(typical, writes=True)  # what the model writes with, while it is evaluated
        show(paths, given.compute)
    return 0


def say(text: str) -> None:
    """Print what the demo itself has to say."""
    print(f"\n{monitor.filled(f'== {text}')}", flush=True)


# ---- the stages ----------------------------------------------------------------------------------


def prepare_corpus(paths: Paths) -> None:
    """Write the corpus, its held-out documents free of near-duplicates of the others."""
    if paths.corpus.exists():
        return
    texts = standard_library()
    held = [t for t in texts if is_held_out(t.text.encode(), HELDOUT)]
    rest = [t for t in texts if not is_held_out(t.text.encode(), HELDOUT)]
    doubles = near_duplicates([t.text for t in held], [t.text for t in rest])
    dropped = {t.name for t, double in zip(held, doubles, strict=True) if double}
    kept = [t for t in texts if t.name not in dropped]
    again = [t for t in rest if is_prose(t)] * (PROSE_COPIES - 1)
    write_texts(paths.corpus, kept + again)
    say(
        f"corpus: {len(kept)} documents, {size_of(kept)}, from Python's standard library; "
        f"{len(held) - len(dropped)} of them held out, {len(dropped)} more dropped as "
        f"near-duplicates (at least {SHARED:.0%} of their eight-word runs occur in training text); "
        f"English prose to train on is taken {PROSE_COPIES} times"
    )


def prepare_packages(paths: Paths, tokens: int) -> None:
    """Pack sources of the installed packages: about so many tokens, or all that there are."""
    if not paths.packages.exists():
        manifest = read_manifest(paths.data / "train")
        left = tokens * paths.corpus.stat().st_size // manifest.tokens
        apart, found = Apart([t.text for t in read_corpus(paths)[1]], FOREIGN), []
        for text in packages():
            if left <= 0:
                break
            if apart.takes(text.text):
                found.append(text)
                left -= len(text.text)
        write_texts(paths.packages, found)
        say(
            f"the library would be read more than {READINGS} times, so {len(found)} sources of the "
            f"packages installed here are mixed in, {size_of(found)}, which hold at most "
            f"{FOREIGN:.0%} of the eight-word runs of any held-out document"
        )
    if paths.packages.stat().st_size:
        packed(paths, paths.packages, paths.package_data, heldout=0.0)


def write_texts(path: Path, texts: list[Text]) -> None:
    """Write texts as rows, durably."""
    lines = (json.dumps({"text": t.text, "name": t.name}) + "\n" for t in texts)
    replace_durably(path, "".join(lines).encode())


def size_of(texts: list[Text]) -> str:
    """Return how many bytes texts have, for people."""
    return monitor.bytes_text(sum(len(t.text.encode()) for t in texts))


def is_prose(text: Text) -> bool:
    """Whether a document is a chapter of the language reference rather than a source."""
    return text.name.startswith("topic ")


def read_corpus(paths: Paths) -> tuple[list[Text], list[Text]]:
    """Return the training documents and the held-out ones."""
    with paths.corpus.open(encoding="utf-8") as file:
        texts = [Text(r["name"], r["text"]) for r in map(json.loads, file)]
    held = [t for t in texts if is_held_out(t.text.encode(), HELDOUT)]
    return [t for t in texts if not is_held_out(t.text.encode(), HELDOUT)], held


def prepare_tokenizer(paths: Paths) -> None:
    """Train the tokenizer on the training documents."""
    if paths.tokenizer.exists():
        return
    from tokenizer import train_from_iterator

    vocab_size = config.load("demo").model.vocab_size
    say(f"tokenizer: byte-level BPE with {vocab_size:,} ids")
    started = time.monotonic()
    train_from_iterator([t.text for t in read_corpus(paths)[0]], vocab_size).save(paths.tokenizer)
    print(f"learned in {time.monotonic() - started:.1f} s: {paths.tokenizer}")


def packed(paths: Paths, texts: Path, out: Path, heldout: float) -> None:
    """Pack texts, unless they are."""
    if (out / "train" / MANIFEST).exists():
        return
    say(
        f"packing:\n   myllm pack {texts} --tokenizer {paths.tokenizer} \\"
        f"\n     --heldout {heldout:g} -o {out}"
    )
    pack.pack([str(texts)], out, pack.Settings(str(paths.tokenizer), heldout=heldout))


def settings_of(
    paths: Paths, ranks: int, size: Size, steps: int, out: Path, compute: str
) -> config.RunFile:
    """Return the run file of the demo for a size and a number of steps."""
    run = config.load(
        "demo",
        [
            *size.overrides(ranks),
            f"data.train={json.dumps(str(paths.data / 'train'))}",
            f"data.heldout={json.dumps(str(paths.data / 'heldout'))}",
            *sizing.schedule(steps, EVALUATIONS),
            f"run.out={json.dumps(str(out))}",
            f"run.compute={compute}",
        ],
    )
    mixture = mixture_of(paths, steps * run.tokens_per_step)
    if mixture is None:
        return run
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, train="", phases=(mixture,)),
        train=dataclasses.replace(run.train, steps=0),
    )


def mixture_of(paths: Paths, tokens: int) -> config.Phase | None:
    """Return the run's only phase, where so many tokens are more than two readings of the library.

    Then the packages are mixed in, so that it is read twice, or as often as they are. None where
    the library alone is enough, or is all that there is.
    """
    library, others = paths.data / "train", paths.package_data / "train"
    if not all((folder / MANIFEST).exists() for folder in (library, others)):
        return None
    has, more = (read_manifest(folder).tokens for folder in (library, others))
    share = round(max(READINGS * has / tokens, has / (has + more)), 3)
    if share >= 1:
        return None
    weights = {library: share, others: round(1 - share, 3)}
    found = (config.Source(path=str(path), weight=weight) for path, weight in weights.items())
    return config.Phase(tokens=tokens, sources=tuple(found))


def choose_run(paths: Paths, deadline: float, ranks: int, compute: str) -> None:
    """Write a run file: a model for the time left, and as many steps as there is time for.

    The model is chosen by the speed of one that is always the same, the steps by those of a short
    run of the chosen one.
    """
    say("speed: a few steps, to see which model and how many steps there is time for")
    speed = sizing.measured_speed(compute)
    choice = sizing.choice_for(deadline - time.monotonic() - TAIL_SECONDS, speed)
    print(monitor.filled(str(choice)), flush=True)
    with TemporaryDirectory(prefix="probe-", dir=paths.out) as folder:
        run = settings_of(paths, ranks, choice.size, PROBE_STEPS, Path(folder) / "run", compute)
        run = dataclasses.replace(
            run, run=dataclasses.replace(run.run, eval_every=0, checkpoint_every=0, eval_windows=1)
        )
        probe = Path(folder) / "run.toml"
        replace_durably(probe, run.to_toml().encode())
        status = train(probe, ranks)
        if status:
            raise SystemExit(status)
        records = monitor.read_metrics(Path(run.run.out))
    seconds = float(np.mean([r["ms"] for r in records if "ms" in r][PROBE_STEPS // 2 :])) / 1e3

    def steps_left() -> tuple[int, float]:
        left = deadline - time.monotonic() - TAIL_SECONDS
        return max(LEAST_STEPS, int(sizing.SHARE * left / seconds)), left

    beyond = steps_left()[0] * run.tokens_per_step
    beyond -= READINGS * read_manifest(paths.data / "train").tokens
    if beyond > 0:
        prepare_packages(paths, beyond)
    steps, left = steps_left()
    print(f"{seconds * 1e3:.0f} ms a step and {monitor.duration(left)} left: {steps} steps")
    run = settings_of(paths, ranks, choice.size, steps, paths.run, compute)
    for phase in run.data.phases:
        of = ", ".join(f"{source.weight:.0%} from {source.path}" for source in phase.sources)
        print(monitor.filled(f"{phase.tokens:,} tokens: {of}"))
    replace_durably(paths.run_file, run.to_toml().encode())


def train(run_file: Path, ranks: int) -> int:
    """Train as a run file says."""
    if ranks == 1:
        return cli.main(["train", str(run_file)])
    return launch(ranks, ["train", str(run_file)])


# ---- what came of it -----------------------------------------------------------------------------


def show(paths: Paths, compute: str) -> None:
    """Evaluate, draw, verify and let the model write; say where everything is."""
    model = load_model(paths.run, "cpu", compute)
    tokenizer = load_tokenizer(paths.tokenizer, model.state.tokenizer_sha256)
    windows = Windows(str(paths.data / "heldout"), config.from_tables(model.state.config))
    held = read_corpus(paths)[1]

    result = evaluate(
        model.ops,
        model.params,
        model.config,
        windows,
        n_windows=windows.dataset.n_windows,
        micro_batch=8,
        comm=Solo(),
        lengths=token_lengths(tokenizer, model.config.vocab_size),
    )
    say(f"held-out text, {result.n_targets:,} tokens of {len(held)} documents: {result}")
    unigram = unigram_bits(paths, windows, tokenizer)
    text = "".join(t.text for t in held).encode()
    packed = 8 * len(zlib.compress(text, 9)) / len(text)
    print(
        f"bits per byte: this model {result.bits_per_byte:.3f}, zlib -9 {packed:.3f},\n"
        f"a model that knows only how frequent each token is {unigram:.3f}"
    )
    try:
        pictures = [paths.out / "loss.png", paths.out / "loss.svg"]
        draw([paths.run], pictures)
        drawn = ", ".join(map(str, pictures))
    except ImportError as error:
        drawn = f"not drawn: {error}"
    say(f"loss curve: {drawn}")

    worst, name = gradient_error(model.ops, model, windows)
    bar = GRADIENT_BARS[compute]
    say(
        f"gradients of one held-out window against the float64 reference: the largest relative "
        f"error of a parameter is {worst:.1e} ({name}; allowed {bar:.0e})"
    )
    if not worst <= bar:
        raise ValueError(f"the gradient of {name} is off by {worst:.1e}; run myllm verify")

    say(f"completions of held-out text (seed {PROMPT_SEED}, temperature 0.8, top-p 0.95)")
    for text_from, prompt in choose_prompts(held, tokenizer):
        writer = Writer(model, tokenizer, temperature=0.8, top_p=0.95)
        writer.session.read(prompt)
        continuation = "".join(writer.write(NEW_TOKENS, np.random.default_rng([PROMPT_SEED, 0])))
        print(f"\n---- {text_from}\n{tokenizer.decode(prompt)}⟦{continuation}⟧")
    mixed = "\n   packages.jsonl, packages/," if paths.packages.exists() else ""
    say(
        f"""everything is in {paths.out}: corpus.jsonl, tokenizer.myllm, data/, run.toml,{mixed}
   run/metrics.jsonl, run/checkpoints/, {drawn}
   Try next, on text of your own:
     myllm tokenizer train MY_TEXTS --vocab-size 4096 -o my.tok
     myllm pack MY_TEXTS --tokenizer my.tok --heldout 0.1 -o my-data
     myllm train demo --ranks 2 --set data.train=my-data/train \\
       --set data.heldout=my-data/heldout --set run.out=my-run
     myllm generate my-run
   or now:
     myllm generate {paths.run} --prompt "def "
"""
    )


def unigram_bits(paths: Paths, windows: Windows, tokenizer: "Tokenizer") -> float:
    """Return the bits per byte of the best prediction that ignores what came before.

    The probabilities are the frequencies in the training set, one added to each count.
    """
    vocab_size, window = windows.vocab_size, windows.dataset.window
    training = Windows(str(paths.data / "train"), config.load(paths.run_file)).dataset
    counts = np.ones(vocab_size)
    for i in range(training.n_windows):
        counts += np.bincount(training.read(i)[0], minlength=vocab_size)
    bits = -np.log2(counts / counts.sum())
    lengths = token_lengths(tokenizer, vocab_size)
    total, size = 0.0, 0
    for i in range(windows.dataset.n_windows):
        targets = windows.dataset.read(i)[0][1:window]
        total += float(bits[targets].sum())
        size += int(lengths[targets].sum())
    return total / size


def gradient_error(ops: Ops, model: Model, windows: Windows) -> tuple[float, str]:
    """Return the largest relative error of a parameter's gradient, and which one's.

    Of the loss of one window, by the backend, against the reference in float64.
    """
    batch = windows.batch(0, 1)
    layout = decoder_layout(model.config)
    master = load_master(model.path)
    found = gradient(ops, ops.parameters(layout.views(ops.from_numpy(master))), model, batch)
    exact = gradient(reference_ops, layout.views(master.astype(np.float64)), model, batch)
    errors = {
        name: float(np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name]))
        for name in exact
    }
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def gradient(ops: Ops, params: dict[str, Array], model: Model, batch: Batch) -> dict[str, Array]:
    """Return the gradient of the mean loss of a batch, name -> array."""
    layout = decoder_layout(model.config)
    like = np.float64 if params["embedding.weight"].dtype == np.float64 else np.float32
    flat = ops.from_numpy(np.zeros(layout.size, like))
    loss, cache = loss_forward(ops, params, model.config, *on_backend(ops, batch))
    loss_backward(1 / loss.n_valid, cache, layout.views(flat))
    return layout.views(ops.to_numpy(flat))


def choose_prompts(held: list[Text], tokenizer: "Tokenizer") -> list[tuple[str, list[int]]]:
    """Return the beginnings to continue: of two Python sources and of English prose."""
    rng = np.random.default_rng(PROMPT_SEED)
    prose = [t for t in held if is_prose(t)]
    sources = [t for t in held if not is_prose(t)]
    prompts = []
    for texts, number in ((sources, 2), (prose, 1)):
        for index in rng.permutation(len(texts))[:number]:
            text = texts[int(index)]
            lines = text.text.splitlines(keepends=True)
            start = int(rng.integers(0, max(1, len(lines) * 3 // 4)))
            ids = tokenizer.encode_ordinary("".join(lines[start:]))[:PROMPT_TOKENS]
            prompts.append((f"{text.name}, from line {start + 1}", ids))
    return prompts
