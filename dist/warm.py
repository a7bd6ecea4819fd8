"""Compiles the kernels of a run before its first step, on all cores at once.

A kernel is compiled when it is first called, and a step calls one after the other: on a cold cache
one core would compile for a minute while the others wait. Here a step of a tiny model of the run's
kind goes through the reference, which notes what each op is called with. Each op is then called by
itself on the run's backend, by whichever process of this machine comes to it first: the ranks,
and as many more (``python -m dist.warm``) as there are cores. Their kernels go to the cache
(``accel/jit.py``), where the run finds them.

Of a run whose mode is to be chosen it is the products of every mode, by which it is.

What was missed, or could not be compiled here, is compiled when it is called.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from accel import AUTO, launcher, offered, system
from accel import load as load_backend
from accel.jit import Store, store_of
from accel.threads import available_cores
from dist.comm import Solo
from dist.config import RunFile, from_tables
from dist.data import make_batch
from dist.mode import in_mode
from dist.monitor import Output, terminal_columns
from dist.step import Stepper, initial_weights
from reference import model
from reference import ops as reference
from reference.config import Config
from reference.generate import generate
from reference.ops import OPS, Ops
from reference.params import decoder_layout
from reference.types import Array

TOKENS = 8  # of a tiny model's context
PRODUCTS = ("linear_forward-", "linear_backward-")  # tasks that the choice of a mode needs
LONGEST = ("attention_", "linear_")


class Task(NamedTuple):
    """Something to be called once, so that its kernels are compiled."""

    name: str  # the same in every process, and for every run that would call it alike
    compute: str  # of the backend that it is given
    call: Callable[[Ops], object]
    after: str = ""  # the task that calls what this one calls, too


def compile_kernels(run: RunFile, *, writes: bool = False) -> None:
    """Compile what is missing in the cache, together with the other ranks of this machine.

    Parameters
    ----------
    run : RunFile
        Whose backend may be another than the cpu: then there is nothing to do.
    writes : bool
        Whether the model is to write, too.
    """
    if run.run.backend != "cpu":
        return
    ranks = 1 if run.run.compute == AUTO else launcher.local_size()  # one chooses, the others wait
    with helpers(available_cores() // ranks - 1) as begin:
        begin(run, writes=writes)()


class Begin(Protocol):
    """Has the helpers compile what a run misses; what it returns helps them until it is done."""

    def __call__(self, run: RunFile, *, writes: bool = False) -> Callable[[], None]: ...


@contextlib.contextmanager
def helpers(number: int) -> Iterator[Begin]:
    """Have a number of processes compile for one run after the other, beside the caller.

    They are started when something is missing, and end when the block does, or this process.
    """
    store = _store()
    started: list[subprocess.Popen[str]] = []
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "MYLLM_THREADS": "1", "PYTHONPATH": path}

    def begin(run: RunFile, *, writes: bool = False) -> Callable[[], None]:
        missing = [task for task in tasks_of(run, writes=writes) if not _is_done(store, task)]
        if missing:
            store.announce("accel.cpu")
        while len(started) < min(number, len(missing)):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "dist.warm"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    encoding="utf-8",
                    env=environment,
                    **system.out_of_reach(),
                )
            )
        order = json.dumps({"run": run.to_dict(), "writes": writes}) + "\n"
        for process in started:
            with contextlib.suppress(BrokenPipeError):  # it has said on stderr why it ended
                cast(Any, process.stdin).write(order)
                cast(Any, process.stdin).flush()
        return lambda: work(missing, store, _show)

    try:
        yield begin
    finally:
        for process in started:
            with contextlib.suppress(BrokenPipeError):
                cast(Any, process.stdin).close()  # which ends it
            process.wait()


def main() -> None:
    """Compile what each line of stdin asks for; end at once when stdin does."""
    orders: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    store = _store()
    store.silent = True
    while True:
        order = json.loads(orders.get())
        work(tasks_of(from_tables(order["run"]), writes=order["writes"]), store)


def _read(orders: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    os._exit(0)


# ---- sharing -------------------------------------------------------------------------------------


def work(
    tasks: list[Task],
    store: Store,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Do the tasks that nobody does; wait for the others, and do what they leave undone.

    ``show`` is told how many of how many are done.
    """
    left = list(tasks)
    while left:
        names = {task.name for task in left}
        ready = [task for task in left if task.after not in names]
        task = next((task for task in ready if _do(task, store, wait=False)), ready[0])
        _do(task, store, wait=True)
        left.remove(task)
        show(len(tasks) - len(left), len(tasks))


def _do(task: Task, store: Store, *, wait: bool) -> bool:
    """See that a task is done; unless ``wait``, not if another process has it."""
    descriptor = store.open_lock(task.name)
    try:
        if not system.lock(descriptor, wait=wait):
            return False
        if os.fstat(descriptor).st_size == 0:
            task.call(load_backend("cpu", compute=task.compute))
            os.write(descriptor, b"done")
        return True
    finally:
        os.close(descriptor)


def _show(done: int, total: int) -> None:
    """Let a line on the terminal tell how far the compiling is."""
    if launcher.local_rank() == 0 and terminal_columns(Output(sys.stderr)):
        end = "\n" if done == total else ""
        print(f"\rcompiling: {done} of {total} calls", end=end, file=sys.stderr, flush=True)


def _is_done(store: Store, task: Task) -> bool:
    path = store.folder / f"{task.name}.lock"
    return path.exists() and path.stat().st_size > 0


