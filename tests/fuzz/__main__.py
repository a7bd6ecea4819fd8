"""Fuzz the commands: ``python -m tests.fuzz --inputs 20000 --seed 1``.

Inputs are drawn and tried in a few worker processes. What a worker does not survive is a finding as
well. Each finding of a new place is saved in ``tests/fuzz/corpus``, which the tests replay.
"""

import argparse
import collections
import hashlib
import shutil
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

from tests.fuzz.workers import Worker
from tests.fuzz.world import SECONDS, WAITING, Finding, Input, World

CORPUS = Path(__file__).parent / "corpus"
PATIENCE = (
    3 * WAITING * SECONDS
)  # with a worker that says nothing: hung where no signal is looked at


def temporary() -> Path:
    """Return a new folder, in memory if possible: thousands of files are synced."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="myllm-fuzz-", dir=memory if memory.is_dir() else None))


def fuzz(n: int, seed: int, workers: int, save: bool) -> int:
    """Try ``n`` inputs, print what was found by place, and return how many places there are."""
    folder = temporary()
    found: dict[str, list[tuple[Input | None, str]]] = collections.defaultdict(list)
    kinds: collections.Counter[str] = collections.Counter()
    slowest, begun = (0.0, ""), time.monotonic()
    try:
        world = World(folder)
        world.build()
        team = [Worker(world.clean) for _ in range(workers)]
        seeds = iter([f"{seed}/{i}" for i in range(n)])
        busy = []
        for worker, first in zip(team, seeds, strict=False):
            worker.start(first)
            busy.append(worker)
        while busy:
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in list(busy):
                silent = worker.pipe not in ready
                if silent and time.monotonic() - worker.since < PATIENCE:
                    continue
                findings = [Finding("hangs, deaf to signals", "")] if silent else worker.hear()
                if findings is None:
                    continue
                kind = worker.tried.kind if worker.tried else "none"
                kinds[kind] += 1
                slowest = max(slowest, (time.monotonic() - worker.since, kind))
                for finding in findings:
                    if finding.place not in found:
                        print(f"found: {finding.place} {finding.detail[:200]}", flush=True)
                    found[finding.place].append((worker.tried, finding.detail))
                if silent or not worker.process.is_alive():
                    worker.end()
                    busy.remove(worker)
                    worker = Worker(world.clean)
                    busy.append(worker)
                following = next(seeds, None)
                if following is None:
                    busy.remove(worker)
                    worker.end()
                else:
                    worker.start(following)
                if sum(kinds.values()) % 1000 == 0:
                    print(f"{sum(kinds.values()):,} inputs, {len(found)} places", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - begun
    print(f"{sum(kinds.values()):,} inputs in {seconds:.0f} s: {dict(kinds.most_common())}")
    print(f"the slowest took {slowest[0]:.1f} s ({slowest[1]})")
    for place, cases in sorted(found.items(), key=lambda item: -len(item[1])):
        tried, detail = min(cases, key=lambda case: len(case[0].to_json()) if case[0] else 0)
        print(
            f"{len(cases):6}  {place}\n        {tried.commands if tried else ''}\n        {detail}"
        )
        if save and tried is not None:
            data = tried.to_json()
            name = f"{tried.kind}-{hashlib.sha256(data).hexdigest()[:8]}.json"
            CORPUS.mkdir(exist_ok=True)
            (CORPUS / name).write_bytes(data)
    print(f"{len(found)} places, {sum(map(len, found.values()))} findings")
    return len(found)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-save", action="store_true", help="leave the corpus as it is")
    given = parser.parse_args()
    return 1 if fuzz(given.inputs, given.seed, given.workers, not given.no_save) else 0


if __name__ == "__main__":
    sys.exit(main())
