"""The model follows the speed and the time, and `plan --minutes` writes a run that trains."""

import gzip
import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from dist import cli, config, monitor, pack, sizing
from dist.heldout import place
from dist.shards import Dataset
from dist.sizing import SIZES, Size, choice_for, choose
from reference.params import decoder_layout
from tests.helpers.runs import VOCAB, prepare_texts, random_walk, text, write_dataset
from tokenizer import Tokenizer

TINY = Size(0.0, 16, 1, 2, 1, 8, 24, 12, 4, 1e-2, 300)


def run_of(size: Size) -> config.RunFile:
    return config.load("demo", [*size.overrides(2), f"model.vocab_size={size.vocab_size}"])


def test_more_time_or_speed_never_gives_a_smaller_model() -> None:
    assert [choose(size.flops) for size in SIZES] == list(SIZES)
    assert choose(0.0) == SIZES[0] and choose(1e30) == SIZES[-1]
    sizes = [decoder_layout(run_of(size).model).size for size in SIZES]
    assert sizes == sorted(sizes) and sizes[-1] > 40 * sizes[0]
    budgets = [size.flops for size in SIZES]
    assert budgets == sorted(budgets) and budgets[0] == 0.0
    below = [choose(np.nextafter(size.flops, 0)) for size in SIZES[1:]]
    assert below == list(SIZES[:-1])


def test_the_budget_is_speed_times_time() -> None:
    """A minute of a slow machine, and half an hour of a fast one."""
    slow, fast = choice_for(30, 10e9), choice_for(1700, 600e9)
    assert slow.flops == pytest.approx(sizing.SHARE * 30 * 10e9)
    assert slow.size == SIZES[0] and fast.size.d_model >= 192
    said = str(fast)
    assert "for 9.2e+14 operations (600 GFLOP/s for 90 % of 1700 s)" in said
    assert f"{fast.size.d_model} wide" in said
    late = choice_for(-5, 1e9)  # no time is left: the smallest all the same
    assert late.size == SIZES[0] and "1 GFLOP/s for 90 % of 0 s" in str(late)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_size_can_be_trained_on_a_few_ranks(ranks: int) -> None:
    for size in SIZES:
        run = config.load("demo", size.overrides(ranks))
        assert run.accumulation(ranks) * ranks >= 2  # so that two ranks may go on with it
        assert run.train.global_batch == size.global_batch and run.train.lr == size.lr
        assert run.optim.embedding_rate == size.embedding_rate
        # whatever the preset has
        assert run.optim.kind == size.kind and run.model.qkv_bias == size.qkv_bias
    preset, typical = config.load("demo"), config.load("demo", sizing.TYPICAL.overrides(1))
    assert (preset.model, preset.train.lr) == (typical.model, typical.train.lr)
    assert preset.optim == typical.optim