def _store() -> Store:
    import accel.cpu

    store = store_of(str(accel.cpu.__file__))
    assert store is not None
    return store


# ---- what there is to compile --------------------------------------------------------------------


def tasks_of(run: RunFile, *, writes: bool) -> list[Task]:
    """Return the calls that differ in kind of a step, an evaluation and, if asked for, writing.

    Those that take longest to compile come first.
    """
    if run.run.compute == AUTO:
        modes = reversed(offered(run.run.backend))  # bf16 has most to compile
        every = [tasks_of(in_mode(run, name), writes=False) for name in modes]
        return [task for tasks in every for task in tasks if task.name.startswith(PRODUCTS)]
    tiny = _tiny(run.model)
    batch = make_batch([(np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, np.bool_))] * 2)
    if run.data.isolate_documents:
        batch = batch._replace(documents=np.zeros_like(batch.ids))
    layout, recorder = decoder_layout(tiny), Recorder(run.run.compute)
    ops = cast(Ops, recorder)
    weights = initial_weights(ops, layout, 0)
    stepper = Stepper(ops, tiny, run.optim, layout, Solo(), weights, 0, run.run.recompute)
    # two leaves, so that the tree adds
    stepper.update(stepper.gradient([batch, batch], 1, 0), 1e-3)
    tasks = sorted(recorder.tasks.values(), key=lambda task: not task.name.startswith(LONGEST))
    if writes or run.run.sample_every:
        compute = run.run.compute
        name = _name("writing", compute, tiny.to_dict())
        tasks.append(Task(name, compute, partial(_write, tiny)))
    return tasks


def _tiny(model: Config) -> Config:
    """Return a model of the same kind, a few numbers wide."""
    grouped = model.n_kv_heads < model.n_heads
    window = model.window if isinstance(model.window, int) else max(model.window)
    return dataclasses.replace(
        model,
        vocab_size=TOKENS,
        d_model=8,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1 if grouped else 2,
        d_head=4,
        d_ff=8,
        context_length=TOKENS,
        window=min(window, TOKENS),
    )


def _write(tiny: Config, ops: Ops) -> None:
    layout = decoder_layout(tiny)
    params = ops.parameters(layout.views(layout.init(0)))
    generate(ops, params, tiny, [[1, 2]], max_new_tokens=2, temperature=1.0, seed=1)


class Recorder:
    """The reference as a backend that notes how its ops are called."""

    def __init__(self, compute: str) -> None:
        self.tasks: dict[str, Task] = {}
        self._compute = compute
        self._weights: dict[int, Array] = {}
        self._ops = {name: op for op in OPS.values() for name in op.names}

    def __getattr__(self, name: str) -> Any:
        function = getattr(reference, name)
        op = self._ops.get(name)
        if op is None:
            return function
        if not op.backward:
            return partial(self._plain, name, function)
        return partial(self._forward if name == op.forward_name else self._backward, op, function)

    def parameters(self, master: Mapping[str, Array]) -> dict[str, Array]:
        """Remember which arrays are weights: a backend keeps other forms of them."""
        made = dict(master)
        self._weights = {id(array): array for array in made.values()}
        return made

    def gradient(self, *given: Any, **how: Any) -> Any:
        """Compute a gradient of these ops, so that they are noted."""
        return model.gradient(cast(Ops, self), *given, **how)

    def _note(self, kind: str, call: Callable[[Ops], object], *given: Any, after: str = "") -> str:
        name = _name(kind, self._compute, [self._kind_of(value) for value in given])
        self.tasks.setdefault(name, Task(name, self._compute, call, after))
        return name

    def _plain(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        again = partial(_call, name, self._marked(args), options)
        self._note(name, again, args, options)
        return function(*args, **options)

    def _forward(self, op: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        again = partial(_call, op.forward_name, self._marked(args), options)
        name = self._note(op.forward_name, again, args, options)
        out, cache = function(*args, **options)
        return out, (cache, again, name, args, options)

    def _backward(
        self, op: Any, function: Callable[..., Any], dout: Any, noted: Any, **options: Any
    ) -> Any:
        cache, forward, after, *given = noted

        def again(ops: Ops) -> None:
            _, kept = forward(ops)
            getattr(ops, op.backward_name)(dout, kept, **options)

        self._note(op.backward_name, again, *given, dout, options, after=after)
        return function(dout, cache, **options)

    def _marked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_Weight(a) if id(a) in self._weights else a for a in args)

    def _kind_of(self, value: Any) -> Any:
        """Return what a kernel could be compiled for: types, axes, what is missing, choices."""
        if isinstance(value, np.ndarray):
            return [value.dtype.str, value.ndim, id(value) in self._weights]
        if isinstance(value, Mapping):
            return {name: self._kind_of(part) for name, part in value.items()}
        if isinstance(value, (tuple, list)):
            return [self._kind_of(part) for part in value]
        if value is None or isinstance(value, (bool, str)):
            return value
        return type(value).__name__


class _Weight(NamedTuple):
    array: Array


def _call(name: str, args: tuple[Any, ...], options: dict[str, Any], ops: Ops) -> Any:
    given = [ops.parameters({"": a.array})[""] if isinstance(a, _Weight) else a for a in args]
    return getattr(ops, name)(*given, **options)


def _name(kind: str, *detail: object) -> str:
    digest = hashlib.sha256(json.dumps(detail, sort_keys=True).encode()).hexdigest()
    return f"{kind}-{digest[:16]}"


if __name__ == "__main__":
    main()
