"""The same functions as ``reference``, made fast. ``load`` hands out the backends by name."""

import importlib
from typing import Final, Literal, cast, get_args

from reference.ops import Ops

__all__ = ["load", "offered"]

BACKENDS = ("reference", "cpu", "cuda")
COMPUTE = ("float32", "bf16")
READING = "q8_0"  # computes, too, but nothing can be trained in it
AUTO: Final = "auto"
DEFAULT: Final = "default"  # of a GPU's products: cuBLAS's own choice
# what multiplies in a GPU's attention: products of warpgroups (Hopper alone), mma.sync, or one
# thread at a time, the plain statement of the same
Attention = Literal["auto", "wgmma", "mma", "plain"]
Products = str | tuple[str, ...]  # AUTO, DEFAULT, or the lines that accel/cuda/products.py chose


def load(
    backend: str,
    *,
    compute: str = "float32",
    attention: Attention = AUTO,
    products: Products = AUTO,
) -> Ops:
    """Return a backend: a module with the functions of ``reference.ops``.

    Parameters
    ----------
    backend : str
        ``"reference"`` (NumPy, to be read), ``"cpu"`` (Numba) or ``"cuda"`` (an NVIDIA GPU).
    compute : str
        ``"float32"``; or ``"bf16"``, in which products and attention read bfloat16 operands and add
        up in float32. Parameters and optimizer stay in float32 either way, but for Muon's products
        on the cpu. ``"q8_0"`` (cpu alone): float32, with matrices rounded to eight bits a weight,
        for decoding; not for training.
    attention : str
        By which kernels the backend ``"cuda"`` computes attention of bf16: ``"wgmma"``, ``"mma"``
        or ``"plain"``; ``"auto"``: the first of these that the GPU has. Which is the faster for the
        shapes of a run, ``accel/cuda/paths.py`` finds out.
    products : str or tuple of str
        By which algorithms the backend ``"cuda"`` multiplies matrices of bf16: what
        ``accel/cuda/products.py`` has chosen for a run; ``"auto"``, ``"default"``: those that
        cuBLAS picks.

    Raises
    ------
    ValueError
        When there is no such backend, or it has no such mode, or ``$MYLLM_THREADS`` is no number of
        threads.
    ImportError
        When this machine or installation lacks what it needs; the message says what, and how to
        get it. Nothing else is taken in its place.
    """
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; known: {', '.join(BACKENDS)}")
    if compute not in (*COMPUTE, READING):
        known = ", ".join((*COMPUTE, READING))
        raise ValueError(f"there is no compute mode {compute!r}; known: {known}")
    if compute == READING and backend == "cuda":
        raise ValueError(f"the backend 'cuda' has no mode {compute}; choose bf16, or backend cpu")
    if attention not in get_args(Attention):
        known = ", ".join(get_args(Attention))
        raise ValueError(f"there is no attention {attention!r}; known: {known}")
    if backend == "cuda":
        from accel.cuda.cupy_device import backend as cuda_backend  # needs CuPy only when called

        return cuda_backend(compute, attention, products)
    if attention != AUTO:
        raise ValueError(
            f"attention {attention!r} is by kernels of GPUs, and the backend {backend!r} has none; "
            "leave attention at 'auto'"
        )
    if products != AUTO:
        raise ValueError(
            f"products are chosen on GPUs, and the backend {backend!r} has none; leave products at "
            "'auto'"
        )
    if backend == "reference":
        if compute != "float32":
            raise ValueError(
                f"the reference computes in the type of the arrays it is given, not in {compute}; "
                "leave compute at 'float32'"
            )
        return cast(Ops, importlib.import_module("reference.ops"))
    from accel.threads import threads

    threads()  # refuses a wrong $MYLLM_THREADS here, where all ranks can say so once
    if compute == "bf16":
        from accel.cpu import bf16_tiles

        bf16_tiles.enable()
        return cast(Ops, importlib.import_module("accel.cpu.ops_bf16"))
    name = "accel.cpu.ops_q8" if compute == READING else "accel.cpu.ops"
    return cast(Ops, importlib.import_module(name))


def offered(backend: str) -> dict[str, Ops]:
    """Return the modes in which this machine can train with a backend, float32 first.

    Raises
    ------
    ValueError, ImportError
        When it cannot even in float32, as ``load`` says.
    """
    found = {}
    for mode in COMPUTE:
        try:
            found[mode] = load(backend, compute=mode)
        except (ImportError, ValueError):  # a processor without bf16, say
            if mode == COMPUTE[0]:
                raise
    return found
