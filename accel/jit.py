"""The kernel cache: how every Numba kernel of this project is compiled, kept and found again.

``@jit`` is ``numba.njit`` with another cache behind it. Numba's own looks at the file of the
function being compiled and at nothing else: after a change of a helper, a constant or an intrinsic
in another file, it still serves the old machine code. Here all compiled code of
a folder of sources lives in one cache folder whose **name** is a hash of

- the text of every ``*.py`` file in the folder of the kernel, of this file, ``linking.py`` and
  ``cache_files.py``;
- the versions of Python, NumPy, Numba and llvmlite, and the settings of Numba that change code;
- the name and the features of the processor, and ``$MYLLM_BF16`` (``cpu/bf16_tiles.py``).

Whatever changes, the name changes, and the kernels are compiled again. This asks for one rule:
**a kernel and everything it freezes (helpers, constants, intrinsics) lie in one folder.** A kernel
that calls a kernel of another folder is refused.

The cache lies in ``kernels/`` under ``$MYLLM_CACHE_DIR``, else ``$NUMBA_CACHE_DIR``, else the
user's cache folder. A folder that can be read but not written still serves what it holds. Nothing
is looked up, created or compiled before a kernel is first called. A folder that others can write is
refused, and a damaged file is compiled again (``cache_files.py``).

A kernel that another kernel calls is a part of it: LLVM's optimised code of it is kept, in a file
of its own, and ends up in the machine code of the caller. Machine code of its own, and a way in
from Python, are made when Python calls it. It is optimised again with each kernel that calls it,
for which it may be inlined. Large ones that are said to be ``apart`` are optimised by themselves
alone, in one version for all constants that they are called with.

Several processes that start together on a cold cache share the work: each kernel has a lock file,
is compiled by one of them, and the others load what it wrote (``dist/warm.py`` lets each begin with
another one). A kernel stays locked while those that it calls are, so no two wait for each other.
"""

import contextlib
import hashlib
import os
import platform
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, overload

import llvmlite
import numba
from numba.core import codegen, config, sigutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _Cache, _CacheLocator
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher, cpu_target
from numba.core.runtime import rtsys
from numba.core.types.misc import unliteral
from numba.np import numpy_support

from accel import cache_files, launcher, linking, system
from accel.cache_files import (
    CheckedFiles,
    Damaged,
    check_private,
    default_root,
    named_root,
    private_folder,
    say,
    temporary_root,
)
from accel.linking import Compiling, generated_by, is_part, nothing_else, parts
from accel.threads import ready_pool

F = TypeVar("F", bound=Callable[..., Any])


# --- the decorator -------------------------------------------------------------------------------


@overload
def jit(func: F, /) -> F: ...
@overload
def jit(*, apart: bool = False, **options: Any) -> Callable[[F], F]: ...
def jit(func: F | None = None, /, *, apart: bool = False, **options: Any) -> F | Callable[[F], F]:
    """Compile a function with Numba on its first call and keep the machine code on disk.

    Use it as ``@jit`` or ``@jit(nogil=True, parallel=True, fastmath={"contract"}, ...)``. A package
    may state in ``COMPILE_SECONDS`` how long one core (of Zen 5) compiles what ``myllm demo`` needs
    of it; the first user is told.

    Parameters
    ----------
    func : callable
        The function, when used without parentheses.
    apart : bool
        As a part of other kernels, it is optimised once, by itself: for what is too large to be
        inlined, and gains nothing by constants.
    **options
        Options of ``numba.njit``; ``cache`` is not one of them, since caching is the point.

    Returns
    -------
    kernel
        A Numba dispatcher (typed as the function it came from). With ``NUMBA_DISABLE_JIT=1``, the
        function itself.
    """
    if "cache" in options:
        raise ValueError("jit always caches: leave the option 'cache' out")
    locals_ = options.pop("locals", {})
    always = {"nopython": True, "boundscheck": None, "no_cfunc_wrapper": True}
    # macOS's pip has no other pool of Numba's than the one that several threads may not start
    one_at_a_time = sys.platform == "darwin" or config.THREADING_LAYER == "workqueue"

    def kernel_of(function: F) -> Any:
        if config.DISABLE_JIT:
            return function
        kernel = (InTurn if one_at_a_time else Kernel)(function, locals_, {**always, **options})
        kernel.apart = apart
        return kernel

    return kernel_of if func is None else kernel_of(func)


