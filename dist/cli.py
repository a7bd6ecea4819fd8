"""The command ``myllm``: a thin dispatcher.

``COMMANDS`` names the function behind each subcommand; its module is imported only when the
subcommand is called, so ``myllm --help`` costs nothing. The function takes the remaining arguments
and returns an exit status: 0 for success, 1 for failure, 2 for wrong usage.

What a subcommand raises as ``ValueError``, ``OSError``, ``ImportError`` or ``MemoryError`` is taken
as a message to the person at the terminal: one sentence on stderr and status 1.
``MYLLM_TRACEBACK=1`` in the environment shows the traceback as well, for those who look for a bug.
"""

import errno
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast


class Command(NamedTuple):
    target: str  # "module:function"
    help: str  # one line for myllm --help


# One or two words -> where the subcommand lives. A line appears here when its subcommand works.
COMMANDS: dict[str, Command] = {
    "demo": Command("dist.demo:main", "from nothing to a model that writes, in five minutes"),
    "pack": Command("dist.commands:pack", "turn texts into shards of token ids"),
    "train": Command("dist.commands:train", "train a model, on one rank or many, and resume it"),
    "generate": Command("dist.generate:main", "let a trained model write"),
    "chat": Command("dist.chat:main", "talk with a model that was trained on conversations"),
    "serve": Command("dist.serve.cli:serve", "a model over HTTP: OpenAI's API, and a page"),
    "score": Command("dist.score:main", "how likely a model finds a text, token by token"),
    "eval": Command("dist.use:eval_", "measure a trained model on held-out text"),
    "inspect": Command("dist.inspect.cli:inspect", "what a model makes of a text, as a page"),
    "export": Command(
        "dist.convert.commands:export", "weights and tokenizer for Hugging Face or llama.cpp"
    ),
    "import": Command(
        "dist.convert.commands:import_", "weights and tokenizer of others, into a checkpoint"
    ),
    "plot": Command("dist.use:plot", "draw the curves of a run, or compare runs"),
    "sweep": Command("dist.sweep.cli:main", "small runs that differ in a few keys, compared"),
    "plan": Command("dist.plan:main", "memory, work, time and disk of a run, by arithmetic"),
    "bench cpu": Command(
        "accel.bench.cpu:main", "time the cpu backend, beside PyTorch if it is there"
    ),
    "verify": Command("accel.verify.cli:run", "hold any kernel, in any language, to the reference"),
    "study ablations": Command(
        "dist.study.ablations.cli:run", "positions, norms and heads, tried on small models"
    ),
    "study": Command("dist.study.cli:run", "the ladder rung by rung, and graded exercises"),
    "tokenizer train": Command("tokenizer.cli:train", "learn a byte-level BPE vocabulary"),
    "tokenizer encode": Command("tokenizer.cli:encode", "text to ids"),
    "tokenizer decode": Command("tokenizer.cli:decode", "ids to text"),
    "tokenizer info": Command("tokenizer.cli:info", "size, special ids, bytes per token"),
    "tokenizer export": Command("tokenizer.cli:export", "to Hugging Face or tiktoken"),
    "tokenizer import": Command("tokenizer.cli:import_", "from Hugging Face or tiktoken"),
    "tokenizer extend": Command("tokenizer.cli:extend", "add special tokens, those of a chat"),
    "tokenizer compare": Command("tokenizer.cli:compare", "four ways to cut text, side by side"),
    "bench cuda": Command("accel.bench.cuda:main", "the GPU's kernels, products and training step"),
    "bench verify": Command(
        "accel.verify.board.bench:main", "what verify and others' rules catch of wrong kernels"
    ),
    "bench train": Command("dist.bench.train:main", "start-up, own time, ranks against threads"),
    "bench loss": Command("dist.bench.loss:main", "minutes to a loss, beside a trainer in PyTorch"),
    "bench generate": Command(
        "dist.bench.generate:main", "tokens written and read, beside llama.cpp"
    ),
    "bench convert": Command(
        "dist.bench.convert:main", "export and import, beside copying the same file"
    ),
    "bench serve": Command("dist.bench.serve:main", "tokens a second, one answer and several"),
    "bench tokenizer": Command(
        "dist.bench.tokenizer:main", "beside tiktoken, rustbpe, Hugging Face"
    ),
}


