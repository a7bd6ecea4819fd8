"""The study models: each rung of the ladder shows what its file says it shows."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from reference.gradcheck import check_vjp
from reference.softmax import softmax
from reference.study import LADDER, autoregression, copy_task, losses
from reference.study.poem import POEM, bigram_counts, bigram_entropy, decode, encode
from reference.types import Array
from tests.helpers import ROOT

IDS, VOCABULARY = encode()
COUNTS = bigram_counts(IDS, len(VOCABULARY))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep BLAS to one thread: on matrices this small, threads only wait for each other."""
    with threadpool_limits(1):
        yield


def check_loss(loss: Callable[..., tuple[float, Any]], z: Array, y: int) -> None:
    """Hold the slope that a loss returns to differences of its value."""
    check_vjp(
        lambda z: (np.asarray(loss(z, y)[0]), loss(z, y)[1]),
        lambda dloss, slope: dloss * slope,
        {"z": z},
    )


# ---- the poem ------------------------------------------------------------------------------------


def test_poem_is_encoded_without_loss() -> None:
    assert decode(IDS, VOCABULARY) == POEM
    assert len(VOCABULARY) == len(set(VOCABULARY)) == IDS.max() + 1


def test_a_poem_with_stanzas_comes_back_as_it_was() -> None:
    text = "a b\n\n\nc a b d\n"
    assert decode(*encode(text)) == text


def test_poem_leaves_a_one_word_reader_in_doubt() -> None:
    assert np.count_nonzero(COUNTS[VOCABULARY.index("the")]) == 5
    assert bigram_entropy(COUNTS) > 0.7


def test_bigram_entropy_of_a_hand_counted_text() -> None:
    # a b a c a b: after a comes b, c, b; after b and c comes a. So 3/5 of log 3 - 2/3 log 2
    ids, vocabulary = encode("a b a c a b")
    by_hand = 3 / 5 * (np.log(3) - 2 / 3 * np.log(2))
    counts = bigram_counts(ids[:-1], len(vocabulary))  # without the end of the line
    assert bigram_entropy(counts) == pytest.approx(by_hand, rel=1e-14)


# ---- autoregression ------------------------------------------------------------------------------


def test_teacher_forced_rows_are_the_true_pasts() -> None:
    X, y = autoregression.teacher_forced(np.arange(7.0), 3)
    assert X.tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert y.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("order", [0, 5, 6])
def test_teacher_forced_refuses_an_order_without_a_whole_past(order: int) -> None:
    with pytest.raises(ValueError, match=r"order must lie in 1\.\.4"):
        autoregression.teacher_forced(np.zeros(5), order)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_least_squares_residual_is_orthogonal_to_every_column(seed: int, order: int) -> None:
    series = np.random.default_rng(seed).standard_normal(50)
    X, y = autoregression.teacher_forced(series, order)
    w = autoregression.fit(X, y)
    assert np.linalg.norm(X.T @ (X @ w - y)) <= 1e-12 * np.linalg.norm(X) * np.linalg.norm(y)
    assert w == pytest.approx(autoregression.fit_by_normal_equations(X, y), rel=1e-9, abs=1e-12)


def test_two_waves_are_continued_exactly_from_four_numbers() -> None:
    series = autoregression.two_tides(400, noise=0.0)
    X, y = autoregression.teacher_forced(series[:300], 4)
    w = autoregression.fit(X, y)
    assert np.max(np.abs(w - autoregression.exact_weights())) < 1e-12
    assert autoregression.generate(series[:300], w, 100) == pytest.approx(series[300:], abs=1e-9)


def test_three_numbers_do_not_suffice_for_two_waves() -> None:
    X, y = autoregression.teacher_forced(autoregression.two_tides(300, noise=0.0), 3)
    assert autoregression.rms(X @ autoregression.fit(X, y) - y) > 1e-3


