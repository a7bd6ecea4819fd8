"""The training loop.

    myllm train CONFIG.toml                      one rank, no MPI
    myllm train CONFIG.toml --ranks 2            starts MPI itself
    mpirun -n 8 myllm train CONFIG.toml          under a launcher of your own

All ranks run this same code; rank 0 also speaks and writes the metrics.
"""

import errno
import math
import shutil
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from threadpoolctl import threadpool_limits

from accel import load as load_backend
from accel.system import HANDED_ON
from dist import checkpoint, manifest, mode, monitor, saving
from dist.carriers import carrier
from dist.checkpoint import CHECKPOINTS
from dist.comm import AllRanksError, Comm, sentence, together, warn
from dist.config import RunFile, from_tables
from dist.data import TrainingData, Windows, any_known, held_out, short_names
from dist.differences import computes_by, measured_on, same_learning, the_same
from dist.evaluate import Evaluation, evaluate, load_tokenizer, pooled, token_lengths
from dist.introduction import introduction
from dist.lock import locked, still_at
from dist.step import Stepper
from dist.stopping import StopRequest, same_command
from dist.weights import Weights, first_weights, same_tokenizer
from reference.flops import training_flops
from reference.generate import generate
from reference.params import decoder_layout
from tokenizer.files import LOCK, check_folder, replace_durably

CONFIG = "config.toml"


