"""Requests and answers in the form of OpenAI's API: what a client may ask, and what it is told.

What a request may hold is declared in ``ChatRequest`` and ``CompletionRequest``. A setting that
this server does not have is refused unless it asks for what is done anyway (``NEUTRAL``), so that
nobody is answered other than they asked.
"""

import re
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from dist.documents import ASSISTANT
from dist.generate import chat_ids, prompt_ids
from dist.pack import special_id
from dist.serve.engine import Piece, Token
from reference.generate import Sampling

if TYPE_CHECKING:
    from tokenizer import Tokenizer

MAX_BEST = 20  # likeliest tokens that can be asked for with each token
# settings that are not there, and the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
# what says nothing about the answer
IGNORED = (
    *("metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "service_tier"),
    *("store", "user"),
)


class Refused(Exception):
    """A request that is not answered; the message says why, and what to do."""

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI writes it."""
        return error_body(str(self), self.status, self.param, self.code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI writes it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    kind = "rate_limit_error" if status == 429 else kind
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# ---- requests ------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of an answer that comes in pieces."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request may say."""

    model: str
    temperature: float = 1.0
    top_p: float = 1.0
    n: Annotated[int, Meta(ge=1, le=128)] = 1
    stop: str | Annotated[list[str], Meta(max_length=16)] = []
    seed: int | None = None  # OpenAI's may be negative
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # OpenAI has not these
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def sampling(self) -> Sampling:
        """Return how tokens are to be chosen."""
        try:
            return Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=None if self.top_p == 1 else self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
            )
        except ValueError as error:
            raise Refused(str(error).removeprefix("sample: ")) from error

    def stops(self) -> list[str]:
        """Return the strings before which an answer ends."""
        strings = [self.stop] if isinstance(self.stop, str) else self.stop
        if not all(0 < len(s) <= 1000 for s in strings):
            raise Refused("a stop string must have from 1 to 1,000 characters", param="stop")
        return strings


class CompletionRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """Asks for the continuation of texts."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=2048)]
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    logprobs: Annotated[int, Meta(ge=0, le=MAX_BEST)] | None = None

    chat: ClassVar[bool] = False

    def limit(self) -> int | None:
        """Return how many tokens may be written; None: what the context leaves."""
        return self.max_tokens

    def best(self) -> int:
        """Return how many of the likeliest are told with each token; -1: no log-probabilities."""
        return -1 if self.logprobs is None else self.logprobs

    def prompts(self, tokenizer: "Tokenizer") -> list[list[int]]:
        """Return the ids of what is to be continued."""
        texts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [prompt_ids(tokenizer, text) for text in texts]


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message."""

    text: str


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A turn of a conversation; the names of those who speak are not told the model."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str = ""

    def turn(self) -> dict[str, str]:
        """Return it as ``documents.chat`` takes it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Common, kw_only=True, forbid_unknown_fields=True):
    """Asks for the next turn of a conversation."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_BEST)] = 0

    chat: ClassVar[bool] = True

    def limit(self) -> int | None:
        """Return how many tokens may be written; None: what the context leaves."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given) if given else None

    def best(self) -> int:
        """Return how many of the likeliest are told with each token; -1: no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs to be true", param="top_logprobs")
        return self.top_logprobs if self.logprobs else -1

    def prompts(self, tokenizer: "Tokenizer") -> list[list[int]]:
        """Return the ids of the conversation, up to where the answer begins."""
        turns = [message.turn() for message in self.messages]
        return [[*chat_ids(tokenizer, turns), special_id(tokenizer, ASSISTANT)]]


Request = CompletionRequest | ChatRequest
R = TypeVar("R", CompletionRequest, ChatRequest)


