"""Run files: what is refused, what is resolved, and the arithmetic of the presets."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dist import cli, config, keys
from reference import presets
from tests.helpers import ROOT
from tests.helpers.runs import tables


def test_the_headline_run_is_47837_and_57221_steps() -> None:
    run = config.load("myllm-1b")
    assert run.model == presets.MYLLM_1B
    assert run.tokens_per_step == 262_144
    assert run.data.phases[0].tokens == 12_540_182_528 == 47_837 * 262_144
    assert run.phase_steps == (47_837, 57_221) and run.steps == 105_058
    assert run.accumulation(8) == 1
    # one epoch is 1,530,776 windows; the last step borrows 8 of the next
    assert 47_837 * run.train.global_batch - 12_540_116_992 // 8_192 == 8


def test_the_readme_names_every_preset() -> None:
    said = (ROOT / "dist/README.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"A preset is named instead of a\s+file: ([^()]*) \(", said)
    assert set(re.findall(r"`([^`]+)`", names)) == {p.stem for p in config.PRESETS.glob("*.toml")}


def test_gpt2_small_is_the_model_of_the_reference() -> None:
    assert config.load("gpt2-small").model == presets.GPT2_SMALL


def test_gpt2_textbook_is_the_model_of_the_reference_and_its_weights_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert config.load("gpt2-textbook").model == presets.GPT2_TEXTBOOK
    assert cli.main(["plan", "gpt2-textbook"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"parameters +124,356,864\n +weights alone +124,318,464 ", said)
    assert cli.main(["plan", "gpt2-textbook", "--set", "model.vocab_size=50304"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"parameters +124,392,960\n +weights alone +124,354,560 ", said)


@pytest.mark.parametrize("path", sorted(config.PRESETS.glob("*.toml")), ids=lambda p: p.stem)
def test_a_resolved_run_file_reads_back_the_same(path: Path) -> None:
    run = config.load(path)
    assert config.from_tables(tomllib.loads(run.to_toml())) == run


@pytest.mark.parametrize("path", sorted(config.PRESETS.glob("*.toml")), ids=lambda p: p.stem)
def test_a_preset_says_what_in_it_is_our_own_choice(path: Path) -> None:
    words = path.read_text(encoding="utf-8").replace("\n# ", " ")
    assert "our own choice, not swept" in words
    optim = config.load(path).optim
    if (optim.beta2, optim.embedding_rate) != (0.95, 1.0):  # the defaults
        assert "dist/sweep/rates" in words


def test_set_overrides_keys_as_toml_or_as_a_bare_string() -> None:
    run = config.load("demo", ["train.lr=3e-4", "run.out=a/b c", "data.isolate_documents=true"])
    assert (run.train.lr, run.run.out, run.data.isolate_documents) == (3e-4, "a/b c", True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", r"unknown key train\.learning_rate; known: .*lr"),
        ("trainer.lr=1", r"unknown table \[trainer\]"),
        ("lr=1", r"takes table\.key=value"),
        ("train.lr=fast", r"train\.lr must be a positive number, got 'fast'"),
        ("train.steps=1.5", r"train\.steps must be a whole number"),
        ("train.steps=true", r"train\.steps must be a whole number"),
        ("run.out=3", r"run\.out must be a string"),
        ("data.isolate_documents=1", r"must be true or false"),
        ("data.heldout=3", r"data\.heldout must be a string or a list of strings, got 3"),
        ('data.heldout=["a", 3]', r"data\.heldout must be a string or a list of strings"),
        ('data.heldout=["a", "b", "./a"]', r"each of data\.heldout must be another .*, got 'a'"),
        ('data.heldout=["a", ""]', r"each of data\.heldout must be another packed folder, got ''"),
        ("train.schedule=step", r"must be one of cosine"),
        ("train.schedule=wsd", r"\[train\]: schedule 'wsd' needs decay_steps in 1\..*, got 0$"),
        ("train.lr=-1", r"train\.lr must be a positive number"),
        ("train.lr=nan", r"train\.lr must be a positive number"),
        ("train.global_batch=10", r"must be a multiple of train\.micro_batch"),
        ("train.global_batch=12", r"power of two micro-batches"),
        ("train.steps=0", r"train\.steps must be at least 1"),
        ("train.warmup_steps=9999", r"train\.warmup_steps \(9,999\) must not exceed the .* steps"),
        ("train.decay_steps=-1", r"train\.decay_steps must be a whole number >= 0"),
        (f"train.steps={10**400}", r"train\.steps must be a number of 64 bits, got one of 1329"),
        (f"train.lr={10**400}", r"train\.lr must be a number of 64 bits"),
        ("train.lr=" + "[" * 50_000, r"train\.lr must be a positive number"),
        ("run.out=", r"run\.out must name a folder"),
        ("optim.beta2=1.0", r"optim\.beta2 must be a number in \[0, 1\)"),
        ("optim.embedding_rate=0", r"optim\.embedding_rate must be a positive number, got 0"),
        ("optim.embedding_rate=inf", r"optim\.embedding_rate must be a positive number, got inf"),
        ("train.lr=1e300", r"train\.lr must be a number that float32 holds, 3\.4e\+38 at most"),
        ("optim.eps=1e39", r"optim\.eps must be a number that float32 holds, .* got 1e\+39"),
        ("model.norm_eps=1e300", r"model\.norm_eps must be a number that float32 holds"),
        ("optim.clip=inf", r"optim\.clip must be a finite number >= 0, got inf"),
        ("run.timeout=inf", r"run\.timeout must be a finite number >= 0, got inf"),
        ("run.compute=q8_0", r"nothing can be trained in eight bits; choose 'float32', 'bf16' or"),
        ("run.compute=fp8", r"run\.compute must be one of float32, bf16, auto, got 'fp8'"),
        ("run.backend=gpu", r"run\.backend must be one of reference, cpu, cuda, got 'gpu'"),
        ("run.patience=0", r"run\.patience must be a whole number >= 1"),
        ("run.eval_every=-1", r"run\.eval_every must be a whole number >= 0"),
        ("data.train=", r"\[data\] needs either train"),
        ("model.n_kv_heads=3", r"\[model\]: n_heads \(4\) must be a multiple"),
        ("model.width=4", r"unknown model field 'width'"),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    for option, words in (("--set", ([override],)), ("--grid", ([], [override]))):
        with pytest.raises(ValueError, match=message) as error:
            config.load("demo", *words)
        assert str(error.value).startswith(f"{option} ")


def test_what_is_wrong_in_the_file_is_said_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(config.load("laptop").to_toml().replace("\nlr = ", "\nlr = -"))
    with pytest.raises(ValueError, match=r"mine\.toml: train\.lr must be a positive number"):
        config.load(path, ["train.seed=1", "model.n_layers=3"])


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ((("a", "b"), ("b", "a")), None),
        ((("a", "b", "a"),), "phase 1 of data.phases names a twice: add the weights up"),
        ((("a", "./a"),), "phase 1 of data.phases names ./a, which is a: spell it alike"),
        ((("a",), ("b", "a/")), "phase 2 of data.phases names a/, which is a: spell it alike"),
    ],
)
def test_a_source_goes_on_where_it_stopped(
    tmp_path: Path, phases: tuple[tuple[str, ...], ...], said: str | None
) -> None:
    told = [{"tokens": 500, "sources": [{"path": name} for name in names]} for names in phases]
    raw = tables(tmp_path, data__train="", data__phases=told, train__steps=0)
    run = config.from_tables(raw)  # what an earlier run wrote is read
    path = tmp_path / "run.toml"
    path.write_text(run.to_toml())
    if said is None:
        assert config.load(path) == run
    else:
        with pytest.raises(ValueError, match=re.escape(said)):
            config.load(path)


def test_held_out_sets_are_one_path_or_a_list() -> None:
    for value, sets in (("", ()), ("[]", ()), ("a/b", ("a/b",)), ('["a", "b"]', ("a", "b"))):
        run = config.load("demo", [f"data.heldout={value}"])
        assert run.data.heldout_sets == sets
        assert config.from_tables(tomllib.loads(run.to_toml())) == run


def test_a_missing_key_and_a_missing_file_are_named(tmp_path: Path) -> None:
    raw = tables(tmp_path)
    del raw["train"]["lr"]
    with pytest.raises(ValueError, match=r"train\.lr is missing"):
        config.from_tables(raw)
    with pytest.raises(FileNotFoundError, match=r"no run file .*; *|no preset .*demo"):
        config.load(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ValueError, match="is not a TOML file"):
        config.load(tmp_path / "bad.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 50_000)
    with pytest.raises(ValueError, match="is not a TOML file"):
        config.load(tmp_path / "deep.toml")


def test_a_file_may_begin_with_a_mark_and_utf_16_is_named(tmp_path: Path) -> None:
    text, path = config.load("laptop").to_toml(), tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8-sig")
    assert config.load(path) == config.load("laptop")
    path.write_text(text, encoding="utf-16")
    with pytest.raises(ValueError, match=r"mine\.toml is UTF-16, which has to be saved as UTF-8$"):
        config.load(path)


def test_phases_and_steps_exclude_each_other(tmp_path: Path) -> None:
    phase = {"tokens": 100, "sources": [{"path": "x", "weight": 2}]}
    raw = tables(tmp_path, data__train="", data__phases=[phase])
    with pytest.raises(ValueError, match=r"train\.steps \(6\) and data\.phases"):
        config.from_tables(raw)
    raw["train"]["steps"] = 0
    assert config.from_tables(raw).steps == 2  # 96 tokens a step, rounded up
    raw["data"]["phases"] = [{**phase, "token": 3}]
    with pytest.raises(ValueError, match=r"number 1 of data\.phases: unknown key .*\.token"):
        config.from_tables(raw)
    sources = [*phase["sources"], {"path": "y", "weight": 0}]  # type: ignore[misc]
    raw["data"]["phases"] = [phase, {**phase, "sources": sources}]
    where = r"number 2 of data\.phases: number 2 of data\.phases\.sources: .*\.weight must be a pos"
    with pytest.raises(ValueError, match=where):
        config.from_tables(raw)


@pytest.mark.parametrize(("ranks", "message"), [(3, "power of two"), (16, "at most 8 ranks")])
def test_ranks_that_cannot_share_the_batch_are_refused(
    tmp_path: Path, ranks: int, message: str
) -> None:
    run = config.from_tables(tables(tmp_path))
    assert [run.accumulation(w) for w in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match=message):
        run.accumulation(ranks)


def test_the_page_of_keys_is_made_from_the_declarations() -> None:
    page = (ROOT / "dist" / "KEYS.md").read_text(encoding="utf-8")
    assert page == keys.table(), "put what `python -m dist.keys` prints there"
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*) \| (.+) \|$", page, re.MULTILINE)
    run = config.load("demo")
    known = [f.name for table in dataclasses.fields(run) for f in table_fields(run, table.name)]
    known += ["tokens", "sources", "path", "weight"]
    assert sorted(name for name, *_ in rows) == sorted(known)
    assert all(said.strip() for *_, said in rows)
    assert ("lr", "a positive number", "", "peak") in rows
    assert ("norm_eps", "a positive number", "`1e-05`", "ε, inside the root") in rows


def table_fields(run: config.RunFile, name: str) -> Any:
    return dataclasses.fields(getattr(run, name))
