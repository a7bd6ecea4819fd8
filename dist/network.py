"""What a step sends over the network between machines, by arithmetic, and how long that takes.

N float32 gradients, W ranks, P of them on each of H = W/P machines, which share its network
interface. All-to-all sends each rank 1/W of every other's gradient: P·(H-1)/H·4N bytes leave a
machine. All-gather passes the slices of the master around a ring of ranks, as the MPIs and NCCL do
with long messages: (W-1)/W·4N bytes leave a machine, from the last of its ranks.

The ranks of a machine are a subtree of the sum (``step.py``). Were it added up on the machine
first, the same pairs would be added, so the bits would be the same, and (H-1)/H·4N bytes would
leave: 1/P of the all-to-all.
"""

import math
import re
from typing import NamedTuple

from dist.config import RunFile

EFFICIENT = 0.9  # the share of a step's time that is not exchange
WITHIN = 20e9  # bytes a second: what PCIe 4.0 carries, 16 lanes wide, of 31.5 GB/s at most
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


class Traffic(NamedTuple):
    """Bytes of a step."""

    between: float  # that leave a machine, and as many that come
    within: float  # that a rank sends to others on its machine
    by_machine: float  # that would leave it if the machine's ranks were added up first


class Exchange(NamedTuple):
    """Seconds of a step."""

    between: float
    within: float
    by_machine: float

    @property
    def total(self) -> float:
        """Both, one after the other: what overlaps is time won."""
        return self.between + self.within


def rate(text: str) -> float:
    """Return bytes a second: of "50GB/s", "50 Gbit/s", "400Gb/s" (b is a bit, B a byte).

    Raises
    ------
    ValueError
        If it is neither.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMGT]?)(B|bit|b)/s", text)
    value = float(found[1]) * UNITS[found[2]] / (1 if found[3] == "B" else 8) if found else 0.0
    if not value:
        raise ValueError(f"a rate is like 50GB/s or 400Gbit/s, got {text[:40]!r}")
    return value


def traffic(parameters: int, ranks: int, per_node: int) -> Traffic:
    """Return the bytes of a step.

    Raises
    ------
    ValueError
        When the ranks are not whole machines of ``per_node``.
    """
    if per_node < 1 or ranks % per_node:
        raise ValueError(
            f"{ranks} ranks are not whole machines of {per_node}: --per-node must divide --ranks"
        )
    size, machines = 4 * parameters, ranks // per_node
    alone, single = machines == 1, per_node == 1
    gather = size * (ranks - 1) / ranks
    away = size * (machines - 1) / machines
    return Traffic(
        between=0.0 if alone else per_node * away + gather,
        within=0.0 if single else size * (per_node - 1) / ranks + gather,
        by_machine=2 * away,
    )


def exchange(sent: Traffic, network: float, within: float) -> Exchange:
    """Return the seconds that bytes take at two rates."""
    return Exchange(sent.between / network, sent.within / within, sent.by_machine / network)


def efficient_batch(run: RunFile, ranks: int, speed: float, seconds: float) -> int:
    """Return the least ``train.global_batch`` whose exchange takes at most 1 - ``EFFICIENT``.

    The micro-batch stays as it is, and a rank has at least one; their number is a power of two.
    """
    wanted = seconds * speed * EFFICIENT / (1 - EFFICIENT) / run.window  # windows
    least = run.train.micro_batch * ranks
    return int(least * 2 ** max(0, math.ceil(math.log2(wanted / least)))) if wanted else least


def counted(number: int, name: str) -> str:
    """Return "1 rank" or "2 ranks"."""
    return f"{number} {name}{'s' if number > 1 else ''}"


def lines(
    run: RunFile, parameters: int, ranks: int, per_node: int, network: str, speed: float | None
) -> list[str]:
    """Return what ``myllm plan --network`` says."""
    sent = traffic(parameters, ranks, per_node)
    took = exchange(sent, rate(network), WITHIN)
    machines = ranks // per_node

    def line(name: str, size: float, seconds: float, note: str) -> str:
        return f"  {name:<18}{size:>22,.0f} bytes = {1e3 * seconds:,.1f} ms  ({note})"

    out = [
        "",
        f"exchange of a step, {counted(machines, 'machine')} of {counted(per_node, 'rank')}: by "
        "arithmetic, without latency and waiting",
        line("between machines", sent.between, took.between, f"leave each, at {network}"),
        line(
            "within a machine", sent.within, took.within, f"a rank, {WITHIN / 1e9:.0f} GB/s taken"
        ),
    ]
    if speed:
        computing = run.tokens_per_step / speed
        efficiency = computing / (computing + took.total)
        batch = efficient_batch(run, ranks, speed, took.total)
        out += [
            f"  computing         {1e3 * computing:>22,.1f} ms a step at {speed:,.0f} tokens/s "
            f"without exchange: {efficiency:.1%} efficient",
            f"  {EFFICIENT:.0%} and more     {batch:>22,} windows a step and above "
            f"(train.global_batch; micro_batch {run.train.micro_batch}, accumulation "
            f"{batch // ranks // run.train.micro_batch})",
        ]
    if machines > 1 and per_node > 1:
        out += [
            line(
                "added by machine", sent.by_machine, took.by_machine, "not done: would leave each"
            ),
            f"    {sent.between / sent.by_machine:.1f} times less would cross, with the same bits",
        ]
    return out
