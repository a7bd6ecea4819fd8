"""PyTorch's side of ``myllm bench cuda --peer torch``: the same step at its documented best.

The model of ``accel/bench_torch.py`` (``scaled_dot_product_attention`` with grouped heads,
``rms_norm``) under autocast to bfloat16 with float32 weights, as ours has them; ``torch.compile``;
clipping by the global norm; the fused AdamW. Only this file, ``accel/bench_torch.py`` and tests
import PyTorch.
"""

from collections.abc import Mapping

import torch

from accel.bench_torch import Model
from reference.config import Config
from reference.types import Array


class Peer:
    """A model of PyTorch's with its optimizer, ready to train.

    Parameters
    ----------
    config : Config
    master : mapping
        Name -> initial weights, NumPy.
    ids, targets : (B, T) int32
    device : str
        ``"cuda"``; the tests have only ``"cpu"``.
    compiled : bool
        Let ``torch.compile`` have it.
    """

    def __init__(
        self,
        config: Config,
        master: Mapping[str, Array],
        ids: Array,
        targets: Array,
        *,
        device: str = "cuda",
        compiled: bool = True,
    ) -> None:
        self.device = device
        self.model = Model(config, master).to(device)
        self._ids, self._targets = (torch.from_numpy(x).long().to(device) for x in (ids, targets))
        decayed = [w for w in self.model.parameters() if w.ndim >= 2]
        rest = [w for w in self.model.parameters() if w.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True
        )
        self._run = torch.compile(self.model) if compiled else self.model

    def _backward(self) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss: torch.Tensor = self._run(self._ids, self._targets)
        loss.backward()
        return loss.detach()

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

    def step(self) -> None:
        """Take a training step."""
        self._backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Array]:
        """Return the weights as they are now."""
        return {
            name: self.model.weights[key].detach().cpu().numpy().copy()
            for name, key in self.model.names.items()
        }


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