def usage(group: str = "") -> str:
    """Return the text of ``myllm --help``, or of the help of the commands that begin alike."""
    shown = {name: c for name, c in COMMANDS.items() if name.startswith(group)}
    width = max((len(name) for name in shown), default=0)
    lines = [f"  {name:<{width}}  {command.help}" for name, command in shown.items()]
    return "\n".join(
        [
            f"usage: myllm {group}COMMAND [ARGUMENTS]",
            "",
            "A transformer language model with no framework underneath.",
            "",
            "commands:",
            *lines,
            "",
            f"myllm {group}COMMAND --help explains a command and gives an example.",
        ]
    )


def find(argv: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the command named by the first one or two words, and the arguments left over."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if len(argv) >= words and name in COMMANDS:
            return name, list(argv[words:])
    return None


def loaded(name: str) -> Callable[[list[str]], int]:
    """Return the function behind a command, its modules imported.

    These are in use to the end: the search for garbage, which would take a quarter of the time that
    importing and ending take, leaves them out.
    """
    module, function = COMMANDS[name].target.split(":")
    if module not in sys.modules:
        searching = gc.isenabled()
        gc.disable()
        try:
            importlib.import_module(module)
        finally:
            gc.freeze()
            if searching:
                gc.enable()
    return cast(Callable[[list[str]], int], getattr(sys.modules[module], function))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (by default the process's own) and return its exit status."""
    try:
        status = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except OSError as error:  # of what is written to stdout; it would fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader, `head` say, has left
            print(f"myllm: {_advised(error)}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    if sys.platform == "win32":
        from accel.system import write_utf8  # imports NumPy, and is not needed elsewhere

        write_utf8()
    elif getattr(sys.stdout, "errors", "") == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # letters that its encoding lacks
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    found = find(argv)
    if found is None:
        known = sorted({name.split()[0] for name in COMMANDS})
        inner = [name for name in COMMANDS if name.startswith(argv[0] + " ")]
        if inner and argv[1:] and argv[1] in ("-h", "--help"):
            print(usage(f"{argv[0]} "))
            return 0
        say = f"say which: {', '.join(inner)}" if inner else f"known: {', '.join(known)}"
        print(f"myllm: no command {' '.join(argv[:1])!r}; {say}", file=sys.stderr)
        return 2
    name, rest = found
    try:
        from dist.interrupt import Ended, raising  # imports NumPy, as whatever does something does
    except KeyboardInterrupt:
        print(f"myllm {name}: interrupted", file=sys.stderr)
        return 130
    try:
        with raising():
            return loaded(name)(rest)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError, MemoryError) as error:
        if os.environ.get("MYLLM_TRACEBACK"):
            traceback.print_exc()
        print(f"myllm {name}: {_advised(error)}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # Python has no type of its own for this one
        if "start new thread" not in str(error) or os.environ.get("MYLLM_TRACEBACK"):
            raise
        print(f"myllm {name}: {error}: the system allows no more (ulimit -u, -v)", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"myllm {name}: interrupted", file=sys.stderr)
        return 130
    except Ended as end:
        print(f"myllm {name}: {end}", file=sys.stderr)
        return 128 + end.signal


def _advised(error: BaseException) -> str:
    """Return an error as one sentence, with what to do about a full disk."""
    from dist.comm import sentence

    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "; make room there, and give the command again" if full else ""
    return f"{sentence(error)}{advice}"


if __name__ == "__main__":
    sys.exit(main())
