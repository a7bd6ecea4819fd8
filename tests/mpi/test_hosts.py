"""Several machines, as a test can make them: the same bits, over a network and whatever it does."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist.config import RunFile
from tests.helpers.processes import start, wait_for
from tests.helpers.runs import digest, losses, prepare, with_run
from tests.mpi.hosts import Hosts, hosts

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_hosts_learn_the_same_bits_as_one(net: Hosts, tmp_path: Path, ranks: int) -> None:
    config = prepare(tmp_path, run__eval_every=3, model__dropout_residual=0.2)
    before = [net.sent(host) for host in (0, 1)]
    status, out, err = net.start(config, ranks).end()
    assert status == 0, err
    assert f"{2 * ranks} ranks" in out
    assert digest(config) == alone(config)
    # in every step the gradient goes to the rank with the only block, and the weights come back
    least = 6 * 4 * 2608
    assert all(net.sent(host) - before[host] > least for host in (0, 1))
    assert net.processes() == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_link_that_goes_down_ends_the_run_on_all_hosts(
    net: Hosts, tmp_path: Path, ranks: int
) -> None:
    config = prepare(tmp_path, run__timeout=2.0, train__steps=100_000)
    run = net.start(config, ranks)
    wait_for(lambda: len(losses(config)) >= 20)
    net.link(1, "down")
    status, _, err = run.end()
    assert status != 0
    silent = f"rank {ranks} hangs, or the network to its machine {net.names[1]} is down: nothing"
    assert silent in err
    assert re.search(r"rank 0 waits at step \d+ \(step\), in collective \d+", err)
    net.all_gone()
    stacks = (Path(config.run.out) / "stacks.txt").read_text()
    assert all(f"rank {rank} at " in stacks for rank in range(2 * ranks))


def test_a_slow_link_only_slows(net: Hosts, tmp_path: Path) -> None:
    config = prepare(tmp_path, run__timeout=2.0)
    net.limit("1mbit")
    status, _, err = net.start(config, 1).end()
    assert status == 0, err
    assert digest(config) == alone(config)
