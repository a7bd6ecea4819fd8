"""The subcommands of training: ``myllm train`` and those around it."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from accel import launcher
from accel.help import parser
from dist import config as run_file
from dist.comm import AllRanksError, Comm, sentence, start, together
from dist.interrupt import Ended
from dist.monitor import bytes_text, duration


def add_set(args: argparse.ArgumentParser) -> None:
    """Add ``--set``."""
    args.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override a key of the run file; may be given many times",
    )


def on_ranks(name: str, work: Callable[[Comm], int]) -> int:
    """Run ``work`` on this rank so that no rank ever waits for one that has failed.

    With one rank, errors go to the dispatcher. With several, one that all know of is said once; any
    other ends every rank at once, with the sentence of the rank that it happened on, and a
    traceback where the dispatcher would show one.
    """
    comm = start()
    if comm.size == 1:
        return work(comm)
    try:
        try:
            status = work(comm)
        except AllRanksError as error:
            if comm.rank == 0:
                print(f"myllm {name}: {error}", file=sys.stderr, flush=True)
            status = 1
        comm.finish()
        return status
    except KeyboardInterrupt:
        comm.abort(130)
    except BaseException as error:
        expected = isinstance(error, (ValueError, OSError, ImportError, MemoryError))
        shown = not expected or "MYLLM_TRACEBACK" in os.environ
        text = "".join(traceback.format_exception(error)) if shown else ""
        # in one write, so that the lines of another rank cannot come between
        sys.stderr.write(f"{text}myllm {name}: rank {comm.rank}: {sentence(error)}\n")
        comm.abort(1)


def train(argv: Sequence[str]) -> int:
    """``myllm train``."""
    args = parser(
        "train",
        "Train a model as a run file says. Given the same command again, it goes on from the "
        "newest checkpoint in run.out.",
        "myllm train laptop --ranks 2 --set train.lr=5e-4\n  mpirun -n 8 myllm train run.toml",
    )
    args.add_argument("config", metavar="CONFIG", help="a TOML run file, or a preset's name")
    add_set(args)
    args.add_argument(
        "--ranks", type=int, default=1, help="MPI ranks to start on this machine (default 1)"
    )
    args.add_argument(
        "--from",
        dest="begin",
        metavar="step-N",
        help="go on from this checkpoint in run.out, not from the newest; given again, it goes "
        "back there again",
    )
    args.add_argument(
        "--changed",
        action="store_true",
        help="go on from a checkpoint although [model] [data] [train] or [optim] have changed",
    )
    given = args.parse_args(argv)
    if given.ranks != 1:
        if launcher.size() > 1:
            raise ValueError("--ranks starts MPI itself: leave it out under mpirun or srun")
        config = run_file.load(given.config, given.overrides)
        config.accumulation(given.ranks)
        from dist.launch import launch

        words = [given.config, *(["--changed"] if given.changed else [])]
        words += ["--from", given.begin] if given.begin else []
        words += [f"--set={override}" for override in given.overrides]
        return launch(given.ranks, ["train", *words], config.run.timeout)

    from dist.stopping import StopRequest
    from dist.train import Trainer

    def work(comm: Comm) -> int:
        with StopRequest().listening() as stop:
            config = together(comm, lambda: run_file.load(given.config, given.overrides))[comm.rank]
            trainer = Trainer(config, comm, changed=given.changed, begin=given.begin)
            stopped = trainer.run(stop)
        # under MPI a status other than 0 would be taken for a failure of the rank
        return 128 + stopped if stopped is not None and comm.size == 1 else 0

    return on_ranks("train", work)


def tell_of_packing(total: int) -> Callable[[int, int, int], None]:
    """Return what prints, every two seconds, how far a packing of so many bytes on disk is.

    The speed is that since the first call: what an interrupted packing had done took no time now.
    """
    first: tuple[float, int, int] | None = None
    last = 0.0

    def tell(n_bytes: int, tokens: int, done: int) -> None:
        nonlocal first, last
        now = time.monotonic()
        if first is None:
            first, last = (now, n_bytes, done), now
        if now - last < 2:
            return
        last = now
        seconds = now - first[0]
        speed, pace = (n_bytes - first[1]) / seconds, (done - first[2]) / seconds
        eta = f", ETA {duration(max(0, total - done) / pace)}" if total and pace else ""
        print(
            f"{bytes_text(n_bytes)} of text, {tokens:,} tokens, {bytes_text(speed)}/s{eta}",
            flush=True,
        )

    return tell


def pack(argv: Sequence[str]) -> int:
    """``myllm pack``."""
    from accel.system import cores
    from dist import pack as packing
    from dist.duplicates import SHARED, SHINGLE
    from dist.evaluate import load_tokenizer
    from dist.heldout import far_share
    from dist.shards import TOKENIZER, check_crcs, read_manifest

    args = parser(
        "pack",
        "Turn texts into shards of token ids, a training set and a held-out one. Inputs are files, "
        "folders, globs or - for standard input; rows of .jsonl, .json, .csv, .tsv and .parquet (a "
        "text field, prompt and completion, or chat messages), .gz and .zst are understood. What "
        "is no text is passed over in folders. An interrupted packing goes on when the same "
        "command is given again.",
        "myllm pack books/ notes.jsonl.gz --tokenizer mine.tok -o data/mine\n"
        "  myllm pack --check data/mine/train",
    )
    defaults = packing.Settings._field_defaults
    args.add_argument("inputs", nargs="*", metavar="INPUT")
    args.add_argument("--tokenizer", metavar="FILE")
    args.add_argument("-o", "--out", metavar="DIR")
    args.add_argument("--check", metavar="DIR", help="verify the CRCs of a packed folder")
    args.add_argument(
        "--skip-bad-lines", action="store_true", help="report lines that cannot be read and go on"
    )
    args.add_argument(
        "--field",
        help="field or column of rows that holds the text, whatever else they have (default: "
        "messages, or prompt and completion, or text)",
    )
    args.add_argument(
        "--max-chars",
        type=float,
        metavar="N",
        help="end with the document that brings so many characters of text",
    )
    args.add_argument(
        "--layout",
        choices=("stream", "truncate"),
        default="stream",
        help="stream: documents one after the other; truncate: one window a document, its first "
        "tokens, padded (needs --window)",
    )
    args.add_argument("--window", type=int, default=0, help="tokens of a window, for truncate")
    args.add_argument(
        "--chat",
        action="store_true",
        help="rows of prompt and completion become a user's turn and the assistant's answer",
    )
    args.add_argument("--bos", action="store_true", help="begin each document with a bos")
    args.add_argument(
        "--heldout",
        type=float,
        default=defaults["heldout"],
        help="fraction of the documents held out for evaluation, or of the text where that would "
        "be none of few documents (default %(default)s)",
    )
    args.add_argument(
        "--drop-near-duplicates",
        action="store_true",
        help=f"drop held-out documents of whose runs of {SHINGLE} words training text has "
        f"{100 * SHARED:g}%% or more; reads the texts three times",
    )
    args.add_argument(
        "--shard-tokens",
        type=int,
        default=defaults["shard_tokens"],
        help=f"tokens of a file of a set ({defaults['shard_tokens']:,})",
    )
    args.add_argument("--processes", type=int, default=cores(), help="that encode (one a core)")
    given = args.parse_args(argv)
    if given.check:
        folder = Path(given.check)
        files = check_crcs(folder)
        load_tokenizer(folder / TOKENIZER, read_manifest(folder).tokenizer_sha256)
        print(f"{files} files are as they were packed, and so is the tokenizer")
        return 0
    if not (given.inputs and given.tokenizer and given.out):
        args.error("INPUT, --tokenizer and -o are needed")
    if (given.layout == "truncate") != bool(given.window):
        args.error("--layout truncate and --window N belong together")
    settings = packing.Settings(
        tokenizer=given.tokenizer,
        field=given.field,
        window=given.window,
        bos=given.bos,
        chat=given.chat,
        heldout=given.heldout,
        shard_tokens=given.shard_tokens,
        max_chars=given.max_chars,
        distinct=given.drop_near_duplicates,
    )
    started = time.monotonic()

    def report(said: str) -> None:
        print(f"myllm pack: {said}", file=sys.stderr)

    try:
        summary = packing.pack(
            given.inputs,
            Path(given.out),
            settings,
            processes=given.processes,
            skip_bad_lines=given.skip_bad_lines,
            report=report,
            progress=tell_of_packing(0 if given.max_chars else packing.plain_bytes(given.inputs)),
        )
    except (KeyboardInterrupt, Ended):
        if done := packing.kept(Path(given.out)):
            report(f"the same command goes on after {done:,} documents")
        raise
    for split in packing.SPLITS:
        print(
            f"{given.out}/{split}: {summary.documents[split]:,} documents, "
            f"{summary.tokens[split]:,} tokens"
        )
    left_out = f"; left out: {summary.bad_lines} bad lines, {summary.empty} empty documents"
    if given.drop_near_duplicates:
        left_out += f", {summary.near} near-duplicates"
    if summary.silent:
        where = f" within --window {given.window}" if given.window else ""
        left_out += f", {summary.silent} documents with nothing to predict{where}"
    print(
        f"{bytes_text(summary.n_bytes)} of text in {duration(time.monotonic() - started)}{left_out}"
    )
    if far := far_share(summary.tokens["heldout"], sum(summary.tokens.values()), given.heldout):
        report(far)
    return 0
