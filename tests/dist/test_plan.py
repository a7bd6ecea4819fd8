"""The arithmetic of the headline run."""

import tomllib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import accel
from accel.cpu.loss import CHUNK_ELEMENTS, LEAST_ROWS
from dist import cli, config
from dist.monitor import COLUMNS, bytes_text
from dist.plan import (
    CPU_LOGITS,
    CPU_ROWS,
    kv_cache_bytes,
    make_plan,
    parameters_by_part,
    rank_memory,
    score_bytes,
)
from reference.config import DEEPEST
from reference.flops import forward_flops
from reference.params import decoder_layout
from reference.presets import MYLLM_1B


def test_the_headline_figures() -> None:
    plan = make_plan(config.load("myllm-1b"), 8)
    n = 1_055_231_744
    assert plan.parameters == n
    assert plan.kv_cache == 224 * 2**20 == kv_cache_bytes(MYLLM_1B, 2)
    assert plan.scores == 1_879_048_192 == score_bytes(MYLLM_1B, 2)
    assert 2 * plan.scores == 3.5 * 2**30
    assert plan.sent == 2 * n * 7 // 8 * 4
    assert plan.master == 4 * n and plan.moments == n and plan.weights == 2 * n
    assert plan.gradients == 4 * n * 2  # one micro-batch: its buffer, and the received slices
    assert plan.states == (4 + 1 + 2 + 8) * n
    assert plan.checkpoint == 12 * n
    # 51,776 bytes a token and layer, of which norms and the SwiGLU product are 16,896
    token = {"none": 51_776 * 28, "norms": 34_880 * 28, "block": 3_584 * 28 + 51_776}
    assert plan.activations == {level: 4 * 8_192 * n for level, n in token.items()}
    assert plan.steps == 47_837 + 57_221
    assert plan.exposures == 105_058 * 262_144


def test_the_cpu_keeps_no_form_of_a_weight_in_bf16_and_packs_the_head_for_many_rows() -> None:
    few = ["train.micro_batch=1", "model.context_length=256", "run.compute=bf16"]
    for words, packed in ((["run.compute=bf16"], 1), (few, 0)):
        run = config.load("laptop", words)
        full = replace(run, run=replace(run.run, compute="float32"))
        assert make_plan(run, 1).weights == make_plan(full, 1).weights == 0
        kept = [make_plan(each, 1).activations["none"] for each in (run, full)]
        more = rank_memory(run, 1, "none") - rank_memory(full, 1, "none") - (kept[0] - kept[1])
        assert more == packed * 4 * run.model.vocab_size * run.model.d_model


def test_a_layer_with_a_window_keeps_no_more_of_the_cache() -> None:
    """Of 8 MiB a layer of 8,192 tokens; ALiBi keeps them all."""
    few = replace(MYLLM_1B, window=(*[1_024] * 27, 0))
    assert kv_cache_bytes(few, 2) == (27 + 8) * 2**20
    assert kv_cache_bytes(replace(few, position="alibi"), 2) == 224 * 2**20


@pytest.mark.parametrize("compute", ["float32", "bf16"])
@pytest.mark.parametrize("window", ["0", "[4, 0, 4, 0, 4, 0, 4, 0]"])
def test_the_cpu_keeps_as_many_bytes_of_a_sequence_as_planned(compute: str, window: str) -> None:
    run = config.load("laptop", [f"run.compute={compute}", f"model.window={window}"])
    ops = accel.load("cpu", compute=compute)
    params = {"embedding.weight": np.zeros((1, 1), np.float32)}
    cache = ops.kv_cache(params, run.model, 1, run.model.context_length)
    assert sum(a.nbytes for a in (*cache.k, *cache.v)) == make_plan(run, 1).kv_cache


def test_windows_of_a_run_file_come_back_from_the_resolved_one() -> None:
    run = config.load("laptop", ["model.window=[4, 0, 4, 0, 4, 0, 4, 0]", "model.qk_norm=true"])
    assert run.model.window == (4, 0, 4, 0, 4, 0, 4, 0) and run.model.qk_norm
    assert "window = [4, 0, 4, 0, 4, 0, 4, 0]" in run.to_toml()
    assert config.from_tables(tomllib.loads(run.to_toml())) == run
    with pytest.raises(ValueError, match=r"\[model\]: window has 2 entries"):
        config.load("laptop", ["model.window=[4, 0]"])


