"""Several machines, as a test can make them: the same bits, over a network and whatever it does."""

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import pytest

from dist import monitor, network
from dist.config import RunFile
from reference.params import decoder_layout
from tests.helpers import ROOT
from tests.helpers.processes import start, wait_for
from tests.helpers.runs import digest, losses, prepare, save_run_file, with_run
from tests.mpi.hosts import Hosts, hosts, ip, myllm

pytestmark = pytest.mark.mpi


@pytest.fixture
def net() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def alone(config: RunFile) -> str:
    """Return the hash of what two ranks learn on this machine."""
    run = with_run(config, out=f"{config.run.out}-alone")
    status, _, err = start(run, 2).end()
    assert status == 0, err
    return digest(run)


def test_hosts_are_cleared_away_after_a_failure() -> None:
    with pytest.raises(RuntimeError, match="of a test"), hosts(2) as net:
        process = subprocess.Popen([net.ssh, net.names[1], "sleep", "1000"])
        wait_for(lambda: len(net.processes()) > 0)
        raise RuntimeError("of a test")
    assert process.wait(10) != 0
    left = {line.split()[0] for line in ip("netns", "list").splitlines()}
    assert not left & {*net.names, f"switch{os.getpid()}"}
    assert not net.ssh.exists()


@pytest.mark.parametrize(
    ("ranks", "hostfile"), [(2, True), pytest.param(1, False, marks=pytest.mark.slow)]
)
def test_two_hosts_learn_the_same_bits_as_one(
    net: Hosts, tmp_path: Path, ranks: int, hostfile: bool
) -> None:
    config = prepare(tmp_path, run__eval_every=3, model__dropout_residual=0.2)
    before = [net.sent(host) for host in (0, 1)]
    status, out, err = net.start(config, ranks, hostfile).end()
    assert status == 0, err
    assert f"{2 * ranks} ranks" in out
    assert digest(config) == alone(config)
    # in every step the gradient goes to the rank with the only block, or the weights come back;
    # once, whatever the ranks of a machine
    least = 6 * 4 * 2608
    assert all(least < net.sent(host) - before[host] < 4 * least for host in (0, 1))
    assert net.processes() == []


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_link_that_goes_down_ends_the_run_on_all_hosts(
    net: Hosts, tmp_path: Path, ranks: int
) -> None:
    config = prepare(tmp_path, run__timeout=2.0, train__steps=100_000)
    run = net.start(config, ranks)
    wait_for(lambda: len(losses(config)) >= 20)
    net.link(1, "down")
    status, _, err = run.end()
    assert status != 0
    lost = "|".join(str(rank) for rank in range(ranks, 2 * ranks))  # whichever was silent first
    silent = rf"rank ({lost}) hangs, or the network to its machine {net.names[1]} is down: nothing"
    assert re.search(silent, err)
    assert re.search(r"rank 0 waits at step \d+ \(step\), in collective \d+", err)
    net.all_gone()
    stacks = (Path(config.run.out) / "stacks.txt").read_text()
    assert all(f"rank {rank} at " in stacks for rank in range(2 * ranks))


@pytest.mark.parametrize(
    "how",
    [
        "tbf rate 1mbit burst 64kb latency 1s",
        pytest.param("netem delay 10ms", marks=pytest.mark.slow),
    ],
)
def test_a_slow_link_only_slows(net: Hosts, tmp_path: Path, how: str) -> None:
    config = prepare(tmp_path, run__timeout=2.0)
    try:
        net.shape(how)
    except OSError as error:
        pytest.skip(f"this kernel has no {how.split()[0]}: {error}")
    status, _, err = net.start(config, 1).end()
    assert status == 0, err
    assert digest(config) == alone(config)


def test_a_rank_knows_its_number_on_its_own_host(net: Hosts) -> None:
    code = "import os; from accel import launcher, threads; threads.available_cores = lambda: 8; "
    code += "os.cpu_count = lambda: 8; said = launcher.size(), launcher.local_rank(); "
    # in one write: the ranks share the output
    code += r'os.write(1, b"%s %d %d %d\n" % (os.uname()[1].encode(), *said, threads.threads()))'
    words = [net.ssh, net.names[0], *net.mpirun(2), sys.executable, "-c", quote(code)]
    environment = {k: v for k, v in os.environ.items() if k != "MYLLM_THREADS"}
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == sorted(f"{name} 4 {rank} 4" for name in net.names for rank in (0, 1))


