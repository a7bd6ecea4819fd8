"""``myllm serve``: what it answers is what the model writes, and no client hinders another."""

import contextlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist import checkpoint, cli
from dist.documents import END
from dist.score import log_probabilities
from dist.serve import app
from dist.serve import server as web
from dist.serve.api import ChatRequest, read_request
from tests.helpers import ROOT
from tests.helpers.runs import save_run_file
from tests.helpers.serving import Server, chat_of, prepare_chats, serving, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a model that saw chats."""
    folder = tmp_path_factory.mktemp("run")
    config = prepare_chats(folder, train__steps=3)
    assert cli.main(["train", str(save_run_file(config, folder / "run.toml"))]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def shared(run: Path) -> Iterator[Server]:
    with serving(run) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """A server whose model is free to work, and idle afterwards."""
    shared.go.set()
    yield shared
    shared.go.set()
    shared.wait_until_idle()


# ---- what is written -----------------------------------------------------------------------------


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
    expected = log_probabilities(checkpoint.load_model(run, "cpu"), ids)[len(prompt) - 1 :]
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


# ---- many clients --------------------------------------------------------------------------------


def test_many_clients_at_once_get_what_each_would_get_alone(server: Server) -> None:
    words = ["the quick brown", "a", "seven wizards", "pack boxes while", "fox", "the " * 12]
    asked = [
        {"prompt": words[i % 6], "seed": i, "temperature": i % 3, "top_p": 0.9, "max_tokens": 9 + i}
        for i in range(16)
    ]
    alone = [server.complete(**settings)["choices"] for settings in asked]
    server.together.clear()
    server.go.clear()  # until all have asked
    with ThreadPoolExecutor(len(asked)) as pool:
        waiting = [pool.submit(server.complete, **settings) for settings in asked]
        wait_for(lambda: server.engine.busy() == len(asked))
        server.go.set()
        assert [w.result()["choices"] for w in waiting] == alone
    assert max(server.together) == 4  # all places were taken


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_client_that_leaves_frees_its_place(stream: bool, path: str, server: Server) -> None:
    server.go.clear()
    asked = chat_of("the") if path == CHAT else {"model": "tiny", "prompt": "the"}
    asked |= {"stream": stream, "n": 3, "max_tokens": 40, "temperature": 0}
    clients = [server.open(path, asked) for _ in range(2)]  # more than there are places
    wait_for(lambda: server.engine.busy() == 6)
    for client in clients:
        assert client.sock is not None
        client.sock.shutdown(socket.SHUT_RDWR)
        client.close()
    # noticed, while the model stands still
    wait_for(lambda: server.engine.busy() == len(server.engine._left))
    server.go.set()
    server.wait_until_idle()
    assert server.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_place(server: Server) -> None:
    asked = {"model": "tiny", "prompt": "the", "stream": True, "max_tokens": 46, "temperature": 0}
    server.go.clear()
    with closing(server.open(TEXT, asked)) as client:
        answer = client.getresponse()
        server.go.set()
        assert b"data: " in answer.readline()
        server.go.clear()
    server.go.set()
    server.wait_until_idle()


def test_a_full_queue_is_said_and_then_there_is_room_again(run: Path) -> None:
    with serving(run, places=2, queue=1) as server:
        server.go.clear()
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(server.complete, "the", max_tokens=2) for _ in range(3)]
            wait_for(lambda: server.engine.busy() == 3)
            with closing(server.open(TEXT, {"model": "tiny", "prompt": "the"})) as connection:
                answer = connection.getresponse()
                error = json.loads(answer.read())["error"]
            assert answer.status == 429 and answer.headers["retry-after"] == "1"
            assert "busy with 3 answers and takes 3 at most" in error["message"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "server_busy")
            server.go.set()
            assert all(w.result()["usage"]["completion_tokens"] <= 2 for w in waiting)
        server.complete("the", max_tokens=2)
        status, said = server.ask(TEXT, {"model": "tiny", "prompt": ["a"] * 4})
        assert status == 400 and "asks for 4 answers, and this server takes 3" in str(said)


# ---- bad requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked", "status", "message", "param"),
    [
        (TEXT, b"{", 400, "no JSON", None),
        (TEXT, b"\xff", 400, "no JSON", None),
        (TEXT, b"[" * 90_000, 400, "no JSON", None),
        (TEXT, [1], 400, "must be a JSON object", None),
        (TEXT, {"prompt": "x"}, 400, "missing required field `model`", "model"),
        (TEXT, {"model": "tiny"}, 400, "missing required field `prompt`", "prompt"),
        (TEXT, {"model": "gpt-4o", "prompt": "x"}, 404, "no model 'gpt-4o' here, only", "model"),
        (TEXT, {"model": "tiny", "prompt": "x", "foo": 1}, 400, "unknown field `foo`", "foo"),
        (TEXT, {"model": "tiny", "prompt": [1, 2]}, 400, "Expected `str`, got `int`", "prompt"),
        (TEXT, {"model": "tiny", "prompt": []}, 400, "missing required field", "prompt"),
        (TEXT, {"model": "tiny", "prompt": "x", "n": 0}, 400, "`int` >= 1", "n"),
        (TEXT, {"model": "tiny", "prompt": "x", "n": 10**30}, 400, "fit", "n"),
        (TEXT, {"model": "tiny", "prompt": "x", "max_tokens": 1.5}, 400, "got", "max_tokens"),
        (TEXT, {"model": "tiny", "prompt": "x", "top_p": 0}, 400, "a probability in (0, 1]", None),
        (TEXT, {"model": "tiny", "prompt": "x", "temperature": -1}, 400, "must be >= 0", None),
        (TEXT, {"model": "tiny", "prompt": "x", "stop": ""}, 400, "1 to 1,000 characters", "stop"),
        (TEXT, {"model": "tiny", "prompt": "x", "logprobs": 21}, 400, "<= 20", "logprobs"),
        (TEXT, {"model": "tiny", "prompt": "x", "echo": True}, 400, "not supported", "echo"),
        (TEXT, {"model": "tiny", "prompt": "x " * 60}, 400, "the model's context is 48", "prompt"),
        (CHAT, chat_of("x " * 60), 400, "leave out what came first", "messages"),
        (CHAT, {"model": "tiny", "messages": []}, 400, "missing required field", "messages"),
        (CHAT, {"model": "tiny", "messages": ["x"]}, 400, "Expected `object`", "messages"),
        (CHAT, chat_of("x", tools=[{}]), 400, "unknown field `tools`", "tools"),
        (CHAT, chat_of("x", presence_penalty=0.5), 400, "not supported", "presence_penalty"),
        (CHAT, chat_of("x", top_logprobs=2), 400, "needs logprobs", "top_logprobs"),
        (CHAT, {"model": "tiny", "messages": [{"role": "tool", "content": "x"}]}, 400, "'tool'", 1),
        ("/v1/embeddings", {"model": "tiny"}, 404, "nothing at /v1/embeddings", None),
        ("/v1/models/other", None, 404, "no model 'other'", "model"),
        (TEXT, None, 405, "does not take GET", None),
    ],
)
def test_a_bad_request_is_one_sentence(
    path: str, asked: Any, status: int, message: str, param: Any, server: Server
) -> None:
    found, said = server.ask(path, asked)
    error = said["error"]
    assert found == status and message in error["message"] and "\n" not in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == ("messages" if param == 1 else param)
    assert server.engine.busy() == 0


def test_settings_that_ask_for_what_is_done_anyway_are_no_fault(server: Server) -> None:
    neutral = {"frequency_penalty": 0, "logit_bias": {}, "tools": [], "tool_choice": "none"}
    neutral |= {"response_format": {"type": "text"}, "user": "me", "seed": None, "stop": None}
    asked = chat_of("the", max_completion_tokens=1, **neutral)
    asked["messages"].append({"role": "assistant", "content": "a", "refusal": None})
    assert server.ask(CHAT, asked)[0] == 200


def test_a_browser_elsewhere_cannot_speak_to_it(server: Server) -> None:
    asked = json.dumps({"model": "tiny", "prompt": "x"}).encode()
    status, said = server.ask(TEXT, asked, headers={"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in said["error"]["message"]
    headers = {"Content-Type": "application/json", "Host": "evil.example"}
    status, said = server.ask(TEXT, asked, headers=headers)
    assert status == 403 and "not to evil.example" in said["error"]["message"]
    headers["Host"] = "[::1"
    assert server.ask(TEXT, asked, headers=headers)[0] == 403
    headers["Host"] = "localhost:1234"
    assert server.ask(TEXT, asked, headers=headers)[0] == 200


def test_a_request_that_is_too_large_is_refused_before_it_is_read(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: 9999999\r\n\r\n".encode())
        assert b"413 " in sock.recv(1000)
    body = iter([b'{"model": "tiny", "prompt": "', *[b"x" * 65536] * 17, b'"}'])  # of unsaid size
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with closing(connection), contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # where it has answered and closed before all was sent, the answer may be lost
        connection.request("POST", TEXT, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 413 and "larger than 1,048,576" in answer.read().decode()


def test_slow_clients_are_not_waited_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(web, "IDLE_SECONDS", 0.2)
    with serving(run, seconds=0.6) as server:
        for sent in (b"", b"GET / HTTP/1.1\r\nX-Slow: "):  # a head that never ends
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
                sock.sendall(sent)
                assert sock.recv(1000) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            head = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
            assert b"408 " in sock.recv(1000)
        server.go.clear()
        asked = {"model": "tiny", "prompt": "the", "max_tokens": 3}
        status, said = server.ask(TEXT, asked)
        assert status == 504 and "took longer than 0.6 s" in said["error"]["message"]
        with closing(server.open(TEXT, {**asked, "stream": True})) as connection:
            with pytest.raises(http.client.IncompleteRead):
                connection.getresponse().read()
        server.go.set()
        server.wait_until_idle()


# ---- the server's own end ------------------------------------------------------------------------


def test_when_the_model_fails_everybody_is_told_and_it_ends(run: Path) -> None:
    with serving(run) as server:
        server.go.clear()
        with ThreadPoolExecutor(2) as pool:
            asked = {"model": "tiny", "prompt": "the"}
            waiting = [pool.submit(server.ask, TEXT, asked) for _ in range(2)]
            wait_for(lambda: server.engine.busy() == 2)

            def fail() -> Any:
                raise MemoryError("no room")

            server.engine.batch._decode = fail  # type: ignore[method-assign]
            server.go.set()
            for answer in waiting:
                status, said = answer.result()
                assert status == 500 and said["error"]["message"] == "it failed: no room"
        assert isinstance(server.engine.failure, MemoryError)


def test_logits_that_are_not_finite_end_one_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("reference.generate.np.isfinite", lambda x: np.zeros(1, np.bool_))
        status, said = server.ask(TEXT, {"model": "tiny", "prompt": "the"})
        assert status == 500 and "has the model diverged?" in said["error"]["message"]
    server.complete("the", max_tokens=1)


def start(run: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "dist", "serve", str(run), "--port", "0", *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    found = re.search(r"(\S+) is served at http://127.0.0.1:(\d+) ", line)
    assert found, line + process.stderr.read()
    return process, int(found[2])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it_and_tells_those_who_wait(number: signal.Signals, run: Path) -> None:
    process, port = start(run, "--batch", "1", "--name", "m")
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            asked = {"model": "m", "prompt": ["the"] * 60, "max_tokens": 47, "stream": True}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", TEXT, json.dumps(asked), headers)
            answer = connection.getresponse()
            answer.readline()
            process.send_signal(number)
            assert "this server is ending" in answer.read().decode()
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "ended\n", "")
    finally:
        process.kill()
        process.wait()


def test_an_address_that_is_taken_is_said_before_the_model_is_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", str(run / "nowhere"), "--port", port]) == 1
        assert f"port {port}: " in (said := capsys.readouterr().err) and "--port" in said
    for words, message in (
        (["--port", "70000"], "must lie in 0..65535"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--host", "no.such.host.invalid"], "cannot listen on"),
        (["--backend", "tpu", "--port", "0"], "no backend"),
    ):
        assert cli.main(["serve", str(run), *words]) == 1
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1


def test_without_the_extra_it_says_what_to_install(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "dist.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", str(run)]) == 1
    assert "pip install 'myllm[serve]'" in capsys.readouterr().err


def test_a_model_is_named_and_told_of(server: Server) -> None:
    status, said = server.ask("/v1/models")
    (found,) = said["data"]
    assert status == 200 and (found["id"], found["context_length"]) == ("tiny", 48)
    assert server.ask("/v1/models/tiny") == (200, found)


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    with closing(server.open("/")) as connection:
        answer = connection.getresponse()
        page = answer.read().decode()
    assert (
        answer.status == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    )
    assert not re.search(r"https?://|src=|@import|url\(", page)
    (facts,) = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(facts) == {"model": "tiny", "no_chat": "", "context": 48}


def test_a_model_that_never_saw_a_chat_says_so_and_continues_texts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepare_chats(tmp_path / "plain", chats=False, train__steps=1)
    assert cli.main(["train", str(save_run_file(config, tmp_path / "run.toml"))]) == 0
    with serving(tmp_path / "plain" / "run") as server:
        status, said = server.ask(CHAT, chat_of("the"))
        assert status == 400 and "never saw a chat in training" in said["error"]["message"]
        assert said["error"]["code"] == "no_chat"
        server.complete("the", max_tokens=1)
        with closing(server.open("/")) as connection:
            assert "never saw a chat" in connection.getresponse().read().decode()
    capsys.readouterr()
    for path, warned in ((tmp_path / "plain" / "run", True), (run, False)):
        assert cli.main(["generate", str(path), "--chat", "--prompt", "the", "--tokens", "1"]) == 0
        assert ("never saw a chat" in capsys.readouterr().err) == warned


def test_what_a_run_began_with_may_have_seen_chats(run: Path, tmp_path: Path) -> None:
    """Learning from texts alone does not unlearn it; nor does a run that goes on forget."""
    begun = {"train__init": str(run), "train__steps": 2}
    config = prepare_chats(tmp_path / "more", chats=False, **begun)
    path = save_run_file(config, tmp_path / "run.toml")
    assert cli.main(["train", str(path), "--set", "train.steps=1"]) == 0
    out = tmp_path / "more" / "run"
    assert checkpoint.read_manifest(checkpoint.find(out)).chats is True
    assert cli.main(["train", str(path), "--changed", "--set", "train.init=''"]) == 0
    found = checkpoint.read_manifest(checkpoint.find(out))
    assert (found.step, found.chats) == (2, True)
    # of shards by others nobody knows what is in them
    shards = sorted((tmp_path / "more" / "train").glob("*.bin"))
    words = [f"data.train={str(shards[0])!r}", f"run.out={str(tmp_path / 'new')!r}"]
    words += ["train.init=''", "train.steps=1"]
    assert cli.main(["train", str(path), *(f"--set={word}" for word in words)]) == 0
    assert checkpoint.read_manifest(checkpoint.find(tmp_path / "new")).chats is None


# ---- the page in a browser -----------------------------------------------------------------------

# What a person would do, and what is seen of it, told to the server by a name that it has not.
ACT = """<script>
const seen = {errors: []};
onerror = (m) => { seen.errors.push(String(m)); };
onunhandledrejection = (e) => { seen.errors.push(String(e.reason)); };
const until = async (holds) => { while (!holds()) await new Promise((r) => setTimeout(r, 20)); };
const turns_shown = () => [...document.querySelectorAll(".turn")].map((e) => e.textContent);
const say = async (text) => {
  $("text").value = text;
  const key = {key: "Enter", bubbles: true, cancelable: true};
  $("text").dispatchEvent(new KeyboardEvent("keydown", key));
  await until(() => running === null);
};
(async () => {
  seen.note = $("note").textContent;
  $("temperature").value = "0"; $("max_tokens").value = "5";
  await say("the <b>fox</b>");
  seen.first = turns_shown(); seen.how = document.querySelector(".how").textContent;
  seen.bold = document.querySelectorAll(".turn b, .turn img").length;
  await say("a dog"); seen.second = turns.length;
  for (const word of ["seven", "wizards"]) await say(word);
  seen.forgotten = $("said").lastElementChild.textContent; seen.kept = turns.length;
  $("max_tokens").value = "0"; await say("x"); seen.error = $("said").lastElementChild.textContent;
  seen.red = document.querySelectorAll(".error").length; seen.after = turns.length;
  $("anew").click(); seen.anew = [turns.length, turns_shown().length];
  $("max_tokens").value = "40"; $("temperature").value = "1"; $("text").value = "the";
  $("form").requestSubmit(); await until(() => running !== null);
  seen.button = $("send").textContent; $("form").requestSubmit();
  await until(() => running === null);
  seen.stopped = $("said").lastElementChild.textContent;
  seen.wide = document.documentElement.scrollWidth - innerWidth;
  seen.paper = getComputedStyle(document.body).backgroundColor;
  await fetch("/v1/models/seen:" + encodeURIComponent(JSON.stringify(seen)));
})();
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dark"), [(1200, False), (500, True)], ids=["light", "dark and narrow"]
)
def test_the_page_works_in_a_browser(
    width: int, dark: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    told: list[str] = []
    check, respond = app._check_name, app.HTMLResponse

    def note(served: app.Served, name: str) -> None:
        if name.startswith("seen:"):
            told.append(name.removeprefix("seen:"))
        check(served, name)

    def acted(page: str, headers: dict[str, str]) -> Any:
        return respond(page.replace("</html>", f"{ACT}</html>"), headers=headers)

    monkeypatch.setattr(app, "_check_name", note)
    monkeypatch.setattr(app, "HTMLResponse", acted)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--remote-debugging-port=0", f"--window-size={width},900"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    browser = subprocess.Popen(
        [chromium, *flags, f"http://127.0.0.1:{server.port}/"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: bool(told))
    finally:
        browser.terminate()
        browser.wait()
    seen = json.loads(told[0])
    assert seen["errors"] == [] and seen["note"] == "sees 48 tokens"
    assert seen["first"][0] == "the <b>fox</b>" and len(seen["first"]) == 2 and seen["bold"] == 0
    (answer,) = server.chat("the <b>fox</b>", temperature=0, max_tokens=5)["choices"]
    assert seen["first"][1] == answer["message"]["content"]
    assert re.fullmatch(r"\d tokens, \d+ a second; (it wrote the end|the limit .*)", seen["how"])
    assert "earlier turns are forgotten" in seen["forgotten"] and seen["kept"] < 8
    assert "`int` >= 1" in seen["error"] and seen["red"] == 1 and seen["after"] == seen["kept"]
    assert seen["anew"] == [0, 0] and seen["button"] == "Stop"
    assert seen["stopped"] == "stopped" or "tokens, " in seen["stopped"]
    assert seen["wide"] <= 0 and (seen["paper"] == "rgb(20, 23, 28)") == dark