class Kernel(CPUDispatcher):  # type: ignore[misc]
    """A Numba dispatcher that compiles under the lock and keeps its code in a ``Store``."""

    apart = False

    def __init__(
        self,
        py_func: Callable[..., Any],
        locals: dict[str, Any] | None = None,
        targetoptions: dict[str, Any] | None = None,
        **rest: Any,
    ):
        super().__init__(py_func, locals, targetoptions, **rest)
        self._store = store_of(py_func.__code__.co_filename)
        if self._store is not None:
            self._cache = _LazyCache(py_func, self._store)
            self._compile_here = self._compiler.compile
            self._compiler.compile = self._compile_and_load

    def compile(self, sig: Any) -> Any:
        """Load or compile the version of this kernel for the argument types ``sig``."""
        with global_compiler_lock:
            if _parallel(self):
                ready_pool()
            if self._store is None:
                return super().compile(sig)
            before, self._cache.part = self._cache.part, _active is not None
            args, _ = sigutils.normalize_signature(sig)
            if not self._cache.part and args in self.overloads and is_part(self.overloads[args]):
                del self.overloads[args]  # Python calls it now
            try:
                with self._store.compiling(self.py_func):
                    return super().compile(sig)
            finally:
                self._cache.part = before

    def get_call_template(self, args: Any, kws: dict[str, Any]) -> Any:
        """Type the call by another kernel; what LLVM makes of constants needs no other version."""
        if self.apart or self.targetoptions.get("forceinline"):
            args = [unliteral(kind) for kind in args]
            kws = {name: unliteral(kind) for name, kind in kws.items()}
        return super().get_call_template(args, kws)

    def add_overload(self, compiled: Any) -> None:
        """Take a version in; Python, which looks by arguments' types, does not find a part."""
        if is_part(compiled):
            self.overloads[tuple(compiled.signature.args)] = compiled
        else:
            super().add_overload(compiled)

    def _compile_and_load(self, args: Any, return_type: Any) -> Any:
        """Compile, store, and return what every later process will load.

        Freshly compiled code calls the body of a ``prange``, or another kernel, as machine code
        that exists already. The stored code holds a copy of it that was optimised again together
        with its caller, and may add in another order. So the process that compiled loads, too.
        """
        options, part = self._compiler.targetoptions, self._cache.part
        self._compiler.targetoptions = {**options, "no_cpython_wrapper": part}
        try:
            compiling = Compiling(self.py_func.__qualname__, part, self.apart)
            with generated_by(self.targetctx, compiling), nothing_else():
                compiled = self._compile_here(args, return_type)
        finally:
            self._compiler.targetoptions = options
        self._cache.store(args, compiled)
        loaded = self._cache.reload(args, self.targetctx)
        if loaded is None:
            return compiled
        self.targetctx.insert_user_function(loaded.entry_point, loaded.fndesc, [loaded.library])
        return loaded


class InTurn(Kernel):
    """A kernel that waits while another thread of Python is in one that uses the pool.

    Numba's pool ``workqueue`` ends the process when two threads start work on it.
    """

    _turn = threading.Lock()
    _uses_pool: bool | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the kernel, in turn."""
        if self._uses_pool is None:
            self._uses_pool = _parallel(self)
        with self._turn if self._uses_pool else contextlib.nullcontext():
            return super().__call__(*args, **options)


def _parallel(kernel: Kernel) -> bool:
    """Whether a kernel, or one that it calls, uses Numba's pool: stored code does not start it."""
    function = kernel.py_func
    called = (function.__globals__.get(name) for name in function.__code__.co_names)
    return bool(kernel.targetoptions.get("parallel")) or any(
        isinstance(other, Kernel) and _parallel(other) for other in called
    )


# --- where compiled code is kept -----------------------------------------------------------------


