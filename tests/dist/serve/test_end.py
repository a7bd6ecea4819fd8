"""How a server ends, and what it says of its model before anybody asks."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel import threads
from accel.system import cores
from dist import checkpoint, cli
from dist.model import load_model
from dist.serve.engine import Engine
from tests.helpers import ROOT
from tests.helpers.runs import in_threads, save_run_file
from tests.helpers.serving import Server, chat_of, prepare_chats, serving, wait_for
from tests.helpers.weights import write_random
from tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_the_engine_has_as_many_threads_as_the_process(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba keeps the number for each thread of Python."""
    model, seen = load_model(run, "cpu", "float32"), []
    monkeypatch.setattr(Engine, "_admit", lambda self: seen.append(threads.team()))
    for n in (1, cores()):
        with in_threads(n):
            threads.ready_pool()
            engine = Engine(model, places=1, queue=0)
            engine.start()
            engine._thread.join()
    assert seen == [1, cores()]


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
            headers = {"Content-Type": "application/json"}
            # kernels that are compiled first would take longer than an ending server waits
            warm = {"model": "m", "prompt": "the", "max_tokens": 2}
            connection.request("POST", TEXT, json.dumps(warm), headers)
            connection.getresponse().read()
            asked = {"model": "m", "prompt": ["the"] * 60, "max_tokens": 47, "stream": True}
            connection.request("POST", TEXT, json.dumps(asked), headers)
            answer = connection.getresponse()
            answer.readline()
            process.send_signal(number)
            assert "this server is ending" in answer.read().decode()
        out, err = process.communicate(timeout=60)
        said = [line for line in err.splitlines() if "compiling kernels" not in line]
        assert (process.returncode, out, said) == (0, "ended\n", [])
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
        (["--host", "192.0.2.1"], "choose another --host"),  # of no machine (RFC 5737)
        (["--backend", "tpu", "--port", "0"], "no backend"),
    ):
        assert cli.main(["serve", str(run), *words]) == 1
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1


def test_a_context_without_room_for_an_answer_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = load_model(run, "cpu")
    assert found.tokenizer is not None
    small = replace(found.config, context_length=1)
    write_random(tmp_path / "small", small, Tokenizer.load(found.tokenizer))
    assert cli.main(["serve", str(tmp_path / "small"), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert f"{tmp_path / 'small'}: a context of one token has no room" in said


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
