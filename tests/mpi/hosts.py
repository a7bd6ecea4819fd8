"""Machines that a test makes itself: network namespaces on a switch of their own.

Each has a name, an address, a host name, and shared memory that no other sees, so MPI has nothing
but the network between them. They are not real machines: they share a processor, a clock and the
file system. Nothing of this machine's own network is touched: the switch, a bridge, lies in a
namespace too.

``ssh`` is a script that runs a command on one of them, as launchers expect of theirs.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from dist import launch
from dist.config import RunFile
from tests.helpers import ROOT
from tests.helpers.processes import PATIENCE, Started, run_file, wait_for
from tests.helpers.runs import ENVIRONMENT, save_run_file

NETNS = Path("/etc/netns")  # `ip netns exec NAME` lays what is in NAME/ over /etc
MTU = "9000"  # of packets, so that their headers are 1 % of them
SSH = """#!/bin/sh
# ssh [OPTION]... HOST COMMAND...
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts --ipc sh -c \
    "hostname $host; mount -t tmpfs tmpfs /dev/shm; $*"
"""


def ip(*words: str) -> str:
    """Run ``ip`` and return what it says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Hosts(NamedTuple):
    """Some machines."""

    names: list[str]
    ssh: Path

    def sent(self, host: int) -> int:
        """Return the bytes that a host has sent over the network."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(ip("netns", "exec", self.names[host], "cat", path))

    def link(self, host: int, state: str) -> None:
        """Set a host's link "up" or "down"."""
        ip("-n", self.names[host], "link", "set", "eth0", state)

    def shape(self, how: str) -> None:
        """Send what each host sends through a queue of the kernel's."""
        for name in self.names:
            words = f"tc qdisc replace dev eth0 root {how}"
            ip("netns", "exec", name, *words.split())

    def limit(self, rate: str) -> None:
        """Let each host send no more than a rate, "80mbit" say."""
        self.shape(f"tbf rate {rate} burst 64kb latency 1s")

    def processes(self) -> list[int]:
        """Return the processes on all hosts."""
        return [int(pid) for name in self.names for pid in ip("netns", "pids", name).split()]

    def start(
        self, config: RunFile, ranks: int, hostfile: bool = False, **environment: str
    ) -> Started:
        """Start ``myllm train`` from the first host, with as many ranks on each host."""
        path = save_run_file(config, run_file(config))
        with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
            process = subprocess.Popen(
                [self.ssh, self.names[0], *self.mpirun(ranks, hostfile), *myllm(path)],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **environment, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            )
        return Started(config, process)

    def mpirun(self, ranks: int, hostfile: bool = False) -> list[str]:
        """Return the words that start ``ranks`` ranks on each host, of a file or of a list."""
        path, kind = launch.find_mpirun()
        n = ["-n", str(ranks * len(self.names))]
        file = self.ssh.with_name("hostfile")
        if hostfile:
            slots = ":" if kind == "mpich" else " slots="
            file.write_text("".join(f"{name}{slots}{ranks}\n" for name in self.names))
        if kind == "mpich":
            where = ["-hosts", ",".join(self.names), "-ppn", str(ranks)]
            where = ["-f", str(file)] if hostfile else where
            return [path, "-launcher", "ssh", "-launcher-exec", str(self.ssh), *where, *n]
        where = ["--host", ",".join(f"{name}:{ranks}" for name in self.names)]
        where = ["--hostfile", str(file)] if hostfile else where
        words = [path, "--prtemca", "plm_ssh_agent", str(self.ssh), *where, *n]
        words += ["--bind-to", "none"]
        return [*words, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]

    def all_gone(self, seconds: float = PATIENCE) -> None:
        """Wait until no process is left on any host."""
        wait_for(lambda: not self.processes(), seconds)


def myllm(path: Path) -> list[str]:
    """Return the words that train as a run file says."""
    return [sys.executable, "-P", "-m", "dist", "train", str(path)]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make machines, and clear them away with all that runs on them.

    A test is skipped where that is not allowed.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("hosts are made with ip and tc, which are not here (package iproute2)")
    try:
        ip("netns", "add", f"test{os.getpid()}")
        ip("netns", "del", f"test{os.getpid()}")
    except OSError as error:
        pytest.skip(f"hosts are network namespaces, which may not be made here: {error}")
    switch = f"switch{os.getpid()}"
    names = [f"host{os.getpid()}x{i}" for i in range(count)]
    folder = Path(tempfile.mkdtemp())
    made = Hosts(names, folder / "ssh")
    try:
        made.ssh.write_text(SSH)
        made.ssh.chmod(0o755)
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        table = "127.0.0.1 localhost\n"
        table += "".join(f"10.0.0.{i} {name}\n" for i, name in enumerate(names, 1))
        for i, name in enumerate(names, 1):
            (NETNS / name).mkdir(parents=True)
            (NETNS / name / "hosts").write_text(table)
            ip("netns", "add", name)
            peer = ["mtu", MTU, "type", "veth", "peer", "name", "eth0", "mtu", MTU, "netns", name]
            ip("-n", switch, "link", "add", f"port{i}", *peer)
            ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.0.0.{i}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        for name in [*names, switch]:
            with contextlib.suppress(OSError):  # of one that was not made
                for pid in ip("netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                ip("netns", "del", name)
            shutil.rmtree(NETNS / name, ignore_errors=True)
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # where there are others
            NETNS.rmdir()