def test_forming_the_normal_equations_squares_the_condition_number_and_costs_digits() -> None:
    X, y = autoregression.teacher_forced(autoregression.two_tides(1_000, noise=0.0), 4)
    assert np.linalg.cond(X.T @ X) == pytest.approx(np.linalg.cond(X) ** 2, rel=1e-6)
    exact = autoregression.exact_weights()
    sound = np.max(np.abs(autoregression.fit(X, y) - exact))
    by_formula = np.max(np.abs(autoregression.fit_by_normal_equations(X, y) - exact))
    assert by_formula > 10 * sound


def test_errors_feed_on_errors_when_the_model_reads_its_own_guesses() -> None:
    series = autoregression.two_tides(1_240, noise=0.05)
    w = autoregression.fit(*autoregression.teacher_forced(series[:1_000], 2))
    X, y = autoregression.teacher_forced(series[998:], 2)
    free = autoregression.generate(series[:1_000], w, 240)
    assert autoregression.rms(free - y) > 2 * autoregression.rms(X @ w - y)


# ---- losses --------------------------------------------------------------------------------------

SCORES = st.lists(st.integers(-800, 800), min_size=2, max_size=6).map(lambda z: np.array(z) / 100)


@given(SCORES, st.data())
def test_gradients_of_the_losses_match_differences(z: Array, data: st.DataObject) -> None:
    y = data.draw(st.integers(0, len(z) - 1))
    z = z / 4  # where p is not so near to 0 or 1 that differences lose its digits
    check_loss(losses.squared_error_on_onehots, z, y)
    check_loss(losses.cross_entropy, z, y)
    check_loss(losses.contrastive(random_q(len(z), len(z))), z, y)
    check_loss(losses.squared_error_on_ids, z[0] + 0.001, y)  # off the minimum, where all is 0


@pytest.mark.parametrize("y", range(3))
def test_hinge_slope_matches_differences_away_from_kinks(y: int) -> None:
    check_loss(losses.hinge, np.array([0.3, 1.1, -0.4]), y)


@given(st.integers(0, 2**32 - 1))
def test_zero_one_loss_is_flat_where_cross_entropy_slopes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, v = rng.standard_normal(24), rng.standard_normal(24)
    order = np.sort(z)
    step = 0.4 * (order[-1] - order[-2]) / np.abs(v).max()  # too small for the best to change
    for y in range(24):
        assert losses.zero_one(z + step * v, y) == losses.zero_one(z, y)
        assert np.linalg.norm(losses.cross_entropy(z, y)[1]) > 1e-3


def test_squared_error_on_ids_predicts_a_word_that_never_follows() -> None:
    q = COUNTS[VOCABULARY.index("the")] / COUNTS[VOCABULARY.index("the")].sum()
    mean = float(q @ np.arange(len(q)))
    slope = sum(q_y * losses.squared_error_on_ids(mean, y)[1] for y, q_y in enumerate(q))
    assert slope == pytest.approx(0, abs=1e-12)  # so the mean is where it is least
    assert q[round(mean)] == 0


def test_squared_error_on_ids_depends_on_how_words_are_numbered() -> None:
    q = np.array([0.5, 0.5, 0.0])
    renumbered = q[[0, 2, 1]]
    assert q @ np.arange(3) != renumbered @ np.arange(3)


def test_squared_error_on_onehots_hardly_learns_when_surely_wrong() -> None:
    surely_wrong = np.array([20.0, 0.0])
    loss, slope = losses.squared_error_on_onehots(surely_wrong, 1)
    assert loss < 2 and np.abs(slope).max() < 1e-8
    assert np.abs(losses.cross_entropy(surely_wrong, 1)[1]).max() > 0.999


