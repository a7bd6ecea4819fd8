"""``myllm bench tokenizer``: train, encode and decode beside tiktoken, rustbpe, Hugging Face.

Every measurement runs in a process of its own, with the number of threads fixed for all libraries,
first ours, then the peer, round after round; the table shows medians. Peers that are not installed
are left out. All encode with the vocabulary that ours was trained to, exported to their format, and
the ids are compared in the process that is timed.

What is timed: training from a list of str in memory to merges, at N = 65,520 ids without the 16
control ids, and the GPT-4 pattern; encoding a list of documents into a list of lists of ids, and
for us and tiktoken also into arrays, of which the ratio takes each library's faster; decoding one
long list, and for us an array. On one thread seconds are CPU seconds, on two of the clock.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from accel.bench import report
from accel.bench.report import Row
from accel.bench.timing import rounds
from reference.memory import memory
from tokenizer import Tokenizer, to_huggingface, to_tiktoken, train_from_iterator
from tokenizer.patterns import GPT4
from tokenizer.read import Source

VOCAB = 65_536
MERGES_AND_BYTES = VOCAB - 20


Medians = dict[str, dict[str, float]]  # by library


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table."""
    if argv[:1] == ["--work"]:  # in the process that is timed
        print(json.dumps(_work(json.loads(argv[1]))))
        return 0
    about = "Measure training, encoding and decoding beside the peers that are installed."
    p = report.parser("tokenizer", about, "tokenizer corpus.jsonl --rounds 5")
    p.add_argument("paths", nargs="*", metavar="PATHS", help="corpus (Python's own library)")
    p.add_argument("--mb", type=float, default=100, help="MB of text to train on, at most")
    p.add_argument("--encode-mb", type=float, default=30, help="MB of text to encode, at most")
    p.add_argument("--rounds", type=int, default=3, help="by turns (3)")
    p.add_argument("--large", action="store_true", help="also train on 500 M characters")
    given = report.parse(p, argv)
    if given.rounds < 1:
        p.error("--rounds must be at least 1")
    paths = given.paths or [str(Path(sysconfig.get_paths()["stdlib"]) / "**/*.py")]
    peers = [name for name in ("rustbpe", "tokenizers", "tiktoken") if find_spec(name)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        n_bytes = _prepare(folder, paths, given)

        def measure(task: str, libraries: Sequence[str], n_threads: int = 1, n: int = 0) -> Medians:
            """Run a task of each installed library in turn, and return the medians."""
            who = ["ours", *(peer for peer in peers if peer in libraries)]
            tasks = {
                name: partial(_spawn, folder, f"{task} {name}", n_threads, given) for name in who
            }
            runs = list(rounds(tasks, n or given.rounds))
            return {
                name: {f: statistics.median(r[name][f] for r in runs) for f in runs[0][name]}
                for name in who
            }

        parts: dict[str, Callable[[], Iterator[Row]]] = {
            "training": lambda: training(measure("train", ("rustbpe", "tokenizers"))),
            "encoding": lambda: encoding(measure("encode", ("tiktoken", "tokenizers"))),
            "encoding on two threads": lambda: two_threads(measure("encode", ("tiktoken",), 2)),
            "decoding": lambda: decoding(measure("decode", ("tiktoken",))),
        }
        if given.large:
            parts["large"] = lambda: large(measure("large", (), n=1))
        title = f"{report.machine(*peers)}; {n_bytes / 1e6:.1f} MB, medians of {given.rounds}"
        return report.run(p, given, title, parts)


# --- the table


def training(of: Medians) -> Iterator[Row]:
    """Yield CPU seconds beside each peer's."""
    ours = of.pop("ours")
    note = f"{ours['size']:,.0f} ids, peak {ours['peak_mb']:,.0f} MB"
    if not of:
        yield Row("train, one thread, CPU time", ours["seconds"], note=note)
    for peer, bar in (("rustbpe", 0.30), ("tokenizers", 0.12)):
        if peer in of:
            theirs = of[peer]
            beside = f"{note}; {theirs['size']:,.0f} ids, {theirs['peak_mb']:,.0f} MB"
            yield Row(f"train / {peer}", ours["seconds"], theirs["seconds"], bar, note=beside)


def encoding(of: Medians) -> Iterator[Row]:
    """Yield speeds: of each library, the faster of lists and arrays."""
    yield from _speeds("encode", of, {"tiktoken": 3.5})


def two_threads(of: Medians) -> Iterator[Row]:
    """Yield speeds on two threads: beside ours on one, by the same clock, and a peer's on two."""
    ours = of["ours"]
    yield Row("encode, 2 threads / 1", ours["mb_s_array"], ours["mb_s_one"], 1.8, "MB/s")
    yield from _speeds("encode on 2 threads", of, {})


def decoding(of: Medians) -> Iterator[Row]:
    """Yield speeds: of each library, the faster of lists and arrays."""
    yield from _speeds("decode", of, {"tiktoken": 4.0})


def large(of: Medians) -> Iterator[Row]:
    """Yield the memory of training on 500 M characters."""
    ours = of["ours"]
    note = f"{ours['seconds']:.1f} CPU s, {ours['size']:,.0f} ids"
    yield Row("train on 500 M characters, peak", ours["peak_mb"], None, 1000.0, "MB", note)


def _speeds(what: str, of: Medians, bars: dict[str, float]) -> Iterator[Row]:
    def note(row: dict[str, float]) -> str:
        same = f", {row['same']:.2%} same ids" if "same" in row else ""
        return f"lists {row['mb_s']:.1f}, arrays {row['mb_s_array']:.1f}{same}"

    best = {name: max(row["mb_s"], row["mb_s_array"]) for name, row in of.items()}
    ours = note(of["ours"])
    if len(of) == 1:
        yield Row(what, best["ours"], unit="MB/s", note=ours)
    for peer in list(of)[1:]:
        beside = f"{ours}; {note(of[peer])}"
        yield Row(f"{what} / {peer}", best["ours"], best[peer], bars.get(peer), "MB/s", beside)


# --- around the processes that are timed


def _prepare(folder: Path, paths: list[str], options: argparse.Namespace) -> int:
    """Write the corpus and our vocabulary in all formats, compiling kernels on the way."""
    size = 0
    texts = []
    for text in Source(paths, report_bad=lambda sentence: None).texts():
        if size + len(text) > options.mb * 1e6:
            break
        size += len(text)
        texts.append(text.decode("utf-8", "replace"))
    if not texts:
        raise ValueError("the corpus holds no text that fits --mb")
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
    tokenizer = train_from_iterator(texts, VOCAB, min_count=1)
    tokenizer.decode(tokenizer.encode_ordinary("kernels are compiled by now"))
    tokenizer.save(folder / "ours.tok")
    to_tiktoken(tokenizer, folder / "ours.tiktoken")
    to_huggingface(tokenizer, folder / "ours.json")
    return size


def _spawn(folder: Path, task: str, n_threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one task in a process of its own."""
    work = {"folder": str(folder), "task": task, "threads": n_threads, "mb": options.encode_mb}
    env = os.environ | {
        "RAYON_NUM_THREADS": str(n_threads),
        "TOKENIZERS_PARALLELISM": str(n_threads > 1).lower(),
        "MYLLM_THREADS": str(n_threads),
    }
    command = [sys.executable, "-m", "dist", "bench", "tokenizer", "--work", json.dumps(work)]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        raise ValueError(f"{task} with {n_threads} threads failed: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


# --- in the process that is timed


def _work(work: dict[str, Any]) -> dict[str, Any]:
    kind, who = work["task"].split()
    folder = Path(work["folder"])
    if kind == "large":
        return _train(who, _large(folder), min_count=2)
    texts = list(_corpus(folder))
    if kind == "train":
        return _train(who, texts)
    whole = np.cumsum([len(text) for text in texts]) <= work["mb"] * 1e6
    texts = texts[: max(1, int(whole.sum()))]
    tokenizer = Tokenizer.load(folder / "ours.tok")
    run = _encode if kind == "encode" else _decode
    return run(who, folder, texts, tokenizer, work["threads"])


def _corpus(folder: Path) -> Iterator[str]:
    with (folder / "corpus.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _large(folder: Path, size: int = 500_000_000) -> Iterator[str]:
    """Yield so many characters that are never all in memory: the corpus, again and again.

    Each time round every word gets another ending, so that the words are not the same ones again.
    """
    for k in itertools.count():
        for text in _corpus(folder):
            if size <= 0:
                return
            ending = chr(0x61 + k % 26) + chr(0x61 + k // 26) + " "
            yield text.replace("e ", ending) if k else text
            size -= len(text)


def _train(who: str, texts: Iterable[str], min_count: int = 1) -> dict[str, Any]:
    start = time.process_time()
    if who == "ours":
        ours = train_from_iterator(texts, VOCAB, min_count=min_count, num_threads=1)
        n = len(ours.vocabulary.tokens)
    elif who == "rustbpe":
        import rustbpe

        theirs = rustbpe.Tokenizer()
        theirs.train_from_iterator(iter(texts), MERGES_AND_BYTES, pattern=GPT4)
        n = theirs.vocab_size
    else:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

        face = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(GPT4), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        face.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        trainer = trainers.BpeTrainer(
            vocab_size=MERGES_AND_BYTES,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        face.train_from_iterator(texts, trainer)
        n = face.get_vocab_size()
    return {"seconds": time.process_time() - start, "size": n, "peak_mb": memory() / 1e6}


def _timed(function: Callable[[], Any], n_threads: int = 1) -> tuple[Any, float]:
    """Run three times; return the result and the median of the seconds.

    On one thread they are CPU seconds, which other work on the machine disturbs less.
    """
    clock = time.process_time if n_threads == 1 else time.perf_counter
    runs = []
    for _ in range(3):
        out = None  # the memory of the run before is free again
        start = clock()
        out = function()
        runs.append(clock() - start)
    return out, statistics.median(runs)


def _tiktoken(folder: Path, tokenizer: Tokenizer) -> Any:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    return tiktoken.Encoding(
        "ours",
        pat_str=tokenizer.vocabulary.pattern,
        mergeable_ranks=load_tiktoken_bpe(str(folder / "ours.tiktoken")),
        special_tokens=tokenizer.special_tokens,
    )


def _encode(
    who: str, folder: Path, texts: list[str], tokenizer: Tokenizer, n_threads: int
) -> dict[str, Any]:
    ours = partial(tokenizer.encode_batch, texts, disallowed_special=())
    to_arrays = partial(tokenizer.encode_batch_to_numpy, texts, disallowed_special=())
    expected = ours(num_threads=1)
    arrays: Callable[[], Any] | None = None
    if who == "ours":
        lists: Callable[[], Any] = partial(ours, num_threads=n_threads)
        arrays = partial(to_arrays, num_threads=n_threads)
    elif who == "tiktoken":
        encoding = _tiktoken(folder, tokenizer)
        lists = partial(encoding.encode_ordinary_batch, texts, num_threads=n_threads)
        if n_threads == 1:
            lists = lambda: [encoding.encode_ordinary(t) for t in texts]  # noqa: E731
            arrays = lambda: [encoding.encode_to_numpy(t, disallowed_special=()) for t in texts]  # noqa: E731
    else:
        import tokenizers

        face = tokenizers.Tokenizer.from_file(str(folder / "ours.json"))
        lists = lambda: [face.encode(t, add_special_tokens=False).ids for t in texts]  # noqa: E731
    got, first = _timed(lists, n_threads)
    second = first if arrays is None else _timed(arrays, n_threads)[1]
    mb = sum(len(text.encode()) for text in texts) / 1e6
    same = sum(a == b for a, b in zip(got, expected, strict=True)) / len(texts)
    out = {"mb_s": mb / first, "mb_s_array": mb / second, "same": same}
    if who == "ours" and n_threads == 2:  # the same work on one thread, by the same clock
        out["mb_s_one"] = mb / _timed(partial(to_arrays, num_threads=1), 2)[1]
    return out


def _decode(
    who: str, folder: Path, texts: list[str], tokenizer: Tokenizer, n_threads: int
) -> dict[str, Any]:
    del n_threads
    rows = tokenizer.encode_batch(texts, disallowed_special=(), num_threads=1)
    ids = [i for row in rows for i in row]
    decode = (tokenizer if who == "ours" else _tiktoken(folder, tokenizer)).decode_bytes
    decode(ids[:10])
    got, first = _timed(lambda: decode(ids))
    got_too, second = got, first
    if who == "ours":
        array = np.array(ids, tokenizer.dtype)
        got_too, second = _timed(lambda: decode(array))
    whole = "".join(texts).encode()
    if not got == got_too == whole:
        raise ValueError(f"{who} decodes to other bytes")
    return {"mb_s": len(whole) / first / 1e6, "mb_s_array": len(whole) / second / 1e6}