def test_forward_work_is_a_third_of_training() -> None:
    model = MYLLM_1B
    plan = make_plan(config.load("myllm-1b"), 8)
    gains = (2 * model.n_layers + 1) * model.d_model
    parts = forward_flops(model, 8_192, causal=False)
    assert parts["attention"] == 4 * 28 * 8_192 * 1_792
    assert sum(parts.values()) - parts["attention"] == 2 * (plan.parameters - gains)
    assert 3 * sum(parts.values()) == plan.flops[0]


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "myllm-1b", "--ranks", "8", "--speed", "100000"]) == 0
    said = capsys.readouterr().out
    for figure in (
        "1,055,231,744",
        "224.0 MiB",
        "(as set)",
        "1.5 GiB",  # 1,568 MiB with as many KV heads as query heads
        f"{1_568 * 2**20:,}",
        "1,879,048,192",
        "3.5 GiB",
        "21,104,634,880  the run is 1.305 of it",
        "47,837",
        "57,221",
        "76.5 hours",
    ):
        assert figure in said
    assert "(4: all that a rank has of global_batch)" in said  # not all that fits
    large = ["--set", "train.global_batch=4096", "--set", "train.warmup_steps=9"]
    assert cli.main(["plan", "myllm-1b", "--ranks", "8", *large]) == 0
    assert "all that a rank has" not in capsys.readouterr().out
    assert cli.main(["plan", "myllm-1b", "--ranks", "64"]) == 1
    assert "at most 8 ranks" in capsys.readouterr().err


