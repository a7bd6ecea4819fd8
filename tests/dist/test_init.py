"""A run that begins with the weights of another model: ``train.init``."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import checkpoint, cli, monitor, saving
from dist.checkpoint import CHECKPOINTS
from dist.comm import Solo
from dist.config import RunFile, load
from dist.train import Trainer
from dist.weights import Weights, load_master
from reference.config import Config
from tests.helpers import ROOT
from tests.helpers.runs import VOCAB, digest, prepare, tables, text, train, write_dataset
from tests.helpers.weights import write_random
from tokenizer import Tokenizer, train_from_iterator

OTHER: dict[str, Any] = {"vocab_size": VOCAB, "tied": True}


def begun(config: RunFile, init: Path, **model: Any) -> RunFile:
    """Return a run that begins with a checkpoint, its model changed."""
    return replace(
        config,
        model=replace(config.model, **model),
        train=replace(config.train, init=str(init)),
    )


def test_a_run_begins_with_the_weights_and_all_else_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = prepare(tmp_path, run__eval_every=2)
    assert train(old) == 0
    source = checkpoint.find(tmp_path / "run")  # the best
    assert source.name != "step-00000000" and (tmp_path / "run/checkpoints/best").is_file()
    new = replace(begun(old, tmp_path / "run"), run=replace(old.run, out=str(tmp_path / "new")))
    trainer = Trainer(new, Solo())
    np.testing.assert_array_equal(trainer.stepper.master, load_master(source))
    assert not trainer.stepper.m.any() and not trainer.stepper.v.any()
    assert (trainer.step, trainer.stepper.updates, trainer.best) == (0, 0, None)
    trainer._held.close()

    capsys.readouterr()
    assert train(new) == 0
    assert f"beginning with the weights of {source}\n" in capsys.readouterr().out
    records = [r for r in monitor.read_metrics(tmp_path / "new") if "lr" in r]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["lr"] for r in records] == [new.lr(step) for step in range(1, 7)]
    assert checkpoint.find(tmp_path / "new").parents[1] == tmp_path / "new"
    # the moments and the seed of the weights before do not matter, so it is another run than this
    same = replace(
        new, train=replace(new.train, init=""), run=replace(new.run, out=str(tmp_path / "x"))
    )
    assert train(same) == 0 and digest(same) != digest(new)


def test_an_interrupted_run_goes_on_and_does_not_begin_again(tmp_path: Path) -> None:
    config = prepare(tmp_path, run__checkpoint_every=3)
    write_random(tmp_path / "base", config.model)
    whole = begun(config, tmp_path / "base")
    assert train(whole) == 0
    half = replace(whole, run=replace(whole.run, out=str(tmp_path / "half"), keep=9))
    assert train(half) == 0
    shutil.rmtree(tmp_path / "half" / CHECKPOINTS / "step-00000006")
    saving.point(tmp_path / "half" / CHECKPOINTS, "latest", "step-00000003")
    shutil.rmtree(tmp_path / "base")  # no longer needed
    assert train(half) == 0 and digest(half) == digest(whole)


def test_the_model_is_that_of_the_checkpoint_unless_the_run_file_says_more(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    write_random(tmp_path / "base", replace(config.model, window=(3,)))
    fields = tables(tmp_path)
    del fields["model"]
    fields["train"]["init"] = str(tmp_path / "base")
    path = tmp_path / "new.toml"
    lines = [
        f"[{t}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in f.items())
        for t, f in fields.items()
    ]
    path.write_text("\n".join(lines))
    assert load(path).model == replace(config.model, window=(3,))
    more = load(path, ["model.vocab_size=50", "model.dropout_residual=0.1"])
    assert more.model == replace(config.model, window=(3,), vocab_size=50, dropout_residual=0.1)
    assert cli.main(["train", str(path)]) == 0
    assert Weights(tmp_path / "run").config.window == (3,)
    with pytest.raises(ValueError, match="unknown model field 'depth'"):
        load(path, ["model.depth=3"])
    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        load(path, ["train.init=nowhere"])
    shutil.rmtree(tmp_path / "base")  # the run has begun: it has the model, and goes on
    assert load(path).model == replace(config.model, window=(3,))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "latest").write_text("step-00000001")  # which is no more
    assert load(path).model == replace(config.model, window=(3,))
    assert cli.main(["train", str(path), "--set", "train.steps=9", "--changed"]) == 0
    with pytest.raises(FileNotFoundError, match="is no whole checkpoint"):
        load(path, ["run.out=another"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_ff": 32}, "model.d_ff is 24 there and 32 here"),
        (
            {"n_layers": 2, "tied": False},
            "model.n_layers is 1 there and 2 here; model.tied is True",
        ),
        ({"vocab_size": VOCAB - 1}, "model.vocab_size is 40 there and 39 here"),
        ({"rope_base": 1e4}, "model.rope_base is 500000.0 there and 10000.0 here"),
        ({"window": 3}, "model.window is 0 there and 3 here"),
    ],
)
def test_another_model_is_refused_with_the_fields(
    change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path)
    write_random(tmp_path / "base", config.model)
    write_dataset(tmp_path / "train", np.arange(600) % 39, vocab_size=39)
    write_dataset(tmp_path / "heldout", np.arange(100) % 39, vocab_size=39)
    assert train(begun(config, tmp_path / "base", **change)) == 1
    said = capsys.readouterr().err
    assert message in said and "Without [model]" in said and said.count("\n") == 1


LEARNED = {"position": "learned", "norm": "layernorm", "ffn": "gelu", "head_bias": True}


@pytest.mark.parametrize("kind", [{}, {**LEARNED, "tied": False}], ids=["tied", "every_table"])
def test_new_ids_begin_as_the_mean_of_the_others(kind: dict[str, Any], tmp_path: Path) -> None:
    config = prepare(tmp_path)
    old = write_random(tmp_path / "base", replace(config.model, **kind))
    trainer = Trainer(begun(config, tmp_path / "base", **kind, vocab_size=VOCAB + 3), Solo())
    params = trainer.stepper.layout.views(trainer.stepper.master)
    trainer._held.close()
    grown = {n for n in params if params[n].shape != old[n].shape}
    assert grown == {"embedding.weight"} | ({"head.weight", "head.bias"} if kind else set())
    for name in params:
        np.testing.assert_array_equal(params[name][:VOCAB], old[name])
    for name in grown:
        mean = old[name].astype(np.float64).mean(axis=0)
        assert params[name][VOCAB:].shape[0] == 3
        np.testing.assert_allclose(
            params[name][VOCAB:], np.broadcast_to(mean, params[name][VOCAB:].shape), rtol=1e-6
        )


def test_the_context_may_change_unless_positions_are_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path)
    write_random(tmp_path / "rope", replace(config.model, context_length=5))
    Trainer(begun(config, tmp_path / "rope"), Solo())._held.close()
    learned = {"position": "learned"}
    old = write_random(tmp_path / "long", replace(config.model, **learned, context_length=20))
    trainer = Trainer(begun(config, tmp_path / "long", **learned), Solo())
    positions = trainer.stepper.layout.views(trainer.stepper.master)["position.weight"]
    np.testing.assert_array_equal(positions, old["position.weight"][:12])
    trainer._held.close()
    write_random(tmp_path / "short", replace(config.model, **learned, context_length=5))
    assert train(begun(config, tmp_path / "short", **learned)) == 1
    assert "model.context_length is 5 there and 12 here" in capsys.readouterr().err


def test_a_run_does_not_go_on_from_weights_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare(tmp_path)
    write_random(tmp_path / "base", config.model)
    manifest = checkpoint.read_manifest(tmp_path / "base")
    folder = tmp_path / "run" / CHECKPOINTS
    folder.mkdir(parents=True)
    (tmp_path / "base").rename(folder / "step-00000000")
    assert manifest.step == 0
    assert train(config, "--changed") == 1
    said = capsys.readouterr().err
    assert "weights alone" in said and "train.init" in said


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat's tokens, as imported ones are, one with them, and another."""
    folder = tmp_path_factory.mktemp("tokenizers")
    ours = train_from_iterator([text(i) for i in range(99)], 320).vocabulary
    bare = dataclasses.replace(
        ours, special_tokens={"<|endoftext|>": ours.special_tokens["<|eos|>"]}
    )
    Tokenizer(bare).save(folder / "bare.tok")
    assert (
        cli.main(["tokenizer", "extend", str(folder / "bare.tok"), "-o", str(folder / "chat.tok")])
        == 0
    )
    train_from_iterator([text(9000 + i) for i in range(99)], 320).save(folder / "other.tok")
    return folder


