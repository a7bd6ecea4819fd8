"""A server in this process, and as much of an HTTP client as the tests of it need."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dist import cli
from dist.config import RunFile, from_tables
from dist.evaluate import load_tokenizer
from dist.generate import never_chatted
from dist.model import load_model
from dist.serve.app import Served, make_app
from dist.serve.engine import Engine
from dist.serve.server import Server as WebServer
from tests.helpers.runs import tables, text
from tokenizer import Tokenizer, train_from_iterator


def prepare_chats(folder: Path, *, chats: bool = True, **overrides: Any) -> RunFile:
    """Pack conversations and texts, and return the run file of a model that learns from both."""
    folder.mkdir(exist_ok=True)
    train_from_iterator([text(i) for i in range(100)], 320).save(folder / "t.tok")
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "quick fox"}]
    lines = [json.dumps({"messages": messages}), *(json.dumps({"text": text(i)}) for i in range(9))]
    lines = lines if chats else lines[1:]
    (folder / "a.jsonl").write_text("\n".join(lines * 9))
    words = ["--tokenizer", str(folder / "t.tok"), "--heldout", "0", "--processes", "1"]
    assert cli.main(["pack", str(folder / "a.jsonl"), *words, "-o", str(folder)]) == 0
    # more ids than the tokenizer has
    more = {"model__vocab_size": 330, "model__context_length": 48, "data__heldout": ""}
    return from_tables(tables(folder, **{**more, **overrides}))


class Server(NamedTuple):
    """One that runs."""

    port: int
    engine: Engine
    tokenizer: Tokenizer
    go: threading.Event  # while it is not set, the model stands still
    together: list[int]  # how many texts were written at each step

    def open(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = ""
    ) -> http.client.HTTPConnection:
        """Send a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if headers is None else headers
        connection.request(method or ("GET" if body is None else "POST"), path, given, headers)
        return connection

    def ask(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
        """Return the status of an answer, and what it says."""
        with closing(self.open(path, body, **more)) as connection:
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def complete(self, prompt: Any, **settings: Any) -> Any:
        """Return a completion."""
        asked = {"model": "tiny", "prompt": prompt, **settings}
        status, said = self.ask("/v1/completions", asked)
        assert status == 200, said
        return said

    def chat(self, *turns: str, **settings: Any) -> Any:
        """Return the answer to turns of a user and an assistant."""
        status, said = self.ask("/v1/chat/completions", chat_of(*turns, **settings))
        assert status == 200, said
        return said

    def stream(self, path: str, body: Any) -> list[Any]:
        """Return the events of an answer that comes in pieces, without the last one."""
        with closing(self.open(path, {**body, "stream": True})) as connection:
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def wait_until_idle(self) -> None:
        """Wait until nobody's answer is written or waits."""
        wait_for(lambda: self.engine.busy() == 0 and len(self.engine.batch) == 0)


def chat_of(*turns: str, **settings: Any) -> dict[str, Any]:
    """Return a request with such turns."""
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    return {"model": "tiny", "messages": messages, **settings}


def wait_for(holds: Callable[[], bool]) -> None:
    """Wait until something holds, for a minute at most."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)


@contextmanager
def serving(run: Path, *, seconds: float = 60.0, **bounds: int) -> Iterator[Server]:
    """Serve a run's model by the name ``tiny``; ``bounds`` are those of ``Engine``."""
    model = load_model(run, "cpu")
    assert model.tokenizer is not None
    tokenizer = load_tokenizer(model.tokenizer, model.state.tokenizer_sha256)
    go, together = threading.Event(), list[int]()
    go.set()
    engine = Engine(model, **{"places": 4, "queue": 16, **bounds}, ended=lambda: end())
    step = engine.batch.step

    def held() -> Any:
        assert go.wait(60)
        found = step()
        together.append(len(found))
        return found

    engine.batch.step = held  # type: ignore[method-assign]
    served = Served("tiny", model, tokenizer, never_chatted(model, tokenizer), seconds, True)
    server = WebServer(make_app(served, engine), engine, lambda: None)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    def end() -> None:
        server.should_exit = True

    engine.start()
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield Server(port, engine, tokenizer, go, together)
    finally:
        go.set()
        server.should_exit = True
        thread.join()
