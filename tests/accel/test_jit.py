"""The kernel cache: what is compiled, when, how often, and where it is kept.

Every claim is about processes (cold, warm, several at once), so each test makes a little package of
kernels in a temporary folder and runs it in processes of its own: forks of an interpreter that has
imported Numba and nothing of ours.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from accel import jit, system, threads, waiting
from tests.helpers import ROOT, forked

OWN = waiting.BRIEF if system.starved() is None else waiting.LONG

HELPERS = """
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

FACTOR = 2.0

@intrinsic
def bump(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.fadd(args[0], ir.Constant(ir.DoubleType(), 10.0))
    return types.float64(types.float64), codegen
"""

KERNELS = """
import numpy as np
from numba import prange
from accel.jit import jit
from pack.helpers import FACTOR, bump

@jit
def scaled(x):
    return bump(FACTOR * x)

@jit(nogil=True, parallel=True, fastmath={"contract"})
def total(a):
    s = 0.0
    for i in prange(a.size):
        s += scaled(a[i])
    return s
"""

KERNELS += """
@jit
def doubled(a):
    return 2 * total(a)
"""

REPORT = """
import numpy as np
from pack import kernels
print(kernels.scaled(1.0), kernels.total(np.arange(4.0)))
print(sum(sum(k.stats.cache_misses.values()) for k in (kernels.scaled, kernels.total)))
"""


def write_pack(folder: Path) -> Path:
    """Write a package of kernels whose sources are a minute old, and return the folder."""
    (folder / "pack").mkdir()
    (folder / "pack/__init__.py").write_text("COMPILE_SECONDS = 7\n")
    (folder / "pack/helpers.py").write_text(HELPERS)
    (folder / "pack/kernels.py").write_text(KERNELS)
    past = time.time() - 60
    for path in (folder / "pack").iterdir():
        os.utime(path, (past, past))
    return folder


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return write_pack(tmp_path)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pack(tmp_path_factory.mktemp("compiled"))
    run(folder)
    return folder


@pytest.fixture
def filled(compiled: Path, tmp_path: Path) -> Path:
    """The same with a cache that holds its kernels: it is found by what the sources say."""
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    return tmp_path


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    drop = ("MYLLM_", "NUMBA_", "XDG_", "OMPI_", "MPI_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    env |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "MYLLM_CACHE_DIR": f"{tmp_path}/cache"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # Python takes two edits within a second for one
    return {k: v for k, v in (env | extra).items() if v}


def ended(tmp_path: Path, code: str = REPORT, **extra: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process of its own."""
    env = environment(tmp_path, **extra)
    if any(name.startswith("NUMBA_") for name in extra):  # read when Numba is imported
        words = [sys.executable, "-c", code]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    return forked.run(forked.NUMBA, code, env=env)


def run(tmp_path: Path, code: str = REPORT, **extra: str) -> tuple[list[str], str]:
    done = ended(tmp_path, code, **extra)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_kernel_may_be_the_first_of_its_process_to_reach_a_parallel_one(pack: Path) -> None:
    """What it calls is part of its stored code, which does not start the threads itself."""
    code = "import numpy as np\nfrom pack import kernels\nprint(kernels.doubled(np.arange(4.0)))"
    cold, warm = run(pack, code), run(pack, code)
    assert cold[0] == warm[0] == ["104.0"]


def test_what_only_kernels_call_is_kept_as_a_part_and_made_whole_when_python_calls_it(
    pack: Path,
) -> None:
    """Machine code and a way in from Python are made for what Python calls alone."""
    code = f"""
import pathlib
import numpy as np
from pack import kernels
every = (kernels.scaled, kernels.total, kernels.doubled)
def show(result):
    names = [path.name for path in pathlib.Path({str(pack)!r}).rglob("*scaled*.nbc")]
    compiled = sum(sum(k.stats.cache_misses.values()) for k in every)
    print(result, compiled, *sorted("part" if ".part." in name else "whole" for name in names))
show(kernels.total(np.arange(4.0)))
show(kernels.scaled(1.0))
show(kernels.total(np.arange(3.0)))
"""
    assert run(pack, code)[0] == ["52.0 2 part", "12.0 3 part whole", "36.0 3 part whole"]
    assert run(pack, code)[0] == ["52.0 0 part whole", "12.0 0 part whole", "36.0 0 part whole"]
    more = code + "show(kernels.doubled(np.arange(4.0)))"
    assert run(pack, more)[0][-1] == "104.0 1 part whole"
    more = code.replace("show(kernels.total", "show(kernels.doubled", 1)
    for compiled in (2, 1):  # total as a part is compiled, then loaded, then called from Python
        (doubled,) = (pack / "cache").rglob("*doubled*.nbi")
        doubled.unlink()
        results = run(pack, more)[0]
        assert results == [f"{x} {compiled} part whole" for x in (104.0, 12.0, 36.0)]


def test_a_part_that_is_apart_is_optimised_once_in_one_version_for_all_constants(
    pack: Path,
) -> None:
    source = """
from numba import prange
from accel.jit import jit
from pack.helpers import bump

@jit(apart={apart})
def chosen(x, flag):
    return bump(x) if flag else x

@jit(parallel=True)
def both(x):
    total = 0.0
    for i in prange(2):
        total += chosen(x, True) + chosen(x, flag=False)
    return total
"""
    code = f"""
import pathlib
from accel import linking
optimise, seen = linking.Library._optimize_final_module, []
def note(library):
    functions = library._final_module.functions
    with_code = any("chosen" in f.name and not f.is_declaration for f in functions)
    if library.name in ("chosen", "both") or "parfor" in library.name:
        seen.append(f"{{library.name[:6]}}:{{with_code}}")
    optimise(library)
linking.Library._optimize_final_module = note
from pack.large import both
print(both(1.0), len(list(pathlib.Path({str(pack)!r}).rglob("*chosen*.nbc"))), *seen)
"""
    optimised = {
        True: "chosen:True __numb:False both:False",
        False: "chosen:True chosen:True __numb:True both:False",
    }
    for apart, names in optimised.items():
        path = pack / "pack/large.py"
        path.write_text(source.format(apart=apart))
        os.utime(path, (time.time() - 60,) * 2)
        shutil.rmtree(pack / "cache", ignore_errors=True)
        versions = names.count("chosen")
        assert run(pack, code)[0] == [f"24.0 {versions} {names}"]
        assert run(pack, code)[0] == [f"24.0 {versions}"]


def test_compiling_leaves_numba_and_the_search_for_garbage_as_they_were(pack: Path) -> None:
    code = """
import gc
from llvmlite.binding import ffi
from pack import kernels
def state():
    return gc.isenabled(), len(ffi.lib._lock._cblist)
gc.enable()
before = state()
kernels.scaled(1.0)
print(before, state() == before)
try:
    kernels.scaled("text")
except Exception as error:
    print(type(error).__name__, state() == before)
"""
    assert run(pack, code)[0] == ["(True, 1) True", "TypingError True"]


def test_first_process_compiles_and_says_so_the_second_loads_in_silence(pack: Path) -> None:
    out, err = run(pack)
    assert out == ["12.0 52.0", "2"]
    assert "compiling kernels of pack once, ~7 s" in err and err.count("\n") == 1
    assert run(pack) == (["12.0 52.0", "0"], "")


def test_stored_code_is_run_without_what_compiles_until_something_is_compiled(
    filled: Path,
) -> None:
    code = (
        REPORT
        + """
import sys
compiler = "numba.np.linalg"  # of which these kernels use nothing
print(compiler in sys.modules)
print(kernels.doubled(np.arange(4.0)), compiler in sys.modules)
"""
    )
    for compiled in (True, False):  # not a fork of who has loaded all of Numba
        words = [sys.executable, "-c", code]
        said = subprocess.check_output(words, env=environment(filled), text=True)
        assert said.splitlines()[-2:] == ["False", f"104.0 {compiled}"]


def test_import_compiles_nothing_and_creates_nothing(pack: Path) -> None:
    assert run(pack, "import pack.kernels") == ([], "")
    assert not (pack / "cache").exists()


def test_an_edited_neighbour_recompiles_constant_and_intrinsic(filled: Path) -> None:
    helpers = filled / "pack/helpers.py"
    helpers.write_text(HELPERS.replace("2.0", "3.0"))
    assert run(filled)[0] == ["13.0 58.0", "2"]
    helpers.write_text(HELPERS.replace("10.0", "20.0"))
    assert run(filled)[0] == ["22.0 92.0", "2"]
    helpers.write_text(HELPERS)
    assert run(filled)[0] == ["12.0 52.0", "0"]  # the first folder still serves the first text


@pytest.mark.parametrize("ours", [jit, jit.cache_files, jit.linking])
def test_the_name_of_the_cache_depends_on_what_compiles_and_keeps(
    ours: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = jit.Store(tmp_path)
    before, path = store.digest(), Path(str(ours.__file__))
    edited = tmp_path / "edited" / path.name
    edited.parent.mkdir()
    edited.write_bytes(path.read_bytes())
    monkeypatch.setattr(ours, "__file__", str(edited))
    assert store.digest() == before
    edited.write_bytes(path.read_bytes() + b"# another\n")
    assert store.digest() != before


def test_another_processor_recompiles(filled: Path) -> None:
    out, _ = run(filled, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+sse2")
    assert out == ["12.0 52.0", "2"]


def test_processes_starting_together_compile_each_kernel_once(pack: Path) -> None:
    env = environment(pack)
    together = [forked.start(forked.NUMBA, REPORT, env=env) for _ in range(4)]
    ends = [process.end() for process in together]
    assert [end.stdout.splitlines()[0] for end in ends] == ["12.0 52.0"] * 4
    compiled = [int(end.stdout.splitlines()[1]) for end in ends]
    assert sum(compiled) == 2
    # who waited is silent; who came when the first kernel was there already may compile the second
    assert 1 <= sum("compiling" in end.stderr for end in ends) <= sum(n > 0 for n in compiled)


def test_a_home_that_cannot_be_written_falls_to_a_temporary_folder_and_says_so(pack: Path) -> None:
    out, err = run(pack, MYLLM_CACHE_DIR="", HOME="/dev/null/home", TMPDIR=str(pack))
    assert out == ["12.0 52.0", "2"]
    assert "set MYLLM_CACHE_DIR" in err
    (temporary,) = pack.glob("myllm-*")
    assert temporary.stat().st_mode & 0o077 == 0
    assert run(pack, MYLLM_CACHE_DIR="", HOME="/dev/null/home", TMPDIR=str(pack))[0][1] == "0"


def test_a_temporary_folder_that_others_may_write_is_not_trusted(pack: Path) -> None:
    folder = pack / f"myllm-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    out, err = run(pack, MYLLM_CACHE_DIR="", HOME="/dev/null/home", TMPDIR=str(pack))
    assert out == ["12.0 52.0", "2"] and str(folder) + ";" not in err
    assert not any(folder.iterdir())


def test_a_chosen_folder_that_cannot_be_written_is_an_error_naming_it(pack: Path) -> None:
    done = ended(pack, MYLLM_CACHE_DIR="/dev/null/cache")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "/dev/null/cache" in last and "MYLLM_CACHE_DIR" in last


def test_a_filled_cache_serves_where_nothing_can_be_locked_or_written(filled: Path) -> None:
    for lock in (filled / "cache").rglob("*.lock"):
        lock.unlink()
        lock.mkdir()  # stands for a read-only disk, also for the superuser
    assert run(filled) == (["12.0 52.0", "0"], "")


def test_a_damaged_file_is_compiled_again(filled: Path) -> None:
    for path in (filled / "cache").rglob("*.nb?"):
        path.write_bytes(path.read_bytes()[:-20])
    out, err = run(filled)
    assert out == ["12.0 52.0", "2"] and "damaged" in err
    assert run(filled) == (["12.0 52.0", "0"], "")


def test_a_flipped_bit_anywhere_in_the_cache_is_noticed_and_mended(pack: Path) -> None:
    """Damaged machine code would end the process by a signal, which no sentence explains."""
    code = """
import importlib, itertools, pathlib, sys
import numpy as np
from pack import kernels
assert kernels.scaled(1.0) == 12.0
files = sorted(pathlib.Path(sys.argv[1]).rglob("*scaled*.nb?"))
assert [path.suffix for path in files] == [".nbc", ".nbi"]
whole = {path: path.read_bytes() for path in files}
for path, part in itertools.product(files, np.linspace(0, 1, 25)):
    damaged = bytearray(whole[path])
    at = int(part * (len(damaged) - 1))
    damaged[at] ^= 1 << at % 8
    path.write_bytes(damaged)
    assert importlib.reload(kernels).scaled(1.0) == 12.0
    assert kernels.scaled.stats.cache_misses, "the damage was not noticed"
    assert importlib.reload(kernels).scaled(1.0) == 12.0
    assert not kernels.scaled.stats.cache_misses, "the damage was not mended"
print(len(files))
"""
    out, err = run(pack, code.replace("sys.argv[1]", repr(str(pack / "cache"))))
    assert out == ["2"] and err.count("a damaged kernel is compiled again: ") == 50


def test_a_damaged_part_of_a_kernel_is_compiled_again(pack: Path) -> None:
    """The code of ``scaled`` for ``total`` alone, when ``total`` is made anew."""
    code = "import numpy as np\nfrom pack import kernels\nprint(kernels.total(np.arange(4.0)))"
    assert run(pack, code)[0] == ["52.0"]
    for suffix in ("nbc", "nbi"):
        (damaged,) = (pack / "cache").rglob(f"*scaled*.part*.{suffix}")
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        (total,) = (pack / "cache").rglob("*total*.nbi")
        total.unlink()
        out, err = run(pack, code)
        assert out == ["52.0"] and "a damaged kernel is compiled again: " in err
        assert run(pack, code)[1] == ""


def test_files_that_changed_places_are_not_taken_for_one_another(pack: Path) -> None:
    """Each has a right hash; so does the code that an index of before a crash may name."""
    run(pack, "from pack import kernels\nkernels.scaled(1.0), kernels.scaled(1)")
    first, second = sorted((pack / "cache").rglob("*scaled*.nbc"))
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    code = "from pack import kernels\nprint(kernels.scaled(1.0), kernels.scaled(1))"
    out, err = run(pack, code)
    assert out == ["12.0 12.0"] and err.count("damaged") == 2

    (index,) = (pack / "cache").rglob("*scaled*.nbi")
    swap = """
import pathlib
from pack import kernels
kernels.scaled(1.0)
files = kernels.scaled._cache._files()._cache_file
overloads = files._load_index()
files._save_index(dict(zip(overloads, reversed(overloads.values()), strict=True)))
"""
    run(pack, swap)
    assert run(pack, code)[0] == ["12.0 12.0"]
    assert index.exists()


def test_a_cache_that_others_can_write_is_refused_with_a_sentence(filled: Path) -> None:
    """What lies there is unpickled and run."""
    (folder,) = (filled / "cache/kernels").glob("pack-*")
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    for open_to_others in (folder, folder.parent):
        open_to_others.chmod(0o720)
        done = ended(filled)
        last = done.stderr.splitlines()[-1]
        assert done.returncode != 0 and f"chmod go-w {open_to_others} if it is yours" in last
        assert "or point MYLLM_CACHE_DIR elsewhere" in last
        open_to_others.chmod(0o755)
    assert run(filled) == (["12.0 52.0", "0"], "")


@pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can give a folder away")
def test_a_cache_of_another_user_is_refused(filled: Path) -> None:
    (folder,) = (filled / "cache/kernels").glob("pack-*")
    os.chown(folder, 12345, -1)
    done = ended(filled)
    assert done.returncode != 0 and "other users can write" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("replaced", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sources_edited_under_a_running_process_do_not_poison_the_cache(
    pack: Path, replaced: bool
) -> None:
    """Also not by a file as old as those that are unpacked or copied with their dates."""
    edit = f"""
import os, pathlib, pack.kernels, time
time.sleep(0.05)
path = pathlib.Path({str(pack / "pack/helpers.py")!r})
edited = path.with_suffix(".new") if {replaced} else path
edited.write_text(path.read_text().replace("2.0", "3.0"))
if {replaced}:
    os.utime(edited, (0, 0))
    os.replace(edited, path)
"""
    out, err = run(pack, edit + REPORT)
    assert out[0] == "12.0 52.0" and "not kept" in err
    assert run(pack)[0] == ["13.0 58.0", "2"]


def test_a_module_edited_before_it_is_imported_does_not_poison_the_cache(pack: Path) -> None:
    late = pack / "pack/late.py"
    late.write_text("from accel.jit import jit\nTWO = 2.0\n@jit\ndef f(x):\n    return TWO * x\n")
    os.utime(late, (1, 1))
    time.sleep(0.05)
    edit = f"""
import pathlib, pack.kernels, time
pack.kernels.scaled(1.0)  # from now on the folder's name is known
time.sleep(0.05)
path = pathlib.Path({str(late)!r})
clean = path.read_text()
path.write_text(clean.replace("2.0", "3.00"))  # of another size, lest Python take its .pyc
from pack import late
path.write_text(clean)
print(late.f(1.0))
"""
    out, err = run(pack, edit)
    assert out == ["3.0"] and "not kept" in err
    assert run(pack, "from pack import late\nprint(late.f(1.0))")[0] == ["2.0"]


def test_a_kernel_that_calls_one_of_another_folder_is_refused(pack: Path) -> None:
    other = pack / "other"
    other.mkdir()
    (other / "far.py").write_text(
        "from accel.jit import jit\nfrom pack.kernels import scaled\n"
        "@jit\ndef far(x):\n    return scaled(x) + 1\n"
    )
    done = ended(pack, "from other.far import far\nfar(1.0)")
    assert done.returncode != 0
    assert "keep kernels that call each other in one folder" in done.stderr


def test_a_function_without_a_file_compiles_without_a_cache(pack: Path) -> None:
    code = "from accel.jit import jit\n@jit\ndef f(x):\n    return x + 1\nprint(f(1))"
    assert run(pack, code)[0] == ["2"]


def test_one_number_governs_the_threads_of_parallel_kernels(filled: Path) -> None:
    code = """
import numba, numpy as np
from accel import threads
from pack import kernels
kernels.total(np.arange(4.0))
print(threads.threads(), numba.get_num_threads())
threads.set_threads(threads.available_cores())
print(threads.threads() == numba.get_num_threads() == threads.available_cores())
"""
    assert run(filled, code, MYLLM_THREADS="1")[0] == ["1 1", "True"]


@pytest.mark.parametrize(
    ("said", "spins"),
    [
        ({}, OWN["GOMP_SPINCOUNT"]),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "passive"}, "0"),
    ],
)
def test_how_long_threads_wait_is_chosen_for_this_process_unless_the_user_has(
    filled: Path, said: dict[str, str], spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # the suite sets it
    code = """
import numba, os
from pack import kernels
import numpy as np
kernels.total(np.arange(4.0))
names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
print(numba.threading_layer(), {name: os.environ[name] for name in names if name in os.environ})
"""
    (line,), heard = run(filled, code, OMP_DISPLAY_ENV="verbose", **said)
    pool, left = line.split(maxsplit=1)
    assert left == str(said)
    if pool != "omp":
        pytest.skip(f"Numba's pool is {pool} here, not OpenMP")
    assert f"GOMP_SPINCOUNT = '{spins}'" in heard
    policy = said.get("OMP_WAIT_POLICY", OWN.get("OMP_WAIT_POLICY") if not said else None)
    assert policy is None or f"OMP_WAIT_POLICY = '{policy.upper()}'" in heard


def test_numba_s_own_limit_is_kept_to(filled: Path) -> None:
    code = """
from accel.threads import threads
from pack import kernels
import numpy as np
kernels.total(np.arange(4.0))
print(threads())
"""
    assert run(filled, code, NUMBA_NUM_THREADS="1")[0] == ["1"]
    everything = run(filled, code)[0]
    assert run(filled, code, NUMBA_NUM_THREADS="one")[0] == everything  # Numba warns, and takes all


def test_ranks_on_one_machine_share_its_cores(pack: Path) -> None:
    code = """
import os
from accel.threads import threads
os.cpu_count = lambda: 8
os.sched_getaffinity = lambda pid: set(range(8))
print(threads())
os.sched_getaffinity = lambda pid: {0, 1, 2}
print(threads())
"""
    assert run(pack, code, MPI_LOCALNRANKS="4")[0] == ["2", "3"]
    assert run(pack, code, OMPI_COMM_WORLD_LOCAL_SIZE="16")[0] == ["1", "3"]
    for text in ("x", "0", "9" * 5000):
        done = ended(pack, code, MPI_LOCALNRANKS=text)
        assert "MPI_LOCALNRANKS must be the number of ranks here" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("text", ["0", "two", "-1", "1000000", "٣٤", "9" * 5000])
def test_a_wrong_number_of_threads_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_threads", None)
    monkeypatch.setenv("MYLLM_THREADS", text)
    with pytest.raises(ValueError, match="MYLLM_THREADS must be a number from 1 to"):
        threads.threads()
    with pytest.raises(ValueError, match="threads must be a number from 1 to"):
        threads.set_threads(threads.available_cores() + 1)


def test_cache_is_no_option() -> None:
    with pytest.raises(ValueError, match="always caches"):
        jit.jit(cache=True)(lambda x: x)
