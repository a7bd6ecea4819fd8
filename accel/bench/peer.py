"""PyTorch's side of the benchmarks, at its documented best; only this file and tests import it.

The model is written as PyTorch models are: ``scaled_dot_product_attention`` with grouped heads,
``rms_norm``, float32 weights under autocast to bfloat16, ``torch.compile``, the fused AdamW.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from accel.bench.cases import OpCase
from accel.bench.training import MUON, SETTINGS, Matrix
from reference.config import Config
from reference.types import Array


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn adjacent pairs of x (B, T, H, d); cos and sin are (T, 1, d/2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@lru_cache
def rope_tables(base: float, d: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin (T, 1, d/2)."""
    omega = base ** (-np.arange(0, d, 2) / d)
    angle = np.arange(length)[:, None, None] * omega
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
            cos, sin = rope_tables(config.rope_base, config.d_head, config.context_length)
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

    def hidden(self, x: torch.Tensor, start: int, attend: Callable[..., Any]) -> torch.Tensor:
        """Return the last norm of x (B, T, D) after all blocks; attend(layer, q, k, v)."""
        c, (B, T, _) = self.config, x.shape
        sizes = [c.n_heads, c.n_kv_heads, c.n_kv_heads]
        for i in range(c.n_layers):
            name = f"layers.{i}"
            h = self.norm(x, f"{name}.attention_norm")
            qkv = self.linear(h, f"{name}.attention.wqkv", f"{name}.attention.bqkv")
            q, k, v = qkv.view(B, T, sum(sizes), c.d_head).split_with_sizes(sizes, dim=2)
            if c.position == "rope":
                cos, sin = self.cos[start : start + T], self.sin[start : start + T]
                q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            o = attend(i, q, k, v).reshape(B, T, -1)
            x = x + self.linear(o, f"{name}.attention.wo", f"{name}.attention.bo")
            h = self.norm(x, f"{name}.ffn_norm")
            if c.gated:
                h = _swiglu(self.linear(h, f"{name}.ffn.w_gate_up", f"{name}.ffn.b_gate_up"))
            else:
                h = self.linear(h, f"{name}.ffn.w_up", f"{name}.ffn.b_up")
                h = F.gelu(h, approximate="tanh" if c.ffn == "gelu_tanh" else "none")
            x = x + self.linear(h, f"{name}.ffn.w_down", f"{name}.ffn.b_down")
        return self.norm(x, "final_norm")

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the targets that are not -100."""
        table, positions = self.w("embedding.weight"), self.w("position.weight")
        assert table is not None
        x = F.embedding(ids, table)
        if positions is not None:
            x = x + positions[: x.shape[1]]
        x = self.hidden(x, 0, lambda i, q, k, v: _attend(q, k, v))
        return F.cross_entropy(F.linear(x, table).flatten(0, 1), targets.flatten())


class Peer:
    """A model of PyTorch's with its optimizer, ready to train.

    Parameters
    ----------
    config : Config
    initial : mapping
        Name -> weights, NumPy.
    ids, targets : (B, T) int32
    kind : str
        ``"float32"``, or ``"bf16"`` by autocast.
    device : str
        ``"cpu"`` or ``"cuda"``.
    compiled : bool
        Let ``torch.compile`` have it.
    clip : bool
        Clip the gradient to a global norm of 1.
    settings : mapping
        Of AdamW, as ``training.SETTINGS`` has them.
    """

    def __init__(
        self,
        config: Config,
        initial: Mapping[str, Array],
        ids: Array,
        targets: Array,
        *,
        kind: str,
        device: str = "cpu",
        compiled: bool = False,
        clip: bool = False,
        settings: Mapping[str, Any] = SETTINGS,
    ) -> None:
        self.device, self.kind, self.clip = device, kind, clip
        self.model = Model(config, initial).to(device)
        self.take(ids, targets)
        weights = list(self.model.parameters())
        groups = [
            {"params": [w for w in weights if w.ndim >= 2]},
            {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, **_options(settings), fused=True)
        self._run = torch.compile(self.model) if compiled else self.model

    def take(self, ids: Array, targets: Array, lr: float | None = None) -> None:
        """Go on with another batch, and another rate if one is given."""
        self._ids, self._targets = (
            torch.from_numpy(x).long().to(self.device) for x in (ids, targets)
        )
        if lr is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = lr

    def _loss(self, run: Callable[..., Any]) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.kind == "bf16"):
            loss: torch.Tensor = run(self._ids, self._targets)
        return loss

    def _backward(self) -> torch.Tensor:
        loss = self._loss(self._run)
        loss.backward()
        return loss.detach()

    def loss(self) -> float:
        """Return the mean loss alone."""
        with torch.no_grad():
            return float(self._loss(self.model))

    def gradient(self) -> tuple[float, dict[str, Array]]:
        """Return the mean loss and the gradient of every weight."""
        loss = float(self._backward())
        gradients = {}
        for name, key in self.model.names.items():
            gradient = self.model.weights[key].grad
            assert gradient is not None
            gradients[name] = gradient.float().cpu().numpy()
        self._optimizer.zero_grad(set_to_none=True)
        return loss, gradients

    def step(self) -> torch.Tensor:
        """Take a training step; return the mean loss before it."""
        loss = self._backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def weights(self) -> dict[str, Array]:
        """Return the weights as they are now."""
        return {
            name: self.model.weights[key].detach().cpu().numpy().copy()
            for name, key in self.model.names.items()
        }


def _options(settings: Mapping[str, Any] = SETTINGS) -> dict[str, Any]:
    """Return AdamW's settings under PyTorch's names."""
    kept = {name: settings[name] for name in ("lr", "eps", "weight_decay")}
    return {**kept, "betas": (settings["beta1"], settings["beta2"])}


def missing() -> str | None:
    """Say what keeps PyTorch from using the GPU here, or None."""
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU: install its build for CUDA (pytorch.org)"
    return None


def forget_peak() -> None:
    """Begin to measure memory anew."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def peak() -> int:
    """Return the most bytes of the GPU's memory that PyTorch has held since."""
    return int(torch.cuda.max_memory_reserved())