class Measured(NamedTuple):
    """What a run over a slow network took, in milliseconds."""

    least: float  # of all steps
    exposed: float  # of the median step
    hidden: float
    planned: float
    share: float  # of the bytes planned that crossed
    digest: str


def measure(config: RunFile, machines: int, ranks: int, rate: str) -> Measured:
    """Train on hosts that send no faster than a rate, in Mbit/s."""
    n = decoder_layout(config.model).size
    sent = network.traffic(n, machines * ranks, ranks)
    with hosts(machines) as net:
        net.limit(f"{rate}mbit")
        before = [net.sent(host) for host in range(machines)]
        status, _, err = net.start(config, ranks).end(300)
        assert status == 0, err
        counted = [net.sent(host) - before[host] for host in range(machines)]
    steps = [r for r in monitor.read_metrics(Path(config.run.out)) if "comm_ms" in r]
    waited = [r["comm_ms"] for r in steps]
    hidden = statistics.median(r["hidden_ms"] for r in steps)
    took = network.exchange(sent, network.rate(f"{rate}Mbit/s"), network.WITHIN).total
    share = max(counted) / config.steps / sent.between
    median = statistics.median(waited)
    return Measured(min(waited), median, hidden, 1e3 * took, share, digest(config))


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "ranks"), [(2, 1), (2, 2), (4, 1)])
def test_the_exchange_takes_as_long_as_planned(tmp_path: Path, machines: int, ranks: int) -> None:
    """A million parameters at 40 Mbit/s; almost nothing to compute.

    The quickest step is held to the plan: what else the machine does makes ranks wait for ranks.
    """
    config = prepare(tmp_path, model__d_ff=20_000, run__overlap=False, train__steps=12)
    found = measure(config, machines, ranks, "40")
    said = f"{machines} machines of {ranks}: {found.least:.0f} ms measured (median "
    said += f"{found.exposed:.0f}), {found.planned:.0f} ms planned, {found.share:.2f} of the bytes"
    print(said)
    assert 0.8 < found.least / found.planned < 1.2, said
    assert 0.9 < found.share < 1.1, said


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_exchange_beside_the_backward_is_hidden_with_the_same_bits(
    tmp_path: Path, ranks: int
) -> None:
    """Three million parameters at 100 Mbit/s, in layers that take as long to compute."""
    config = prepare(
        tmp_path,
        **{"model__n_layers": 8, "model__d_model": 192, "model__d_ff": 512},
        **{"train__micro_batch": 64, "train__global_batch": 128 * ranks, "train__steps": 8},
        run__backend="cpu",
    )
    found = {
        overlap: measure(
            with_run(config, overlap=overlap, out=str(tmp_path / str(overlap))), 2, ranks, "100"
        )
        for overlap in (False, True)
    }
    off, on = found[False], found[True]
    print(
        f"2 machines of {ranks}: {off.exposed:.0f} ms exposed without, {on.exposed:.0f} ms with; "
        f"{on.hidden:.0f} ms hidden, {on.hidden / (on.hidden + on.exposed):.0%}"
    )
    assert off.digest == on.digest
    assert off.hidden == 0 < on.hidden


THIS = os.uname().nodename
JOB = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NODELIST": f"{THIS},elsewhere"},
    **{"SLURM_JOB_NODELIST": f"{THIS},elsewhere", "SLURM_TASKS_PER_NODE": "1(x2)"},
    **{"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
}


def test_ranks_of_this_machine_stay_here_in_a_job_of_slurm_s(tmp_path: Path) -> None:
    """Where mpirun would take all machines of the job, by srun."""
    status, out, err = start(prepare(tmp_path), 2, **JOB).end()
    assert status == 0 and "2 ranks" in out, err


def test_tasks_that_srun_starts_without_mpi_are_refused(tmp_path: Path) -> None:
    """Each would be a run of its own, into one folder."""
    config = prepare(tmp_path)
    step = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    words = myllm(save_run_file(config, tmp_path / "run.toml"))
    environment = {**os.environ, **step, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"started 2 ranks, but .* sees 1: .*srun --mpi=", done.stderr)
    assert not (tmp_path / "run").exists()
