"""Which threads do the work: small arrays wake no other than the caller's, large ones do."""

import os
import time

import numba
import pytest

from accel import system, waiting
from accel.ahead import in_order
from accel.threads import alone, available_cores, threads
from tests.helpers import ROOT, forked

# prints how many threads there are more behind some calls than before
WORK = """
import os, sys
import numpy as np
import accel
from reference.config import Config
from reference.params import decoder_layout

ops = accel.load("cpu")

def relu(rows):
    y, cache = ops.relu_forward(np.ones((rows, 64), np.float32))
    ops.relu_backward(y, cache)

def decode(width):
    config = Config(vocab_size=50, context_length=8, d_model=width, n_heads=2, n_kv_heads=1,
                    d_head=width // 2, d_ff=width, n_layers=2)
    layout = decoder_layout(config)
    params = layout.views(layout.init(0))
    ops.decode_step(params, config, np.array([1]), ops.kv_cache(params, config, 1, 8), 0)

before = len(os.listdir("/proc/self/task"))
eval(sys.argv[1])
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(available_cores() < 2, reason="one core has one thread")
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
@pytest.mark.parametrize(
    "calls, more", [("(relu(256), decode(64))", 0), ("relu(257)", 1), ("decode(256)", 1)]
)
def test_small_work_stays_in_one_thread(calls: str, more: int) -> None:
    env = {**os.environ, "MYLLM_THREADS": "2", "GOMP_SPINCOUNT": "0"}  # which needs no watch
    done = forked.run(forked.NUMBA, WORK, calls, cwd=ROOT, env=env)
    assert (done.returncode, int(done.stdout or -1)) == (0, more), done.stderr


# prints Numba's pool
FIRST = """
import sys
import numba, numpy as np
import accel

ops = accel.load("cpu", compute=sys.argv[1])
x = np.ones((1024, 384), np.float32)
if sys.argv[2] == "attention":
    q = x.reshape(1, 512, 12, 64)
    ops.attention_forward(q, q, q)
else:
    ops.linear_forward(x, np.ones((384, 384), np.float32))
print(numba.threading_layer())
"""


@pytest.mark.parametrize(
    "compute, op", [("float32", "linear"), ("float32", "attention"), ("bf16", "linear")]
)
def test_how_threads_wait_is_chosen_whatever_op_comes_first(compute: str, op: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env |= {"OMP_DISPLAY_ENV": "verbose"}
    done = forked.run(forked.NUMBA, FIRST, compute, op, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() != "omp":
        pytest.skip(f"Numba's pool is {done.stdout.strip()} here, not OpenMP")
    chosen = waiting.BRIEF if system.starved() is None else waiting.LONG
    assert f"GOMP_SPINCOUNT = '{chosen['GOMP_SPINCOUNT']}'" in done.stderr


def test_alone_leaves_the_number_of_threads_as_it_was() -> None:
    before = numba.get_num_threads()
    assert alone(lambda a, *, b: (a, b, numba.get_num_threads()))(1, b=2) == (1, 2, 1)
    assert numba.get_num_threads() == before

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        alone(fails)()
    assert numba.get_num_threads() == before


def test_in_order_is_a_few_items_ahead_and_ends_with_the_first_that_fails() -> None:
    taken: list[int] = []

    def items():
        for i in range(50):
            taken.append(i)
            yield i

    def square(i: int) -> int:
        time.sleep(0.002 * (i % 3 == 0))  # so that later ones are done earlier
        if i == 40:
            raise ValueError("forty")
        return i * i

    found = in_order(square, items())
    assert next(found) == 0 and len(taken) <= 2 * threads() + 1
    some = [next(found) for _ in range(39)]
    assert some == [i * i for i in range(1, 40)]
    with pytest.raises(ValueError, match="forty"):
        next(found)
    assert len(taken) < 50 or threads() > 4
    assert [*in_order(square, [])] == []
