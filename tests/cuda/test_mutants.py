"""Bugs planted in the shipped kernels: the tests of the cuda backend must see each of them.

A bug is a change to the text of a kernel file, compiled and run on the shim. It is caught when some
case, in some order of threads, is off by the rule, differs from what another order gives, or is
stopped by the shim. The named bugs are those that were feared; with ``-m slow`` every barrier and
wait of every kernel is removed in turn.
"""

import faulthandler
import os
import re
import resource
from collections.abc import Sequence

import numpy as np
import pytest

from accel.cuda import attention, sources
from accel.cuda import device as devices
from tests.cuda_shim import require
from tests.cuda_shim.device import ORDERS, ShimDevice, ShimError
from tests.helpers.cuda_barriers import RUN, removal, runs, synchronizations
from tests.helpers.cuda_cases import attention_by_the_rule, by_the_rule, rounded, run_backend

require.shim()


def caught(
    source: str,
    file: str,
    old: str,
    new: str,
    only: str = "",
    orders: Sequence[str] = tuple(ORDERS),
) -> str | None:
    """Return how a bug in ``file`` shows when the cases of ``source`` run, or None."""
    shims = [
        ShimDevice(
            order,
            early=order == "reverse",
            edits={file: [(old, new)]},
            warpgroups=source == "attention_wgmma",
        )
        for order in orders
    ]
    for i, shim in enumerate(shims):
        shim.launches += [""] * i  # their number is the seed of "shuffled"
    for module, dtype, case in runs(source):
        if only not in case[1]:
            continue
        op, what, arrays, options = case
        # blocks of dk and dv walk over a group of heads in these cases, over one in the others
        whole = any(word in what for word in ("long", "everything", "more keys", "few"))
        attention.ENOUGH = attention.ENOUGH_EQUAL = 0 if whole else 1025
        attention.rising = lambda lengths, alike, places: len(lengths)  # type: ignore[assignment]
        results = []
        for shim in shims:
            before = devices.use(shim)
            try:
                given = rounded(arrays) if dtype == "bf16" else arrays
                results.append(run_backend(module, op, given, options))
                if shim is shims[0]:
                    rule = (
                        attention_by_the_rule(case, results[0])
                        if dtype == "bf16"
                        else by_the_rule(module, case, dtype, got=results[0])
                    )
                    for name, closeness in rule.items():
                        if not closeness.ok:
                            return f"{what}: {name} is off"
            except ShimError as error:
                return str(error)
            finally:
                devices.use(before)
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                if not np.array_equal(a, b, equal_nan=True):
                    return f"{what}: the order of threads shows"
    return None


