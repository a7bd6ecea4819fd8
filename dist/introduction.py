"""What a run says before its first step."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dist import checkpoint

if TYPE_CHECKING:
    from dist.train import Trainer


def introduction(run: "Trainer") -> Iterator[str]:
    """Yield the lines that tell what is trained, by whom, on what, and where it goes on."""
    config, comm = run.config, run.comm
    n = run.stepper.layout.size
    yield f"all settings are in {run.config_file}"
    yield f"{n:,} parameters; {comm.size} rank{'s' * (comm.size > 1)} ({comm.library})"
    yield (
        f"{run.accumulation} × {config.train.micro_batch} windows of {config.window} tokens "
        f"each; {config.tokens_per_step:,} tokens a step, {config.steps:,} steps"
    )
    used = max(source.dataset.vocab_size or 0 for source in run.data.sources)
    rows = config.model.vocab_size
    if used and rows > 1.25 * used:
        yield f"model.vocab_size is {rows:,}, where the tokenizer has {used:,} ids:"
        yield "  the others only cost time"
    behind = ""
    if comm.size > 1 and config.run.overlap and comm.behind:
        behind = f"gradients travel when the backward has ended: {comm.behind}"
    for said in (run.chosen, run.attention, run.products, run.carried, behind):
        if said:
            yield said
    for source in run.data.sources:
        d = source.dataset
        rest = d.n_tokens - d.n_windows * d.window
        end = ";" if rest else ""
        yield f"{d.path}: {d.n_tokens:,} tokens, {d.n_windows:,} windows{end}"
        if rest:
            some = "token is" if rest == 1 else f"{rest} tokens are"
            yield f"  the last {some} not used: less than a window"
        if d.unchecked:
            yield d.unchecked
    looked_at = config.run.eval_windows
    for windows in run.heldout:
        d = windows.dataset
        if any(source.dataset.path == d.path for source in run.data.sources):
            yield f"{d.path} is held out and trained on: it says nothing of new text"
        if looked_at < d.n_windows:
            yield f"{d.path}: {d.n_windows:,} windows held out;"
            yield f"  the first {looked_at:,} are looked at (run.eval_windows)"
    yield from run.reservations
    if run.begun:
        yield run.begun
    if run.step > config.steps:
        yield (
            f"{run.out} has taken {run.step} steps, more than the {config.steps} asked "
            "for: give train.steps a larger number, or choose another run.out"
        )
    elif run.step == config.steps:
        yield f"{run.out} has taken all of its {run.step} steps"
    elif run.step:
        yield f"going on after step {run.step} in {run.out}"
    there = checkpoint.steps(run.out / checkpoint.CHECKPOINTS) if run.set_back else []
    newer = [checkpoint.folder_name(step) for step in there if step > run.step]
    if newer:
        some = f"{newer[0]} is" if len(newer) == 1 else f"{newer[0]} to {newer[-1]} are"
        yield f"{some} of what was learned before,"
        yield "  and there until this run has left them behind"
