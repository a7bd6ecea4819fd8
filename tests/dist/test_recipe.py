"""The recipe for MyLLM-1B, at a small size: its commands, on files with the datasets' columns."""

import re
import shlex
from pathlib import Path

import pytest

from dist import cli, config
from dist.shards import read_manifest
from tests.helpers import ROOT
from tests.helpers.tokenizer_texts import corpus

PAGE = (ROOT / "dist" / "MYLLM_1B.md").read_text(encoding="utf-8")
ROW = r"^\| `[\w-]+/([\w-]+)` \| `(\S+?)\*\.parquet`.*?\| (.*?) \|"
COLUMNS = re.findall(ROW, PAGE, re.MULTILINE)
# what is smaller here, and what the launcher does
SMALLER = (
    *(("--vocab-size 65536", "--vocab-size 600"), ("5e8", "6e4")),
    ("--processes 8", "--heldout 0.2"),
)
SMALL = {
    **{"model.vocab_size": 600, "model.d_model": 16, "model.n_layers": 1, "model.n_heads": 2},
    **{"model.n_kv_heads": 1, "model.d_head": 8, "model.d_ff": 24, "model.context_length": 32},
    **{"train.micro_batch": 1, "train.global_batch": 4, "train.warmup_steps": 1},
    **{"run.backend": '"cpu"', "run.compute": '"float32"', "run.eval_windows": 2},
}


def commands() -> list[list[str]]:
    """Return the page's commands of ours."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("mpirun -n 8 ", "")
    for large, small in SMALLER:
        lines = lines.replace(large, small)
    return [shlex.split(line)[1:] for line in lines.splitlines() if line.startswith("myllm ")]


def test_the_recipe_goes_from_parquet_to_a_model_that_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet

    monkeypatch.chdir(tmp_path)
    texts = [text for text in corpus() if text][:90]
    assert [name for name, _, _ in COLUMNS] == ["open-web-math", "fineweb-edu", "cosmopedia"]
    for i, (name, folder, columns) in enumerate(COLUMNS):
        part = texts[i::3]
        table = {c: ["not the text"] * len(part) for c in re.findall(r"`(\w+)`", columns)}
        table["text"] = part
        at = Path("raw", name, folder)
        at.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table(table), at / "train-0.parquet")
    Path("data").mkdir()

    run = config.load("myllm-1b")
    phases = ", ".join(
        "{tokens = 256, sources = ["
        + ", ".join(f'{{path = "{s.path}", weight = {s.weight}}}' for s in phase.sources)
        + "]}"
        for phase in run.data.phases
    )
    small = [f"{key}={value}" for key, value in SMALL.items()] + [f"data.phases=[{phases}]"]
    done = []
    for words in commands():
        if words[0] == "train":
            words += [word for setting in small for word in ("--set", setting)]
        assert cli.main(words) == 0, words
        done.append(words[0])
    assert done == ["tokenizer", "pack", "pack", "pack", "plan", "train", "eval"]
    said = capsys.readouterr().out
    assert "at 438,480 tokens/s: 17.4 hours" in said and "bits per byte" in said
    for phase in run.data.phases:
        for source in phase.sources:
            assert read_manifest(Path(source.path)).tokens > 0
    assert "not the text" not in said
    for path in run.data.heldout_sets:  # while training, and by eval
        assert re.search(rf"^  {path.split('/')[1]}: loss .* bits per byte$", said, re.MULTILINE)
        assert re.search(rf" on {path}: loss .* bits per byte", said)


def test_the_page_s_figures_are_the_preset_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "myllm-1b", "--ranks", "8"]) == 0
    said = capsys.readouterr().out
    for figure in ("27,540,324,352", "105,058", "262,144", "68.3 GB"):
        assert figure in said and figure in PAGE
    gpus = (ROOT / "accel" / "cuda" / "GPUS.md").read_text(encoding="utf-8")
    assert "598 ms, 54,810 tokens/s |" in gpus
    tokens, speed = 27_540_324_352, 8 * 54_810
    assert f"{8} × 54,810 = {speed:,} tokens/s" in PAGE
    assert f"| {tokens / speed / 3600:.1f} hours |" in PAGE
    sent = 7_386_622_208
    assert f"{sent:,}" in said
    for rate, ms, hours in ((200e9, 37, "1.1"), (20e9, 369, "10.8")):
        assert (
            f"{round(1e3 * sent / rate)}" == f"{ms}" and f"{ms} ms at {rate / 1e9:.0f} GB/s" in PAGE
        )
        assert f"{sent / rate * 105_058 / 3600:.1f}" == hours and f"{hours} hours" in PAGE