# ---- single ops --------------------------------------------------------------------------------


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend causally: (B, T, H, d) in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


set_threads = torch.set_num_threads

# how people write each op of ours, options under our names
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "attention": _attend,
    "dropout": lambda x, p, key: F.dropout(x, p),
    "embedding": lambda ids, table: F.embedding(ids.long(), table),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "global_norm": torch.linalg.vector_norm,
    "layernorm": lambda x, gain, bias, eps: F.layer_norm(x, gain.shape, gain, bias, eps),
    "linear": lambda x, weight, bias: x @ weight,
    "relu": torch.relu,
    "rmsnorm": lambda x, gain, eps: F.rms_norm(x, gain.shape, gain, eps),
    "rope": lambda x, base: _rotate(x, *rope_tables(base, x.shape[3], x.shape[1])),
    "scale": lambda x, factor: factor * x,
    "softmax": lambda x: torch.softmax(x, -1),
    "swiglu": _swiglu,
}
INTO: dict[str, Callable[..., torch.Tensor]] = {  # and into memory that is there already
    "add": torch.add,
    "relu": lambda x, out: torch.clamp(x, min=0, out=out),
}


def op(case: OpCase, dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    """Return a function that runs an op: its forward, and its backward where that is timed."""
    leaves = [torch.from_numpy(np.array(x)) for x in case.arrays]
    leaves = [x.to(dtype) if x.is_floating_point() else x for x in leaves]
    floats = [x.requires_grad_() for x in leaves if case.dout is not None and x.dtype == dtype]
    cotangent = None if case.dout is None else torch.from_numpy(case.dout).to(dtype)

    def run() -> list[torch.Tensor]:
        out = OPS[case.op](*leaves, **case.options)
        return [out, *torch.autograd.grad(out, floats, cotangent)] if floats else [out]

    return run


def arrays(tensors: Sequence[torch.Tensor]) -> list[Array]:
    """Return tensors as NumPy's arrays."""
    return [x.detach().numpy() for x in tensors]


def into(case: OpCase) -> Callable[[], object] | None:
    """Return a function that runs an op's forward into given memory, for the ops that can."""
    if case.dout is not None or case.op not in INTO:
        return None
    tensors = [torch.from_numpy(np.array(x)) for x in case.arrays]
    return partial(INTO[case.op], *tensors, out=torch.empty_like(tensors[0]))


def adamw(
    master: Array, m: Array, v: Array, grad: Array
) -> tuple[Callable[[], object], Callable[[], Array]]:
    """Return a function that takes a step of the fused AdamW, the ninth first, and the weights."""
    weight = torch.nn.Parameter(torch.from_numpy(np.array(master)))
    weight.grad = torch.from_numpy(np.array(grad))
    optimizer = torch.optim.AdamW([weight], **_options(), fused=True)
    optimizer.state[weight] = {
        "step": torch.tensor(8.0),
        "exp_avg": torch.from_numpy(np.array(m)),
        "exp_avg_sq": torch.from_numpy(np.array(v)),
    }
    return optimizer.step, lambda: weight.detach().numpy()


def muon(matrices: list[Matrix]) -> tuple[Callable[[], object], Callable[[], list[Array]]]:
    """Return a function that takes a step of Muon of all matrices, and their weights.

    Its products are of bfloat16, whatever its weights are. It keeps 1 - momentum times our moment.
    """
    weights, moments, kept = [], [], np.float32(1 - MUON["momentum"])
    for w, m, g in (state for matrix in matrices for state in matrix.apart()):
        weight = torch.nn.Parameter(torch.from_numpy(w.copy()))
        weight.grad = torch.from_numpy(g.copy())
        moments.append(torch.from_numpy(kept * m))
        weights.append(weight)
    optimizer = torch.optim.Muon(weights, adjust_lr_fn="match_rms_adamw", **MUON)
    for weight, moment in zip(weights, moments, strict=True):
        optimizer.state[weight]["momentum_buffer"] = moment
    return optimizer.step, lambda: arrays(weights)


def decoder(
    config: Config, master: Mapping[str, Array], cache: Any, position: int
) -> Callable[[], Array]:
    """Return a function that decodes one token at ``position`` of a cache (L, B, S, H, d)."""
    model = Model(config, master)
    keys, values = (
        torch.from_numpy(np.stack(layers).swapaxes(2, 3).copy()) for layers in (cache.k, cache.v)
    )
    token, table = torch.tensor([[7]]), model.w("embedding.weight")
    assert table is not None

    def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys[i, :, :, position], values[i, :, :, position] = k[:, 0], v[:, 0]
        seen = keys[i, :, :, : position + 1], values[i, :, :, : position + 1]
        o = F.scaled_dot_product_attention(q.transpose(1, 2), *seen, enable_gqa=True)
        return o.transpose(1, 2)

    def step() -> Array:
        with torch.inference_mode():
            x = model.hidden(F.embedding(token, table), position, attend)
            logits: Array = F.linear(x, table).view(1, -1).numpy()
            return logits

    return step
