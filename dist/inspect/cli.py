"""``myllm inspect``: a text through a trained model, as a page to look at."""

import base64
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.help import parser
from dist.inspect.trace import Trace, trace
from dist.model import Model, load_model
from dist.monitor import bytes_text
from dist.use import add_checkpoint, text_of, tokenizer_of
from reference.params import decoder_layout
from reference.types import Array
from tokenizer.files import make_room, replace_durably

if TYPE_CHECKING:
    from tokenizer import Tokenizer

BEST = 5  # predictions shown of each token


def inspect(argv: Sequence[str]) -> int:
    """``myllm inspect``."""
    args = parser(
        "inspect",
        "Write one HTML page that shows what a model makes of a text: loss and predictions of each "
        "token, attention by layer and head, norms of activations and gradients, and what each "
        "layer would predict. It needs no network and no other file. Nothing stands before the "
        "text, so nothing predicts its first token; `myllm score` has an end of text there.",
        'myllm inspect runs/laptop --text "Once upon a time there was a king."',
    )
    add_checkpoint(args)
    args.add_argument("--text", required=True, help="what to read; - takes it from standard input")
    args.add_argument(
        "-o", "--out", type=Path, default=Path("inspect.html"), help="default inspect.html"
    )
    given = args.parse_args(argv)
    make_room(given.out, b"<!doctype html>")
    model = load_model(given.checkpoint, "reference", "float32")
    tokenizer = tokenizer_of(model)
    text = text_of(given.text)
    ids = np.array(tokenizer.encode_ordinary(text), np.int32)
    page = make_page(model, tokenizer, ids)
    replace_durably(given.out, page.encode())
    print(f"{given.out}: {len(ids)} tokens, {bytes_text(len(page.encode()))}")
    return 0


def make_page(model: Model, tokenizer: "Tokenizer", ids: Array) -> str:
    """Return the page about the tokens of a text."""
    found = trace(model.params, model.config, ids, min(BEST, model.config.vocab_size))
    return page_of(facts(model, found, tokenizer, ids))


def page_of(data: dict[str, Any]) -> str:
    """Return the page with its data in it."""
    # as JSON in a script element: neither "</script>" nor "<!--" in a token may end it
    content = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    template = resources.files("dist.inspect").joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("__DATA__", content)


def facts(model: Model, found: Trace, tokenizer: "Tokenizer", ids: Array) -> dict[str, Any]:
    """Return what the page is made of, as plain values."""
    config = model.config
    named = sorted({*ids.tolist(), *found.best.reshape(-1).tolist()})
    n_bytes = sum(len(_bytes(tokenizer, i)) for i in ids[1:].tolist())
    bits = found.loss.sum() / np.log(2) / max(n_bytes, 1)
    return {
        "model": str(model.path),
        "parameters": decoder_layout(config).size,
        "layers": config.n_layers,
        "heads": config.n_heads,
        "ids": ids.tolist(),
        "names": {str(i): _name(tokenizer, i) for i in named},
        "loss": _short(found.loss, 3),
        "rank": found.rank.tolist(),
        "figures": f"{len(ids)} tokens; of the {len(ids) - 1} behind the first, which nothing "
        f"predicts: mean loss {found.loss.mean():.3f} nats, {bits:.3f} bits per byte",
        "best": found.best.tolist(),
        "best_p": _short(found.best_p, 4),
        "true_p": _short(found.true_p, 5),
        "attention": [[_triangle(head) for head in layer] for layer in found.attention],
        "x_norm": _short(found.x_norm, 3),
        "dx_norm": _short(found.dx_norm, 5),
    }


def _triangle(p: Array) -> str:
    """Return the lower triangle of P (T, T) in base64, a byte each: 255 √p, as most p are small."""
    rows, columns = np.tril_indices(len(p))
    levels = np.round(255 * np.sqrt(p[rows, columns].astype(np.float64)))
    return base64.b64encode(levels.astype(np.uint8).tobytes()).decode()


def _short(values: Array, digits: int) -> Any:
    """Return numbers with so many significant digits, in lists."""
    flat = [float(f"{x:.{digits}g}") for x in np.asarray(values, np.float64).reshape(-1)]
    return np.array(flat).reshape(np.shape(values)).tolist()


def _bytes(tokenizer: "Tokenizer", token: int) -> bytes:
    return tokenizer.vocabulary.tokens.get(token, b"")


def _name(tokenizer: "Tokenizer", token: int) -> str:
    """Return a token as text; bytes that are no whole character are escaped."""
    if token in tokenizer.vocabulary.tokens:
        return _bytes(tokenizer, token).decode("utf-8", "backslashreplace")
    if token < tokenizer.n_vocab:
        return tokenizer.decode([token])
    return f"#{token}"  # a model may have more ids than its tokenizer
