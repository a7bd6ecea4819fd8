"""What a step sends over the network between machines, by arithmetic, and how long that takes.

N float32 gradients, W ranks, P of them on each of H = W/P machines, which share its network
interface. Every rank sends and receives slices, twice: gradients to be added up, weights back.

With one level, each rank sends each other 1/W of its array: P·(H-1)/H·4N bytes leave a machine,
and (P-1)/W·4N pass between a rank and others on its machine. With two (``reduction.py``), a machine
adds up first: (P-1)/P·4N pass within, and then (H-1)/H·4N leave. Per way two levels save

    (P-1)·(H-1)/H·4N bytes between machines, for (P-1)·(H-1)/(P·H)·4N more within,

so they pay as long as a machine's network carries less than P times what one rank sends to others
on its machine: less than all its ranks together. That is so on every cluster, so it is always done.
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


class Exchange(NamedTuple):
    """Seconds of a step."""

    between: float
    within: float

    @property
    def total(self) -> float:
        """Both, one after the other: what overlaps, or passes beside computing, is time won."""
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


def traffic(parameters: int, ranks: int, per_node: int, levels: int = 2) -> Traffic:
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
    size, machines = 2 * 4 * parameters, ranks // per_node
    away, others = size * (machines - 1) / machines, size * (per_node - 1)
    if levels == 1:
        return Traffic(between=per_node * away, within=others / ranks)
    return Traffic(between=away, within=others / per_node)


def exchange(sent: Traffic, network: float, within: float) -> Exchange:
    """Return the seconds that bytes take at two rates."""
    return Exchange(sent.between / network, sent.within / within)


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
        return f"  {name:<18}{size:>15,.0f} bytes = {1e3 * seconds:,.1f} ms  ({note})"

    out = [
        "",
        f"exchange, {counted(machines, 'machine')} of {counted(per_node, 'rank')}: by arithmetic, "
        "without latency and waiting",
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
            f"  computing alone   {1e3 * computing:>15,.1f} ms a step at {speed:,.0f} tokens/s",
            f"  with exchange     {efficiency:>15.1%} efficient",
            f"  {EFFICIENT:.0%} from          {batch:>15,} windows a step on (train.global_batch)",
            f"    with micro_batch {run.train.micro_batch} and accumulation "
            f"{batch // ranks // run.train.micro_batch}",
        ]
    if machines > 1 and per_node > 1:
        alone = exchange(traffic(parameters, ranks, per_node, 1), rate(network), WITHIN)
        out.append(
            "  a machine's ranks are added up first, with the same bits:\n"
            f"    {1e3 * took.total:,.1f} ms in all, where one level would take "
            f"{1e3 * alone.total:,.1f} ms"
        )
    return out
