"""Skip where the shim or NVRTC is missing; fail where their absence is a fault of the set-up."""

import importlib.util
import os
from pathlib import Path

import pytest

from accel.cuda import machine_code
from accel.cuda.compiler import nvrtc_version
from tests.cuda_shim.device import missing


def shim() -> None:
    """Skip the tests of a module without g++; with MYLLM_REQUIRE_SHIM=1 that is a failure."""
    why = missing()
    if why is not None:
        _without(why, "MYLLM_REQUIRE_SHIM")


def nvrtc() -> None:
    """Skip without CuPy or NVRTC; with MYLLM_REQUIRE_NVRTC=1 that is a failure."""
    if importlib.util.find_spec("cupy_backends") is None:
        why = "NVRTC is reached through CuPy, which is not installed: pip install 'myllm[cuda13]'"
        return _without(why, "MYLLM_REQUIRE_NVRTC")
    try:
        nvrtc_version()
    except ImportError as error:
        _without(str(error), "MYLLM_REQUIRE_NVRTC")


def nvdisasm() -> None:
    """Skip without nvdisasm, too; with MYLLM_REQUIRE_NVRTC=1 that is a failure."""
    nvrtc()
    try:
        machine_code.tool()
    except ImportError as error:
        _without(str(error), "MYLLM_REQUIRE_NVRTC")


def cuda_files(pattern: str) -> list[Path]:
    """Return files of NVIDIA's packages; skip without, or fail if MYLLM_REQUIRE_NVRTC is set."""
    packages = importlib.util.find_spec("nvidia")
    folders = (packages and packages.submodule_search_locations) or ()
    found = [path for folder in folders for path in Path(folder).glob(pattern)]
    if not found or importlib.util.find_spec("cupy_backends") is None:
        why = f"NVIDIA's {pattern} and CuPy are missing: pip install 'myllm[libraries]'"
        _without(why, "MYLLM_REQUIRE_NVRTC")
    return found


def _without(why: str, required: str) -> None:
    if os.environ.get(required):
        pytest.fail(f"{why} ({required} is set)")
    pytest.skip(why, allow_module_level=True)