def test_a_step_is_timed_as_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "SECONDS", 0.0)
    run = config.load("demo", [*TINY.overrides(1), "run.backend=reference", "train.global_batch=8"])
    assert run.micro_batches == 4
    assert 0 < sizing.step_seconds(run) < 60


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sizing, "SIZES", (TINY, TINY._replace(flops=1e30, d_model=32)))
    monkeypatch.setattr(sizing, "TYPICAL", TINY)
    monkeypatch.setattr(sizing, "SECONDS", 0.0)
    monkeypatch.setattr(sizing, "step_seconds", lambda run: 0.9 * 60 * 0.01 / 25)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_plan_writes_a_run_file_that_trains(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_texts(quick)
    capsys.readouterr()
    assert cli.main(["plan", "--minutes", "0.01", str(quick), "-o", "mine.toml"]) == 0
    said = capsys.readouterr().out
    assert "model: 16 wide, 1 layers, for" in said and "25 steps in 0.01 minutes" in said
    assert "then:\n  myllm train mine.toml\n" in said and "times the" in said
    run = config.load("mine.toml")
    assert run.model.vocab_size == 320 and run.data.heldout == str(quick / "heldout")
    assert (run.steps, run.train.warmup_steps, run.run.eval_every) == (25, 2, 2)
    assert f"{decoder_layout(run.model).size:,}" in said  # the plan of that run follows

    assert cli.main(["train", "mine.toml"]) == 0
    records = monitor.read_metrics(quick / "runs" / "mine")
    assert [r["step"] for r in records if "lr" in r][-1] == 25
    assert sum("bits_per_byte" in r for r in records) == 13  # ten and the last, of 25 by twos

    before = Path("mine.toml").read_bytes()
    assert cli.main(["plan", "--minutes", "0.01", str(quick), "-o", "mine.toml"]) == 1
    assert "mine.toml is there already" in capsys.readouterr().err
    assert Path("mine.toml").read_bytes() == before


def test_plan_says_what_to_do_with_text_that_is_not_packed(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = quick / "my texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"It was the {i}. time. " * 40)
    assert cli.main(["plan", "--minutes", "0.01", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("  myllm ")]
    assert [words[0] for words in commands] == ["tokenizer", "pack", "train"]
    assert all(cli.main(words) == 0 for words in commands)
    assert monitor.read_metrics(quick / "runs" / "run")


def test_plan_takes_a_bare_packed_folder_and_says_what_is_missing(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(quick / "ids", random_walk(200))
    assert cli.main(["plan", "--minutes", "0.01", "ids"]) == 0
    said = capsys.readouterr().out
    assert "No held-out text was packed" in said and "more than four times" in said
    run = config.load("run.toml")
    assert (run.data.train, run.data.heldout, run.model.vocab_size) == ("ids", "", VOCAB)
    assert cli.main(["plan", "--minutes", "0.01", "elsewhere", "-o", "b.toml"]) == 1
    assert "'elsewhere' is no file, folder or glob of files" in capsys.readouterr().err
    assert not Path("b.toml").exists()


def test_what_plan_says_of_texts_that_are_not_packed_works(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a few texts, of which a hundredth is none."""
    (quick / "texts").mkdir()
    for i in range(60):
        (quick / "texts" / f"{i}.txt").write_text(text(i) * 3)
    (quick / "texts" / "more.txt.gz").write_bytes(gzip.compress(text(60).encode()))
    assert cli.main(["plan", "--minutes", "0.01", "texts/*.*"]) == 0
    commands = printed_commands(capsys.readouterr().out)
    assert commands[1][3:7] == ["run.tok", "--heldout", "0.1", "-o"]
    assert all(cli.main(words) == 0 for words in commands)
    assert "heldout" in config.load("run.toml").data.heldout
    assert cli.main(["plan", "--minutes", "0.01", "run-data", "-o", "b.toml"]) == 0
    # what no packing has finished in is no folder of texts
    (quick / "half").mkdir()
    (quick / "half" / "lock").touch()
    assert cli.main(["plan", "--minutes", "0.01", "half", "-o", "c.toml"]) == 1
    assert "no packing in half has finished" in capsys.readouterr().err
    # but texts may be called so
    for name in ("lock", "manifest.json"):
        (quick / "texts" / name).write_text(text(1))
    assert cli.main(["plan", "--minutes", "0.01", "texts", "-o", "d.toml"]) == 0
    assert "texts is to be packed first" in capsys.readouterr().out


def printed_commands(said: str) -> list[list[str]]:
    """Return the commands in what was printed, whose other lines fit a terminal."""
    lines = said.splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("  myllm ")]
    assert [words[0] for words in commands] == ["tokenizer", "pack", "train"]
    others = [line for line in lines if not line.startswith("  myllm ")]
    assert all(len(line) <= monitor.COLUMNS for line in others)
    return commands


@pytest.mark.parametrize(
    ("size", "heldout"), [(150, False), (60_000, False), (70_000, True), (300_000, True)]
)
def test_the_recipe_for_a_single_text_works_as_it_is_printed(
    quick: Path, size: int, heldout: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has 64 KiB or less is one document, of which nothing can be held out."""
    words = "".join(map(text, range(3000)))
    Path("one.txt").write_text(words[:size])
    assert cli.main(["plan", "--minutes", "0.01", "one.txt", "-o", "t.toml"]) == 0
    said = capsys.readouterr().out
    tokens, have = 25 * 4 * 12, size // 4  # at four bytes a token
    if not heldout:
        assert f"{tokens:,} tokens" in said and f"the {have:,} of one.txt" in " ".join(said.split())
    assert "by an estimate of 4 bytes a token" in " ".join(said.split())
    assert ("more than four times" in " ".join(said.split())) == (size < 1000)
    assert ("Too little of one.txt can be held out, so" in said) != heldout
    commands = printed_commands(said)
    assert commands[1][3:6] == ["t.tok", "--heldout", "0.1" if heldout else "0"]
    assert config.load("t.toml").data.heldout == ("t-data/heldout" if heldout else "")
    assert all(cli.main(words) == 0 for words in commands)
    scored = [r for r in monitor.read_metrics(Path("runs/t")) if "heldout_loss" in r]
    assert bool(scored) == heldout


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"Hello world\n"])
def test_plan_of_next_to_no_text_is_refused(
    quick: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("few.txt").write_bytes(content)
    assert cli.main(["plan", "--minutes", "30", "few.txt"]) == 1
    said = capsys.readouterr().err
    least = 2 * sizing.BYTES_A_TOKEN * TINY.context_length
    size = len(content) if content[:1] == b"H" else 0
    assert f"few.txt holds {size} bytes of text, but a run needs some {least}" in said
    assert said.count("\n") == 1 and not Path("run.toml").exists()


def test_what_is_said_to_be_held_out_is_what_pack_holds_out(quick: Path) -> None:
    """Few long texts and many short ones, an empty one among them, by their hashes or by size."""
    prepare_texts(quick)
    tokenizer = Tokenizer.load("t.tok")
    for number, lengths in enumerate([[70_000, 20, 0, 9], [500] * 40, [50], [50, 60], [5, 0]]):
        folder = Path(f"texts{number}")
        folder.mkdir()
        for i, length in enumerate(lengths):
            (folder / f"{i}.txt").write_text((text(i) * 1000)[:length])
        files = [str(path) for path in sorted(folder.iterdir())]
        for share in (0.1, 0.5):
            settings = pack.Settings("t.tok", heldout=share)
            trained, held = sizing.split_bytes(files, share)
            assert trained + held == sum(lengths)
            out = Path(f"packed{number}-{share}")
            if not trained or not held:
                with pytest.raises(ValueError, match="held out"):
                    pack.pack([str(folder)], out, settings)
                continue
            pack.pack([str(folder)], out, settings)
            for name, size in (("train", trained), ("heldout", held)):
                found = Dataset(out / name, 1)
                ids = [int(found.read(i)[0][0]) for i in range(found.n_windows)]
                ids = [i for i in ids if i != found.eos]
                assert len(tokenizer.decode_bytes(ids)) == size


@pytest.mark.parametrize("share", ["0", "0.2"])
def test_a_share_that_holds_out_too_little_is_not_taken(
    quick: Path, share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few bytes, less than a window, are held out by a tenth, and by a fifth some more or not.

    What lies beside them is too long for a tenth, or for either.
    """

    def one(length: int, low: float, high: float) -> str:
        """Return a text whose place lies between."""
        texts = (f"{i} {text(i) * 100}"[:length] for i in range(1000))
        return next(found for found in texts if low <= place(found.encode()) < high)

    (quick / "texts").mkdir()
    kept = [one(3, 0.0, 0.1), one(2000, 0.3, 1.0)]
    if share == "0.2":
        kept.append(one(500, 0.3, 1.0))
    for i, content in enumerate(kept):
        (quick / "texts" / f"{i}.txt").write_text(content)
    assert cli.main(["plan", "--minutes", "0.01", "texts"]) == 0
    commands = printed_commands(capsys.readouterr().out)
    assert commands[1][4:6] == ["--heldout", share]
    assert all(cli.main(words) == 0 for words in commands)


def test_plan_takes_rows_whose_texts_it_cannot_find(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their field is for `myllm pack` to be told."""
    rows = "".join(json.dumps({"content": text(i)}) + "\n" for i in range(60))
    Path("rows.jsonl").write_text(rows)
    assert cli.main(["plan", "--minutes", "0.01", "rows.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "It reads" not in said and "--heldout 0.1" in said
    assert "nor packed so: rows.jsonl, line 1: there is no text field" in " ".join(said.split())
    Path("large.txt").write_text("word " * 7_000_000)  # and no large text is read
    assert cli.main(["plan", "--minutes", "0.01", "large.txt", "-o", "l.toml"]) == 0
    said = capsys.readouterr().out
    assert "the 8,750,000 of large.txt" in " ".join(said.split()) and "--heldout" not in said
    Path("large.jsonl").write_text((json.dumps({"text": "hi", "id": "z" * 1000}) + "\n") * 34_000)
    assert cli.main(["plan", "--minutes", "0.01", "large.jsonl", "-o", "r.toml"]) == 0
    assert "It reads" not in capsys.readouterr().out  # of rows, text is a part that nobody knows


def test_plan_of_a_folder_without_texts_writes_no_file(
    quick: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (quick / "empty").mkdir()
    assert cli.main(["plan", "--minutes", "0.01", "empty"]) == 1
    assert "empty" in capsys.readouterr().err and not Path("run.toml").exists()


def test_plan_writes_no_file_that_its_ranks_cannot_share(
    quick: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(quick / "ids", random_walk(200))
    words = ["plan", "--minutes", "0.01", "ids", "--ranks"]
    for ranks, said in (("3", "power of two"), ("16", "at most 4 ranks")):
        assert cli.main([*words, ranks]) == 1
        assert said in capsys.readouterr().err and not Path("run.toml").exists()
        # which sixteen could share
        monkeypatch.setattr(sizing, "TYPICAL", TINY._replace(global_batch=16))
    assert cli.main([*words, "4"]) == 0
    assert "then:\n  myllm train run.toml --ranks 4\n" in capsys.readouterr().out
    assert config.load("run.toml").accumulation(4) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "0"], "--minutes: must be a number of minutes above 0"),
        (["--minutes", "nan"], "--minutes: must be a number of minutes above 0"),
        (["--minutes", "1e9"], "a number of minutes above 0, at most 10,000,000, got 1e9"),
        ([], "CONFIG is needed, or --minutes"),
        (["demo", "-o", "x.toml"], "-o belongs with --minutes"),
        (["--minutes", "1", "--speed", "5"], "no --set, no --speed"),
    ],
)
def test_wrong_usage_of_plan(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", *words])
    assert said in capsys.readouterr().err


def test_the_sweeps_in_the_repository_bear_the_table_out() -> None:
    """Where budgets were tried, the size that is taken is the best of those tried, or near it."""
    folder = Path(sizing.__file__).parent / "sweep" / "sizing"
    tried = sorted(folder.glob("sizes*.json"))
    assert tried
    for path in tried:
        report = json.loads(path.read_text())
        flops = report["budget"]["amount"]
        means = {s["settings"]["model.d_model"]: s["mean"] for s in report["settings"]}
        assert means[choose(flops).d_model] <= min(means.values()) + 0.05, path