def test_squared_error_on_onehots_is_not_convex_and_cross_entropy_is() -> None:
    ends = np.array([0.0, 0.0]), np.array([20.0, 0.0])
    middle = (ends[0] + ends[1]) / 2

    def excess(loss: losses.ScoreLoss) -> float:
        """Return how far the middle lies above the chord: positive is not convex."""
        return loss(middle, 1)[0] - (loss(ends[0], 1)[0] + loss(ends[1], 1)[0]) / 2

    assert excess(losses.squared_error_on_onehots) > 0.5
    assert excess(losses.cross_entropy) <= 0


def random_q(seed: int, n: int) -> Array:
    return np.random.default_rng(seed).dirichlet(np.ones(n))


@given(st.integers(0, 2**32 - 1), SCORES)
def test_cross_entropy_and_squared_error_are_least_at_the_true_distribution(
    seed: int, z: Array
) -> None:
    q = random_q(seed, len(z))
    for loss in (losses.cross_entropy, losses.squared_error_on_onehots):
        best, slope = losses.expected(loss, np.log(q), q)
        assert np.abs(slope).max() < 1e-12
        assert losses.expected(loss, z, q)[0] >= best - 1e-12


@given(st.integers(0, 2**32 - 1), SCORES)
def test_hinge_is_least_at_equal_scores_when_no_word_has_the_majority(seed: int, z: Array) -> None:
    q = random_q(seed, len(z))
    if q.max() > 0.5:  # mix in as much of the uniform as takes the best word down to one half
        share = (q.max() - 0.5) / (q.max() - 1 / len(q))
        q = (1 - share) * q + share / len(q)
    assert losses.expected(losses.hinge, np.zeros(len(z)), q)[0] == pytest.approx(1, abs=1e-12)
    assert losses.expected(losses.hinge, z, q)[0] >= 1 - 1e-12


def test_hinge_has_the_same_best_scores_for_a_slight_and_a_large_majority() -> None:
    start = np.array([-2.0, 2.0])
    slight, large = (
        losses.descend(losses.hinge, start, np.array(q), steps=5_000, rate=0.01)
        for q in ((0.6, 0.4), (0.9, 0.1))
    )
    assert slight[0] - slight[1] == pytest.approx(1, abs=0.02)
    assert large[0] - large[1] == pytest.approx(1, abs=0.02)


@given(st.integers(0, 2**32 - 1), SCORES)
def test_contrastive_is_least_at_the_ratio_to_the_noise(seed: int, z: Array) -> None:
    q, noise = random_q(seed, len(z)), random_q(seed + 1, len(z))
    loss = losses.contrastive(noise)
    best, slope = losses.expected(loss, np.log(q / noise), q)
    assert np.abs(slope).max() < 1e-12
    assert losses.expected(loss, z, q)[0] >= best - 1e-12


def test_contrastive_against_one_sure_word_is_cross_entropy_of_two() -> None:
    z = np.array([0.3, -1.2])
    only_the_other = losses.contrastive(np.array([0.0, 1.0]))
    assert only_the_other(z, 0)[0] == pytest.approx(losses.cross_entropy(z, 0)[0])
    assert only_the_other(z, 0)[1] == pytest.approx(losses.cross_entropy(z, 0)[1])


def test_cross_entropy_descends_to_the_true_distribution() -> None:
    for q in (np.array([0.6, 0.4]), np.array([0.4, 0.3, 0.3])):
        z = losses.descend(losses.cross_entropy, np.zeros(len(q)), q, steps=5_000, rate=0.1)
        assert softmax(z) == pytest.approx(q, abs=1e-6)


# ---- the copy task -------------------------------------------------------------------------------


def test_copy_batches_are_laid_out_as_described() -> None:
    source, target, mask = copy_task.draw(np.random.default_rng(0), 200)
    for row, shifted, counts in zip(source, target, mask, strict=True):
        n = int(counts.sum()) - 1  # symbols before END
        assert 3 <= n <= 8 and counts[: n + 1].all()
        assert (row[:n] >= 2).all() and row[n] == copy_task.END
        assert shifted[0] == copy_task.START and shifted[1 : n + 1].tolist() == row[:n].tolist()


