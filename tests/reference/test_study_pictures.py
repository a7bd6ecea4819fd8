"""Pictures show the numbers of the functions they are drawn from: read back, not looked at."""

from collections.abc import Iterator
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from reference import gelu
from reference.rope import forward as rope_forward
from reference.schedule import learning_rate
from reference.study import pictures, svg

SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


@cache
def kept(name: str) -> str:
    return (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")


def shares(drawn: str) -> list[float]:
    """Return how dark the squares of a map are."""
    squares = ElementTree.fromstring(drawn).iter(f"{SPACE}rect")
    return [
        float(square.attrib["fill-opacity"])
        for square in squares
        if "fill-opacity" in square.attrib
    ]


def words(drawn: str) -> list[str | None]:
    return [element.text for element in ElementTree.fromstring(drawn).iter(f"{SPACE}text")]


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_picture_kept_is_the_one_that_the_code_draws(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert words(kept(name)) == words(drawn)
    ours, theirs = svg.curves_of(kept(name)), svg.curves_of(drawn)
    assert [list(panel) for panel in ours] == [list(panel) for panel in theirs]
    for panel, other in zip(ours, theirs, strict=True):
        for curve, (x, y) in panel.items():
            np.testing.assert_allclose(x, other[curve][0], atol=1e-3 * np.ptp(x), err_msg=curve)
            np.testing.assert_allclose(y, other[curve][1], rtol=0.02, atol=0.01, err_msg=curve)
    np.testing.assert_allclose(shares(kept(name)), shares(drawn), atol=0.1)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_small_and_needs_nothing_else(name: str) -> None:
    assert len(kept(name).encode()) <= 60_000
    assert not any(word in kept(name) for word in ("href", "<script", "<style", "<image"))


def test_what_is_drawn_can_be_read_back() -> None:
    x, y = np.linspace(1, 3, 7), np.array([1e-3, 1e-2, 0.5, 1, 2, 50, 100])
    straight = svg.Panel("t", "a", "b", (1, 3), (0, 100), {"<&": (x, y), "other": (x, -y)})
    logarithmic = straight._replace(y=(1e-4, 1e3), log_y=True, curves={"<&": (x, y)})
    first, second = svg.curves_of(svg.figure([straight, logarithmic]))
    np.testing.assert_allclose(first["<&"], (x, y), atol=0.03)
    np.testing.assert_allclose(first["other"][1], -y, atol=0.03)
    np.testing.assert_allclose(second["<&"][1], y, rtol=0.01)


def test_the_losses_drawn_are_their_formulas() -> None:
    value, slope = svg.curves_of(kept("losses"))
    p = value["cross-entropy"][0]
    for name, loss, by_score in (
        ("cross-entropy", -np.log(p), p - 1),
        ("squared error on one-hots", 2 * (1 - p) ** 2, -4 * p * (1 - p) ** 2),
        ("contrastive, even noise", (np.log(2) - np.log(p)) / 2, (p - 1) / 2),
        ("squared error on ids, ŷ = p", (1 - p) ** 2, 2 * (p - 1)),
        ("zero-one", np.where(p > 0.5, 0.0, 1.0), 0 * p),
    ):
        inside = (p > 0.05) & (np.abs(p - 0.5) > 0.01)  # where a tenth of a pixel is not much
        np.testing.assert_allclose(value[name][1][inside], loss[inside], atol=0.02, err_msg=name)
        np.testing.assert_allclose(slope[name][1][inside], by_score[inside], atol=0.01)


def test_the_other_curves_are_their_functions() -> None:
    x, y = svg.curves_of(kept("activations"))[0]["gelu"]
    np.testing.assert_allclose(y, gelu.forward(x)[0], atol=0.02)
    (drawn,) = svg.curves_of(kept("schedules"))
    for kind, (step, rate) in drawn.items():
        want = [
            learning_rate(
                max(round(n), 1),
                peak=1,
                warmup_steps=100,
                total_steps=1000,
                decay_steps=200,
                schedule=kind,  # type: ignore[arg-type]
            )
            for n in step
        ]
        np.testing.assert_allclose(rate, want, atol=0.02, err_msg=kind)
    angle, score = svg.curves_of(kept("rope"))
    np.testing.assert_allclose(
        angle["pair 2"][1], angle["pair 2"][0] * 10_000 ** (-4 / 16), atol=0.1
    )
    q = np.tile([1.0, 0.0], 8)
    for start in (0, 5):  # the score of equal vectors depends on their distance alone
        turned, _ = rope_forward(np.tile(q, (1, 129, 1, 1)), 10_000.0, start)
        scores = turned[0, :, 0] @ turned[0, 0, 0] / 8
        np.testing.assert_allclose(score["mean of all 8 pairs"][1], scores, atol=0.01)


def test_a_map_of_shares_has_rows_that_sum_to_one_and_see_no_later_word() -> None:
    P = np.reshape(shares(kept("attention_map")), (18, 18))
    np.testing.assert_allclose(P.sum(axis=1), 1, atol=0.02)
    assert (np.triu(P, 1) == 0).all() and P.max() > 0.5
