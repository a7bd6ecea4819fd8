"""The calls by which others judge a kernel: their sizes, inputs and options, op by op.

``rules.py`` says where they come from, and where sizes are cut.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from accel.verify.board.corpus import calls as c
from accel.verify.board.outcome import Call, rng
from reference.ops import OPS

# ---- KernelBench ---------------------------------------------------------------------------------

ONE_SHAPE: dict[str, Callable[[], Call]] = {
    "add": lambda: c.two("add", (256, 256), (256, 256)),
    "scale": lambda: c.one("scale", (256, 256), factor=3.14),
    "embedding": lambda: c.emb(rng(1).integers(0, 1000, 256), V=1000, D=64),
    "linear": lambda: c.lin(256, 256, 256),
    "split_heads": lambda: c.one("split_heads", (4, 64, 12, 32), heads=(8, 2, 2)),
    "merge_heads": lambda: c.one("merge_heads", (4, 64, 8, 32)),
    "rmsnorm": lambda: c.norm("rmsnorm", (16, 64), 256),
    "layernorm": lambda: c.norm("layernorm", (16, 64), 256),
    "rope": lambda: c.rope(128, 8, 64, 2),
    "attention": lambda: c.att(128, Hq=4, Hkv=4, d=64, B=2),
    "swiglu": lambda: c.one("swiglu", (16, 16384)),
    "gelu": lambda: c.one("gelu", (16, 4096)),
    "gelu_tanh": lambda: c.one("gelu_tanh", (512, 512)),
    "relu": lambda: c.one("relu", (16, 16384)),
    "dropout": lambda: c.one("dropout", (16, 1024), p=0.2, key=c.key()),
    "linear_cross_entropy": lambda: c.lce(256, 1024, 64, mask=False),
    "softmax": lambda: c.one("softmax", (16, 16384)),
    "logits": lambda: c.lgt(64, 1024, 64),
    "square_sums": lambda: c.one("square_sums", (2**18,)),
    "global_norm": lambda: c.one("global_norm", (2**18,)),
    "accumulate": lambda: c.add_onto((256, 256)),
    "adamw": lambda: c.adam(2**16, step=10, lr=1e-3),
    "muon": lambda: c.matrix_step(256, 256),
    "kv_cache": lambda: c.cache_of(4, 16),
    "write_kv": lambda: c.write(0, 16, 4, 64),
    "decode_step": lambda: c.dec(8, 4),
}
TRIALS = 5


def uniform(call: Call, seed: int) -> Call:
    """Return the call with uniform numbers in [0, 1) for its activations, as torch.rand draws."""
    operands = OPS[call.op].operands
    arrays = tuple(
        rng(seed + i).random(a.shape).astype(a.dtype)
        if i < len(operands) and operands[i].kind == "activation" and isinstance(a, np.ndarray)
        else a
        for i, a in enumerate(call.arrays)
    )
    return call._replace(arrays=arrays)


def kernelbench(op: str) -> list[Call]:
    call = ONE_SHAPE[op]()._replace(forward_only=True)
    return [uniform(call, 100 * trial) for trial in range(TRIALS)]


# ---- BackendBench --------------------------------------------------------------------------------

S, M = 5, 10  # the sizes of PyTorch's OpInfo samples


def opinfo(op: str) -> list[Call]:
    samples: dict[str, list[Call]] = {
        "add": [
            c.two("add", a, b)
            for a, b in [((S, S), (S, S)), ((S, S), (S,)), ((S, 1, S), (M, S)), ((), ())]
        ],
        "linear": [c.lin(S, 8, S), c.lin(1, 8, S, bias=False), c.lin(M, M, S)],
        "layernorm": [c.norm("layernorm", (1, 2), 3), c.norm("layernorm", (S, S), S)],
        "rmsnorm": [c.norm("rmsnorm", (1, 2), 3), c.norm("rmsnorm", (S, S), S)],
        "attention": [
            c.att(T, S=k, Hq=4, Hkv=h, d=8, B=4, causal=causal, **more)
            for T, k in ((5, 5), (5, 6))
            for h in (4, 2)
            for causal in (True, False)
            for more in ({}, {"scale": 1.1}, {"key_mask": "random"})
        ],
        "softmax": [c.one("softmax", s, size=3.0) for s in ((S,), (S, S), (S, M, S))],
        "embedding": [c.emb(rng(2).integers(0, M, s), V=M, D=S) for s in ((), (M,), (M, M))],
        "linear_cross_entropy": [
            c.lce(2, 3, S, mask=False),
            c.lce(S, M, S),
            c.lce(S, M, S, bias=False),
        ],
        "dropout": [c.one("dropout", (S, S), p=p, key=c.key()) for p in (0.2, 0.5, 0.0)],
        "adamw": [c.adam(n, step=1, lr=1e-3) for n in (1, S, S * M)],
        "decode_step": [c.dec(3)],
    }
    if op in samples:
        return samples[op]
    small = {
        "scale": c.one("scale", (S, S), factor=3.14),
        "split_heads": c.one("split_heads", (2, S, S, M), heads=(2, 2, 1)),
        "merge_heads": c.one("merge_heads", (2, S, 3, M)),
        "rope": c.rope(S, 2, M, 2),
        "swiglu": c.one("swiglu", (S, M), size=3.0),
        "logits": c.lgt(S, M, S),
        "accumulate": c.add_onto((S, S)),
        "muon": c.matrix_step(S, M),
        "kv_cache": c.cache_of(),
        "write_kv": c.write(),
    }
    if op in small:
        return [small[op]]
    shapes = ((S * M,),) if op in ("square_sums", "global_norm") else ((), (S,), (S, M))
    return [c.one(op, s, size=3.0) for s in shapes]


# ---- Liger-Kernel --------------------------------------------------------------------------------


def liger(op: str) -> list[Call]:
    made: dict[str, list[Call]] = {
        "rmsnorm": [
            _unit_gain(c.norm("rmsnorm", shape[:2], shape[2], eps=1e-6))
            for shape in ((2, 128, 512), (3, 423, 213), (5, 123, 123), (7, 341, 234), (9, 236, 345))
        ],
        "layernorm": [
            _unit_gain(c.norm("layernorm", shape[:2], shape[2], eps=1e-6))
            for shape in ((2, 8, 64), (4, 16, 128), (1, 1, 1023), (3, 7, 256))
        ],
        "rope": [
            c.rope(T, H, d, B)
            for B, T, H, d in ((1, 128, 32, 64), (2, 128, 40, 64), (3, 423, 28, 92), (1, 2, 4, 8))
        ],
        "swiglu": [
            c.one("swiglu", s) for s in ((2, 256, 1024), (6, 42, 862), (2, 8, 16), (9, 7, 82))
        ],
        "gelu_tanh": [c.one("gelu_tanh", s) for s in ((2, 2, 8), (9, 7, 41), (9, 41, 423))],
        "linear_cross_entropy": [
            _mean_loss(rows, V, H, bias)
            for rows, H, V in ((8, 512, 512), (423, 128, 2000), (64, 16, 32000))
            for bias in (True, False)
        ],
        "embedding": [
            c.emb(rng(3).integers(0, V, 320), V=V, D=D)
            for V, D in ((100, 64), (1000, 128), (100, 60), (1000, 120), (1000, 500), (30522, 768))
        ],
        "softmax": [
            c.one("softmax", s)
            for s in ((2, 8), (4, 16), (1, 1023), (3, 7, 256), (1, 4096), (1, 2, 4096), (2, 70000))
        ],
    }
    return made.get(op, [])


def _unit_gain(call: Call) -> Call:
    """Return the call of a norm as a fresh module makes it: gain 1, bias 0."""
    x, gain, *bias = call.arrays
    return call._replace(arrays=(x, np.ones_like(gain), *(np.zeros_like(b) for b in bias)))


def _mean_loss(rows: int, V: int, H: int, bias: bool) -> Call:
    call = c.lce(rows, V, H, mask=False, bias=bias, dloss=1 / rows)
    x, head, targets = call.arrays
    return call._replace(arrays=(x, rng(9).random(head.shape).astype(head.dtype), targets))


# ---- flash-attention -----------------------------------------------------------------------------

LENGTHS = ((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256))
LONG = ((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048))


def flash(op: str) -> list[Call]:
    if op != "attention":
        return []
    heads = ((2, 2), (2, 1), (4, 2))  # multi-head, multi-query, grouped
    made = []
    options = [
        (causal, local, alibi, p)
        for causal in (False, True)
        for local in (False, True)
        for alibi in (False, True)
        for p in (0.0, 0.17)
    ]
    for i, (T, keys) in enumerate((*LENGTHS, *LONG)):
        chosen = options if (T, keys) in LENGTHS else options[i % 2 :: 8]
        for j, (causal, local, alibi, p) in enumerate(chosen):
            Hq, Hkv = heads[(i + j) % 3]
            more: dict[str, Any] = {"alibi": True} if alibi else {}
            if p:
                more["dropout_p"] = p
            window = int(rng(j).integers(1, keys)) if local else 0
            made.append(c.att(T, keys, Hq, Hkv, 32, seed=j, causal=causal, window=window, **more))
    return made


# ---- cs336 ---------------------------------------------------------------------------------------


def cs336(op: str) -> list[Call]:
    B, T, D, F = 4, 12, 64, 128
    made: dict[str, list[Call]] = {
        "linear": [c.lin(B * T, D, F, bias=False)],
        "embedding": [c.emb(rng(4).integers(0, 10_000, (B, T)), V=10_000, D=D)],
        "swiglu": [c.one("swiglu", (B, T, 2 * F))],
        "attention": [c.att(T, Hq=4, Hkv=4, d=16, B=B), c.att(T, 16, 1, 1, D, B=B, causal=False)],
        "rmsnorm": [c.norm("rmsnorm", (B, T), D)],
        "rope": [c.rope(T, 1, D, B), c.rope(T, 4, 16, B)],
        "softmax": [c.one("softmax", (3, 5)), c.one("softmax", (3, 5), shift=100.0)],
        "linear_cross_entropy": [
            c.lce(8, 5, 5, mask=False, bias=False, size=size) for size in (1.0, 30.0)
        ],
        "adamw": [c.adam(6, step=t, lr=1e-3, beta2=0.999, weight_decay=0.01) for t in (1, 5, 10)],
    }
    return [call._replace(forward_only=True) for call in made.get(op, [])]


# ---- gpucheck ------------------------------------------------------------------------------------

FUZZED = (
    *((1, 1), (1, 16), (16, 1)),
    *((n, n) for n in (31, 33, 35, 63, 65, 67, 127, 129, 131)),  # around tiles of 32, 64 and 128
    *((n, n) for n in (7, 13, 257)),  # primes
    *((n, n) for n in (128, 255, 256, 511, 512, 513)),  # around powers of two
    *((1024, 1), (1024, 3), (1024, 7), (2048, 1), (7, 128), (13, 256), (4096, 1)),
)


def gpucheck(op: str) -> list[Call]:
    """Two axes that matter, over the shapes of fuzz_shapes, contiguous and transposed."""
    made: dict[str, Callable[[int, int], Call]] = {
        "add": lambda a, b: c.two("add", (a, b), (a, b)),
        "scale": lambda a, b: c.one("scale", (a, b), factor=2.5),
        "embedding": lambda a, b: c.emb(rng(5).integers(0, b, a), V=b, D=8),
        "linear": lambda a, b: c.lin(a, b, b),
        "split_heads": lambda a, b: c.one("split_heads", (1, a, 4, b), heads=(2, 1, 1)),
        "merge_heads": lambda a, b: c.one("merge_heads", (1, a, 3, b)),
        "rmsnorm": lambda a, b: c.norm("rmsnorm", a, b),
        "layernorm": lambda a, b: c.norm("layernorm", a, b),
        "rope": lambda a, b: c.rope(a, 2, 2 * b, 1),
        "attention": lambda a, b: c.att(a, max(a, b), 2, 2, 16),
        "swiglu": lambda a, b: c.one("swiglu", (a, 2 * b)),
        "dropout": lambda a, b: c.one("dropout", (a, b), p=0.2, key=c.key()),
        "linear_cross_entropy": lambda a, b: c.lce(a, b, 16, mask=False),
        "logits": lambda a, b: c.lgt(a, b, 16),
        "square_sums": lambda a, b: c.one("square_sums", (a * b,)),
        "global_norm": lambda a, b: c.one("global_norm", (a * b,)),
        "accumulate": lambda a, b: c.add_onto((a, b)),
        "adamw": lambda a, b: c.adam(a * b, step=10, lr=1e-3),
        "muon": c.matrix_step,
        "kv_cache": lambda a, b: c.cache_of(min(a, 64), 16),
        "write_kv": lambda a, b: c.write(0, min(a, 64), 2, 64),
        "decode_step": lambda a, b: c.dec(2 + a % 14, min(b, 64)),
    }
    make = made.get(op, lambda a, b: c.one(op, (a, b)))
    calls = [make(a, b) for a, b in FUZZED]
    turned = [k._replace(arrays=tuple(_turned(a) for a in k.arrays)) for k in calls[::4]]
    return [*calls, *([] if OPS[op].home or OPS[op].written else turned)]


def _turned(a: Any) -> Any:
    return np.asfortranarray(a) if isinstance(a, np.ndarray) and a.ndim > 1 else a