def test_extend_adds_what_a_chat_needs_and_changes_no_id(
    tokenizers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, chat = (Tokenizer.load(tokenizers / f"{name}.tok") for name in ("bare", "chat"))
    added = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    expected = {name: bare.n_vocab + i for i, name in enumerate(added)}
    assert chat.special_tokens == bare.special_tokens | expected
    assert chat.encode_ordinary("the quick") == bare.encode_ordinary("the quick")
    words = ["tokenizer", "extend", str(tokenizers / "chat.tok"), "-o", str(tmp_path / "t.tok")]
    assert cli.main(words) == 1
    assert "has <|pad|>, <|system|>" in capsys.readouterr().err
    assert cli.main([*words, "--special", "<tool>", "--special", "<|end|>"]) == 0
    more = Tokenizer.load(tmp_path / "t.tok").special_tokens
    assert more == chat.special_tokens | {"<tool>": chat.n_vocab}


def packed(folder: Path, tokenizer: Path) -> RunFile:
    """Pack chats with a tokenizer and return a run on them."""
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]
    lines = [json.dumps({"messages": messages}), json.dumps({"text": text(1)})]
    if tokenizer.stem == "bare":
        lines = lines[1:]
    (folder / "a.jsonl").write_text("\n".join(lines * 20))
    words = ["--tokenizer", str(tokenizer), "--heldout", "0", "--processes", "1"]
    assert cli.main(["pack", str(folder / "a.jsonl"), *words, "-o", str(folder)]) == 0
    config = tables(folder, data__heldout="", model__vocab_size=340)
    from dist.config import from_tables

    return from_tables(config)


