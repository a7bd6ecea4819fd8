"""No client hinders another: many at once, those that leave, are slow, or ask for nonsense."""

import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dist.serve import app
from dist.serve import server as web
from dist.serve.api import CompletionRequest
from dist.serve.engine import Answer
from tests.helpers.serving import Server, chat_of, serving, wait_for

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


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


def test_a_long_prompt_holds_nobody_up_but_those_whose_turn_comes_after(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, submit = CompletionRequest.prompts, server.engine.submit
    begun, go, order = threading.Event(), threading.Event(), list[int]()

    def slow(self: CompletionRequest, tokenizer: Any) -> list[list[int]]:
        if self.max_tokens == 1:
            begun.set()
            assert go.wait(60)
        return prompts(self, tokenizer)

    def noted(answers: Sequence[Answer]) -> None:
        order.append(answers[0].left)
        submit(answers)

    monkeypatch.setattr(CompletionRequest, "prompts", slow)
    monkeypatch.setattr(server.engine, "submit", noted)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.complete, "the", max_tokens=1)
        assert begun.wait(60)
        second = pool.submit(server.complete, "the", max_tokens=2)
        try:
            with closing(server.open("/v1/models")) as connection:
                connection.sock.settimeout(10)
                assert connection.getresponse().status == 200
            with pytest.raises(TimeoutError):
                second.result(0.3)
        finally:
            go.set()
        assert first.result() and second.result()
    assert order == [1, 2]


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
    assert server.complete("a", temperature=0, max_tokens=1)["usage"]["completion_tokens"] == 1


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


def test_a_client_that_has_left_is_no_line_in_the_terminal(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio_s = logging.getLogger("asyncio")
    asyncio_s.warning("socket.send() raised exception.")  # what it says when it writes to nobody
    asyncio_s.warning("something else")
    assert caplog.messages == ["something else"]


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
        (
            TEXT,
            {"model": "tiny", "prompt": []},
            400,
            "null and [] count as nothing given",
            "prompt",
        ),
        (CHAT, {"model": "tiny", "messages": [None]}, 400, "got `null`", "messages"),
        (
            CHAT,
            {"model": "tiny", "messages": [{"role": "user", "content": None}]},
            400,
            "missing required field `content` - at `$.messages[0]`; null and [] count",
            "content",
        ),
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
