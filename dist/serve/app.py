"""What is answered at which address, and what keeps one client from hindering the others."""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dist.documents import END
from dist.model import Model
from dist.pack import ends_of, special_id
from dist.serve.api import (
    ChatRequest,
    CompletionRequest,
    R,
    Refused,
    Reply,
    Request,
    error_body,
    read_request,
)
from dist.serve.engine import Answer, Engine, Full, Piece

if TYPE_CHECKING:
    from tokenizer import Tokenizer

BODY_SECONDS = 30.0  # that a request may take to arrive
LOCAL = ("127.0.0.1", "localhost", "::1")
CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class Served(NamedTuple):
    """What is served, and within what bounds."""

    name: str
    model: Model
    tokenizer: "Tokenizer"
    no_chat: str  # why there is no chat, in a sentence; "": there is
    seconds: float  # that an answer may take, its waiting included
    local: bool  # only this machine can reach it

    @property
    def body_bytes(self) -> int:
        """The size of a request, at most: ample for a text as long as the context."""
        return max(1 << 20, 64 * self.model.config.context_length)


Inbox = asyncio.Queue[tuple[int, Piece]]  # of a request: which choice, and what is new of it


def make_app(served: Served, engine: Engine) -> ASGIApp:
    """Return the application."""
    # prompts are tokenized one after the other, so that answers begin as they were asked for
    answering = partial(_answering, served, engine, asyncio.Lock())
    routes = [
        Route("/", partial(_page, served)),
        Route("/v1/models", partial(_models, served)),
        Route("/v1/models/{name:path}", partial(_model, served)),
        Route("/v1/chat/completions", answering(ChatRequest), methods=["POST"]),
        Route("/v1/completions", answering(CompletionRequest), methods=["POST"]),
    ]
    handlers: Any = {Refused: _refused, HTTPException: _not_here, Exception: _failed}
    return Gate(Starlette(routes=routes, exception_handlers=handlers), served)


