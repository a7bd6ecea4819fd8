"""The bytes between machines, counted message by message, and what follows from them."""

import dataclasses
import itertools

import pytest

from dist import cli, config, network
from dist.config import RunFile


def counted(n: int, ranks: int, per_node: int, levels: int) -> tuple[int, int]:
    """Return the bytes that leave a machine, and that its first rank sends to others there."""
    between = within = 0
    for a, b in itertools.permutations(range(ranks), 2):
        same_machine, same_number = a // per_node == b // per_node, a % per_node == b % per_node
        if levels == 1:
            size = 4 * n // ranks
        elif same_machine:
            size = 4 * n // per_node
        else:  # the share of a machine, divided among those of the same number
            size = 4 * n // ranks if same_number else 0
        size *= 2  # gradients, and weights
        if a // per_node == 0 and not same_machine:
            between += size
        if a == 0 and same_machine:
            within += size
    return between, within


SHAPES = [(2, 1), (2, 2), (4, 1), (4, 2), (8, 4), (8, 8), (64, 8), (64, 1)]


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
def test_the_traffic_is_that_of_all_messages(ranks: int, per_node: int, levels: int) -> None:
    sent = network.traffic(6400, ranks, per_node, levels)
    assert (sent.between, sent.within) == counted(6400, ranks, per_node, levels)


@pytest.mark.parametrize(("ranks", "per_node"), SHAPES)
@pytest.mark.parametrize("rate", [0.1, 0.9, 1.1, 7.9, 8.1, 100])
def test_two_levels_pay_while_the_network_carries_less_than_all_ranks_of_a_machine(
    ranks: int, per_node: int, rate: float
) -> None:
    one, two = (
        network.exchange(network.traffic(6400, ranks, per_node, levels), rate, 1.0).total
        for levels in (1, 2)
    )
    if 1 < per_node < ranks:
        assert (two < one) == (rate < per_node)
    else:
        assert two == one  # there is only one


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50GB/s", 50e9), ("50Gbit/s", 6.25e9), ("50 Gb/s", 6.25e9), ("1.5MB/s", 1.5e6), ("8b/s", 1)],
)
def test_rates_are_read(text: str, rate: float) -> None:
    assert network.rate(text) == rate


@pytest.mark.parametrize("text", ["", "50", "50GB", "GB/s", "-1GB/s", "0GB/s", "9" * 400 + "B/s"])
def test_other_rates_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "laptop", "--ranks", "2", f"--network={text}"]) == 1
    assert "a rate is like 50GB/s or 400Gbit/s, got" in capsys.readouterr().err


def efficiency(run: RunFile, batch: int, speed: float, seconds: float) -> float:
    train = dataclasses.replace(run.train, global_batch=batch)
    computing = dataclasses.replace(run, train=train).tokens_per_step / speed
    return computing / (computing + seconds)


@pytest.mark.parametrize("seconds", [1e-4, 0.1, 0.8125, 7.0])
def test_the_batch_is_the_least_that_is_efficient(seconds: float) -> None:
    run = config.load("myllm-1b", ["train.warmup_steps=0"])
    batch = network.efficient_batch(run, 64, 1e6, seconds)
    micro_batches = batch // run.train.micro_batch
    assert micro_batches & (micro_batches - 1) == 0 and micro_batches >= 64
    assert efficiency(run, batch, 1e6, seconds) >= 0.9
    assert micro_batches == 64 or efficiency(run, batch // 2, 1e6, seconds) < 0.9


def test_the_command_says_what_crosses_and_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "myllm-1b", "--ranks", "64", "--per-node", "8", "--network", "50GB/s"]
    assert cli.main([*words, "--speed", "1280000", "--set", "train.global_batch=256"]) == 0
    said = capsys.readouterr().out
    n = 1_055_231_744
    for figure in (
        "8 machines of 8 ranks",
        f"{2 * 4 * n * 7 // 8:,} bytes = 147.7 ms  (leave each, at 50GB/s)",
        f"{2 * 4 * n * 7 // 8:,} bytes = 369.3 ms  (a rank, 20 GB/s taken)",
        "1,638.4 ms a step",
        "76.0% efficient",
        "1,024 windows a step",
        "added up first, with the same bits:",
        "517.1 ms in all, where one level would take 1,228",
    ):
        assert figure in said
    assert cli.main(["plan", "laptop", "--ranks", "8", "--per-node", "3", "--network=1B/s"]) == 1
    assert "8 ranks are not whole machines of 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "laptop", "--per-node", "2"])
    assert cli.main(["plan", "laptop", "--network", "1GB/s"]) == 0
    assert "1 machine of 1 rank" in capsys.readouterr().out
