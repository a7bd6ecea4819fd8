"""What ``myllm bench cuda --model`` says follows from the listing, and from arithmetic."""

import re
from pathlib import Path

import numpy as np
import pytest

from accel.bench import cuda as bench
from accel.bench import predict, published
from accel.bench.gpus import MODELS
from accel.bench.multiprocessor import played
from accel.bench.predict import Launch, busy, dealt
from accel.cuda import ops_bf16
from accel.cuda.device import Product
from accel.cuda.machine_code import count, hot_loop, loops, read_listing, way
from tests.cuda_shim import require
from tests.helpers import ROOT

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"
WIDE = "HGMMA.64x128x16.F32.BF16 R24, R216, gdesc[UR20].tnspB, R24"


def listing(*lines: str) -> str:
    """Return what nvdisasm would print of a kernel: labels end in a colon.

    First stand the stall and, after colons, the counters that are raised until the result is there
    and until the operands are read (7: none), and the bits of those that are waited for.
    """
    text = '\t.section\t.text.kernel,"ax",@progbits\n'
    for line in lines:
        if line.endswith(":"):
            text += line + "\n"
            continue
        control, _, code = line.partition(" ")
        fields = [int(x) for x in control.split(":")]
        stall, sets, frees, waits = fields + [1, 7, 7, 0][len(fields) :]
        upper = (stall | sets << 5 | frees << 8 | waits << 11) << 41 | 0x1F << 36 | 3 << 58
        text += f"        /*0010*/    {code} ;    /* 0x0000000000017802 */\n"
        text += f"    /* 0x{upper:016x} */\n"
    return text


LOOP = listing(
    "1 LDC R1, c[0x0][0x28]",
    ".L_x_0:",
    "2 @P1 BRA `(.L_x_1)",
    "4 LDGSTS.E.BYPASS.128 [R4], desc[UR8][R2.64]",
    ".L_x_1:",
    "5 HMMA.16816.F32.BF16 R4, R8, R12, R4",
    "1:0:5 LDSM.16.M88.4 R8, [R2]",
    "6:7:7:33 @P0 BRA `(.L_x_2)",
    "1 FFMA R1, R2, R3, R4",
    "1 FFMA R1, R2, R3, R4",
    ".L_x_2:",
    "8 MUFU.EX2 R5, R5",
    "5 @!P2 BRA `(.L_x_0)",
    "1 STG.E.128 desc[UR8][R2.64], R4",
    "5 EXIT",
)


def test_the_way_that_is_run_most_has_the_copies_and_no_detour() -> None:
    (code,) = read_listing(LOOP).values()
    assert loops(code) == [(1, 9)] and [i.stall for i in code[:3]] == [1, 2, 4]
    assert [(i.sets, i.frees, i.waits) for i in code[4:6]] == [(0, 5, 0), (7, 7, 33)]
    found = count(hot_loop(code))
    assert (found.issued, found.tensor, found.ldsm, found.mufu, found.fma) == (7, 1, 1, 1, 0)
    assert found.flops == 2 * 16 * 8 * 16 and found.shared == 2 * 512
    assert found.accesses == {("LDGSTS", 16): 1}
    assert [i.name for i in way(code)][-2:] == ["STG.E.128", "EXIT"] and len(way(code)) == 10


def test_a_loop_that_is_left_in_the_middle_leads_on() -> None:
    (code,) = read_listing(
        listing("1 MOV R1, R2", ".L_x_0:", "5 @P0 BRA `(.L_x_1)", "2 LDG.E.U16 R1, [R2.64]",
                "5 BRA `(.L_x_0)", ".L_x_1:", "1 STG.E.64 [R2.64], R4", "5 EXIT")
    ).values()  # fmt: skip
    assert count(way(code)).accesses == {("STG", 8): 1}
    assert count(code).accesses == {("LDG", 2): 1, ("STG", 8): 1} and not hot_loop(code)


def test_a_loop_that_is_left_by_a_call_of_the_kernel_s_end_leads_on() -> None:
    """As the assembler writes it for sm_80."""
    (code,) = read_listing(
        listing("1 MOV R1, R2", ".L_x_0:", "1 LDG.E.128 R4, [R2.64]",
                "5 @P0 CALL.REL.NOINC `(.L_x_1)", "5 BRA `(.L_x_0)", ".L_x_1:", "5 EXIT",
                ".L_x_2:", "5 BRA `(.L_x_2)")
    ).values()  # fmt: skip
    assert [i.stem for i in way(code)] == ["MOV", "LDG", "CALL", "EXIT"]


