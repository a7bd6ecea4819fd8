"""The bytes between machines, counted message by message, and what follows from them."""

import dataclasses

import pytest

from dist import cli, config, network
from dist.config import RunFile


def counted(n: int, ranks: int, per_node: int) -> tuple[int, int]:
    """Return the bytes that leave a machine, and that its first rank sends to others there."""
    between = within = 0
    piece = 4 * n // ranks
    messages = [(a, b, piece) for a in range(ranks) for b in range(ranks) if a != b]
    messages += [(a, (a + 1) % ranks, piece) for a in range(ranks) for _ in range(ranks - 1)]
    for a, b, size in messages:
        if a // per_node == 0 != b // per_node:
            between += size
        if a == 0 and b // per_node == 0 and a != b:
            within += size
    return between, within


@pytest.mark.parametrize(
    ("ranks", "per_node"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 4), (8, 8), (64, 8), (64, 1)]
)
def test_the_traffic_is_that_of_all_to_all_and_a_ring(ranks: int, per_node: int) -> None:
    sent = network.traffic(6400, ranks, per_node)
    assert (sent.between, sent.within) == counted(6400, ranks, per_node)
    # as many machines of one rank
    assert sent.by_machine == network.traffic(6400, ranks // per_node, 1).between


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
        f"{8 * 4 * n * 7 // 8 + 4 * n * 63 // 64:,} bytes = 674.0 ms",
        "1,638.4 ms a step",
        "64.4% efficient",
        "2,048 windows a step",
        f"{2 * 4 * n * 7 // 8:,} bytes = 147.7 ms",
        "4.6 times less",
    ):
        assert figure in said
    assert cli.main(["plan", "laptop", "--ranks", "8", "--per-node", "3", "--network=1B/s"]) == 1
    assert "8 ranks are not whole machines of 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "laptop", "--per-node", "2"])
    assert cli.main(["plan", "laptop", "--network", "1GB/s"]) == 0
    assert "1 machine of 1 rank" in capsys.readouterr().out