class Trainer:
    """A run in progress.

    Parameters
    ----------
    config : RunFile
    comm : Comm
    changed : bool
        Go on from a checkpoint although the settings that decide what is learned have changed.
    begin : str, optional
        The checkpoint to go on from, ``step-N``, in place of the newest.

    Raises
    ------
    AllRanksError
        When it cannot start, whichever rank found out.
    """

    def __init__(
        self, config: RunFile, comm: Comm, *, changed: bool = False, begin: str | None = None
    ) -> None:
        self.comm = comm
        self._held = ExitStack()  # the lock of the run's folder, on rank 0
        self._lock: int | None = None  # its descriptor, as long as it lies there
        self.carried = ""  # a sentence: how a GPU's arrays travel
        self.out = Path(config.run.out)
        self.config_file = self.out / CONFIG
        self.heldout: list[Windows] = []
        self.reservations: list[str] = []  # sentences on what is not promised of a run that goes on
        together(comm, lambda: check_folder(self.out), only=0)
        self.again = same_command(set_back=begin is not None)
        comm.watch.follow(self.out, config.run.timeout, self.again)
        folder = self.out / CHECKPOINTS
        newest = together(comm, lambda: checkpoint.to_resume(folder, begin), only=0)[0]
        there = together(comm, lambda: checkpoint.steps(folder), only=0)[0]
        config, self.chosen = together(comm, lambda: mode.settled(config, newest), only=0)[0]
        config, self.attention = together(comm, lambda: mode.attending(config, newest), only=0)[0]
        config, self.products = together(comm, lambda: mode.multiplying(config, newest), only=0)[0]
        self.config = config
        the_same(together(comm, lambda: self._open(fresh=newest is None)))
        self.comm, self.carried = carrier(comm, config.run.backend, config.run.comm)
        layout = decoder_layout(config.model)
        first, self.begun = first_weights(
            self.ops, layout, config, comm, self.tokenizer, fresh=newest is None
        )
        self.stepper = Stepper(
            self.ops,
            config.model,
            config.optim,
            layout,
            self.comm,
            first,
            config.train.seed,
            config.run.recompute,
            config.run.overlap,
        )
        self.step = 0
        memory = monitor.Memory()
        self.chats = self.data.chats
        if newest is not None:
            memory = self._resume(newest, changed)
        elif config.train.init:
            init = config.train.init
            chats = together(comm, lambda: Weights(init).manifest.chats, only=0)[0]
            self.chats = any_known([self.chats, chats])
        self.guards = monitor.Guards(config.run.patience, memory)
        self.best = memory.best
        self.saved_step = self.step if newest is not None else -1
        self.set_back = newest.name if newest is not None and begin is not None else None
        together(comm, lambda: self._prepare_folder(newest, there), only=0)

    def _open(self, *, fresh: bool) -> dict[str, str]:
        """Open what the run reads; return, by path, what tells it from another of that name."""
        run, init = self.config.run, self.config.train.init
        self.accumulation = self.config.accumulation(self.comm.size)
        self.ops = load_backend(
            run.backend, compute=run.compute, attention=run.attention, products=run.products
        )
        if run.backend == "reference":
            threadpool_limits(1)  # BLAS adds up in an order that depends on its threads
        self.data = TrainingData(self.config)
        self.heldout = held_out(self.config)
        for windows in self.heldout:
            if not windows.has_targets(run.eval_windows):
                raise ValueError(
                    f"no token of the first {run.eval_windows} windows of {windows.dataset.path} "
                    "(run.eval_windows) is to be predicted: name another data.heldout"
                )
            theirs, ours = windows.dataset.tokenizer_sha256, self.data.tokenizer_sha256
            if theirs is not None and ours is not None and theirs != ours:
                raise ValueError(
                    f"{windows.dataset.path} was not packed with the tokenizer of the training data"
                )
        sets = [windows.dataset for windows in (*self.data.sources, *self.heldout)]
        self.checksums = {str(each.path): each.checksum for each in sets if each.checksum}
        # any source's: they were all packed with the same
        self.tokenizer_path = self.data.sources[0].dataset.tokenizer
        self.tokenizer = None
        self.lengths = None
        if self.tokenizer_path is not None:
            self.tokenizer = load_tokenizer(self.tokenizer_path, self.data.tokenizer_sha256)
            self.lengths = token_lengths(self.tokenizer, self.config.model.vocab_size)
        elif self.config.run.sample_every:
            raise ValueError(
                "run.sample_every needs a tokenizer, but "
                f"{self.data.sources[0].dataset.path} has none beside it"
            )
        if run.sample_every and self.tokenizer is not None:
            length = len(self.tokenizer.encode_ordinary(run.sample_prompt or "\n"))
            if length >= self.config.window:
                raise ValueError(
                    f"run.sample_prompt has {length} tokens, which leaves no room to write in a "
                    f"context of {self.config.window}: shorten it"
                )
        if run.backend == "cpu":
            from dist.warm import compile_kernels  # with Numba, as long to import as all else

            compile_kernels(self.config)
        known = {str(each.path): f"{each.n_tokens} {each.checksum}" for each in sets}
        if fresh and init:
            known[init] = checkpoint.read_manifest(checkpoint.find(init)).checksum
        return known

    def _resume(self, newest: Path, changed: bool) -> monitor.Memory:
        saved = together(self.comm, lambda: checkpoint.read_resumable(newest))[0]
        state: checkpoint.State = saved
        differences = same_learning(state.config, self.config, state.data, self.checksums)
        known = state.tokenizer_sha256
        if known != self.data.tokenizer_sha256:
            differences.append("the tokenizer of the data")
            together(self.comm, lambda: same_tokenizer(newest, known, self.tokenizer))
        others = sorted(
            path
            for path, checksum in self.checksums.items()
            if state.data.get(path, checksum) != checksum
        )
        differences += [f"{path} was packed anew, and differs" for path in others]
        best = together(self.comm, lambda: checkpoint.pointed(newest.parent, "best"), only=0)[0]
        if differences and saved.parameters != self.stepper.layout.size:
            raise AllRanksError(
                f"{newest} is of another model ({'; '.join(differences)}), of {saved.parameters:,} "
                f"parameters and not {self.stepper.layout.size:,}: choose another run.out"
            )
        if differences and not changed:
            raise AllRanksError(
                f"{newest} belongs to a run with other settings ({'; '.join(differences)}): pass "
                "--changed to go on from it all the same, or choose another run.out"
            )
        state = checkpoint.load(newest, self.stepper, self.comm)
        self.chats = any_known([self.chats, state.chats])
        self.step = state.step
        if not state.sealed:
            self.reservations.append(
                f"{newest} was saved by an older version: nothing checks its {checkpoint.MANIFEST}"
            )
        before, now = (computes_by(c.run) for c in (from_tables(state.config), self.config))
        if before != now:
            self.reservations.append(
                f"{newest} was learned by the backend {before}: from here on the last bits are "
                f"those of {now}"
            )
        taken = self.step * self.config.train.global_batch
        if state.position != taken:
            what = "are passed over" if taken > state.position else "come again"
            self.reservations.append(
                f"{newest} has taken {state.position:,} windows; by train.global_batch "
                f"({self.config.train.global_batch}) the data goes on behind {taken:,}: "
                f"{abs(taken - state.position):,} windows {what}"
            )
        former = from_tables(state.config)
        measured = measured_on(former, state.data)
        of_another_text = measured != measured_on(self.config, self.checksums if state.data else {})
        # or learned otherwise, behind this step: what is learned now is not held to it
        of_another_run = differences and best is not None and best.name > newest.name
        if of_another_text or of_another_run:
            return msgspec.structs.replace(state.monitor, best=None)
        return state.monitor

    def _prepare_folder(self, newest: Path | None, there: list[int]) -> None:
        with ExitStack() as held:
            self._lock = held.enter_context(locked(self.out, "run"))
            folder = self.out / CHECKPOINTS
            moved = self.set_back is None and checkpoint.to_resume(folder) != newest
            if moved or checkpoint.steps(folder) != there:
                raise ValueError(
                    f"another run has gone on in {self.out} while this one was getting ready: give "
                    "the command again, which goes on from there"
                )
            replace_durably(self.config_file, self.config.to_toml().encode())
            self._held = held.pop_all()  # until the run ends

    # ---- the loop ----------------------------------------------------------------------------

    def run(self, stop: StopRequest) -> int | None:
        """Train to the last step; return the signal that ended it before, or None.

        Raises
        ------
        AllRanksError
            When too many steps in a row were not finite.
        """
        config, comm = self.config, self.comm
        every = config.run.log_every
        self.console = monitor.Console(comm.rank == 0, config.steps, comm.watch, every=every)
        self.sinks: list[monitor.Metrics | monitor.TensorBoard] = []  # of rank 0
        self.unwritten: str | None = None  # why rank 0 could not write a record
        self.measured = False  # rank 0: what was held out, after the step that it goes on from
        self.saving: saving.Saving | None = None  # being written
        self.copies: saving.Copies | None = None  # what is being written, of this rank
        self.removing = threading.Thread()  # checkpoints that are no longer needed
        self._introduce()
        try:
            self.peak = monitor.measure_peak(self.ops, comm)
            self.flops = training_flops(config.model, config.model.context_length, causal=False)
            together(comm, self._open_sinks, only=0)
            return self._loop(stop)
        finally:
            self._wait_for_removing()
            self._held.close()
            self.console.close()
            for sink in self.sinks:
                sink.close()

    def _open_sinks(self) -> None:
        metrics = monitor.Metrics(self.out, self.step)
        self.sinks.append(metrics)
        self.measured = metrics.measured
        if self.config.run.tensorboard:
            self.sinks.append(monitor.TensorBoard(self.out, self.step))

    def _loop(self, stop: StopRequest) -> int | None:
        config, run = self.config, self.config.run
        self._measure_what_was_left()
        started, first_step = time.perf_counter(), self.step
        while self.step < config.steps:
            record = self._one_step()
            # what a step needs of the memory it has by now
            if self.step == first_step + 1 and saving.room_for_copies(self.stepper, self.comm):
                self.copies = saving.Copies(self.stepper)
            # one message a step: who was asked to stop, how much memory is in use, whether rank 0
            # could write what there was to write since the last one, and whether a checkpoint that
            # is being written is
            written = self.saving is None or self.saving.written
            mine = (stop.signal, self.ops.memory(), self.unwritten, written)
            everyone = self.comm.all_gather(mine)
            stop.learned = True
            if everyone[0][2] is not None:
                raise AllRanksError(everyone[0][2])
            signals = [int(number) for number, *_ in everyone if number is not None]
            asked = signals[0] if signals else None
            record["memory"] = sum(memory for _, memory, *_ in everyone)
            now, timed = time.perf_counter(), self.step - first_step - 1
            if not timed:
                started = now  # behind the first step, in which kernels are compiled
            eta = (now - started) / timed * (config.steps - self.step) if timed else None
            self.console.step(record, eta)
            self._write(record)
            if all(done for *_, done in everyone):
                self._finish_saving()
            if self.guards.exhausted(record["n_valid"]) or self.guards.bad_in_a_row == config.steps:
                self._give_up(record["n_valid"])
            last = self.step == config.steps
            left_out = self._measured_here()
            if left_out and asked is None:
                asked = self._evaluate(stop)
                left_out = asked is not None
            if _due(self.step, run.sample_every) and asked is None:
                self._sample()
            # after a skipped step the checkpoint before it stays the newest, to go back to
            healthy = not self.guards.bad_in_a_row
            if last or asked is not None or (healthy and _due(self.step, run.checkpoint_every)):
                self._save()
            if last or asked is not None:
                self._finish_saving()
            if asked is not None and (left_out or not last):
                # SIGUSR1 is what our own launcher makes of the signal that it was sent
                by = "" if asked == HANDED_ON else f" by {signal.Signals(asked).name}"
                self.console.say(
                    f"stopped{by} after step {self.step}; {self.again} goes on from there"
                )
                break
        else:
            asked = None
        self._wait_for_removing()
        unwritten = self.comm.broadcast(self.unwritten)
        if unwritten is not None:
            raise AllRanksError(unwritten)
        return asked

    def _one_step(self) -> dict[str, Any]:
        config, stepper = self.config, self.stepper
        began = time.perf_counter()
        stepper.clock.read()
        self.step += 1
        self.comm.watch.begin("step", self.step)
        sample = self.comm.rank * self.accumulation * config.train.micro_batch
        position = (self.step - 1) * config.train.global_batch + sample
        batches = (
            self.data.batch(position + i * config.train.micro_batch, config.train.micro_batch)
            for i in range(self.accumulation)
        )
        gradient = stepper.gradient(batches, self.step, sample)
        lr = config.lr(self.step)
        z = self.guards.look(gradient.loss, gradient.finite)
        if gradient.finite:
            stepper.update(gradient, lr)
        seconds = time.perf_counter() - began
        comm, hidden, backend = stepper.clock.read()
        speed = config.tokens_per_step / seconds
        self.peak = max(self.peak, speed * self.flops)  # a busy moment held up what measured it
        return {
            "step": self.step,
            "loss": gradient.loss,
            "norm": gradient.norm,
            "lr": lr,
            "n_valid": gradient.n_valid,
            "z": z,
            "skipped": not gradient.finite,
            "ms": 1e3 * seconds,
            "comm_ms": 1e3 * comm,
            "hidden_ms": 1e3 * hidden,
            "own_ms": 1e3 * (seconds - comm - backend),
            "tokens_per_s": speed,
            "utilisation": speed * self.flops / self.peak,
        }

    def _write(self, record: dict[str, Any]) -> None:
        """Write a record; if that fails, all ranks hear of it after the next step."""

        def write(sink: monitor.Metrics | monitor.TensorBoard) -> None:
            if self.set_back is not None:  # the first record cuts off what came behind that step
                saving.point(self.out / CHECKPOINTS, "latest", self.set_back)
                self.set_back = None
            sink.write(record)

        self._tell(write)

    def _tell(self, what: Callable[[monitor.Metrics | monitor.TensorBoard], None]) -> None:
        try:
            for sink in self.sinks:
                what(sink)
        except OSError as error:
            self.unwritten = sentence(error)

    def _give_up(self, n_valid: int) -> None:
        self._finish_saving()
        good = checkpoint.pointed(self.out / CHECKPOINTS)
        named = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        why = "the loss or the gradient was not finite"
        instead = "A lower train.lr or a smaller optim.clip helps most often"
        if not n_valid:
            why = "no token was to be predicted"
            instead = (
                "Texts of which more is to be predicted, or a larger train.global_batch or "
                "run.patience, help"
            )
        raise AllRanksError(
            f"{why} in {self.guards.bad_in_a_row} steps in a row, the last of them step "
            f"{self.step}; {named}. {instead}"
        )

    def _introduce(self) -> None:
        for said in introduction(self):
            self.console.say(said)

    # ---- now and then ------------------------------------------------------------------------

    def _measured_here(self) -> bool:
        """Whether an evaluation follows this step."""
        last = self.step == self.config.steps
        return bool(self.heldout) and (last or _due(self.step, self.config.run.eval_every))

    def _measure_what_was_left(self) -> None:
        """Make up for an evaluation that a signal left out, after the step that it belongs to."""
        if self.step and self._measured_here() and not self.comm.broadcast(self.measured):
            self.saved_step = -1  # it may be the best
            self._evaluate(None)
            self._finish_saving()

    def _evaluate(self, stop: StopRequest | None) -> int | None:
        """Measure what is held out, unless a signal comes meanwhile, which is returned."""
        self.comm.watch.begin("evaluation", self.step)

        def look() -> None:
            signals = self.comm.all_gather(stop and stop.signal)
            asked = next((number for number in signals if number is not None), None)
            if asked is not None:
                raise Asked(asked)

        try:
            results = [
                evaluate(
                    self.ops,
                    self.stepper.params,
                    self.config.model,
                    windows,
                    n_windows=self.config.run.eval_windows,
                    micro_batch=self.config.train.micro_batch,
                    comm=self.comm,
                    lengths=self.lengths,
                    between=look,
                )
                for windows in self.heldout
            ]
        except Asked as asked:
            return asked.signal
        result = pooled(results)
        self.console.say(f"step {self.step}: held-out {result}")
        parts: dict[str, Evaluation] = {}
        if len(results) > 1:
            names = short_names(self.config.data.heldout_sets)
            parts = dict(zip(names, results, strict=True))
        for name, part in parts.items():
            self.console.say(f"  {name}: {part}")
        self._write(evaluation_record(self.step, result, parts))
        if math.isfinite(result.loss) and (self.best is None or result.loss < self.best):
            self.best = result.loss
            self._save(best=True)
        return None

    def _sample(self) -> None:
        if self.comm.rank or self.tokenizer is None:
            return
        self.comm.watch.begin("sample", self.step)
        prompt = self.tokenizer.encode_ordinary(self.config.run.sample_prompt or "\n")
        room = self.config.window - len(prompt)
        ids = generate(
            self.ops,
            self.stepper.params,
            self.config.model,
            [prompt],
            max_new_tokens=min(64, room),
            temperature=0.8,
            top_p=0.95,
            seed=self.step,
        )[0]
        text = self.tokenizer.decode([i for i in prompt + ids if i < self.tokenizer.n_vocab])
        said = f"step {self.step} writes: {text!r}"
        self.console.say(textwrap.fill(said, monitor.COLUMNS, subsequent_indent="  "))

    def _save(self, best: bool = False) -> None:
        """Begin a checkpoint, unless this step has one; it is whole some steps later."""
        if self.saved_step == self.step:
            return
        self.comm.watch.begin("checkpoint", self.step)
        self._finish_saving()
        began = time.perf_counter()
        self._wait_for_removing()  # it may be the half of a checkpoint of this very step
        state = checkpoint.State(
            step=self.step,
            updates=self.stepper.updates,
            position=self.step * self.config.train.global_batch,
            seed=self.config.train.seed,
            tokenizer_sha256=self.data.tokenizer_sha256,
            chats=self.chats,
            config=self.config.to_dict(),
            data=self.checksums,
            format_version=manifest.NEWEST if self.checksums else manifest.SEALED_SINCE,
            monitor=self.guards.remember(self.best),
        )
        if self._lock is not None and not still_at(self.out / LOCK, self._lock):
            warn(f"{self.out / LOCK} was removed or moved: nothing keeps another run out of there")
            self._lock = None
        self._tell(lambda sink: sink.flush())
        folder = self.out / CHECKPOINTS
        self.saving = saving.Saving(
            folder,
            self.stepper,
            state,
            self.comm,
            self.tokenizer_path,
            best,
            aside=self.copies,
            again=self.again,
        )
        self.saved_step = self.step
        self.saving_seconds = time.perf_counter() - began
        if self.copies is None:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Make the checkpoint that is being written whole, and drop those no longer needed."""
        done, self.saving = self.saving, None
        if done is None:
            return
        began = time.perf_counter()
        # nothing tells how long a disk may take for what training did not wait for so far
        self.comm.watch.begin("renaming" if done.written else "disk", self.step)
        path = done.finish()
        if self.comm.rank == 0:
            doomed = saving.prune(path.parent, self.config.run.keep)
            self.removing = threading.Thread(target=self._remove, args=(doomed,), daemon=True)
            self.removing.start()
        self.saving_seconds += time.perf_counter() - began
        self.console.say(f"saved {path}")
        self._write(
            {
                "step": done.state.step,
                "save_ms": 1e3 * self.saving_seconds,
                "write_ms": 1e3 * done.seconds,
            }
        )

    def _remove(self, doomed: list[Path]) -> None:
        """Remove folders, which takes long if they are large, while training goes on."""
        for path in doomed:
            try:
                shutil.rmtree(path)
            except OSError as error:
                # somebody on another machine reads it (NFS keeps its files): the next time, then
                if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                    self.unwritten = sentence(error)

    def _wait_for_removing(self) -> None:
        if self.removing.is_alive():
            self.removing.join()


class Asked(Exception):
    """A signal asks for the end in the middle of what can be made up for later."""

    def __init__(self, number: int) -> None:
        self.signal = number
        super().__init__(number)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def evaluation_record(
    step: int, result: Evaluation, parts: Mapping[str, Evaluation]
) -> dict[str, Any]:
    """Return an evaluation as a line of ``metrics.jsonl``; ``parts`` are several sets by name."""
    return {
        "step": step,
        "heldout_loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
        **{f"heldout_loss/{name}": part.loss for name, part in parts.items()},
        **{f"bits_per_byte/{name}": part.bits_per_byte for name, part in parts.items()},
    }
