"""PyTorch's sides of ``accel/bench.py``: what they are compared with, at its documented best.

The model is written as PyTorch models are: ``scaled_dot_product_attention`` with grouped heads,
``rms_norm``, the fused AdamW, autocast for bfloat16. Only this file and tests import PyTorch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from reference.config import Config

Array = npt.NDArray[Any]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn adjacent pairs of x (B, T, H, d); cos and sin are (T, 1, d/2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def rope_tables(config: Config, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin (T, 1, d/2)."""
    omega = config.rope_base ** (-np.arange(0, config.d_head, 2) / config.d_head)
    angle = np.arange(start, start + length)[:, None, None] * omega
    return torch.from_numpy(np.cos(angle)).float(), torch.from_numpy(np.sin(angle)).float()


class Model(torch.nn.Module):
    """A decoder of pre-norm blocks, with RoPE or learned positions, RMSNorm or LayerNorm."""

    def __init__(self, config: Config, master: Mapping[str, Array]) -> None:
        super().__init__()
        self.config = config
        self.names = {name: name.replace(".", "_") for name in master}
        self.weights = torch.nn.ParameterDict(
            {
                self.names[name]: torch.nn.Parameter(torch.from_numpy(np.array(w)))
                for name, w in master.items()
            }
        )
        if config.position == "rope":
            cos, sin = rope_tables(config, 0, config.context_length)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)

    def w(self, name: str) -> torch.Tensor | None:
        """Return a weight by its name; None when the model has none of that name."""
        key = self.names.get(name)
        return None if key is None else self.weights[key]

    def linear(self, x: torch.Tensor, weight: str, bias: str) -> torch.Tensor:
        """Return x W + b."""
        matrix, shift = self.w(weight), self.w(bias)
        assert matrix is not None
        return F.linear(x, matrix.T, shift)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the norm of the rows."""
        c = self.config
        if c.norm == "rmsnorm":
            return F.rms_norm(x, (c.d_model,), self.w(f"{name}.gain"), c.norm_eps)
        gain, bias = self.w(f"{name}.gain"), self.w(f"{name}.bias")
        return F.layer_norm(x, (c.d_model,), gain, bias, c.norm_eps)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        c = self.config
        table = self.w("embedding.weight")
        assert table is not None
        x = F.embedding(ids, table)
        B, T, _ = x.shape
        positions = self.w("position.weight")
        if positions is not None:
            x = x + positions[:T]
        cos, sin = (self.cos[:T], self.sin[:T]) if c.position == "rope" else (None, None)
        sizes = [c.n_heads, c.n_kv_heads, c.n_kv_heads]
        for i in range(c.n_layers):
            name = f"layers.{i}"
            h = self.norm(x, f"{name}.attention_norm")
            qkv = self.linear(h, f"{name}.attention.wqkv", f"{name}.attention.bqkv")
            q, k, v = qkv.view(B, T, sum(sizes), c.d_head).split_with_sizes(sizes, dim=2)
            if cos is not None and sin is not None:
                q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            o = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=c.n_heads != c.n_kv_heads,
            )
            o = o.transpose(1, 2).reshape(B, T, -1)
            x = x + self.linear(o, f"{name}.attention.wo", f"{name}.attention.bo")
            h = self.norm(x, f"{name}.ffn_norm")
            if c.ffn == "swiglu":
                h = self.linear(h, f"{name}.ffn.w_gate_up", f"{name}.ffn.b_gate_up")
                gate, up = h.chunk(2, -1)
                h = F.silu(gate) * up
            else:
                h = self.linear(h, f"{name}.ffn.w_up", f"{name}.ffn.b_up")
                h = F.gelu(h, approximate="tanh" if c.ffn == "gelu_tanh" else "none")
            x = x + self.linear(h, f"{name}.ffn.w_down", f"{name}.ffn.b_down")
        x = self.norm(x, "final_norm")
        return F.cross_entropy(F.linear(x, table).view(B * T, -1), targets.view(-1))

    def gradient(self, ids: Array, targets: Array) -> tuple[float, dict[str, Array]]:
        """Return the loss and the gradient of every weight."""
        loss = self(torch.from_numpy(ids).long(), torch.from_numpy(targets).long())
        loss.backward()
        gradients = {}
        for name, key in self.names.items():
            gradient = self.weights[key].grad
            assert gradient is not None
            gradients[name] = gradient.numpy()
        return loss.item(), gradients


def trainer(config: Config, ours: Any, kind: str, *, compiled: bool) -> Callable[[], object]:
    """Return a function that takes one training step; ``kind`` is float32, or bf16 by autocast."""
    model = Model(config, ours.master)
    decayed = [w for w in model.parameters() if w.ndim >= 2]
    rest = [w for w in model.parameters() if w.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=True)
    ids, targets = torch.from_numpy(ours.ids).long(), torch.from_numpy(ours.targets).long()
    run = torch.compile(model) if compiled else model

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16"):
            loss = run(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


def _attention(
    q: Array, k: Array, v: Array, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the leaves and the output (B, T, H, d) of PyTorch's causal attention."""
    leaves = [torch.from_numpy(np.array(x)).to(dtype).requires_grad_() for x in (q, k, v)]
    return leaves, _attend(leaves)


