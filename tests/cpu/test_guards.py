"""No kernel of the cpu backend touches what lies beside the arrays it is given or it makes."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT, needs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are forbidden by mprotect")
assert needs  # which has the mode bf16 computed by its portable block where it has to be


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("mode", ["float32", "bf16"])
def test_nothing_is_touched_beside_arrays(mode: str, place: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.helpers.guarded", mode, place],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"MYLLM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "nothing was touched\n"), done.stderr[-3000:]
