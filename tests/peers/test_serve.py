"""``myllm serve`` as OpenAI's own client sees it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dist import cli
from tests.helpers.runs import save_run_file
from tests.helpers.serving import Server, prepare_chats, serving, wait_for

openai = pytest.importorskip("openai")

HELLO: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("run")
    config = prepare_chats(folder, train__steps=3, model__context_length=128)
    assert cli.main(["train", str(save_run_file(config, folder / "run.toml"))]) == 0
    with serving(folder / "run") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    address = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as found:
        yield found
    server.go.set()
    server.wait_until_idle()


def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o' here"):
        client.models.retrieve("gpt-4o")


def test_a_conversation_goes_on(client: Any) -> None:
    how = {"model": "tiny", "temperature": 0, "max_completion_tokens": 5}
    first = client.chat.completions.create(messages=HELLO, **how)
    message = first.choices[0].message
    assert message.role == "assistant" and first.object == "chat.completion"
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    more = [*HELLO, message, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    second = client.chat.completions.create(messages=more, **how)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_stream_is_the_whole_in_pieces(client: Any) -> None:
    how = {"model": "tiny", "seed": 3, "temperature": 1.2, "max_tokens": 12, "logprobs": True}
    whole = client.chat.completions.create(messages=HELLO, **how)
    chunks = list(
        client.chat.completions.create(
            messages=HELLO, stream=True, stream_options={"include_usage": True}, **how
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    told = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [entry for t in told for entry in t.content] == whole.choices[0].logprobs.content
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends[-1] == whole.choices[0].finish_reason and set(ends[:-1]) <= {None}


def test_completions_and_their_log_probabilities(client: Any) -> None:
    how = {"model": "tiny", "prompt": ["the", "a"], "n": 2, "seed": 1, "max_tokens": 6}
    whole = client.completions.create(logprobs=4, **how)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        n = len(choice.logprobs.tokens)
        assert n == len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs)
    parts: dict[int, str] = {}
    for chunk in client.completions.create(stream=True, **how):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    assert parts == {choice.index: choice.text for choice in whole.choices}


def test_settings_of_ours_go_by_extra_body(client: Any) -> None:
    how = {"model": "tiny", "prompt": "the", "max_tokens": 6}
    greedy = client.completions.create(temperature=0, **how).choices[0].text
    drawn = client.completions.create(temperature=2, extra_body={"top_k": 1}, **how)
    assert drawn.choices[0].text == greedy


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"messages": [{"role": "user", "content": "x " * 150}]}, "BadRequestError", "context is"),
        ({"presence_penalty": 1}, "BadRequestError", "presence_penalty is not supported"),
        ({"extra_body": {"foo": 1}}, "BadRequestError", "unknown field `foo`"),
        ({"model": "gpt-4o"}, "NotFoundError", "no model 'gpt-4o' here, only 'tiny'"),
    ],
)
def test_what_is_refused_raises_the_error_that_it_is(
    settings: Any, kind: str, message: str, client: Any
) -> None:
    with pytest.raises(getattr(openai, kind), match=message) as found:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **settings})
    assert found.value.type == "invalid_request_error"


def test_a_stream_that_is_closed_frees_its_place(client: Any, server: Server) -> None:
    server.go.clear()
    stream = client.completions.create(model="tiny", prompt="the", max_tokens=40, stream=True)
    stream.close()
    engine = server.engine
    wait_for(lambda: bool(engine._left) or not engine.busy())  # come and gone before it was begun
    server.go.set()
    server.wait_until_idle()


def test_a_busy_server_is_tried_again(client: Any, server: Server) -> None:
    """The client waits by itself, as it does for OpenAI's."""
    server.go.clear()
    patient = client.with_options(max_retries=5)
    asked = {"model": "tiny", "prompt": ["the"] * 20, "max_tokens": 2}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.completions.create, **asked)
        wait_for(lambda: server.engine.busy() == 20)
        with pytest.raises(openai.RateLimitError, match="busy with 20 answers"):
            client.completions.create(model="tiny", prompt="the")
        second = pool.submit(patient.completions.create, model="tiny", prompt="the")
        server.go.set()
        assert len(first.result().choices) == 20
        assert json.loads(second.result().model_dump_json())["choices"]
