"""What training takes of a GPU's memory, by arithmetic. An H100 held 3 % less (GPT-2 small).

A step's arrays are pieces of one block (``accel/cuda/arena.py``): what is kept for the backward,
and what comes and goes. The widest moments are the loss, with a chunk of logits, and the backward
of a block. Between pieces some of it lies free. The launchers of a whole step of MyLLM-1B, run with
nothing behind them, ask for what is said here to within 8 %, and for up to 21 % less with
``run.recompute = "block"`` (``tests/dist/test_gpu.py``).
"""

from typing import NamedTuple

from accel.cuda.loss import chunk_shape
from reference.config import Config

SIZES = (80, 141)  # GB of an A100 or H100, of an H200
GAPS = 0.05  # of the block, between its pieces
CUBLAS = 64 << 20  # bytes of workspace: what cuBLAS takes on Hopper, and cublasLt may
ASSUMED = 1 << 30  # bytes: CUDA's own, machine code, NCCL's buffers


class GpuMemory(NamedTuple):
    """Bytes on one GPU."""

    states: int  # master, m and v, the gradient's tree, the weights that the ops read
    activations: int
    scratch: int  # what comes and goes within a step
    gaps: int
    libraries: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def loss_bytes(model: Config, tokens: int, item: int) -> int:
    """Return the bytes of a chunk of logits, of the head's float32 gradient and a padded head."""
    rows, width = chunk_shape(tokens, model.vocab_size)
    copied = width * item if width > model.vocab_size else 0
    return rows * width * item + model.d_model * (4 * width + copied)


def scratch_bytes(model: Config, tokens: int, item: int, loss: int) -> int:
    """Return the bytes of a step beside activations, at its widest moment.

    From the loss to the end of the backward three arrays of the residual stream's size are held.
    With them, whichever is largest: the bytes of the loss, ``loss``; in the backward of a
    feed-forward the gradients of its product and of its input; in that of attention
    those of its output and of q, k and v, and dk and dv of each query head in float32.
    """
    c = model
    held = 3 * tokens * c.d_model * item
    ffn = tokens * (3 if c.gated else 2) * c.d_ff * item
    heads = (2 * c.n_heads + 2 * c.n_kv_heads) * item + 2 * 4 * c.n_heads
    return held + max(loss, ffn, tokens * heads * c.d_head)


def gpu_memory(states: int, model: Config, activations: int, tokens: int, item: int) -> GpuMemory:
    """Return the memory of a step with ``activations`` bytes kept of ``tokens`` tokens."""
    scratch = scratch_bytes(model, tokens, item, loss_bytes(model, tokens, item))
    gaps = int(GAPS * (activations + scratch))
    return GpuMemory(states, activations, scratch, gaps, CUBLAS + ASSUMED)