def test_of_loops_with_as_many_products_the_shortest_is_run_most() -> None:
    product = "5 HMMA.16816.F32.BF16 R4, R8, R12, R4"
    (code,) = read_listing(
        listing(".L_x_0:", product, "1 FSEL R1, R1, R2, P0", "5 @P0 BRA `(.L_x_0)",
                ".L_x_1:", product, "5 @P1 BRA `(.L_x_1)", "5 EXIT")
    ).values()  # fmt: skip
    assert [i.stem for i in hot_loop(code)] == ["HMMA", "BRA"]


def test_products_of_warpgroups_are_counted_for_a_quarter_of_them() -> None:
    (code,) = read_listing(listing(f"1 {PRODUCT}", f"1 {WIDE}")).values()
    assert [4 * i.flops for i in code] == [2 * 64 * 64 * 16, 2 * 64 * 128 * 16]
    # the right operand, and the left one where it is no register
    assert [4 * i.shared for i in code] == [2 * 16 * (64 + 64), 2 * 16 * 128]


def test_units_take_what_the_tables_say() -> None:
    (code,) = read_listing(LOOP).values()
    a100, h100 = (busy(count(code), MODELS[name], 8) for name in ("A100", "H100"))
    assert a100["FMA"] == 2 * h100["FMA"] == 8 * 2 * 32 / 64
    assert a100["MUFU"] == 8 * 32 / 16 and a100["shared memory"] == 8 * 1024 / 128
    assert a100["issue"] == 8 * len(code) / 4
    assert a100["tensor"] == 8 * 4096 / 2048 and h100["tensor"] == 8 * 4096 / (4096 * 0.62)
    for gpu, peak in (("H100", 989.4e12), ("A100", 312e12), ("RTX4090", 165.2e12)):
        one = MODELS[gpu]
        assert one.processors * one.clock * one.tensor == pytest.approx(peak, rel=0.002)


def loop_of(*lines: str, gpu: str = "H100", warps: int = 8) -> float:
    """Return the cycles of a round that such warps take together."""
    (code,) = read_listing(listing(".L_x_0:", *lines, "1 @P0 BRA `(.L_x_0)")).values()
    return played(way(code, 0, len(code) - 1), MODELS[gpu], warps)


def test_a_warp_waits_as_long_as_the_assembler_says_and_for_what_it_counts() -> None:
    product = "HMMA.16816.F32.BF16 R4, R8, R12, R4"
    # one warp a quarter: its stalls; two: each in the other's; eight: the tensor core is busy
    assert loop_of(f"15 {product}", gpu="A100", warps=4) == 15 + 1
    assert loop_of(f"15 {product}", gpu="A100", warps=8) == 16
    assert loop_of(f"15 {product}", gpu="A100", warps=32) == 8 * 8
    # ldmatrix of four matrices takes 29, a shuffle 23, and MUFU 23 beside 8 of its unit
    for name, latency in (("LDSM.16.M88.4", 29), ("SHFL.BFLY", 23), ("MUFU.EX2", 23)):
        waits = loop_of(f"1:2 {name} R8, [R2]", "1:7:7:4 FADD R1, R8, R8", warps=1)
        assert waits == latency + 1 + 1
        assert loop_of(f"1:2 {name} R8, [R2]", "1:7:7:2 FADD R1, R8, R8", warps=1) < latency
    # 32 exponentials of 8 cycles each that nobody waits for leave their unit no rest
    exponentials = ["1 MUFU.EX2 R1, R2"] * 32 + ["1:3 MUFU.EX2 R1, R2", "1:7:7:8 FADD R1, R1, R1"]
    assert loop_of(*exponentials, warps=4) == pytest.approx(33 * 8 + 23 - 8 + 2, abs=12)
    assert loop_of(*exponentials, warps=8) == pytest.approx(2 * 33 * 8, abs=12)


