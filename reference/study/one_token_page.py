"""The page and the picture that ``one_token.py`` writes."""

import numpy as np

from reference.study import svg
from reference.study.one_token import CONFIG, TEXT, Step, merges, parameters, run, table

CELL = 13  # of an array in the picture, in pixels


def page() -> str:
    """Return the page, every number of it from a run."""
    lines, vocabulary, parts = merges(TEXT, 2)
    ids = np.array([vocabulary.index(part) for part in parts], np.int32)
    tokens, wanted = parts[:-1], parts[1:]
    p = parameters()
    forward, backward = run(p, ids[:-1], ids[1:])
    named = {step.name: step.value for step in [*forward, *backward]}
    loss, dE = float(named["ℓ"]), named["dE"]

    i, j, h = int(ids[0]), 0, 1e-5
    moved = []
    for way in (h, -h):
        nudged = {name: x.copy() for name, x in p.items()}
        nudged["embedding.weight"][i, j] += way
        moved.append(float(run(nudged, ids[:-1], ids[1:])[0][-1].value))
    stepped = {**p, "embedding.weight": p["embedding.weight"] - 0.1 * dE}
    after = float(run(stepped, ids[:-1], ids[1:])[0][-1].value)

    def listing(steps: list[Step]) -> str:
        return "\n".join(table(step, tokens, vocabulary) for step in steps)

    bytes_ = "  ".join(f"{c} {ord(c)}" for c in TEXT)
    numbered = "  ".join(f"{k} {name}" for k, name in enumerate(vocabulary))
    read = "  ".join(f"{name} → {target}" for name, target in zip(tokens, wanted, strict=True))
    matrices = "\n".join(
        f"{name}   {' × '.join(map(str, x.shape))}\n"
        + "\n".join("    " + "".join(f"{v:6.1f}" for v in row) for row in x)
        for name, x in p.items()
        if x.ndim == 2
    )
    probability = named["P"][0, ids[1]]
    return f"""\
# One token, there and back

Written by `python -m reference.study.one_token --write` from a run of the reference's ops; a test
runs it again and compares. T = {len(tokens)} tokens are read, V = {len(vocabulary)} are known, the
width is D = {CONFIG.d_model}, the head's d = {CONFIG.d_head}, the feed-forward's F = {CONFIG.d_ff}.
A `d` before a name means: how the loss moves when that moves. Letters and rules are those of
[the README](../README.md).

<img src="pictures/one_token.svg" width="690" alt="shapes of all arrays, forward beside backward">

## From bytes to ids

The text is six bytes. The most frequent pair of neighbours becomes one token, and again; among
pairs that occur equally often, the one of the smallest ids.

```
bytes      {bytes_}
merge 1    {lines[0]}
merge 2    {lines[1]}
ids        {numbered}
{TEXT} =   {" ".join(str(k) for k in ids)}
```

Each token but the last is read, and is to tell the one after it: {read}. We follow **{tokens[0]}**.

## Forward

```
{listing(forward)}
```

After {tokens[0]} the model gives {wanted[0]}, the token that comes, a probability of
{probability:.3f}. {tokens[0]} looks at itself alone, as nothing stands before it; {tokens[1]} looks
at both.

## Backward

The same lines from the last to the first. Where the forward went two ways, past a branch and
through it, two gradients meet and are added.

```
{listing(backward)}
```

The table E was used at both ends, so its gradient has two parts: every row as a column of scores,
and the rows of {tokens[0]} and {tokens[1]} as what was looked up. The gradient of each matrix of
the block is (what came in)ᵀ (the gradient of what went out), as dE as head is; it is not printed.

## Is it right?

Move one number of the row of {tokens[0]}, E[{i}, {j}], by ±{h:g}, and see how the loss moves:

```
(ℓ(E + h) - ℓ(E - h)) / 2h   {(moved[0] - moved[1]) / (2 * h):.6f}
dE[{i}, {j}]                     {dE[i, j]:.6f}
```

And a step against the gradient, E - 0.1 dE, brings the loss from {loss:.4f} to {after:.4f}.

## The parameters

Gains of norms are 1; RoPE's base is {CONFIG.rope_base:g}.

```
{matrices}
```
"""


def shapes() -> str:
    """Return a picture of all arrays of the run as grids: forward down, backward up beside it."""
    _, vocabulary, parts = merges(TEXT, 2)
    ids = np.array([vocabulary.index(part) for part in parts], np.int32)
    p = parameters()
    forward, backward = run(p, ids[:-1], ids[1:])
    forward = [Step("E", "", "V D", p["embedding.weight"]), *forward]
    gradient = {step.name.replace("d", ""): step for step in backward}
    body = [
        svg.text(20, 24, "forward", bold=True),
        svg.text(350, 24, "backward", bold=True),
    ]
    y = 40
    for step in forward[:-1]:
        body += grid(20, y, step, int(ids[0]) if step.name == "E" else 0)
        if step.name in gradient:
            body += grid(350, y, gradient[step.name], int(ids[0]) if step.name == "E" else 0)
        y += CELL * len(step.value) + 18
    body.append(svg.text(20, y + 10, f"ℓ = {float(forward[-1].value):.4f}"))
    body.append(f'<path d="M320 48V{y}m-5 -8l5 8l5 -8" stroke="{svg.COLOURS[0]}"/>')
    body.append(f'<path d="M670 {y}V48m-5 8l5 -8l5 8" stroke="{svg.COLOURS[1]}"/>')
    return svg.document(690, y + 24, body)


def grid(x: float, y: float, step: Step, row: int) -> list[str]:
    """Return an array as cells, the row of our token filled, its name and shape beside it."""
    rows, columns = step.value.shape
    colour = svg.COLOURS[1 if step.name.startswith("d") else 0]
    lines = "".join(f"M{x} {y + CELL * i}h{CELL * columns}" for i in range(rows + 1))
    lines += "".join(f"M{x + CELL * j} {y}v{CELL * rows}" for j in range(columns + 1))
    name = f"{step.name}  ({', '.join(step.shape.split())}) = {rows} × {columns}"
    return [
        f'<path d="M{x} {y + CELL * row}h{CELL * columns}v{CELL}H{x}z" fill="{colour}" '
        f'fill-opacity="0.35"/><path d="{lines}" stroke="{colour}"/>',
        svg.text(x + CELL * columns + 8, y + CELL * rows / 2 + 4, name),
    ]