def test_a_layer_less_and_one_more_and_shorter_windows_stand_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "myllm-1b", "--ranks", "8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    layers = next(i for i, line in enumerate(lines) if line[:1] == ["layers"])
    assert lines[layers][1:] == ["27", "28", "29"]
    n, block = 1_055_231_744, 33_492_480
    assert lines[layers + 1][1:] == [f"{n - block:,}", f"{n:,}", f"{n + block:,}"]
    context = next(i for i, line in enumerate(lines) if line[:1] == ["context"])
    assert lines[context][1:] == ["512", "1,024", "2,048", "4,096", "8,192"]
    # each of four windows: 51,776 bytes a token and layer
    kept = [f"{4 * (512 << i) * 28 * 51_776 / 2**30:.1f}" for i in range(5)]
    assert lines[context + 1][1::2] == kept
    assert lines[context + 2][2::2] == ["14.0", "28.0", "56.0", "112.0", "224.0"]
    # a window for each layer: there is no layer more to compare with
    words = ["plan", "laptop", "--set", "model.window=[4, 0, 4, 0, 4, 0, 4, 0]"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "context" in said and "\n  layers" not in said


LARGE = ("n_layers=48", "d_model=8192", "n_heads=64", "n_kv_heads=64", "d_ff=28672")


@pytest.mark.parametrize("preset", sorted(path.stem for path in config.PRESETS.glob("*.toml")))
def test_no_line_is_wider_than_a_terminal(
    preset: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether or not it fits; eight ranks do not share the demo's batch."""
    ranks = ["--ranks", "2" if preset == "demo" else "8"]
    cluster = [*ranks, "--network", "50GB/s", "--per-node", ranks[1], "--speed", "100000"]
    for total in (1 << 29, 1 << 40):
        monkeypatch.setattr(
            "psutil.virtual_memory", lambda total=total: SimpleNamespace(total=total)
        )
        large = [w for key in LARGE for w in ("--set", f"model.{key}")]  # for any GPU
        for words in ([], ranks, cluster, large, ["--set", "run.recompute=block"]):
            assert cli.main(["plan", preset, *words]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert not [line for line in lines if len(line) > COLUMNS]
            if words is large:
                assert all("no micro-batch" in line for line in lines if " GB holds " in line)


def rows(said: str, name: str) -> list[list[str]]:
    """Return what stands in the rows of a name."""
    return [line[20:].split() for line in said.splitlines() if line.startswith(f"  {name:<18}")]


def test_the_deepest_model_has_none_beside_it_with_a_layer_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "laptop", "--set", f"model.n_layers={DEEPEST}"]) == 0
    assert rows(capsys.readouterr().out, "layers") == [["9999", "10000"]]


def test_memory_in_all_and_whether_it_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (CPU_LOGITS, CPU_ROWS) == (CHUNK_ELEMENTS, LEAST_ROWS)
    run = config.load("laptop")
    needed = [rank_memory(run, 2, level) for level in ("none", "norms", "block")]
    here = 2 * needed[1]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=here))
    assert cli.main(["plan", "laptop", "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    found = [rows(said, level)[-1] for level in ("none", "norms", "block")]
    assert [words[0] for words in found] == [f"{2 * n:,}" for n in needed]
    assert ["fits" in words for words in found] == [False, True, True]
    # weights, moments and their copy for a checkpoint are divided, forms of weights are not
    N = make_plan(run, 1).parameters
    one, two = (rank_memory(run, ranks) for ranks in (1, 2))
    shared = make_plan(run, 1).checkpoint + make_plan(run, 1).moments
    assert one - two == pytest.approx(shared / 2, rel=0.02) and shared == 12 * N + 8 * N
    # of 7, 8 and 9 layers, and of T = 32 to 512
    kept = rank_memory(replace(run, model=replace(run.model, n_layers=7)), 2)
    assert rows(said, "memory of a rank")[0][:2] == bytes_text(kept).split()
    layers, contexts = rows(said, "fits here")
    assert len(layers) == 3 and contexts == ["yes"] * 4 + ["no" if layers[1] == "no" else "yes"]
    assert layers == sorted(layers, reverse=True)
    assert cli.main(["plan", "myllm-1b", "--ranks", "8"]) == 0
    layers, contexts = rows(capsys.readouterr().out, "fits a GPU of")
    assert layers == ["80", "GB"] * 3 and contexts == ["80", "GB"] * 5


@pytest.mark.parametrize("preset", ["gpt2-small", "laptop", "demo"])
def test_every_preset_has_a_plan(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", preset, "--ranks", "2", "--set", "optim.clip=0.5"]) == 0
    assert "sent in a step" in capsys.readouterr().out


def test_a_run_with_muon_takes_its_products_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "demo", "--set", "data.phases=[]", "--set", "train.steps=100"]) == 0
    found = capsys.readouterr().out.partition("floating-point operations\n")[2].splitlines()
    of = {name.strip(): float(n.split()[0].replace(",", "")) for name, n in map(split, found[:6])}
    step = of["training, a step"] + of["Muon, a step"]
    assert of["Muon, a step"] > 0 and of["whole run"] == pytest.approx(100 * step, rel=1e-3)


def split(line: str) -> tuple[str, str]:
    """Return the name and the figures of a line of a plan."""
    return line[:20], line[20:]


def test_the_parts_of_a_model_are_its_parameters() -> None:
    """MyLLM-1B: 1,792 wide, 28 layers, 14 heads of 128 of which 2 for keys, SwiGLU of 4,864."""
    model = MYLLM_1B
    parts = parameters_by_part(model)
    projected = 2 * (model.n_heads + model.n_kv_heads) * model.d_head
    assert parts == {
        "embedding": model.vocab_size * model.d_model,
        "attention": model.n_layers * model.d_model * projected,
        "feed-forward": model.n_layers * 3 * model.d_model * model.d_ff,
        "norms": (2 * model.n_layers + 1) * model.d_model,
    }
    other = config.load("gpt2-small").model
    parts = parameters_by_part(other)
    assert parts["position"] == other.context_length * other.d_model
    assert sum(parts.values()) == decoder_layout(other).size
    plan = make_plan(config.load("gpt2-small"), 1)
    assert plan.block * other.n_layers + parts["embedding"] + parts["position"] + 2 * 768 == (
        plan.parameters
    )
    untied = replace(model, tied=False, head_bias=True)
    assert parameters_by_part(untied)["head"] == (model.d_model + 1) * model.vocab_size