def test_encoder_decoder_copies_sequences_it_never_saw() -> None:
    rng = np.random.default_rng(0)
    batches = [copy_task.draw(rng, 32) for _ in range(300)]
    params, history = copy_task.learn(batches)
    new = copy_task.unseen(copy_task.draw(rng, 400), batches)
    assert len(new.source) > 300
    assert copy_task.copied(copy_task.write(params, new), new).all()
    assert history[0] > 2 and history[-1] < 0.05
    # what is written comes from the source: with two symbols swapped there, they are swapped here
    swapped = new.source.copy()
    swapped[:, [0, 2]] = swapped[:, [2, 0]]
    new = new._replace(source=swapped)
    assert copy_task.copied(copy_task.write(params, new), new).all()


def test_the_copy_task_counts_its_sequences_rightly() -> None:
    assert (
        sum(copy_task.SYMBOLS**n for n in range(3, 9)) == 111_111_000
    )  # "111 million" on its page
    assert copy_task.__doc__ and "111 million sequences" in copy_task.__doc__


def test_copying_is_judged_by_every_symbol_and_the_end() -> None:
    batch = copy_task.draw(np.random.default_rng(1), 50)
    assert copy_task.copied(batch.source, batch).all()
    last = batch.mask.sum(axis=1) - 1
    for position in (np.zeros_like(last), last):
        wrong = batch.source.copy()
        wrong[np.arange(50), position] += 1
        assert not copy_task.copied(wrong, batch).any()


def test_unseen_leaves_out_what_was_trained_on() -> None:
    rng = np.random.default_rng(2)
    first, second = copy_task.draw(rng, 20), copy_task.draw(rng, 20)
    both = copy_task.CopyBatch(*(np.concatenate(pair) for pair in zip(first, second, strict=True)))
    kept = copy_task.unseen(both, [first])
    np.testing.assert_array_equal(kept.source, second.source)


# ---- the commands --------------------------------------------------------------------------------


SAYS = {  # a piece of what each rung prints
    "reference.study.autoregression": "reading its own",
    "reference.study.losses": "hears the majority only",
    "reference.study.attention": "takes home",
    "reference.study.classroom": POEM,
    "reference.study.mistakes": "two names     E moves by 2.00 lr, W_up by 1.00 lr",
    "reference.study.order": "without positions",
    "reference.study.rnn": "passes U 63 times",
    "reference.study.dropouts": "1.7778 times as long",
    "tokenizer.reference": "␣ · s · low · e · s · t",
    "reference.study.one_token": "merge 2    b + an occurs 1 time:  ban an a",
    "reference.study.gpt": "Explicit is better than implicit.\nSimple is",
    "reference.study.tiled_attention": "four times the table",
    "reference.study.copy_task": "never seen are copied exactly",
    "reference.study.ranks": "same for any number of ranks",
}


LONG = "reference.study.gpt"  # whose parts tests/reference/test_study_gpt.py holds
RUNGS = [pytest.param(n, marks=[pytest.mark.slow] if n == LONG else []) for n in LADDER]


@pytest.mark.parametrize("name", RUNGS)
def test_each_rung_runs_and_says_what_it_shows(name: str) -> None:
    command = [sys.executable, "-W", "error", "-m", name]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=120, env=one_thread, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout and done.stderr == ""
    if name != "reference.study.one_token":  # a page of Markdown
        assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", ["tokenizer.reference", "reference.study.one_token"])