def caught_apart(
    source: str,
    file: str,
    old: str,
    new: str,
    only: str = "",
    orders: Sequence[str] = tuple(ORDERS),
) -> str | None:
    """Return ``caught`` of a child process: a bug may reach outside of memory and end it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # its end is an answer, not a crash to be told of
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        # a bug may loop for ever, and ask for memory while it does
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        status = 1  # an exception: what the kernel gave was no answer at all
        try:
            os.write(writing, (caught(source, file, old, new, only, orders) or "").encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    return f"the process ended with status {status}" if status else told or None


# what: (file, or file:kernel; what stands there once; what is put in its place; of which cases)
FEARED: dict[str, tuple[str, str, str, str]] = {
    "barrier before a tile is read": (
        "attention_mma:attention_forward",
        "        sync_block();  // keys of tile j have landed, and values been read\n",
        "",
        "long causal",
    ),
    "barrier before a tile is overwritten": (
        "attention_mma:attention_forward",
        "        sync_block();  // the values have landed, and the keys have been read\n",
        "",
        "long causal",
    ),
    "read before write, and write after read, in dk, dv": (
        "attention_mma:attention_dkv",
        "        sync_block();  // tile j has landed, and the one before has been read\n",
        "",
        "long causal",
    ),
    "keys overwritten while dq by mma.sync reads them": (
        "attention_mma:attention_dq",
        "        sync_block();  // the keys have been read\n",
        "",
        "long causal",
    ),
    "wait count": (
        "attention_mma:attention_dkv",
        "copy_wait<0>();\n        sync_block();  // tile j",
        "copy_wait<1>();\n        sync_block();  // tile j",
        "long causal",
    ),
    "values not waited for": (
        "attention_mma:attention_dq",
        "copy_wait<0>();\n        sync_block();  // the values",
        "copy_wait<1>();\n        sync_block();  // the values",
        "long causal",
    ),
    "a strip shrunk by another's maximum": (
        "attention_mma:attention_forward",
        "rescale(o[strip], shrink)",
        "rescale(o[0], shrink)",
        "long causal",
    ),
    "sums shrunk where both rows' maxima grow, and not where one does": (
        "attention_tiles.cuh",
        "factor[0] != 1.0f || factor[1] != 1.0f",
        "factor[0] != 1.0f && factor[1] != 1.0f",
        "long causal",
    ),
    "no rescaling by mma.sync when the maximum grows": (
        "attention_mma:attention_forward",
        "rescale(o[strip], shrink);",
        "",
        "long causal",
    ),
    "delta of another strip": (
        "attention_mma:attention_dq",
        "const float* of = row_lse + 16 * strip;",
        "const float* of = row_lse;",
        "causal",
    ),
    "the left operand's second strip taken for the first": (
        "attention_mma",
        "onward<OWNED>(left_at, 16 * strip, 2 * k)",
        "onward<OWNED>(left_at, 0, 2 * k)",
        "causal",
    ),
    "lse and delta of another tile": (
        "attention_mma:attention_dkv",
        "tk + floats + turn * 2 * QUERIES * 4",
        "tk + floats + (turn ^ 1) * 2 * QUERIES * 4",
        "long causal",
    ),
    "a query head left out of its group's sum": (
        "attention.cu:sum_heads",
        "g < group;",
        "g < group - 1;",
        "causal",
    ),
    "what a query head gives, put in another's place": (
        "attention_mma:attention_dkv",
        "(i64)b * S * Hq + h0) * d,",
        "(i64)b * S * Hq + hk) * d,",
        "causal",
    ),
    "ldmatrix lanes of the right operand": (
        "attention_mma",
        "b + place<8 * N>(lane % 8 + lane / 16 * 8, lane / 8 % 2)",
        "b + place<8 * N>(lane % 16, lane / 16)",
        "causal",
    ),
    "ldmatrix not transposed": (
        "attention_mma",
        "ldmatrix<true>(right",
        "ldmatrix<false>(right",
        "causal",
    ),
    "swizzle of one side only": (
        "attention_tiles.cuh",
        "const u32 to = tile + place<ROWS>(row, chunk);",
        "const u32 to = tile + chunk / 8 * PANEL<ROWS> + row * 128 + chunk % 8 * 16;",
        "causal",
    ),
    "key/value head of the query's number": (
        "attention_mma:attention_forward",
        "hk = h / (Hq / Hkv)",
        "hk = h % Hkv",
        "everything",
    ),
    "a group's last head forgotten": (
        "attention_mma",
        "const int tiles = heads * each;",
        "const int tiles = (heads - 1) * each;",
        "causal",
    ),
    "the first tile of those that are turned round forgotten": (
        "attention.cuh",
        "z < rising ? rising - 1 - z : z",
        "z < rising - 1 ? rising - 1 - z : z",
        "causal",
    ),
    "tiles that are turned round one place off": (
        "attention.cuh",
        "z < rising ? rising - 1 - z : z",
        "z < rising ? rising - z : z",
        "causal",
    ),
    "the diagonal masked": ("attention.cuh", "- u + ahead)", "- u + ahead - 1)", "causal"),
    "a window of one place more": (
        "attention.cuh",
        "(u32)(behind + ahead)",
        "(u32)(behind + ahead + 1)",
        "window causal",
    ),
    "a window of one place less": (
        "attention.cuh",
        "(u32)(behind + ahead)",
        "(u32)(behind + ahead) - 1",
        "window causal",
    ),
    "a window's first tile of keys passed over": (
        "attention.cuh",
        "within(first + S - T - behind, S)",
        "within(first + S - T - behind + 1, S)",
        "window full",
    ),
    "a window's last tile of queries passed over": (
        "attention_mma",
        "shared_rules.query_end(last + 1)",
        "shared_rules.query_end(last)",
        "window full",
    ),
    "a window of the forward and dq only": (
        "attention_mma:attention_dkv",
        "const Rules rules = ATTENTION_RULES(b, h);",
        "Rules rules = ATTENTION_RULES(b, h);\n        rules.behind = T + S;",
        "window causal",
    ),
    "a gradient of keys that no query reads, written before it is cleared": (
        "attention",
        "    sync_block();  // with no tiles: the gradients have been cleared\n",
        "",
        "window, more keys",
    ),
    "queries taken for the first positions": (
        "attention.cuh",
        "documents[u] == documents[t + S - T]",
        "documents[u] == documents[t]",
        "everything",
    ),
    "whole tiles that are not": (
        "attention_mma:attention_forward",
        "inside(first + row, 16 * STRIPS, u0, KEYS)",
        "inside(first + row + 31, 1, u0, KEYS)",
        "long causal",
    ),
    **{
        f"whole tiles that are not, for a second strip of {kernel}": (
            f"attention_mma:attention_{kernel}",
            f"inside(first + row, 16 * STRIPS, u0, {keys})",
            f"inside(first + row, 16, u0, {keys})",
            "between strips",
        )
        for kernel, keys in (("forward", "KEYS"), ("dq", "DQ_KEYS"))
    },
    "tail guard of a store": (
        "attention_tiles.cuh",
        "if (first + row + r < n && chunk * 8 < width)",
        "if (chunk * 8 < width)",
        "causal",
    ),
    "tail guard of a fetch": (
        "attention_tiles.cuh",
        "chunk * 8 < width ? n - first - row : 0;",
        "chunk * 8 < width ? ROWS : 0;",
        "full, more keys",
    ),
    "no rescaling when the maximum grows": (
        "attention",
        "const float shrink = m[r] == -INFINITY ? 0.0f : expf(m[r] - top);",
        "const float shrink = m[r] == -INFINITY ? 0.0f : 1.0f;",
        "causal",
    ),
    "tail guard of a pack": (
        "device.cuh",
        "if (i + k < n) put(p + i + k, v[k]);",
        "put(p + i + k, v[k]);",
        "",
    ),
    "a token counted once": (
        "embedding",
        "sums[row[k] * width + thread] += d[k];",
        "sums[row[k] * width + thread] = d[k];",
        "one token",
    ),
    "tokens found over those of the look before": (
        "embedding",
        "before += popcount(votes[k]);",
        "",
        "tiles",
    ),
    "sums of only one round of rows": (
        "norm:rmsnorm_backward",
        "(once ? mine[k] : sum_of(dgain, i, D, k)) += d[k] * n;",
        "(once ? mine[k] : sum_of(dgain, i, D, k)) = d[k] * n;",
        "many rows",
    ),
    "the other way's gradient forgotten": (
        "norm:rmsnorm_backward",
        "more[k] + r *",
        "r *",
        "D = 5",
    ),
    "the other way's gradient of another row": (
        "norm:rmsnorm_backward",
        "if (once && plus) of_plus = load_bits(plus + row * D,",
        "if (once && plus) of_plus = load_bits(plus + blockIdx.x * D,",
        "many rows",
    ),
    "the other way's gradient of the first columns alone": (
        "norm:layernorm_backward",
        "if (plus) of_plus = load_bits(plus + row * D, i, D, wide);",
        "",
        "D = 2056",
    ),
    "sums of another column": (
        "norm",
        "return sums[k * packs + (int)i / PACK];",
        "return sums[k * (packs - 1) + (int)i / PACK];",
        "D = 2056",
    ),
    "a row's sums over those of the row before": (
        "norm:rmsnorm_backward",
        "scratch + 32 * odd",
        "scratch",
        "rows of warps",
    ),
    "two sums of a row over those of the row before": (
        "norm:layernorm_backward",
        "scratch + 64 * odd",
        "scratch",
        "rows of warps",
    ),
    "a row too many in a column's sum": (
        "reduce:partial_sums",
        "if (r + k >= last) break;",
        "",
        "many rows",
    ),
    "shifts among the gains": (
        "reduce:sum_rows",
        "i < first ? out + i : more + (i - first)",
        "i <= first ? out + i : more + (i - first)",
        "rows of warps",
    ),
    "a gradient of logits that there are not": (
        "loss",
        "counts && i + k < V ? expf",
        "counts ? expf",
        "",
    ),
    "logits of the row before": (
        "loss",
        "logits + row * width",
        "logits + row * V",
        "",
    ),
    "a warp's sums left out": (
        "reduce:sum_rows",
        "w < warps;",
        "w < warps - 1;",
        "many rows",
    ),
    "the target's logit overwritten before it is read": (
        "loss",
        "    sync_block();  // the target's logit has been read\n",
        "",
        "",
    ),
    "products that do not see what has landed": (
        "attention_wgmma",
        "    fence_async();\n",
        "",
        "long causal",
    ),
    "keys overwritten while dq reads them": (
        "attention_wgmma:attention_dq",
        "copy((now + 2 * stage) % (4 * stage), later)",
        "copy(now, later)",
        "long causal",
    ),
}

# Those of a kind that others above are of: with -m slow.
ALIKE = {
    "read before write, and write after read, in dk, dv",
    "a query head left out of its group's sum",
    "keys overwritten while dq by mma.sync reads them",
    "no rescaling by mma.sync when the maximum grows",
    "delta of another strip",
    "what a query head gives, put in another's place",
    "ldmatrix not transposed",
    "a window of one place less",
    "a window's first tile of keys passed over",
    "a window of the forward and dq only",
    "sums of another column",
    "the target's logit overwritten before it is read",
    "keys overwritten while dq reads them",
}

# More of them, of the kernels by warpgroups: with -m slow, too.
ALSO: dict[str, tuple[str, str, str, str]] = {
    "no rescaling of what a warpgroup has": (
        "attention_wgmma:attention_forward",
        "            rescale(o, shrink);\n",
        "",
        "long causal",
    ),
    "scores taken before they are there": (
        "attention_wgmma:attention_forward",
        "            wgmma_wait<1>();  // the next scores\n",
        "",
        "long causal",
    ),
    "scores of the tile before": (
        "attention_wgmma:attention_forward",
        "ask_rows(s, own, tk + next)",
        "ask_rows(s, own, tk + now)",
        "long causal",
    ),
    "the last values forgotten": (
        "attention_wgmma:attention_forward",
        "        my_turn(group);  // the last values\n        wgmma_fence();\n"
        "        ask_columns(o, p, tv + now);\n",
        "        my_turn(group);\n        wgmma_fence();\n",
        "long causal",
    ),
    "probabilities packed while the last ones are read": (
        "attention_wgmma:attention_forward",
        "            wgmma_wait<0>();\n            rescale(o, shrink);\n            pack(p, s);\n",
        "            pack(p, s);\n            wgmma_wait<0>();\n            rescale(o, shrink);\n",
        "long causal",
    ),
    "values overwritten while the other warpgroup reads them": (
        "attention_wgmma:attention_forward",
        "copy(free, later)",
        "copy(now, later)",
        "long full",
    ),
    "the turn passed on to oneself": (
        "attention_wgmma",
        "barrier_arrive<THREADS>(2 - group)",
        "barrier_arrive<THREADS>(1 + group)",
        "long causal",
    ),
    "dp read before it is there": (
        "attention_wgmma:attention_dkv",
        "if (!DROPOUT) wgmma_wait<1>();  // dp",
        "",
        "long causal",
    ),
    "two stages where three are read": (
        "attention_wgmma:attention_dkv",
        "const int next_turn = turn == 2 ? 0 : turn + 1;",
        "const int next_turn = turn == 1 ? 0 : turn + 1;",
        "long causal",
    ),
    "both warpgroups on the same rows": (
        "attention_wgmma:attention_dq",
        "own = group * 64 * 128",
        "own = 0",
        "causal",
    ),
    "a left operand's registers in another order": (
        "attention_tiles.cuh",
        "from[2 * k + i / 2][i % 2 * 2], from",
        "from[2 * k + i % 2][i / 2 * 2], from",
        "causal",
    ),
    "dropout of dv forgotten": (
        "attention_wgmma:attention_dkv",
        "s[n][i] = pi * kept;",
        "s[n][i] = pi;",
        "everything",
    ),
}


def planted(where: str, old: str, new: str) -> tuple[str, str, str, str]:
    """Return (source whose cases run, file, text, text instead) of a bug in a file or a kernel."""
    name, _, kernel = where.partition(":")
    shared = ("attention.cuh", "attention_tiles.cuh", "attention.cu")
    source = "attention_mma" if name in shared else name
    source = {"device.cuh": "elementwise"}.get(source, source)
    file = name if "." in name else f"{name}.cu"
    text = sources.text_of(file)
    if kernel:
        (text,) = re.findall(rf"^KERNEL[^;{{]*?\b{kernel}\(.*?^}}", text, re.M | re.S)
    # a bug that cannot be planted is none that was caught
    assert text.count(old) == 1, f"{where} has {text.count(old)} places that read {old!r}, not one"
    return source, file, text if kernel else old, text.replace(old, new) if kernel else new


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE | ALSO.keys() else [])
        for name in (*FEARED, *ALSO)
    ],
)
def test_a_feared_bug_is_caught(name: str) -> None:
    where, old, new, only = (FEARED | ALSO)[name]
    how = caught_apart(*planted(where, old, new), only)
    assert how and "g++ refuses" not in how, f"{name}: {how or 'no test sees it'}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "file", "place"),
    [(users[0], file, place) for file, place, users in synchronizations() if file[:-3] in RUN],
    ids=str,
)
def test_no_barrier_or_wait_is_removed_unseen(source: str, file: str, place: int) -> None:
    line, edit = removal(file, place)
    how = caught_apart(source, file, *edit)
    if how is None:  # threads may run for long in an order that hides it
        how = caught_apart(source, file, *edit, "few", ("shuffled",) * 60)
    assert how and "g++ refuses" not in how, f"{file}: {line}{how}"
