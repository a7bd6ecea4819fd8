"""The classroom's two models come down as far as they can, and its mistakes are seen."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from reference.gradcheck import check_vjp
from reference.sinusoidal import sinusoidal_table
from reference.softmax import softmax
from reference.study import classroom, mistakes
from reference.study.classroom import ONE_WORD, TRANSFORMER, Choices
from reference.study.poem import POEM, between_marks, bigram_counts, bigram_entropy, decode
from reference.types import Array, Params

IDS, WORDS = between_marks(POEM)
V = len(WORDS)
COUNTS = bigram_counts(IDS, V)
ENTROPY = bigram_entropy(COUNTS)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Keep BLAS to one thread: on matrices this small, threads only wait for each other."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def poet() -> tuple[Params, list[float]]:
    return classroom.learn(IDS, V)


@pytest.mark.parametrize("choice", [*itertools.product([False, True], repeat=4)], ids=str)
def test_gradients_match_differences_for_every_choice(choice: tuple[bool, ...]) -> None:
    attends, placed, biased, residual = choice
    choices = Choices(attends, placed, 6, 5, biased, residual)
    layout = classroom.layout_of(V, choices)
    flat = layout.init(seed=1, dtype=np.float64)
    flat += 0.01 * np.random.default_rng(0).standard_normal(flat.shape)  # biases other than zero

    def forward(**params: Array) -> tuple[Array, tuple[Array, ...]]:
        grads = layout.views(np.full(layout.size, np.nan))
        loss = classroom.loss_and_grads(params, grads, IDS, choices)
        return np.asarray(loss), tuple(grads.values())

    def backward(dloss: Array, grads: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(dloss * grad for grad in grads)

    check_vjp(forward, backward, layout.views(flat), tolerance=1e-6)


def test_one_word_comes_down_to_the_entropy_of_bigrams_and_no_further() -> None:
    params, history = classroom.learn(IDS, V, ONE_WORD, steps=1_000)
    assert min(history) >= ENTROPY
    assert history[-1] - ENTROPY < 1e-4
    # and there its predictions are the frequencies of the text
    seen = np.unique(IDS[:-1])
    p = softmax(classroom.forward(params, seen, ONE_WORD)[0])
    frequencies = COUNTS[seen] / COUNTS[seen].sum(axis=1, keepdims=True)
    assert np.max(np.abs(p - frequencies)) < 2e-3


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 30), st.booleans())
def test_no_weights_bring_one_word_below_the_entropy(
    seed: int, spread: float, residual: bool
) -> None:
    choices = ONE_WORD._replace(width=4, hidden=3, residual=residual)
    layout = classroom.layout_of(V, choices)
    flat = spread * np.random.default_rng(seed).standard_normal(layout.size)
    grads = layout.views(np.zeros(layout.size))
    with np.errstate(divide="ignore"):  # a word held for impossible costs infinitely much
        assert classroom.loss_and_grads(layout.views(flat), grads, IDS, choices) >= ENTROPY


def test_the_transformer_passes_below_it_and_recites(poet: tuple[Params, list[float]]) -> None:
    params, history = poet
    recited = classroom.recite(params, IDS[:1], len(IDS))
    assert decode(recited[1:-1], WORDS) == POEM and WORDS[recited[-1]] == "<end>"
    assert history[0] > np.log(V) > ENTROPY > 0.01 > history[-1]


def test_it_cannot_recite_before_it_has_learned() -> None:
    layout = classroom.layout_of(V, TRANSFORMER)
    params = layout.views(layout.init(seed=0, dtype=np.float64))
    assert (classroom.recite(params, IDS[:1], len(IDS)) != IDS).any()


def test_place_or_prefix_tell_one_word_s_occurrences_apart() -> None:
    def final_loss(attends: bool, placed: bool) -> float:
        choices = Choices(attention=attends, positions=placed)
        return classroom.learn(IDS, V, choices, steps=300)[1][-1]

    assert final_loss(False, True) < 0.01  # the place is enough: the poem as a list
    assert final_loss(True, False) < 0.1 < ENTROPY  # and so, nearly, is the prefix


def test_it_never_sees_the_word_it_predicts(poet: tuple[Params, list[float]]) -> None:
    z, _ = classroom.forward(poet[0], IDS)
    for t in (0, 1, 17, len(IDS) - 1):
        changed = IDS.copy()
        changed[t] = (changed[t] + 1) % V
        z_changed, _ = classroom.forward(poet[0], changed)
        np.testing.assert_array_equal(z_changed[:t], z[:t])
        assert not np.allclose(z_changed[t], z[t])


def test_a_poem_of_one_s_own_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    poem = tmp_path / "own.txt"
    poem.write_text(
        "rot ist die Rose\nblau ist das Meer\nund der Himmel ist blau\n", encoding="utf-8"
    )
    arguments = ["--text", str(poem), "--width", "16", "--hidden", "24", "--residual"]
    classroom.main([*arguments, "--no-biases"])
    said = capsys.readouterr().out
    assert "und der Himmel ist blau\n<end>" in said and "Mistake 4" in said


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        (None, [], "cannot be read as UTF-8"),
        (b"\xff\xfe", [], "cannot be read as UTF-8"),
        (b" \n", [], "2 to 1000 words"),
        (b"word " * 1001, [], "2 to 1000 words"),
        (b"two words", ["--width", "7"], "an even number"),
        (b"two words", ["--width", "100000"], "an even number"),
        (b"two words", ["--hidden", "0"], "--hidden a number"),
    ],
)
def test_what_is_no_poem_is_refused_with_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: bytes | None,
    arguments: list[str],
    says: str,
) -> None:
    path = tmp_path / "poem.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(SystemExit) as ended:
        classroom.main(["--text", str(path), *arguments])
    assert ended.value.code == 2 and says in capsys.readouterr().err


# ---- the mistakes --------------------------------------------------------------------------------


def test_fed_the_last_word_alone_it_is_a_bigram(poet: tuple[Params, list[float]]) -> None:
    said = mistakes.recite_by_last_word(poet[0], IDS[:1], 40)
    followers: dict[int, set[int]] = {}
    for a, b in itertools.pairwise(said.tolist()):
        followers.setdefault(a, set()).add(b)
    assert all(len(after) == 1 for after in followers.values())  # one word decides the next
    assert np.sum(said != IDS[:40]) > 20


def test_a_table_under_two_names_is_stepped_twice() -> None:
    right, wrong = mistakes.first_step(tied_twice=False), mistakes.first_step(tied_twice=True)
    assert right == pytest.approx(dict.fromkeys(right, 1.0), rel=1e-3)
    assert wrong == pytest.approx({**right, "E": 2 * right["E"]})


def test_products_of_places_depend_on_their_distance_alone_unless_the_base_is_the_place() -> None:
    for n in (1, 5, 20):
        assert mistakes.spread(sinusoidal_table(56, 48, np.float64), n) < 1e-12
        assert mistakes.spread(mistakes.place_as_base(56, 48), n) > 1


def test_three_indices_raise() -> None:
    assert "too many indices" in mistakes.three_indices()