def _attend(leaves: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in leaves)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attention(q: Array, k: Array, v: Array, dout: Array, mode: str) -> Callable[[], object]:
    """Return a function that runs attention forward and backward."""
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    leaves, _ = _attention(q, k, v, dtype)
    cotangent = torch.from_numpy(dout).to(dtype)
    return lambda: torch.autograd.grad(_attend(leaves), leaves, cotangent)


def attention_results(q: Array, k: Array, v: Array, dout: Array) -> list[Array]:
    """Return the output and the gradients of q, k and v, in float32."""
    leaves, out = _attention(q, k, v, torch.float32)
    gradients = torch.autograd.grad(out, leaves, torch.from_numpy(dout))
    return [x.detach().numpy() for x in (out, *gradients)]


def op(case: Any) -> Callable[[], list[Any]]:
    """Return a function that runs an op of ``bench_ops``: forward, backward with a cotangent."""
    backward = case.cotangent is not None
    leaves = [
        torch.from_numpy(np.array(x)).requires_grad_(backward and x.dtype.kind == "f")
        for x in case.arrays
    ]
    floats = [x for x in leaves if x.requires_grad]
    cotangent = torch.from_numpy(case.cotangent) if backward else None

    def run() -> list[Any]:
        out = case.torch(torch, F, *leaves)
        return [out, *torch.autograd.grad(out, floats, cotangent)] if backward else [out]

    return run


def arrays(tensors: list[Any]) -> list[Array]:
    """Return tensors as NumPy's arrays."""
    return [x.detach().numpy() for x in tensors]


def into(case: Any) -> Callable[[], object]:
    """Return a function that runs an op's forward into memory that is there already."""
    tensors = [torch.from_numpy(np.array(x)) for x in case.arrays]
    out = torch.empty_like(tensors[0])
    return lambda: case.into(torch, F, out, *tensors)


def dropout(x: Array, dout: Array) -> Callable[[], object]:
    """Return a function that runs dropout forward and backward."""
    leaf, cotangent = torch.from_numpy(np.array(x)).requires_grad_(), torch.from_numpy(dout)
    return lambda: torch.autograd.grad(F.dropout(leaf, 0.1), leaf, cotangent)


def adamw(
    master: Array,
    m: Array,
    v: Array,
    grad: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Callable[[], object], Callable[[], Array]]:
    """Return a function that takes a step of the fused AdamW, the ninth first, and the weights."""
    weight = torch.nn.Parameter(torch.from_numpy(np.array(master)))
    weight.grad = torch.from_numpy(np.array(grad))
    optimizer = torch.optim.AdamW(
        [weight], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, fused=True
    )
    optimizer.state[weight] = {
        "step": torch.tensor(8.0),
        "exp_avg": torch.from_numpy(np.array(m)),
        "exp_avg_sq": torch.from_numpy(np.array(v)),
    }
    return optimizer.step, lambda: weight.detach().numpy()


def decoder(
    config: Config, master: Mapping[str, Array], cache: Any, position: int
) -> Callable[[], Array]:
    """Return a function that decodes one token at ``position`` of a cache (L, B, S, H, d)."""
    model = Model(config, master)
    k_cache = torch.from_numpy(np.stack(cache.k).swapaxes(2, 3).copy())
    v_cache = torch.from_numpy(np.stack(cache.v).swapaxes(2, 3).copy())
    cos, sin = rope_tables(config, position, 1)
    token = torch.tensor([[7]])
    sizes = [config.n_heads, config.n_kv_heads, config.n_kv_heads]
    table = model.w("embedding.weight")
    assert table is not None

    def step() -> Array:
        with torch.inference_mode():
            x = F.embedding(token, table)
            for i in range(config.n_layers):
                name = f"layers.{i}"
                h = model.norm(x, f"{name}.attention_norm")
                qkv = model.linear(h, f"{name}.attention.wqkv", "")
                q, k, v = qkv.view(1, 1, sum(sizes), config.d_head).split_with_sizes(sizes, dim=2)
                q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
                k_cache[i, :, :, position], v_cache[i, :, :, position] = k[:, 0], v[:, 0]
                o = F.scaled_dot_product_attention(
                    q.transpose(1, 2),
                    k_cache[i, :, :, : position + 1],
                    v_cache[i, :, :, : position + 1],
                    enable_gqa=True,
                )
                x = x + model.linear(
                    o.transpose(1, 2).reshape(1, 1, -1), f"{name}.attention.wo", ""
                )
                h = model.linear(model.norm(x, f"{name}.ffn_norm"), f"{name}.ffn.w_gate_up", "")
                gate, up = h.chunk(2, -1)
                x = x + model.linear(F.silu(gate) * up, f"{name}.ffn.w_down", "")
            logits: Array = F.linear(model.norm(x, "final_norm"), table).view(1, -1).numpy()
            return logits

    return step
