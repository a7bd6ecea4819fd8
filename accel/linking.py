"""How the code of a kernel is put together of its own and that of the kernels that it calls.

Numba generates LLVM's code of one kernel after the other (``jit.py``). Here it becomes machine code
as a whole, or is kept as a part of others.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

from llvmlite.binding import ffi, newpassmanagers, parse_bitcode
from numba.core import codegen


def is_part(compiled: Any) -> bool:
    """Whether a version can be called by other kernels only."""
    return getattr(compiled.library.codegen, "part", False)


class Library(codegen.JITCodeLibrary):  # type: ignore[misc]
    """Code that is made into machine code only if it is a kernel that Python calls.

    Numba makes three more of every ``prange``: its body and two wrappers, each with a copy of all
    that it calls. All end up in the kernel's own, and are optimised there. So do the kernels that
    a kernel calls, its parts: they are kept as LLVM's code. Those that are optimised apart are
    linked to the whole when it has been optimised.
    """

    def __init__(self, codegen: Any, name: str, apart: bool = False):
        super().__init__(codegen, name)
        self.apart = apart or (codegen.apart and name == codegen.kernel)
        self.late: dict[Any, None] = {}  # libraries to link to the whole, in order

    def add_ir_module(self, ir_module: Any) -> None:
        if ir_module.name != "wrapper" or self.name == self.codegen.kernel:  # else nobody calls it
            super().add_ir_module(ir_module)

    def finalize(self) -> None:
        apart = [library for library in self._linking_libraries if getattr(library, "apart", False)]
        for library in self._linking_libraries:
            self.late |= getattr(library, "late", {})  # which Numba's own have not
        for library in apart:
            self.late[library] = None
            self._reload_init |= library._reload_init
            self._linking_libraries.remove(library)
        super().finalize()

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self.codegen._data_layout  # optimised below, all of it together

    def _optimize_final_module(self) -> None:
        # the body of a prange, too: optimised in its kernel alone, LayerNorm's sums have other bits
        if self.name == self.codegen.kernel or self.name.startswith("__numba_parfor_gufunc"):
            unused = newpassmanagers.ModulePassManager()  # most of what was linked to it
            unused.add_global_dead_code_eliminate_pass()
            unused.run(self._final_module, self.codegen._pass_builder())
            super()._optimize_final_module()
        if self.name == self.codegen.kernel:
            for library in self.late:
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)
            self.late = {}

    def _finalize_final_module(self) -> None:
        if self.name == self.codegen.kernel and not self.codegen.part:
            super()._finalize_final_module()
        else:
            self._finalize_dynamic_globals()
            self._finalized = True

    def serialize_using_object_code(self) -> Any:
        if not self.codegen.part:
            return super().serialize_using_object_code()
        return self.name, self.apart, self._get_module_for_linking().as_bitcode()

    @classmethod
    def _unserialize(cls, codegen: Any, state: Any) -> Any:
        name, apart, code = state
        self = codegen.create_library(name, apart=apart)
        self._final_module = self._shared_module = parse_bitcode(code)
        self._finalized = True
        return self


class Compiling(codegen.JITCPUCodegen):  # type: ignore[misc]
    """What makes the code of one kernel, or loads a part."""

    _library_class = Library

    def __init__(self, kernel: str = "", part: bool = True, apart: bool = False):
        super().__init__("myllm.compiled")
        self.kernel, self.part, self.apart = kernel, part, apart

    def _customize_tm_options(self, options: dict[str, Any]) -> None:
        """Have LLVM use the widest vectors of AVX-512.

        It prefers half of them on processors whose first ones slowed down for the whole: it took
        1.2 to 1.4 times as long in softmax and GELU there (Emerald Rapids).
        """
        super()._customize_tm_options(options)
        if "+avx512f" in options["features"]:
            options["features"] += ",-prefer-256-bit"

    def set_env(self, env_name: str, env: Any) -> None:
        if self._engine.is_symbol_defined(env_name):  # of the kernel itself
            super().set_env(env_name, env)


@functools.cache
def parts() -> Compiling:
    """Return what loads the parts of kernels, in one engine."""
    return Compiling()


@contextlib.contextmanager
def generated_by(target_context: Any, other: Any) -> Iterator[None]:
    """Have Numba compile or load with another code generator, whose engine holds the result."""
    common = target_context._internal_codegen
    target_context._internal_codegen = other
    try:
        yield
    finally:
        target_context._internal_codegen = common


@contextlib.contextmanager
def nothing_else() -> Iterator[None]:
    """Leave out what a compilation of Numba's spends a tenth of its time on.

    That is the search for garbage, among what is nearly all in use, and two events at each call of
    LLVM, for timers.
    """
    collecting = gc.isenabled()
    told, ffi.lib._lock._cblist = ffi.lib._lock._cblist, []
    gc.disable()
    try:
        yield
    finally:
        ffi.lib._lock._cblist = told
        if collecting:
            gc.enable()