class Store:
    """The cache folder of one folder of kernel sources.

    Parameters
    ----------
    sources : Path
        The folder whose ``*.py`` files decide the name of the cache folder.
    """

    def __init__(self, sources: Path):
        self.sources = sources
        self.born = time.time()
        self._root: Path | None = None
        self._name: str | None = None
        self._apart = False
        self._held: dict[str, int] = {}  # kernels locked by this process -> descriptors
        # an announcement was made, here or by another process of this machine
        self.silent = launcher.local_rank() > 0

    @property
    def root(self) -> Path:
        """The folder that holds the caches."""
        if self._root is None:
            self._root = default_root() or temporary_root("the user has no home folder")
            self._keep_apart_if_changed()
        return self._root

    @property
    def folder(self) -> Path:
        """The cache folder, named by everything the machine code depends on."""
        if self._name is None:
            self._name = f"{self.sources.name}-{self.digest()}"
        return self.root / self._name

    def digest(self) -> str:
        """Hash what the machine code of these sources depends on."""
        known = [
            sys.implementation.cache_tag or "",
            platform.python_version(),
            numba.__version__,
            llvmlite.__version__,
            str(numpy_support.numpy_version),
            f"{config.OPT} {config.BOUNDSCHECK} {config.DEBUGINFO_DEFAULT}",
            f"{config.LOOP_VECTORIZE} {config.SLP_VECTORIZE} {config.USING_SVML}",
            # triple, processor name and processor features
            str(cpu_target.target_context.codegen().magic_tuple()),
            os.environ.get("MYLLM_BF16", ""),
        ]
        hashed = hashlib.sha256("\n".join(known).encode())
        ours = (Path(file) for file in (__file__, cache_files.__file__, linking.__file__))
        for path in [*self._files(), *ours]:
            text = path.read_bytes()
            hashed.update(f"\0{path.name}\0{len(text)}\0".encode() + text)
        return hashed.hexdigest()[:16]

    @contextlib.contextmanager
    def compiling(self, py_func: Callable[..., Any]) -> Iterator[None]:
        """Surround one load-or-compile, and give back the lock that it took."""
        global _active
        if _active is not None and _active is not self:
            raise RuntimeError(
                f"kernel {py_func.__qualname__} of {self.sources} is called by a kernel of "
                f"{_active.sources}, whose cache would not notice a change of it: "
                "keep kernels that call each other in one folder"
            )
        before, held = _active, set(self._held)
        _active = self
        try:
            yield
        finally:
            _active = before
            for name in self._held.keys() - held:
                os.close(self._held.pop(name))  # closing gives the lock back

    def lock(self, py_func: Callable[..., Any]) -> None:
        """Take the lock that lets one process compile a kernel; waits while another one does."""
        name = f"{py_func.__module__}.{py_func.__qualname__}"
        if name in self._held:
            return
        self._keep_apart_if_changed()
        self._held[name] = descriptor = self.open_lock(name)
        if not system.lock(descriptor, wait=False):
            if launcher.local_size() == 1:  # else only one rank speaks
                self.silent = True  # the process that holds it has said what is going on
            system.lock(descriptor, wait=True)

    def open_lock(self, name: str) -> int:
        """Return the descriptor of a file of this name in the cache folder, which is made.

        Raises
        ------
        OSError
            If the folder that the user has chosen cannot be written.
        """
        try:
            descriptor = self._open(name)
        except OSError as error:
            if named_root() is not None:
                raise OSError(
                    error.errno,
                    f"compiled kernels cannot be kept in {self.folder} ({error.strerror}): "
                    f"make it writable or point {named_root()} elsewhere",
                ) from error
            self._root = temporary_root(f"{self.root} cannot be written ({error.strerror})")
            descriptor = self._open(name)
        check_private(self.root, self.folder)  # what was made in the meantime, too
        return descriptor

    def announce(self, package: str) -> None:
        """Say once what the wait is for."""
        if not self.silent:
            self.silent = True
            seconds = getattr(sys.modules.get(package), "COMPILE_SECONDS", None)
            about = "" if seconds is None else f", ~{seconds} s of one core"
            say(f"compiling kernels of {package} once{about}")

    def _open(self, name: str) -> int:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        tempfile.TemporaryFile(dir=self.folder).close()  # a folder of another user exists, too
        # of a function in a function, whose name has <> in it, which Windows has not in names
        return system.open_lock(self.folder / f"{re.sub('[<>]', '', name)}.lock", 0o600)

    def _keep_apart_if_changed(self) -> None:
        """If the sources have changed, keep the kernels of this process in a folder of its own."""
        if not self._apart and self._changed_since_import():
            self._apart = True
            say(f"{self.sources} changed while it was in use: kernels compiled now are not kept")
            self._root = private_folder()

    def _files(self) -> list[Path]:
        return sorted(self.sources.glob("*.py"))

    def _changed_since_import(self) -> bool:
        # The functions in memory would be compiled under the name of sources they do not come from.
        # A file that was put in another's place may be old; when it was put there is its ctime.
        times = (path.stat() for path in self._files())
        return any(max(time.st_mtime, time.st_ctime) > self.born for time in times)


