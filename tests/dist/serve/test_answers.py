"""What a server answers is what the model writes."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import cli
from dist.documents import END
from dist.model import load_model
from dist.score import log_probabilities
from dist.serve.api import ChatRequest, read_request
from dist.serve.app import encoded
from tests.helpers.serving import Server, chat_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_a_completion_is_what_generate_writes(
    temperature: float, server: Server, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["--temperature", str(temperature), "--seed", "5", "--tokens", "9"]
    assert cli.main(["generate", str(run), "--prompt", "the quick", *how]) == 0
    written = capsys.readouterr().out.removeprefix("the quick").removesuffix("\n")
    said = server.complete("the quick", temperature=temperature, seed=5, max_tokens=9)
    (choice,) = said["choices"]
    assert choice["text"] == written
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    prompt = len(server.tokenizer.encode_ordinary("the quick"))
    assert said["usage"] == {
        **{"prompt_tokens": prompt, "completion_tokens": 9, "total_tokens": prompt + 9},
    }


def test_a_chat_is_what_generate_answers(
    server: Server, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run), "--chat", "--prompt", "the fox <|end|>", "--tokens", "9"]
    assert cli.main([*words, "--temperature", "0"]) == 0
    written = capsys.readouterr().out.removesuffix("\n")
    (choice,) = server.chat("the fox <|end|>", temperature=0, max_tokens=9)["choices"]
    assert choice["message"] == {"role": "assistant", "content": written, "refusal": None}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, chat_of("the", logprobs=True, top_logprobs=3)),
        (TEXT, {"model": "tiny", "prompt": ["the", "a"], "logprobs": 2, "n": 2}),
        (TEXT, {"model": "tiny", "prompt": "the", "stop": ["o", "e "]}),
    ],
)
def test_pieces_add_up_to_the_whole(path: str, asked: dict[str, Any], server: Server) -> None:
    asked = {**asked, "seed": 4, "temperature": 1.5, "max_tokens": 14}
    status, whole = server.ask(path, asked)
    assert status == 200
    events = server.stream(path, {**asked, "stream_options": {"include_usage": True}})
    assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
    assert len({event["id"] for event in events}) == 1
    for expected in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == expected["index"]]
        said = [part.get("text", part.get("delta", {}).get("content", "")) for part in parts]
        assert "".join(said) == expected.get("text", expected.get("message", {}).get("content"))
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [
            expected["finish_reason"]
        ]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        for name, values in (expected["logprobs"] or {}).items():
            if isinstance(values, list):
                assert [v for t in told for v in t[name]] == values


def test_log_probabilities_are_those_of_score(server: Server, run: Path) -> None:
    how = {"temperature": 0, "max_tokens": 7}
    (choice,) = server.complete("the quick", logprobs=3, **how)["choices"]
    (same,) = server.complete("the quick", logprobs=3, **how | {"temperature": 9, "top_k": 1})[
        "choices"
    ]
    assert choice == same  # they are the model's, whatever the settings
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(7)]
    prompt = server.tokenizer.encode_ordinary("the quick")
    known = {server.tokenizer.token_bytes(i): i for i in range(server.tokenizer.n_vocab)}
    ids = [*prompt, *(known[token.encode()] for token in told["tokens"])]
    expected = log_probabilities(load_model(run, "cpu"), ids)[len(prompt) - 1 :]
    np.testing.assert_allclose(told["token_logprobs"], expected, atol=2e-5)
    for token, p, best in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert len(best) == 3 and max(best.values()) == best[token] == p  # greedy
        assert sum(map(math.exp, best.values())) <= 1
    (chat,) = server.chat("the", logprobs=True, top_logprobs=2, **how)["choices"]
    for entry in chat["logprobs"]["content"]:
        first, second = entry["top_logprobs"]
        assert (
            first == {name: entry[name] for name in first} and first["logprob"] > second["logprob"]
        )
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_offsets_count_a_character_that_is_split_over_tokens_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {server.tokenizer.token_bytes(i): i for i in range(server.tokenizer.n_vocab)}
    ids = [known[bytes([byte])] for byte in "aé🙂b".encode()]
    drawn = iter([*ids, *ids])
    monkeypatch.setattr("dist.serve.engine.sample", lambda *_, **__: next(drawn))
    (choice,) = server.complete("the", max_tokens=8, logprobs=0)["choices"]
    assert choice["text"] == "aé🙂b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_offsets_count_bytes_that_come_to_no_character(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {server.tokenizer.token_bytes(i): i for i in range(server.tokenizer.n_vocab)}
    drawn = iter([known[b"a"], known[b"\xc3"], known[b"b"], known[b"c"]])
    monkeypatch.setattr("dist.serve.engine.sample", lambda *_, **__: next(drawn))
    (choice,) = server.complete("the", max_tokens=4, logprobs=0)["choices"]
    assert choice["text"] == "a\ufffdbc"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_an_id_beyond_the_tokenizer_stands_for_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist.serve.engine.sample", lambda *_, **__: 329)
    (choice,) = server.complete("the", max_tokens=2, logprobs=0)["choices"]
    assert choice["text"] == "" and choice["logprobs"]["tokens"] == ["", ""]


def test_choices_differ_and_a_seed_repeats_them(server: Server) -> None:
    how = {"temperature": 1.8, "n": 3, "max_tokens": 12}
    first, again = (server.complete("the", seed=-7, **how) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3 and texts == [choice["text"] for choice in again["choices"]]
    free = [server.complete("the", **how)["choices"][0]["text"] for _ in range(3)]
    assert len(set(free)) > 1
    one = {**how, "n": 1, "seed": 3}
    assert len({c["text"] for c in server.complete(["the", "the", "the"], **one)["choices"]}) == 3


def test_an_answer_ends_for_a_reason(server: Server) -> None:
    (free,) = server.complete("the", temperature=0, max_tokens=20)["choices"]
    stop = free["text"][5:8]
    said = server.complete("the", temperature=0, max_tokens=20, stop=stop)
    (choice,) = said["choices"]
    assert said["usage"]["completion_tokens"] < 20  # nothing is written after it
    assert choice["text"] == free["text"][: free["text"].index(stop)]
    assert choice["finish_reason"] == "stop"
    # the context is full
    (long,) = server.complete("the", temperature=0, max_tokens=999)["choices"]
    said = server.complete("the", temperature=0, max_tokens=999)
    assert said["usage"]["total_tokens"] == 48 or long["finish_reason"] == "stop"
    assert long["text"].startswith(free["text"])


def test_the_end_of_a_turn_ends_an_answer_of_a_chat_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fox,) = server.tokenizer.encode_ordinary(" fox")[:1]
    end = server.tokenizer.special_tokens[END]
    told: list[int] = []
    monkeypatch.setattr("dist.serve.engine.sample", lambda *_, **__: told.pop(0))
    told[:] = [fox, end]
    said = server.chat("the", max_tokens=3)
    assert said["choices"][0]["message"]["content"] == server.tokenizer.decode([fox])
    assert said["choices"][0]["finish_reason"] == "stop"
    assert said["usage"]["completion_tokens"] == 1
    told[:] = [fox, end, fox]
    said = server.complete("the", max_tokens=3)
    assert said["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_may_end_what_the_last_token_held_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a character is shown as U+FFFD once nothing can follow."""
    (half,) = server.tokenizer.encode_bytes("é".encode()[:1])
    monkeypatch.setattr("dist.serve.engine.sample", lambda *_, **__: half)
    (choice,) = server.complete("the", max_tokens=1, stop="\N{REPLACEMENT CHARACTER}")["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("limits", [(3, 9), (9, 3), (None, 3), (3, None)])
def test_the_smaller_of_two_limits_holds(limits: tuple[int | None, int | None]) -> None:
    names = ("max_tokens", "max_completion_tokens")
    given = {name: n for name, n in zip(names, limits, strict=True) if n is not None}
    assert read_request(json.dumps(chat_of("x", **given)).encode(), ChatRequest).limit() == 3


def test_what_people_write_can_never_become_a_control_id(server: Server) -> None:
    names = "".join(server.tokenizer.special_tokens)
    asked = chat_of(names, names, names)
    asked["messages"].insert(0, {"role": "developer", "content": [{"type": "text", "text": names}]})
    (ids,) = read_request(json.dumps(asked).encode(), ChatRequest).prompts(server.tokenizer)
    special = server.tokenizer.special_tokens
    typed = server.tokenizer.encode_ordinary(names)
    assert not set(typed) & set(special.values())
    turns = [[special[f"<|{role}|>"], *typed, special[END]] for role in ("user", "assistant")]
    system = [special["<|system|>"], *typed, special[END]]
    assert ids == [*system, *turns[0], *turns[1], *turns[0], special["<|assistant|>"]]


@pytest.mark.parametrize("content", [{"text": "a\udcc9b\ud800"}, [{"logprobs": {"\udfff": -1.5}}]])
def test_half_a_surrogate_pair_is_sent_as_a_character_that_stands_for_none(content: Any) -> None:
    """A model may write the three bytes of one, which no JSON can hold."""
    sent = encoded(content).decode()
    assert "\ufffd" in sent and json.loads(sent) == json.loads(sent.encode())
    assert encoded({"text": "ä€😀", "n": 1}) == '{"text":"ä€😀","n":1}'.encode()