@pytest.mark.parametrize(("name", "fits"), [("bare", True), ("chat", True), ("other", False)])
def test_ids_must_mean_what_they_mean_to_the_model(
    name: str, fits: bool, tokenizers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = packed(tmp_path, tokenizers / f"{name}.tok")
    model: Config = replace(config.model, vocab_size=322)
    write_random(tmp_path / "base", model, Tokenizer.load(tokenizers / "bare.tok"))
    assert train(begun(config, tmp_path / "base")) == (0 if fits else 1)
    said = capsys.readouterr()
    if fits:
        assert "and 18 new ids, whose rows are the mean of the others" in said.out
    else:
        assert "packed with another tokenizer" in said.err and "tokenizer extend" in said.err


@pytest.mark.parametrize(("name", "fits"), [("chat", True), ("other", False)])
def test_a_change_that_is_meant_is_not_another_tokenizer(
    name: str, fits: bool, tokenizers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "before").mkdir()
    before = packed(tmp_path / "before", tokenizers / "bare.tok")
    assert train(before) == 0
    config = packed(tmp_path, tokenizers / f"{name}.tok")
    run = replace(before, data=config.data, train=replace(config.train, steps=7))
    assert train(run, "--changed") == (0 if fits else 1)
    assert ("ids mean something else" in capsys.readouterr().err) != fits


# ---- the worked page -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_worked_example_learns_its_task(tmp_path: Path) -> None:
    """Each command of the page, word for word, on a base model of its first lines' making."""
    page = (ROOT / "dist" / "convert" / "README.md").read_text(encoding="utf-8")
    page = page[page.index("## Fine-tuning, worked") :]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names = {"python": "tasks.py", "toml": "finetune.toml"}
    for kind, block in blocks:
        if kind in names:
            (tmp_path / names[kind]).write_text(block)
    vocabulary = train_from_iterator([(tmp_path / "tasks.py").read_text() * 3], 360).vocabulary
    bare = Tokenizer(dataclasses.replace(vocabulary, special_tokens={"<|endoftext|>": 2}))
    model = Config(
        **{"vocab_size": bare.n_vocab, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2},
        **{"d_head": 16, "d_ff": 128, "context_length": 64},
    )
    write_random(tmp_path / "given", model, bare)
    assert cli.main(["export", str(tmp_path / "given"), str(tmp_path / "SmolLM2-135M")]) == 0
    shell = "".join(block for kind, block in blocks if kind == "sh")
    commands = [line.partition("  #")[0].strip() for line in shell.splitlines()]
    assert sum(command.startswith("myllm") for command in commands) >= 6
    programs = {"myllm": f"{sys.executable} -m dist", "python": sys.executable}
    said = ""
    for command in filter(None, commands):
        done = subprocess.run(
            re.sub(r"^(myllm|python)", lambda found: programs[found[0]], command),
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, (command, done.stderr)
        said += done.stdout
    answers = [line for line in said.splitlines() if line in ("yes", "no")]
    assert answers == ["yes", "no"], said