class Json(Response):
    """A JSON object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def encoded(content: Any) -> bytes:
    """Return JSON; a lone surrogate, of bytes that a model wrote, becomes U+FFFD."""
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


async def _refused(request: Http, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error)


def _error(error: Refused) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return Json(error.body(), error.status, headers)


async def _not_here(request: Http, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {
        404: f"there is nothing at {request.url.path}: this server has /v1/chat/completions, "
        "/v1/completions, /v1/models, and a page at /",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = said.get(error.status_code, error.detail)
    return Json(error_body(message, error.status_code), error.status_code, error.headers)


async def _failed(request: Http, error: Exception) -> Response:
    message = "this server has failed at the request; its terminal says how"
    return Json(error_body(message, 500), 500)


class Gate:
    """Holds every request to the bounds of time, and to those who may ask.

    A page of somebody else's in a browser on this machine could otherwise speak to a server that
    only this machine can reach: by a host name that leads here, or by a form.
    """

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self.app, self.served = app, served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and end it when its time is up."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            self._check(Http(scope))
            async with asyncio.timeout(self.served.seconds):
                await self.app(scope, receive, sending)
        except Refused as error:
            await _error(error)(scope, receive, send)
        except TimeoutError:
            if begun:  # the connection is closed by who called this
                return
            said = (
                f"the answer took longer than {self.served.seconds:g} s: ask for fewer tokens, or "
                "start the server with a longer --timeout"
            )
            await _error(Refused(said, 504, code="timeout"))(scope, receive, send)

    def _check(self, request: Http) -> None:
        if self.served.local:
            host = None
            with contextlib.suppress(ValueError):  # no name at all
                host = urlsplit(f"//{request.headers.get('host', '')}").hostname
            if host not in LOCAL:
                raise Refused(
                    f"this server answers to {' and '.join(LOCAL)} only, not to {host}", 403
                )
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise Refused("the Content-Type of a request must be application/json", 415)


# ---- what is there to see ------------------------------------------------------------------------


async def _page(served: Served, request: Http) -> Response:
    facts = {
        "model": served.name,
        "no_chat": served.no_chat,
        "context": served.model.config.context_length,
    }
    content = msgspec.json.encode(facts).decode().replace("<", "\\u003c")
    template = resources.files("dist.serve").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(template.replace("__DATA__", content), headers=headers)


def _facts(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": int(served.model.path.stat().st_mtime),
        "owned_by": "myllm",
        "context_length": served.model.config.context_length,
    }


async def _models(served: Served, request: Http) -> Response:
    return Json({"object": "list", "data": [_facts(served)]})


async def _model(served: Served, request: Http) -> Response:
    _check_name(served, request.path_params["name"])
    return Json(_facts(served))


def _check_name(served: Served, name: str) -> None:
    if name != served.name:
        raise Refused(
            f"there is no model {name!r} here, only {served.name!r}",
            404,
            param="model",
            code="model_not_found",
        )


# ---- answers -------------------------------------------------------------------------------------


def _answering(
    served: Served, engine: Engine, turn: asyncio.Lock, kind: type[R]
) -> Callable[[Http], Awaitable[Response]]:
    async def answer(http: Http) -> Response:
        request = read_request(await _body(http, served.body_bytes), kind)
        _check_name(served, request.model)
        if request.chat and served.no_chat:
            raise Refused(served.no_chat, code="no_chat")
        async with turn:  # in a thread: of a long prompt it may take a second
            prompts = await asyncio.to_thread(request.prompts, served.tokenizer)
        inbox = Inbox()
        answers = _answers(served, request, prompts, inbox, engine.capacity)
        reply = Reply(request, served.name, served.tokenizer)
        n_prompt = sum(len(a.ids) for a in answers[:: request.n])
        try:
            engine.submit(answers)
        except Full as error:
            raise Refused(str(error), 429, code="server_busy") from error
        if request.stream:
            usage = request.stream_options.include_usage
            pieces = _streamed(reply, inbox, len(answers), n_prompt, usage)
            return Stream(pieces, partial(engine.leave, answers))
        try:
            return await _gathered(http, reply, inbox, len(answers), n_prompt)
        finally:
            engine.leave(answers)

    return answer


async def _body(http: Http, limit: int) -> bytes:
    said = f"the request is larger than {limit:,} bytes"
    if int(http.headers.get("content-length", "0")) > limit:
        raise Refused(said, 413)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                body += part
                if len(body) > limit:
                    raise Refused(said, 413)
    except TimeoutError as error:
        raise Refused(f"the request did not arrive within {BODY_SECONDS:g} s", 408) from error
    except ClientDisconnect as error:
        raise Refused("the request broke off", 400) from error
    return bytes(body)


def _answers(
    served: Served, request: Request, prompts: list[list[int]], inbox: Inbox, most: int
) -> list[Answer]:
    """Return what the engine is to write for a request: n choices of each prompt."""
    tokenizer, context = served.tokenizer, served.model.config.context_length
    if len(prompts) * request.n > most:
        raise Refused(
            f"the request asks for {len(prompts) * request.n} answers, and this server takes "
            f"{most} at most at a time"
        )
    longest = max(map(len, prompts))
    if longest >= context:
        what = "the messages have" if request.chat else "the prompt has"
        raise Refused(
            f"{what} {longest} tokens, and the model's context is {context}, the answer included: "
            "leave out what came first",
            param="messages" if request.chat else "prompt",
            code="context_length_exceeded",
        )
    ends = ends_of(tokenizer, served.model.state.updates)
    if request.chat:
        ends.add(special_id(tokenizer, END))
    # without a seed each answer is another one; a seed gives the same whenever it is asked for
    seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
    loop = asyncio.get_running_loop()

    def deliver(index: int, piece: Piece) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, (index, piece))

    limit, sampling, stop, best = (
        request.limit() or context,
        request.sampling(),
        request.stops(),
        request.best(),
    )
    return [
        Answer(
            prompt,
            tokenizer,
            partial(deliver, index := number * request.n + choice),
            limit=min(limit, context - len(prompt)),
            sampling=sampling,
            rng=np.random.default_rng([seed, index]),
            ends=ends,
            stop=stop,
            best=best,
        )
        for number, prompt in enumerate(prompts)
        for choice in range(request.n)
    ]


class Stream(StreamingResponse):
    """Pieces as server-sent events; ``close`` is called at the end, whatever the end is."""

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(pieces, media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


def _event(record: dict[str, Any]) -> bytes:
    return b"data: " + encoded(record) + b"\n\n"


def _usage(n_prompt: int, written: int) -> dict[str, Any]:
    counts = {"prompt_tokens": n_prompt, "completion_tokens": written}
    return {**counts, "total_tokens": n_prompt + written}


async def _streamed(
    reply: Reply, inbox: Inbox, choices: int, n_prompt: int, with_usage: bool
) -> AsyncIterator[bytes]:
    for index in range(choices):
        if (begin := reply.begin(index)) is not None:
            yield _event(begin)
    written, open_choices = 0, choices
    while open_choices:
        index, piece = await inbox.get()
        if piece.finish == "error":
            yield _event(error_body(piece.error, 500))
            return
        written += piece.token is not None
        open_choices -= bool(piece.finish)
        for chunk in reply.piece(index, piece):
            yield _event(chunk)
    if with_usage:
        yield _event(reply.last(_usage(n_prompt, written)))
    yield b"data: [DONE]\n\n"


async def _gathered(
    http: Http, reply: Reply, inbox: Inbox, choices: int, n_prompt: int
) -> Response:
    """Return the whole answer; stop waiting for it when the client leaves."""

    async def gather() -> list[list[Piece]]:
        found: list[list[Piece]] = [[] for _ in range(choices)]
        while not all(pieces and pieces[-1].finish for pieces in found):
            index, piece = await inbox.get()
            if piece.finish == "error":
                raise Refused(piece.error, 500)
            found[index].append(piece)
        return found

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks: Sequence[asyncio.Task[Any]] = (
        asyncio.create_task(gather()),
        asyncio.create_task(gone()),
    )
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Refused("the client has left", 499)
        found = tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Refused):
                await task
    written = sum(piece.token is not None for pieces in found for piece in pieces)
    return Json(reply.whole(found, _usage(n_prompt, written)))
