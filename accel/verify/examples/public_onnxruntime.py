"""ONNX Runtime's ops on the CPU, one node a model; ``PUBLIC.md`` has what was found.

pip install onnx onnxruntime
myllm verify --module accel/verify/examples/public_onnxruntime.py --partial
"""

import functools
import math
from typing import Any

import numpy as np
import onnxruntime
from onnx import helper

DTYPES = "float32"
Array = np.ndarray[Any, Any]


@functools.cache
def session(
    op: str, domain: str, kinds: tuple[tuple[str, int] | None, ...], n_out: int, attributes: Any
) -> Any:
    """Make a model of one node, whose sizes are open."""
    names = [f"x{i}" if kind else "" for i, kind in enumerate(kinds)]
    outs = [f"y{i}" for i in range(n_out)]
    inputs = [
        helper.make_tensor_value_info(
            name,
            helper.np_dtype_to_tensor_dtype(np.dtype(kind[0])),
            [f"{name}_{axis}" for axis in range(kind[1])],
        )
        for name, kind in zip(names, kinds, strict=True)
        if kind
    ]
    float32 = helper.np_dtype_to_tensor_dtype(np.dtype(np.float32))
    graph = helper.make_graph(
        [helper.make_node(op, names, outs, domain=domain, **dict(attributes))],
        op,
        inputs,
        [helper.make_tensor_value_info(out, float32, None) for out in outs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def run(op: str, *inputs: Array | None, domain: str = "", n_out: int = 1, **attributes: Any) -> Any:
    kinds = tuple(None if x is None else (str(x.dtype), x.ndim) for x in inputs)
    made = session(op, domain, kinds, n_out, tuple(attributes.items()))
    feed = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    return made.run(None, feed)[0]


contrib = functools.partial(run, domain="com.microsoft")


def rmsnorm_forward(x: Array, gain: Array, *, eps: float) -> Array:
    return run("SimplifiedLayerNormalization", x, gain, epsilon=eps)


def layernorm_forward(x: Array, gain: Array, bias: Array, *, eps: float) -> Array:
    return run("LayerNormalization", x, gain, bias, epsilon=eps)


def gelu_forward(x: Array) -> Array:
    return run("Gelu", x, approximate="none")


def gelu_tanh_forward(x: Array) -> Array:
    return contrib("FastGelu", x)


def relu_forward(x: Array) -> Array:
    return run("Relu", x)


def softmax(x: Array) -> Array:
    return run("Softmax", x, axis=-1)


def embedding_forward(ids: Array, table: Array) -> Array:
    return run("Gather", table, np.asarray(ids, np.int64), axis=0)


def linear_forward(x: Array, weight: Array, bias: Array | None = None) -> Array:
    rows = run("Gemm", x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.reshape(*x.shape[:-1], -1)


def logits(x: Array, head: Array, bias: Array | None = None) -> Array:
    rows = run("Gemm", x.reshape(-1, x.shape[-1]), head, bias, transB=1)
    return rows.reshape(*x.shape[:-1], -1)


def rope_forward(x: Array, *, base: float, start: Any = 0) -> Array:
    """Angles are the caller's: cos and sin of every position that is met."""
    B, T, _, d = x.shape
    position = np.broadcast_to(np.expand_dims(start, -1) + np.arange(T), (B, T))
    met, ids = np.unique(position, return_inverse=True)
    angle = np.outer(met, base ** (-np.arange(0, d, 2) / d))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    ids = ids.reshape(B, T).astype(np.int64)
    turned = contrib("RotaryEmbedding", x.transpose(0, 2, 1, 3), ids, cos, sin, interleaved=1)
    return turned.transpose(0, 2, 1, 3)


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    key_mask: Array | None = None,
) -> Array:
    """GroupQueryAttention, which is causal, where it can say what is asked; else ONNX's Attention.

    Heads of q, k and v are made equally wide for it, with zeros. A scale that is not positive,
    which both refuse, becomes part of q.
    """
    (B, T, Hq, d), (S, Hkv, dv) = q.shape, v.shape[1:]
    scale = 1 / math.sqrt(d) if scale is None else scale
    if scale <= 0:
        q, scale = (q * scale).astype(q.dtype), 1.0
    if causal and T == S and key_mask is None:
        wide = -(-max(d, dv) // 8) * 8
        flat = [
            np.pad(x, ((0, 0), (0, 0), (0, 0), (0, wide - x.shape[3]))).reshape(B, T, -1)
            for x in (q, k, v)
        ]
        out = contrib(
            "GroupQueryAttention",
            *flat,
            None,
            None,
            np.full(B, S - 1, np.int32),
            np.asarray(S, np.int32),
            n_out=3,
            num_heads=Hq,
            kv_num_heads=Hkv,
            scale=float(scale),
            local_window_size=min(window, S) or -1,
        )
        return out.reshape(B, T, Hq, wide)[..., :dv]
    distance = np.arange(S - T, S)[:, None] - np.arange(S)
    seen = np.ones((B, 1, T, S), bool)
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (np.abs(distance) < window)
    if key_mask is not None:
        seen = seen & np.asarray(key_mask, bool)[:, None, None]
    heads_first = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    out = run("Attention", *heads_first, seen, scale=float(scale))
    return out.transpose(0, 2, 1, 3)