_stores: dict[Path, Store] = {}
_active: Store | None = None  # the store of the kernel being compiled; guarded by Numba's own lock


def store_of(file: str) -> Store | None:
    """Return the store of a source file's folder; None for what was typed at a prompt."""
    path = Path(file)
    if not path.is_file():
        return None
    return _stores.setdefault(path.parent, Store(path.parent))


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Tell Numba's cache files where they live."""

    def __init__(self, store: Store, line: int):
        self._store = store
        self._line = line

    def get_cache_path(self) -> str:
        return str(self._store.folder)

    def get_source_stamp(self) -> str:
        return self._store.folder.name

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> "_Locator":
        return cls(
            _stores[Path(py_func.__code__.co_filename).parent], py_func.__code__.co_firstlineno
        )


class _DiskImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _DiskCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _DiskImpl

    def __init__(self, py_func: Callable[..., Any], part: bool):
        super().__init__(py_func)
        stamp = self._impl.locator.get_source_stamp()
        base = self._impl.filename_base + (".part" if part else "")
        self._cache_file = CheckedFiles(self._cache_path, base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return stored code, which needs Numba's runtime; all that compiles is loaded by who does.

        Numba's own way loads all of it first, which takes longer than most commands' own imports.
        """
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


class _LazyCache(_Cache):  # type: ignore[misc]
    """Numba's cache of one function, made when first asked, locked around what is missing."""

    def __init__(self, py_func: Callable[..., Any], store: Store):
        self._py_func = py_func
        self._store = store
        self.part = False  # what is asked for is called by another kernel
        self._disk: dict[bool, Any] = {}

    @property
    def cache_path(self) -> str:
        return str(self._store.folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored code for ``sig``; None, with the lock held, if it must be compiled."""
        found = self._read(sig, target_context)
        if found is None:
            self._store.lock(self._py_func)
            found = self._read(sig, target_context)  # the process we waited for may have written it
        if found is None:
            module = self._py_func.__module__
            self._store.announce(module.rpartition(".")[0] or module)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Do nothing: what was compiled has been stored, and ``data`` may come from there."""

    def store(self, sig: Any, data: Any) -> None:
        """Store freshly compiled code; what cannot be stored still runs."""
        try:
            self._files().save_overload(sig, data)
        except OSError as error:
            say(f"a compiled kernel could not be kept in {self.cache_path}: {error}")

    def reload(self, sig: Any, target_context: Any) -> Any:
        """Return the code just stored for ``sig``; None if it could not be stored."""
        return self._read(sig, target_context)

    def enable(self) -> None:
        self._files().enable()

    def disable(self) -> None:
        self._files().disable()

    def flush(self) -> None:
        self._files().flush()

    def _files(self) -> Any:
        found = self._disk.get(self.part)
        if found is None or found.cache_path != self.cache_path:
            check_private(self._store.root, self._store.folder)
            found = self._disk[self.part] = _DiskCache(self._py_func, self.part)
        return found

    def _read(self, sig: Any, target_context: Any) -> Any:
        # Each in its own engine: a common one would bind a kernel's calls to the first copy of
        # the callee that was loaded, which may have been optimised for another caller.
        files = self._files()
        try:
            loading = parts() if self.part else codegen.JITCPUCodegen("myllm.stored")
            with generated_by(target_context, loading):
                return files.load_overload(sig, target_context)
        except OSError:
            return None  # no such folder, or not ours to read: taking the lock tells which, and why
        except Damaged as error:
            # A full disk, a power cut, a bad block. Forget the file; it is written anew.
            say(f"a damaged kernel is compiled again: {error}")
            self._store.lock(self._py_func)
            with contextlib.suppress(OSError):
                error.args[0].unlink()
            return None