def test_a_rung_ends_without_a_word_when_its_reader_has_read_enough(name: str) -> None:
    command = [sys.executable, "-u", "-m", name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b"" and running.wait(60) == 0


@pytest.mark.parametrize("name", LADDER)
def test_each_rung_is_a_page_and_says_in_a_sentence_what_it_is(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__ and module.__doc__.splitlines()[0].endswith(".")
    assert f"python -m {name}" in module.__doc__
    lines = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (200 if name.startswith("reference.study") else 300)


def test_the_page_of_the_ladder_lists_every_rung_in_order() -> None:
    page = (ROOT / "reference" / "study" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"`python -m ([\w.]+)`", page)
    assert listed == list(LADDER)


# ---- the order -----------------------------------------------------------------------------------

REFERENCE = ROOT / "reference"
ORDER = (REFERENCE / "README.md").read_text(encoding="utf-8")
ORDER = ORDER[ORDER.index("## Reading order") : ORDER.index("## The ops")]
LATER = {
    ("params.py", "config.py"),  # of params.py the class Layout comes first
    ("study/one_token.py", "study/one_token_page.py"),  # what it writes
}
TOKENIZER = {"../tokenizer/reference.py"}


def read_at() -> dict[str, int]:
    """Return the numbered step at which the order first names each file."""
    steps: dict[str, int] = {}
    step = 0
    for line in ORDER.splitlines():
        found = re.match(r"(\d+)\. ", line)
        step = int(found[1]) if found else step
        for name in re.findall(r"\]\(([\w./]+\.py)\)", line):
            steps.setdefault(name, step)
    return steps


def needs(path: Path) -> set[str]:
    """Return the files of the reference that a file imports, types and ops aside."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reference"):
            for alias in node.names:
                parts = [*str(node.module).split(".")[1:], alias.name]
                file = Path(*parts).with_suffix(".py")
                found.add(str(file if (REFERENCE / file).exists() else file.parent))
    files = {name if name.endswith(".py") else f"{name}.py" for name in found}
    return {name for name in files if (REFERENCE / name).exists()} - {"types.py", "ops.py"}


def test_the_order_names_every_file() -> None:
    written = {str(path.relative_to(REFERENCE)) for path in REFERENCE.rglob("*.py")}
    drawn = {"study/pictures.py", "study/svg.py", "study/one_token_page.py"}  # in study/README.md
    assert written - {"__init__.py", "study/__init__.py"} - drawn == set(read_at()) - TOKENIZER


def test_nothing_is_read_before_what_it_needs() -> None:
    steps = read_at()
    last = {"ops.py", "contract.py", "boundary.py"}  # how the ops are offered, not how they work
    for name in set(steps) - last - TOKENIZER:
        for other in needs(REFERENCE / name):
            if (name, other) not in LATER and other != "study/svg.py":
                assert steps[other] <= steps[name], f"{name} is read before {other}"


def test_rungs_are_read_in_the_order_of_the_ladder() -> None:
    files = [name.removeprefix("reference.").replace(".", "/") + ".py" for name in LADDER]
    places = [re.search(rf"\]\((\.\./)?{file}\)", ORDER) for file in files]
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts) and len(starts) == len(LADDER)


def test_every_picture_is_shown_and_every_one_shown_exists() -> None:
    shown = set(re.findall(r'<img src="study/(pictures/\w+\.svg)"', ORDER))
    kept = {str(p.relative_to(REFERENCE / "study")) for p in REFERENCE.rglob("*.svg")}
    assert shown == kept


def test_every_letter_of_an_op_is_in_the_table_of_letters() -> None:
    page = (REFERENCE / "README.md").read_text(encoding="utf-8")
    notation = page[page.index("| letter |") : page.index("Weights are `(in, out)`")]
    known = set(re.findall(r"\w+", " ".join(re.findall(r"^\| ([\w, ]+) \|", notation, re.M)))) | {
        "j"
    }
    table = page[page.index("| op | computes") : page.index("## A whole training step")]
    columns = [
        cell for row in table.splitlines()[2:] for cell in row.split("|")[3:6:2]
    ]  # takes, gives
    shapes = re.findall(r"\(([^()]*)\)", " ".join(columns))
    letters = {x for shape in shapes for x in re.findall(r"[A-Za-z]+", shape)}
    assert {"B", "Hkv", "dv", "I", "n"} <= letters <= known