def test_copies_are_waited_for_by_groups() -> None:
    work = ["10 FADD R1, R2, R3"] * 10
    copy, commit = "1 LDGSTS.E.BYPASS.128 [R4], desc[UR8][R2.64]", "1 LDGDEPBAR"
    all_of = loop_of(copy, commit, "1 DEPBAR.LE SB0, 0x0", *work, warps=1)
    a_copy = 32 * 16 / 64
    assert all_of == pytest.approx(a_copy + 263 + 100, abs=4)
    but_one = loop_of(copy, commit, "1 DEPBAR.LE SB0, 0x1", *work, warps=1)
    assert but_one == pytest.approx((263 + 100) / 2, abs=90) and but_one < all_of - 80
    # many take their turns at it
    copies = loop_of(*[copy] * 8, commit, "1 DEPBAR.LE SB0, 0x0", "1 BAR.SYNC 0x0")
    assert copies == pytest.approx(8 * 8 * a_copy + 263 + 29, abs=12)


def test_the_warps_of_a_block_meet_at_barriers() -> None:
    work = ["10 FADD R1, R2, R3"] * 20
    assert loop_of(*work, "1 BAR.SYNC 0x0") == pytest.approx(200 + 29, abs=4)
    # of two blocks each has its own
    (code,) = read_listing(listing(*work, "1 BAR.SYNC 0x0")).values()
    assert played(code, MODELS["A100"], 4, blocks=2) == pytest.approx(200 + 21, abs=4)


