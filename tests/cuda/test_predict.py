"""What ``myllm bench cuda --model`` says follows from the listing, and from arithmetic."""

import numpy as np
import pytest

from accel.bench import cuda as bench
from accel.bench import predict
from accel.bench.predict import MODELS, Launch, busy, played
from accel.cuda.machine_code import count, hot_loop, loops, read_listing, way
from tests.cuda_shim import require

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24"


def listing(*lines: str) -> str:
    """Return what nvdisasm would print of a kernel: labels end in a colon, a stall stands first."""
    text = '\t.section\t.text.kernel,"ax",@progbits\n'
    for line in lines:
        if line.endswith(":"):
            text += line + "\n"
            continue
        stall, _, code = line.partition(" ")
        upper = int(stall) << 41 | 0xE0 << 48
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
    "1 LDSM.16.M88.4 R8, [R2]",
    "6 @P0 BRA `(.L_x_2)",
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


def test_products_of_warpgroups_are_counted_for_a_quarter_of_them() -> None:
    (code,) = read_listing(
        listing(f"1 {PRODUCT}", "1 HGMMA.64x128x16.F32.BF16 R24, R216, gdesc[UR20].tnspB, R24")
    ).values()
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


def loop_of(*between: str) -> float:
    """Return the cycles of a round: two products of 32 cycles of the tensor core, and more."""
    lines = [f"1 {PRODUCT}", f"1 {PRODUCT}, gsb0", *between, "1 @P0 BRA `(.L_x_0)"]
    (code,) = read_listing(listing(".L_x_0:", *lines)).values()
    return played(hot_loop(code), MODELS["H100"])


def test_warpgroups_wait_for_their_products_and_for_each_other() -> None:
    # no work beside: four products of 2 · 64 · 64 · 16 operations at 4,096 a cycle
    assert loop_of("1 WARPGROUP.DEPBAR.LE gsb0, 0x1") == 4 * 32
    # one works while the other's products run: 100 cycles of stalls beside 64 of its own
    work = ["10 FADD R1, R2, R3"] * 10
    assert loop_of("1 WARPGROUP.DEPBAR.LE gsb0, 0x0", *work) == pytest.approx(64 + 100, abs=4)
    # where they meet in each round before they ask, the second's products come after the first's
    met = loop_of("1 WARPGROUP.DEPBAR.LE gsb0, 0x0", *work, "1 BAR.SYNC 0x0")
    assert met == pytest.approx(128 + 100, abs=6)
    # a unit that both want is shared: 40 exponentials of 8 cycles each
    busy_unit = loop_of(*["1 MUFU.EX2 R1, R2"] * 40)
    assert busy_unit == pytest.approx(2 * 40 * 8, abs=4)


def test_bytes_are_those_of_the_arrays_as_often_as_they_move() -> None:
    n = 1000
    x = np.zeros(n, np.float32)
    given = {"master": x, "m": x, "v": x, "grad": x, "copy": np.zeros(n, np.uint16), "n": n}
    assert Launch("optimizer", "adamw", (1, 1, 1), 256, given, {}).moved == 30 * n
    table = {"ids": np.zeros(7, np.int32), "table": x, "out": np.zeros((7, 5), np.float32)}
    launch = Launch("embedding", "embedding_forward", (1, 1, 1), 256, table, {})
    assert launch.moved == 4 * 7 + 2 * 4 * 35


def test_the_command_predicts_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    require.nvdisasm()
    times = {}
    for gpu in ("H100", "H200"):
        assert bench.main(["--model", gpu, "--batch", "1", "--layers", "1"]) == 0
        table = capsys.readouterr().out
        assert f"predicted of an NVIDIA {gpu}, 1 sequences of 8,192" in table
        rows = [line.split("|")[1:] for line in table.splitlines() if " ms " in line]
        times[gpu] = {row[0].strip(): float(row[1].split()[0]) for row in rows}
        assert {row[0].split(",")[0].strip() for row in rows} >= set(predict.PRODUCTS) | {"adamw"}
        kernels = sum(t for what, t in times[gpu].items() if " of a step" in what)
        assert times[gpu]["training step, 1 layers"] == pytest.approx(kernels, rel=0.01)
    for what, t in times["H100"].items():  # the same multiprocessors, a faster memory
        assert times["H200"][what] <= t * 1.001
