"""``myllm serve``: the command."""

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator, Sequence

from accel.help import parser
from dist import checkpoint
from dist.generate import never_chatted
from dist.model import Model
from dist.use import add_model, load
from reference.batch import Batch, Row

OPEN = "whoever can reach this machine can use the model: there is no password"
NEEDED = (
    "myllm serve needs starlette and uvicorn: pip install 'myllm[serve]', or in a checkout "
    "pip install -e '.[serve]'"
)


def serve(argv: Sequence[str]) -> int:
    """``myllm serve``."""
    args = parser(
        "serve",
        "Let programs and browsers talk with a model: /v1/chat/completions, /v1/completions and "
        "/v1/models in the form of OpenAI's API, and a page at /. Answers are written together, "
        "and each as if it were alone. Ctrl-C ends it.",
        "myllm serve runs/laptop\n  curl http://127.0.0.1:8000/v1/completions \\\n"
        "    -H 'Content-Type: application/json' \\\n"
        '    -d \'{"model": "laptop", "prompt": "Once upon a time"}\'',
    )
    add_model(args)
    args.add_argument(
        "--host",
        default="127.0.0.1",
        help="where to listen (127.0.0.1: this machine only; 0.0.0.0: whoever can reach it)",
    )
    args.add_argument("--port", type=int, default=8000, help="8000; 0 takes any that is free")
    args.add_argument("--name", help="of the model in requests (default: that of the folder)")
    args.add_argument(
        "--batch",
        type=int,
        default=8,
        metavar="N",
        help="answers that are written at once (8); each has a KV cache of the whole context",
    )
    args.add_argument(
        "--queue", type=int, default=64, metavar="N", help="answers that may wait beside them (64)"
    )
    args.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="an answer takes no longer, its waiting included (600)",
    )
    given = args.parse_args(argv)
    if given.batch < 1 or given.queue < 0 or not given.timeout > 0:
        raise ValueError("--batch must be at least 1, --queue 0, and --timeout more than 0")
    if not 0 <= given.port < 1 << 16:
        raise ValueError(f"--port must lie in 0..65535, got {given.port}")
    try:
        from dist.serve.app import LOCAL, Served, make_app
        from dist.serve.engine import Engine
        from dist.serve.server import Server
    except ModuleNotFoundError as error:
        raise ImportError(f"{NEEDED} ({error})") from error

    with _bound(given.host, given.port) as listening:
        model, tokenizer = load(given)
        if tokenizer.n_vocab > model.config.vocab_size:
            raise ValueError(
                f"{model.path}: the tokenizer has {tokenizer.n_vocab:,} ids, but the model "
                f"{model.config.vocab_size:,}"
            )
        if model.config.context_length < 2:
            raise ValueError(
                f"{model.path}: a context of one token has no room for a prompt and its answer; "
                "myllm generate, which forgets what came first, can write with it"
            )
        try:
            no_chat = never_chatted(model, tokenizer)
        except ValueError as error:
            no_chat = str(error)
        name = given.name or checkpoint.name_of(model.path)
        local = given.host in LOCAL
        served = Served(name, model, tokenizer, no_chat, given.timeout, local)
        _warm(model)
        tokenizer.decode(tokenizer.encode_ordinary("the tokenizer's kernels, too"))

        def introduce() -> None:
            host, port = listening.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            if no_chat:
                print(f"myllm serve: no chat: {no_chat}", file=sys.stderr, flush=True)
            if not local:
                print(f"myllm serve: {OPEN}", file=sys.stderr, flush=True)
            print(f"{name} is served at http://{shown}:{port} (Ctrl-C ends it)", flush=True)

        def ended() -> None:
            server.should_exit = True

        engine = Engine(model, places=given.batch, queue=given.queue, ended=ended)
        server = Server(make_app(served, engine), engine, introduce)
        engine.start()
        server.run([listening])
    if engine.failure is not None:
        raise engine.failure
    print("ended", flush=True)
    return 0


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Take the address before the model is read, so that it is known at once when it is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"cannot listen on {host}: {error}") from error
    with found:
        if sys.platform != "win32":  # there it would let two programs take one port
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
        except OSError as error:
            other = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
            raise OSError(
                f"cannot listen on {host}, port {port}: {error.strerror}; choose another {other}"
            ) from error
        yield found


def _warm(model: Model) -> None:
    """Compile what is compiled at the first use, before somebody waits for it."""
    batch = Batch(model.ops, model.params, model.config, 2)
    for _ in range(2):
        batch.join(Row([0]))
    for _ in range(2):
        for row, _ in batch.step():
            row.ids.append(0)