def read_request(body: bytes, kind: type[R]) -> R:
    """Return what a request says.

    Raises
    ------
    Refused
        When it is no JSON, or asks for what there is not.
    """
    try:
        record = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body of the request is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise Refused("the body of the request must be a JSON object")
    record = {name: value for name, value in _given(record).items() if name not in IGNORED}
    for name in NEUTRAL.keys() & record.keys():
        if record.pop(name) not in NEUTRAL[name]:
            raise Refused(
                f"{name} is not supported by this server: leave it out",
                param=name,
                code="unsupported_parameter",
            )
    if isinstance(messages := record.get("messages"), list):
        # what a client got as an answer it sends back with fields that say nothing
        record["messages"] = [_given(m) if isinstance(m, dict) else m for m in messages]
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `(.*?)`", str(error))
        named = unknown or re.search(r"at `\$\.(\w+)|required field `(\w+)`", str(error))
        empty = "; null and [] count as nothing given" * ("required field" in str(error))
        raise Refused(
            f"the request does not fit: {error}{empty}",
            param=next(filter(None, named.groups()), None) if named else None,
            code="unknown_parameter" if unknown else None,
        ) from error


def _given(record: dict[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing: null, and empty lists."""
    return {name: value for name, value in record.items() if value is not None and value != []}


# ---- answers -------------------------------------------------------------------------------------


class Reply:
    """The answer to one request, whole or in pieces.

    Parameters
    ----------
    request : Request
    name : str
        Of the model.
    tokenizer : Tokenizer
    """

    def __init__(self, request: Request, name: str, tokenizer: "Tokenizer") -> None:
        self._chat, self._tokenizer, self._with_tokens = (
            request.chat,
            tokenizer,
            request.best() >= 0,
        )
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        from tokenizer import DecodeStream

        # of each choice how many characters were told of, and what shows them
        self._offsets: defaultdict[int, tuple[int, DecodeStream]] = defaultdict(
            lambda: (0, DecodeStream(tokenizer))
        )

    def whole(self, choices: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return all of the answer."""
        found = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            found.append(self._choice(index, said if self._chat else {"text": text}, pieces))
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": found, "usage": usage}

    def begin(self, index: int) -> dict[str, Any] | None:
        """Return what comes before the first piece of a choice."""
        if not self._chat:
            return None
        said = {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return self._chunk([self._choice(index, said, [])])

    def piece(self, index: int, piece: Piece) -> Sequence[dict[str, Any]]:
        """Return what is sent of a piece: nothing where there is nothing to tell."""
        chunks = []
        if piece.text or (self._with_tokens and piece.token is not None):
            unfinished = piece._replace(finish="")
            said: dict[str, Any] = {"text": piece.text}
            said = {"delta": {"content": piece.text}} if self._chat else said
            chunks.append(self._chunk([self._choice(index, said, [unfinished])]))
        if piece.finish:
            end = Piece("", finish=piece.finish)
            said = {"delta": {}} if self._chat else {"text": ""}
            chunks.append(self._chunk([self._choice(index, said, [end])]))
        return chunks

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return what says how many tokens there were."""
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _choice(self, index: int, said: dict[str, Any], pieces: Sequence[Piece]) -> dict[str, Any]:
        tokens = [piece.token for piece in pieces if piece.token is not None]
        logprobs = None
        if self._with_tokens and tokens:
            logprobs = self._of_chat(tokens) if self._chat else self._of_text(index, tokens)
        finish = pieces[-1].finish if pieces else ""
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish or None}

    def _of_chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = [
            {
                **self._named(token.id, token.log_p),
                "top_logprobs": [self._named(*pair) for pair in token.best],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, log_p: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": log_p, "bytes": list(self._bytes(token))}

    def _of_text(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offset, stream = self._offsets[index]
            shown = stream.step(token.id) if token.id < self._tokenizer.n_vocab else ""
            own = self._text(token.id)  # behind what bytes before it came to, if they waited
            waited = len(shown) - len(own) if own and shown.endswith(own) else 0
            offsets.append(offset + waited)
            self._offsets[index] = offset + len(shown), stream
        # the likeliest last: of tokens that read alike it is the one that stays
        best = [{self._text(i): p for i, p in reversed(token.best)} for token in tokens]
        return {
            "tokens": [self._text(token.id) for token in tokens],
            "token_logprobs": [token.log_p for token in tokens],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }

    def _bytes(self, token: int) -> bytes:
        # a model may have more ids than its tokenizer
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.n_vocab else b""

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")