def test_warpgroups_wait_for_their_products_and_for_each_other() -> None:
    two = [f"1 {PRODUCT}", f"1 {PRODUCT}, gsb0"]
    # no work beside: four products of 2 · 64 · 64 · 16 operations at 4,096 a cycle
    assert loop_of(*two, "1 WARPGROUP.DEPBAR.LE gsb0, 0x1") == pytest.approx(4 * 32)
    # one works while the other's products run: 100 cycles of stalls beside 64 of its own, and 49
    # until they may be read
    work = ["10 NOP"] * 10
    alone = loop_of(*two, "1 WARPGROUP.DEPBAR.LE gsb0, 0x0", *work)
    assert alone == pytest.approx(64 + 49 + 100, abs=4)
    # where they meet in each round before they ask, their products take turns: both end last
    met = loop_of(*two, "1 WARPGROUP.DEPBAR.LE gsb0, 0x0", *work, "1 BAR.SYNC 0x0")
    assert met == pytest.approx(128 + 49 + 100 + 29, abs=6)
    # and one by one: of both the first three are done when six are, of twelve
    three = [f"1 {WIDE}", f"1 {WIDE}", f"1 {WIDE}, gsb0"]
    first, both = (f"1 WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in (1, 0))
    fair = loop_of(*three, *three, first, *["10 NOP"] * 60, both, "1 BAR.SYNC 0x0")
    assert fair == pytest.approx(6 * 64 + 49 + 600 + 29, abs=8)


def test_behind_a_full_queue_a_warp_waits_and_other_results_delay_it() -> None:
    sixteen = [f"1 {WIDE}"] * 15 + [f"1 {WIDE}, gsb0"]  # 64 cycles each
    wait = "1 WARPGROUP.DEPBAR.LE gsb0, 0x0"
    # when nine are done the last is in the queue
    assert loop_of(*sixteen, *["10 NOP"] * 30, wait, warps=4) == pytest.approx(1024 + 49, abs=8)
    behind = loop_of(*sixteen, *["10 NOP"] * 60, wait, warps=4)
    assert behind == pytest.approx(9 * 64 + 600, abs=8)
    sums = loop_of(*sixteen, *["1 FADD R1, R2, R3"] * 300, wait, warps=4)
    assert sums == pytest.approx(1024 + 49 + 300 * 0.49, abs=8)
    # so do accesses of the shared memory that a product reads all of the time
    rows = [f"1 {PRODUCT}"] * 6 + [f"1 {PRODUCT}, gsb0"]
    stores = ["1 STS.128 [R2], R4"] * 8
    free = loop_of(*rows, *stores, wait, warps=4)
    assert free == pytest.approx(7 * 32 + 49 + 4 * 8 * 4, abs=8)


def test_warpgroups_take_turns_where_a_register_names_the_barrier() -> None:
    mine, pass_on = "1 BAR.SYNC.DEFER_BLOCKING R1, 0x100", "1 BAR.ARV R2, 0x100"
    four = [f"1 {WIDE}"] * 3 + [f"1 {WIDE}, gsb0", pass_on, "1 WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    chain = 29 + 4 * 64 + 49
    assert loop_of(mine, *four, *["10 NOP"] * 40) == pytest.approx(chain + 400, abs=20)
    # with less work than products the tensor core is never idle
    assert loop_of(mine, *four, *["10 NOP"] * 5) == pytest.approx(2 * 4 * 64, abs=20)
    # a predicate in place of a register says who passes it on, as outside of loops
    guarded = [line.replace("BAR.ARV R2", "@P1 BAR.ARV 0x2") for line in four]
    assert loop_of(mine, *guarded) == loop_of(mine, *four)
    # what lies between is done by one at a time
    alone = loop_of(mine, *["10 NOP"] * 20, pass_on)
    assert alone == pytest.approx(2 * (200 + 29), abs=8)
    with pytest.raises(ValueError, match="not all arrive"):
        loop_of(mine, *four[:-2])


def test_what_a_product_adds_is_read_beside_it() -> None:
    gpu, product = MODELS["H200"], Product(False, False, 1792, 32768, 4864, 1.0, True)
    onto, apart = (predict.predict(p, gpu) for p in (product, product._replace(apart=True)))
    assert apart.moved == onto.moved + 2 * 1792 * 32768
    assert apart.seconds == onto.seconds + 2 * 1792 * 32768 / 4.8e12


def test_a_grid_s_blocks_are_handed_out_in_order() -> None:
    assert dealt([3, 3, 3], 2) == 6 and dealt([1, 1, 2, 4], 2) == 5 and dealt([4, 2, 1, 1], 2) == 4


def test_blocks_that_share_a_multiprocessor_take_their_rounds_at_once() -> None:
    require.nvdisasm()
    gpu = MODELS["A100"]
    with predict.recording(gpu) as device:
        q, k, v = (device.empty((4, 8192, heads, 128), np.uint16) for heads in (14, 2, 2))
        ops_bf16.attention_forward(q, k, v)
    (launch,) = (one for one in device.asked if isinstance(one, Launch))
    assert launch.threads == 128 and launch.tiles.blocks == 2
    found = predict.predict(launch, gpu)
    # two blocks' 128 × 64 scores, and as many products with values, 2 operations each
    assert found.a_round["tensor"] == 2 * 2 * 2 * 128 * 64 * 128 / gpu.tensor
    defines = tuple(sorted(launch.defines.items()))
    taken = hot_loop(predict._code(launch.source, launch.kernel, defines, gpu.architecture))
    assert found.a_round["a round"] == predict.round_of(taken, gpu, 4, 2)[0]
    tiles = sum(predict.tiles_of_blocks(launch, 64))
    rounds = tiles / (2 * gpu.processors)
    least = rounds * found.a_round["a round"] / gpu.clock
    assert least < found.seconds < 1.1 * least


def test_a_published_kernel_at_peak_is_left_with_the_last_wave() -> None:
    forward = published.KERNELS[0]
    # 2,048 blocks, 264 at a time; a round of two is 2 · 4 · 128 · 64 · 128 operations
    row = published._row(forward, "H100", 2048, "tensor")
    assert 4 * 16_384**2 * 2_048 / row.ours == pytest.approx(989.4e12 * 2048 / (8 * 264), rel=1e-3)
    causal = published._row(published.KERNELS[1], "H100", 2048, "tensor")
    assert 0.5 < causal.ours / row.ours < 0.6  # in the order of rows, the longest last
    assert row.theirs == pytest.approx(4 * 16_384**2 * 2_048 / 370e12)
    # what was counted agrees: a round of 2,048 cycles of tensor cores that were busy in 81.2 %
    (third,) = (k for k in published.KERNELS if k.clock)
    assert published._row(third, "H100", 2048 / 0.812, "").ratio == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("number", "ratio"), [pytest.param(0, 0.89, marks=pytest.mark.slow), (3, 0.93)]
)
def test_flash_attention_2_takes_as_long_as_was_published_within_15_percent(
    number: int, ratio: float
) -> None:
    """And as GPUS.md says: no constant of the model has moved since."""
    kernel, gpu = published.KERNELS[number], MODELS["H100"]
    text = Path(__file__).with_name("flash_attention_2.txt").read_text(encoding="utf-8")
    part = text.split(f"# {kernel.what}\n")[1].partition("#")[0]
    (code,) = read_listing(listing(*re.split(r" \| |\n", part.strip()))).values()
    tile = 2 * kernel.products * published.OWN * kernel.walked * kernel.head
    assert kernel.warps * count(code).flops == tile
    row = published._row(kernel, "H100", *predict.round_of(code, gpu, kernel.warps, kernel.blocks))
    assert row.ratio == pytest.approx(ratio, abs=0.01) and 0.85 <= row.ratio <= 1.15


def test_bytes_are_those_of_the_arrays_as_often_as_they_move() -> None:
    n = 1000
    x = np.zeros(n, np.float32)
    given = {"master": x, "m": x, "v": x, "grad": x, "copy": np.zeros(n, np.uint16), "n": n}
    assert Launch("optimizer", "adamw", (1, 1, 1), 256, given, {}).moved == 30 * n
    table = {"ids": np.zeros(7, np.int32), "table": x, "out": np.zeros((7, 5), np.float32)}
    launch = Launch("embedding", "embedding_forward", (1, 1, 1), 256, table, {})
    assert launch.moved == 4 * 7 + 2 * 4 * 35


def rounds_of(table: str) -> list[list[int]]:
    """Return what a table says of attention's loops, in PROOF.md's order: forward, dq, dkv."""
    found = []
    for kernel in predict.PRODUCTS:
        (note,) = re.findall(rf"{kernel}, its loop.*(a round .*) \|", table)
        numbers = re.findall(r"(a round|[a-zA-Z]+|shared memory) ([\d,]+)", note)
        by = {unit: int(number.replace(",", "")) for unit, number in numbers}
        units = ("tensor", "shared memory", "MUFU", "light", "issue", "a round")
        found.append([by[unit] for unit in units])
    return found


def tokens_of(table: str) -> int:
    """Return the tokens a second of a training step."""
    found = re.search(r"training step, 28 layers.* ([\d,]+) tokens/s", table)
    assert found
    return int(found[1].replace(",", ""))


def test_the_command_predicts_a_step_that_reaches_its_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    require.nvdisasm()
    times, tokens = {}, {}
    for gpu in ("H100", "H200"):
        assert bench.main(["--model", gpu, "--batch", "4"]) == 0
        table = capsys.readouterr().out
        assert f"predicted of an NVIDIA {gpu}, 4 sequences of 8,192" in table
        tokens[gpu] = tokens_of(table)
        rows = [line.split("|")[1:] for line in table.splitlines() if " ms " in line]
        times[gpu] = {row[0].strip(): float(row[1].split()[0]) for row in rows}
        assert {row[0].split(",")[0].strip() for row in rows} >= set(predict.PRODUCTS) | {"adamw"}
        kernels = sum(t for what, t in times[gpu].items() if " of a step" in what)
        assert times[gpu]["training step, 28 layers"] == pytest.approx(kernels, rel=0.01)
    assert tokens["H200"] >= 55_000
    # the page's table is what the command says
    text = (ROOT / "accel/cuda/PROOF.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (?:forward|dq|dk, dv), 128 × .*? \| (.*) \|$", text, re.MULTILINE)
    told = [[int(cell.replace(",", "")) for cell in line.split(" | ")] for line in lines]
    np.testing.assert_allclose(told, rounds_of(table), rtol=0.03)
    for what, t in times["H100"].items():  # the same multiprocessors, a faster memory
        assert times["H200"][what] <= t * 1.001


@pytest.mark.slow
def test_the_path_by_mma_sync_reaches_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    require.nvdisasm()
    assert bench.main(["--model", "H200-mma", "--batch", "4"]) == 0
    table = capsys.readouterr().out
    assert tokens_of(table) >= 42_000
    # and GPUS.md says what the command does: of 64 keys, of which the forward's loop takes 128
    text = (ROOT / "accel/cuda/GPUS.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| H200 by `mma.sync`, .*, 4 \|(.*)\|$", text, re.MULTILINE)
    told = [int(re.sub(r"\D", "", cell.split("→")[1])) for cell in row.split("|")]
    (forward, dq, dkv) = (found[-1] for found in rounds_of(table))
    now = [forward / 2, dq, dkv, tokens_of(table)]
    np.testing.assert_allclose(told, now, rtol=0.03)
