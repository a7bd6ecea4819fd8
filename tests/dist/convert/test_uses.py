"""What special tokens of others are for: it comes in, ends what is written, and goes out again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dist import checkpoint, cli, manifest
from dist.convert import gguf
from dist.documents import END, ROLES
from dist.model import load_model
from dist.pack import ends_of, eos_of
from dist.weights import write_weights
from reference.params import decoder_layout
from reference.types import Array
from tests.helpers.runs import text
from tests.helpers.serving import serving
from tests.helpers.weights import GPT2, LLAMA, copied, random_weights, write_random
from tokenizer import Tokenizer, train_from_iterator
from tokenizer.vocabulary import Uses

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
WRITER = replace(GPT2, vocab_size=330, tied=False)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return train_from_iterator([text(i) for i in range(100)], 320)


def named(ours: Tokenizer, *names: str) -> Tokenizer:
    """Return a tokenizer whose special tokens have the names that others give theirs."""
    ids = sorted(ours.special_tokens.values())
    specials = dict(zip(names, ids, strict=False))
    kept = {f"<|{i}|>": i for i in ids[len(names) :]}
    return Tokenizer(replace(ours.vocabulary, special_tokens={**specials, **kept}))


def always(token: int) -> dict[str, Array]:
    """Return the weights of a GPT-2 that writes one token and no other."""
    layout = decoder_layout(WRITER)
    views = layout.views(random_weights(WRITER))
    views["final_norm.gain"][:] = views["head.weight"][:] = 0
    views["final_norm.bias"][:] = views["head.weight"][token] = 1
    return views


def folder(
    path: Path,
    tokenizer: Tokenizer,
    views: dict[str, Array] | None = None,
    **files: dict[str, Any],
) -> Path:
    """Write a folder as others do: by an export, with what they say in its files."""
    if views is None:
        write_random(path / "made", replace(LLAMA, vocab_size=330), tokenizer)
    else:
        write_weights(path / "made", WRITER, copied(views), tokenizer)
    assert cli.main(["export", str(path / "made"), str(path / "hf")]) == 0
    for name in ("tokenizer_config", "generation_config"):
        (path / "hf" / f"{name}.json").write_text(json.dumps(files.get(name, {})))
    config = json.loads((path / "hf" / "config.json").read_text())
    config |= {"eos_token_id": None, "bos_token_id": None, **files.get("config", {})}
    (path / "hf" / "config.json").write_text(json.dumps(config))
    return path / "hf"


def trained(path: Path) -> None:
    """Make weights those of a model that took updates here."""
    state = checkpoint.read_manifest(path)
    manifest.write(path / checkpoint.MANIFEST, msgspec.structs.replace(state, updates=5))


def ends(path: Path, tokenizer: Tokenizer) -> set[int]:
    """Return the ids at which the model of a folder stops writing."""
    return ends_of(tokenizer, load_model(path, "reference").state.updates)


def imported(source: Path, name: str = "back") -> Tokenizer:
    out = source.parent / name
    assert cli.main(["import", str(source), "-o", str(out)]) == 0
    path = load_model(out, "reference").tokenizer
    assert path is not None
    return Tokenizer.load(path)


def test_a_chat_model_stops_where_its_files_say(
    ours: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = named(ours, *CHATML, *ROLES.values(), END)  # serve wants our own, too
    end = theirs.special_tokens["<|im_end|>"]
    hf = folder(tmp_path, theirs, always(end), config={"eos_token_id": end})
    back = imported(hf)
    assert eos_of(back) == theirs.special_tokens["<|endoftext|>"]  # still stands between documents
    assert ends(tmp_path / "back", back) == {end}
    words = ["--prompt", "hi", "--tokens", "3", "--backend", "reference", "--temperature", "0"]
    capsys.readouterr()
    assert cli.main(["generate", str(tmp_path / "back"), *words]) == 0
    assert capsys.readouterr().out == "hi\n"
    with serving(tmp_path / "back") as server:
        (choice,) = server.complete("hi", max_tokens=3, temperature=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_what_stands_between_texts_ends_one_after_training_here(
    ours: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = named(ours, *CHATML, *ROLES.values(), END)
    ids = theirs.special_tokens
    said = {"eos_token_id": ids["<|im_end|>"]}
    imported(folder(tmp_path, theirs, always(ids["<|endoftext|>"]), config=said))
    words = ["--prompt", "hi", "--tokens", "3", "--backend", "reference", "--temperature", "0"]
    for why, finish in (("3 tokens were asked", "length"), ("it wrote the end", "stop")):
        capsys.readouterr()
        assert cli.main(["generate", str(tmp_path / "back"), *words]) == 0
        assert why in capsys.readouterr().err
        with serving(tmp_path / "back") as server:
            (choice,) = server.complete("hi", max_tokens=3, temperature=0)["choices"]
        assert choice["finish_reason"] == finish
        trained(tmp_path / "back")


@pytest.mark.parametrize("name", ["[EOS]", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>"])
@pytest.mark.parametrize("place", ["config", "generation_config", "tokenizer_config", "gguf"])
def test_an_end_of_any_name_is_known_by_its_id_or_name(
    name: str, place: str, ours: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = named(ours, name)
    i = theirs.special_tokens[name]
    said: dict[str, Any] = {"eos_token_id": [i]}
    if place in ("tokenizer_config", "gguf"):
        said, place = {"eos_token": {"content": name}}, "tokenizer_config"
    back = imported(folder(tmp_path, theirs, **{place: said}))
    assert eos_of(back) == i and ends(tmp_path / "back", back) == {i}
    words = ["score", str(tmp_path / "back"), "hi", "--backend", "reference"]
    assert cli.main(words) == 0
    assert cli.main(["export", str(tmp_path / "back"), str(tmp_path / "m.gguf")]) == 0
    assert gguf.header(tmp_path / "m.gguf")[0]["tokenizer.ggml.eos_token_id"] == i
    assert imported(tmp_path / "m.gguf", "again").sha256 == back.sha256
    assert cli.main(["export", str(tmp_path / "again"), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [i]
    assert imported(tmp_path / "out", "last").sha256 == back.sha256
    capsys.readouterr()
    assert cli.main(["tokenizer", "info", str(tmp_path / "last/tokenizer.myllm")]) == 0
    assert f"a model stops at {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["", ".gguf"])
def test_generating_stops_where_an_export_says_also_after_training(
    suffix: str, ours: Tokenizer, tmp_path: Path
) -> None:
    theirs = named(ours, *CHATML)
    im_end, eos = (theirs.special_tokens[name] for name in ("<|im_end|>", "<|endoftext|>"))
    back = imported(folder(tmp_path, theirs, config={"eos_token_id": im_end}))
    tuned = tmp_path / "back"
    for updates, expected in ((False, {im_end}), (True, {im_end, eos})):
        if updates:
            trained(tuned)
        assert ends(tuned, back) == expected
        out, again = tmp_path / f"out{updates}{suffix}", tmp_path / f"again{updates}"
        assert cli.main(["export", str(tuned), str(out)]) == 0
        assert ends(again, imported(out, again.name)) == expected


@pytest.mark.parametrize("suffix", ["", ".gguf"])
def test_a_turn_s_end_of_ours_ends_a_chat_alone_before_and_after_an_export(
    suffix: str, ours: Tokenizer, tmp_path: Path
) -> None:
    theirs = named(ours, *CHATML, *ROLES.values(), END)
    im_end = theirs.special_tokens["<|im_end|>"]
    back = imported(folder(tmp_path, theirs, config={"eos_token_id": im_end}))
    for tokenizer, expected in ((ours, {eos_of(ours)}), (back, {im_end})):
        made = tmp_path / f"made{len(expected)}{tokenizer is back}"
        write_random(made, replace(LLAMA, vocab_size=330), tokenizer)
        out = made.with_name(f"{made.name}-out{suffix}")
        assert cli.main(["export", str(made), str(out)]) == 0
        again = imported(out, f"{made.name}-again")
        assert ends(made, tokenizer) == ends(tmp_path / f"{made.name}-again", again) == expected
        assert again.sha256 == tokenizer.sha256


def test_what_gguf_has_no_name_for_is_told(
    ours: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = named(ours, "[A]", "[B]", "[C]", "[D]", "[E]")
    ids = [theirs.special_tokens[f"[{name}]"] for name in "ABCDE"]
    for many in (3, 5):
        path = tmp_path / str(many)
        path.mkdir()
        imported(folder(path, theirs, generation_config={"eos_token_id": ids[:many]}))
        capsys.readouterr()
        assert cli.main(["export", str(path / "back"), str(path / "m.gguf")]) == 0
        told = "3 tokens at which a model stops, and [D], [E] are left out"
        assert (told in capsys.readouterr().out.replace("\n", " ")) == (many == 5)


AROUND = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A"}}]


@pytest.mark.parametrize(
    ("processor", "around"),
    [
        (None, False),
        ({"type": "ByteLevel", "trim_offsets": True}, False),
        ({"type": "TemplateProcessing", "single": AROUND[1:], "pair": []}, False),
        ({"type": "TemplateProcessing", "single": AROUND, "pair": []}, True),
        ({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0]}, True),
        (
            {
                "type": "Sequence",
                "processors": [
                    {"type": "ByteLevel"},
                    {"type": "TemplateProcessing", "single": AROUND},
                ],
            },
            True,
        ),
    ],
)
def test_tokens_around_a_text_are_told_to_be_left_out(
    processor: Any,
    around: bool,
    ours: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf = folder(tmp_path, named(ours, *CHATML))
    written = json.loads((hf / "tokenizer.json").read_text())
    (hf / "tokenizer.json").write_text(json.dumps(written | {"post_processor": processor}))
    capsys.readouterr()
    imported(hf)
    assert ("puts before or behind every text" in capsys.readouterr().out) == around


@pytest.mark.parametrize("what", ["bos", "eos"])
def test_tokens_around_a_text_are_told_of_gguf_files_too(
    what: str,
    ours: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, vocab_size=330), ours)
    honest = gguf.gguf_keys
    changed = {f"tokenizer.ggml.add_{what}_token": True}
    monkeypatch.setattr(gguf, "gguf_keys", lambda *given: {**honest(*given), **changed})
    assert cli.main(["export", str(tmp_path / "mine"), str(tmp_path / "m.gguf")]) == 0
    capsys.readouterr()
    imported(tmp_path / "m.gguf")
    assert "puts before or behind every text" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["text", "list", "file"])
def test_template_padding_and_ends_come_in_and_go_out(
    way: str, ours: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = named(ours, *CHATML, "<|begin|>")
    ids = theirs.special_tokens
    said: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    said |= {"bos_token": "<|begin|>"}
    if way != "file":
        several = [{"name": "rag", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        said["chat_template"] = TEMPLATE if way == "text" else several
    stops = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    hf = folder(tmp_path, theirs, tokenizer_config=said, generation_config=stops)
    if way == "file":
        (hf / "chat_template.jinja").write_text(TEMPLATE)
    capsys.readouterr()
    back = imported(hf)
    assert ("its chat templates rag were left out" in capsys.readouterr().out) == (way == "list")
    uses = Uses("<|begin|>", ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", TEMPLATE)
    assert back.vocabulary.uses == uses
    for suffix in ("", ".gguf"):
        out = tmp_path / f"out{suffix}"
        assert cli.main(["export", str(tmp_path / "back"), str(out)]) == 0
        assert imported(out, f"again{suffix}").vocabulary == back.vocabulary
    read = {p.stem: json.loads(p.read_text()) for p in (tmp_path / "out").glob("*.json")}
    written = read["tokenizer_config"]
    assert written["chat_template"] == TEMPLATE and written["eos_token"] == "<|im_end|>"
    assert written["pad_token"] == "<|endoftext|>" and written["bos_token"] == "<|begin|>"
    keys = gguf.header(tmp_path / "out.gguf")[0]
    assert keys["tokenizer.ggml.eos_token_id"] == ids["<|im_end|>"]
    assert keys["tokenizer.ggml.eot_token_id"] == ids["<|endoftext|>"]
    assert keys["tokenizer.ggml.padding_token_id"] == ids["<|endoftext|>"]
    assert keys["tokenizer.chat_template"] == TEMPLATE


def test_a_chat_of_ours_takes_the_place_of_theirs(ours: Tokenizer, tmp_path: Path) -> None:
    theirs = named(ours, *CHATML)
    said = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    back = imported(folder(tmp_path, theirs, tokenizer_config=said))
    more = tmp_path / "more.tok"
    words = ["extend", str(tmp_path / "back/tokenizer.myllm"), "-o", str(more)]
    assert cli.main(["tokenizer", *words]) == 0
    extended = Tokenizer.load(more)
    assert extended.vocabulary.uses == back.vocabulary.uses
    write_random(tmp_path / "tuned", replace(LLAMA, vocab_size=330), extended)
    assert cli.main(["export", str(tmp_path / "tuned"), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert "<|assistant|>" in written["chat_template"]
    said = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert said["eos_token_id"] == sorted(
        extended.special_tokens[name] for name in ("<|im_end|>", "<|end|>")
    )


def test_what_our_names_say_is_not_said_again(ours: Tokenizer, tmp_path: Path) -> None:
    write_random(tmp_path / "mine", replace(LLAMA, vocab_size=330), ours)
    for suffix in ("", ".gguf"):
        out = tmp_path / f"out{suffix}"
        assert cli.main(["export", str(tmp_path / "mine"), str(out)]) == 0
        assert imported(out, f"back{suffix}").sha256 == ours.sha256


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config": {"eos_token_id": 100}}, "what ends a text is 100, which is no special token"),
        ({"tokenizer_config": {"eos_token": "</s>"}}, "what ends a text is '</s>', which is no"),
        ({"tokenizer_config": {"pad_token": "[PAD]"}}, "what fills a text up is '[PAD]'"),
        ({"tokenizer_config": {"eos_token": 7}}, "tokenizer_config.json cannot be read: "),
        ({"generation_config": {"eos_token_id": "7"}}, "generation_config.json cannot be read: "),
    ],
)
def test_what_is_said_of_no_special_token_is_told(
    files: dict[str, Any],
    says: str,
    ours: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hf = folder(tmp_path, ours, **files)
    refused = "cannot" in says
    assert cli.main(["import", str(hf), "-o", str(tmp_path / "back")]) == refused
    told = capsys.readouterr()
    assert says in (told.err if refused else told.out)
    if refused:
        words = ["import", str(hf), "-o", str(tmp_path / "back"), "--without-tokenizer"]
        assert cli.main(words) == 0


def test_a_use_is_of_a_special_token_and_a_file_keeps_it(ours: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'</s>' has a use, but is no special token"):
        replace(ours.vocabulary, uses=Uses(ends=("</s>",)))
    for nfc in (False, True):
        uses = Uses(ends=("<|user|>",), chat_template="{{ 'ä' }}\n")
        told = Tokenizer(replace(ours.vocabulary, nfc=nfc, uses=uses))
        told.save(tmp_path / "t")
        assert (tmp_path / "t").read_bytes().startswith(b"MyLLM tokenizer 3\n")
        back = Tokenizer.load(tmp_path / "t")
        assert back.vocabulary == told.vocabulary and back.sha256 == told.sha256


def test_without_an_end_it_is_said_how_to_get_one(ours: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"tokenizer extend --special .* adds one"):
        eos_of(named(ours, "[EOS]"))
