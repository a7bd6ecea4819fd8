"""Worker processes that try inputs, so that none can do harm to the others."""

import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.kinds import drawn
from tests.fuzz.world import Finding, Input, World


def work(pipe: Connection, clean: Path) -> None:
    """Try the inputs whose seeds come through a pipe; say what is tried before, and found after."""
    os.environ.update(MYLLM_THREADS="1", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    world = world_at(Path(tempfile.mkdtemp(dir=clean.parent)), clean)
    while True:
        seed = pipe.recv()
        if seed is None:
            return
        tried = drawn(random.Random(seed), world)
        pipe.send(tried)
        pipe.send(world.try_(tried))


def world_at(folder: Path, clean: Path) -> World:
    """Return a world whose clean files exist already."""
    world = World(folder)
    world.clean = clean
    return world


class Worker:
    """A process that tries inputs."""

    def __init__(self, clean: Path):
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=work, args=(theirs, clean), daemon=True
        )
        self.process.start()
        theirs.close()
        self.tried: Input | None = None
        self.since = time.monotonic()

    def start(self, seed: str) -> None:
        """Have the next input tried."""
        self.tried, self.since = None, time.monotonic()
        self.pipe.send(seed)

    def hear(self) -> list[Finding] | None:
        """Return what was found; None while it goes on."""
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return [Finding(f"ends the process with status {self.process.exitcode}", "")]
        if isinstance(said, Input):
            self.tried = said
            return None
        return said

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
