"""Kernels of the cpu backend as LLVM would write them for another processor; none of them is run.

``python -m tests.helpers.emitting TRIPLE FOLDER PRESET…`` writes the assembly of every kernel that
training a model of a preset calls, a file each. ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` name
the processor. A call of a kernel compiles it for its arguments, and returns zero.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as ll
import numpy as np


class Engine:
    """Takes modules, and makes nothing of them."""

    def __init__(self, module: Any, machine: Any, **options: Any) -> None:
        self.target_data = machine.target_data
        self._room = ctypes.create_string_buffer(64)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def is_symbol_defined(self, name: str) -> bool:
        """Say that all is there."""
        return True

    def address(self, name: str) -> int:
        """Return where something could be written."""
        return ctypes.addressof(self._room)

    get_function_address = get_global_value_address = address


def emit_for(triple: str) -> None:
    """Have Numba, not loaded yet, compile for another processor."""
    ll.initialize_all_targets()
    ll.initialize_all_asmprinters()
    target = ll.Target.from_triple(triple)
    ll.get_process_triple = ll.get_default_triple = lambda: triple
    ll.Target.from_default_triple = classmethod(lambda cls: target)
    ll.create_mcjit_compiler = Engine
    from numba.core import codegen

    codegen.JitEngine = lambda engine: engine


def write_assembly(folder: Path) -> None:
    """Have every kernel that is called compiled, and its assembly written."""
    from numba.core import codegen, types

    from accel import jit

    jit.store_of = lambda file: None  # type: ignore[assignment]
    written: set[str] = set()

    def keep(library: Any) -> None:
        library._finalize_dynamic_globals()
        if library.name not in written and "." not in library.name:
            written.add(library.name)
            machine = library._codegen._tm
            machine.set_asm_verbosity(True)
            assembly = machine.emit_assembly(library._final_module)
            (folder / f"{library.name}.s").write_text(assembly, encoding="utf-8")

    codegen.JITCodeLibrary._finalize_final_module = keep

    def zero(kind: Any) -> Any:
        if isinstance(kind, types.BaseTuple):
            return tuple(zero(part) for part in kind)
        return None if kind == types.none else 0 if isinstance(kind, types.Integer) else 0.0

    def call(self: Any, *args: Any, **options: Any) -> Any:
        self._compile_for_args(*args, **options)
        return zero(list(self.overloads.values())[-1].signature.return_type)

    jit.Kernel.__call__ = call  # type: ignore[method-assign]
    np.empty = np.zeros  # what no kernel writes to is read all the same


def main() -> None:
    """Write the assembly of what the models of some presets call."""
    triple, folder, *presets = sys.argv[1:]
    emit_for(triple)
    write_assembly(Path(folder))
    from accel import load
    from dist import config
    from dist.warm import tasks_of

    try:
        load("cpu", compute="bf16")
    except ImportError as error:
        print(error)
    ops: Any = load("cpu")
    for preset in presets:
        for task in tasks_of(config.load(preset), writes=True):
            task.call(ops)


if __name__ == "__main__":
    main()
