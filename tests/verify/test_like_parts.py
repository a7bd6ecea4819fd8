"""What ``--like`` is made of: declared and found shapes, and the bound."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.tolerance import Magnitude, round_to
from accel.verify.apart import Source
from accel.verify.draw import Draw
from accel.verify.files import load_failure, save_failure
from accel.verify.like.bound import expect
from accel.verify.like.case import LikeCase
from accel.verify.like.declared import DeclarationError, letters_in, read, value_of
from accel.verify.like.slopes import slopes
from accel.verify.like.truth import as_rows, close
from accel.verify.subject import SubjectError
from tests.helpers.like import checked

# ---- shapes --------------------------------------------------------------------------------------


def first(options: Any, name: str = "") -> Any:
    return options[0]


def test_a_declaration_is_read() -> None:
    declared = read(
        {"x": "B T 2*F, F % 8, T <= 100", "ids": "B T int < V", "table": "V 3", "eps": 1e-5}
    )
    assert declared.letters == ("B", "T", "F", "V")
    assert declared.options == {"eps": (1e-5,)}
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(40):
        draw = Draw(lambda options, name="": options[rng.integers(len(options))], "float32")
        sizes = declared.sizes(draw)
        assert sizes["F"] % 8 == 0 and sizes["T"] <= 100
        arrays = {name: a.values(draw, sizes) for name, a in declared.arrays.items()}
        assert arrays["x"].shape == (sizes["B"], sizes["T"], 2 * sizes["F"])
        assert arrays["table"].shape == (sizes["V"], 3)
        assert arrays["ids"].min() >= 0 and arrays["ids"].max() < sizes["V"]
        seen.add(sizes["F"])
    assert 8 in seen and len(seen) > 3
    assert value_of("2F + 1", {"F": 3}) == 7
    assert (
        read({"x": "... D > 0"})
        .arrays["x"]
        .values(Draw(first, "float32"), {"...": (2,), "D": 5})
        .min()
        > 0
    )


def test_a_capital_of_what_a_module_is_made_with_is_a_letter() -> None:
    declared = read(
        {"init": ("D", "2*F", 8, "relu", "GELU"), "x": "B D", "shape": ("B", "H2", -1)}
        | {"how": ["mean", "N"]}
    )
    assert declared.letters == ("B", "D", "F", "H2")
    rng = np.random.default_rng(0)
    draw = Draw(lambda options, name="": options[rng.integers(len(options))], "float32")
    sizes = declared.sizes(draw)
    made = tuple(declared.words(value, sizes) for value in declared.init)
    assert made == (sizes["D"], 2 * sizes["F"], 8, "relu", "GELU")
    assert declared.words(("B", "H2", -1), sizes) == (sizes["B"], sizes["H2"], -1)


@pytest.mark.parametrize(
    ("shapes", "holds"),
    [
        ({"q": "B T D", "k": "B S D, S >= T"}, lambda n: n["S"] >= n["T"]),
        ({"x": "H W, H == 3*W"}, lambda n: n["H"] == 3 * n["W"]),
        ({"x": "A B C, A < B, B < C"}, lambda n: n["A"] < n["B"] < n["C"]),
        ({"x": "B T D, D != 3, D != T"}, lambda n: n["D"] not in (3, n["T"])),
        ({"x": "N C, C % G == 0, G > 1"}, lambda n: n["C"] % n["G"] == 0 and n["G"] > 1),
    ],
)
def test_sizes_keep_to_what_holds_between_letters(shapes: dict[str, Any], holds: Any) -> None:
    declared, rng, seen = read(shapes), np.random.default_rng(0), set()
    for _ in range(60):
        draw = Draw(lambda options, name="": options[rng.integers(len(options))], "float32")
        sizes = declared.sizes(draw)
        assert holds(sizes) and declared.fits(sizes), sizes
        seen.add(tuple(sizes.values()))
    assert len(seen) > 10
    assert holds(declared.sizes(Draw(first, "float32")))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"eps": 1e-5}, "no array among eps"),
        ({"x": "B, T)"}, "is no expression of sizes"),
        ({"x": "B T!"}, "'T!' where an axis should stand"),
        ({"x": "B 1.5"}, "'1.5' where an axis should stand"),
        ({"x": "B 2E+1"}, "'2E+1' where an axis should stand"),
        ({"x": "B T, B is T"}, "'B is T' is no expression of sizes; it may use + - * // % and <"),
        ({"x": "B T, T > B, T < B"}, "no sizes keep to T > B, T < B"),
        ({"x": "B, B > 5000, B < 5001"}, "no sizes keep to B > 5000, B < 5001"),
        ({"x": "B 50257"}, "no sizes leave every array at most 20,000 elements"),
        ({"y": "B"}, "relu takes no y; it takes x"),
    ],
)
def test_a_declaration_that_cannot_be_read_is_said(
    tmp_path: Path, shapes: dict[str, Any], message: str
) -> None:
    ref = f"import numpy as np\nSHAPES = {{'relu': {shapes!r}}}\ndef relu(x):\n    return abs(x)\n"
    with pytest.raises(SubjectError, match=re.escape(message)):
        checked(tmp_path, "def relu(x):\n    return x", ref=ref)


@pytest.mark.parametrize(
    ("text", "sizes", "value"),
    [
        ("1e-6", {}, 1e-6),
        ("1E+2", {}, 100.0),
        ("1.5e3", {}, 1500.0),
        (".5", {}, 0.5),
        ("1_000", {}, 1000),
        ("2F", {"F": 3}, 6),
        ("2E", {"E": 5}, 10),
        ("2E + 1", {"E": 5}, 11),
        ("2*E+1", {"E": 5}, 11),
        ("12e_2 - 1", {"e_2": 2}, 23),
        ("1.5F", {"F": 2}, 3.0),
    ],
)
def test_a_number_may_have_any_form_that_python_s_have(
    text: str, sizes: dict[str, int], value: float
) -> None:
    assert value_of(text, sizes) == value and set(letters_in(text)) == set(sizes)
    declared = read({"x": "B T > 1e-6"})
    assert declared.letters == ("B", "T") and declared.arrays["x"].bounds == ((">", "1e-6"),)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bf16", "float16", "tf32", "e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("bounds", "holds"),
    [
        ("> 0", lambda x: x > 0),
        ("> 1", lambda x: x > 1),
        ("< -1000", lambda x: x < -1000),
        ("<= 0.3", lambda x: x <= 0.3),
        ("> 0 < 1", lambda x: (x > 0) & (x < 1)),
        (">= 1e-6 < F", lambda x: (x >= 1e-6) & (x < 3)),
    ],
)
def test_a_range_is_kept_in_every_precision(bounds: str, holds: Any, dtype: str) -> None:
    array, rng = read({"x": f"B D {bounds}", "y": "F"}).arrays["x"], np.random.default_rng(0)
    for kind in ("", "minute", "huge", "equal rows", "tiny", "zero rows"):
        for n in (1, 40):

            def pick(options: Any, name: str = "", kind: str = kind) -> Any:
                return kind if kind in options else options[rng.integers(len(options))]

            x = array.values(Draw(pick, dtype), {"B": n, "D": n, "F": 3})
            assert holds(x.astype(np.float64)).all(), (kind, n)
            np.testing.assert_array_equal(x, round_to(x, dtype))


def test_a_range_without_a_number_of_the_precision_is_said(tmp_path: Path) -> None:
    text = "SHAPES = {'f': {'x': 'B T > 1 < 1.001'}}\ndef f(x):\n    return x + 1\n"
    with pytest.raises(SubjectError, match=r"f: no number of bf16 is > 1 < 1.001; declare a wider"):
        checked(tmp_path, text, ref=text, dtypes=("bf16",))


def test_a_range_is_kept_in_a_second_call_and_in_a_smaller_case(tmp_path: Path) -> None:
    text = """
import numpy as np
SHAPES = {"f": {"x": "B T > 1 < 2"}}
def f(x):
    return np.sqrt(np.abs(x - 1))
"""
    strict = text.replace("    return", "    assert ((x > 1) & (x < 2)).all()\n    return")
    for ref in (text, strict):
        report = checked(tmp_path, strict, ref=ref)
        assert report.right, report.text()
    report = checked(tmp_path, text.replace("(np.abs", "(2 * np.abs"), ref=text, shrink=True)
    (failure,) = report.failures
    x = failure.case.arrays["x"]
    assert failure.name == "out" and x.size <= 2 and ((x > 1) & (x < 2)).all(), report.text()


@pytest.mark.parametrize("bounds", [">= 16 <= 1000", "> 16", "<= -16", "> 0 < 1"])
def test_a_reference_that_refuses_what_is_beyond_a_range_is_not_asked_for_it(
    bounds: str, tmp_path: Path
) -> None:
    text = f"""
import numpy as np
SHAPES = {{"f": {{"x": "B T {bounds}", "y": "B T"}}}}
def f(x, y):
    assert ((x {bounds.replace(" <", ") & (x <")})).all()
    return np.sqrt(np.abs(x)) * y
def f_backward(dout, x, y):
    return dout * y * np.sign(x) / (2 * np.sqrt(np.abs(x))), dout * np.sqrt(np.abs(x))
"""
    report = checked(tmp_path, text, ref=text, dtypes=("float32", "float64", "bf16"))
    assert report.right, report.text()
    assert {name for op in report.ops for name in op.results} == {"out", "dx", "dy"}
    wrong = text.replace("dout * np.sqrt", "dout * 1.01 * np.sqrt")
    report = checked(tmp_path, wrong, ref=text, dtypes=("float32",))
    assert {failure.name for failure in report.failures} == {"dy"}, report.text()


def test_a_range_that_is_not_declared_is_said(tmp_path: Path) -> None:
    text = """
SHAPES = {"f": {"x": "B T >= 1 <= 9", "y": "B T"}}
def f(x, y):
    if (x == x.astype("float16")).all():
        return x + y
    raise ValueError("x in three digits")
"""
    says = r"ValueError: x in three digits for numbers that are not those of a case.*declare the"
    with pytest.raises(SubjectError, match=says):
        checked(tmp_path, text, ref=text, dtypes=("float16",))


def test_options_of_a_case_are_read_as_they_were_written(tmp_path: Path) -> None:
    given = {
        "eps": np.float32(1e-5),
        "other": np.inf,
        "shape": ("B", -1, (2,)),
        "names": ["mean", None, True, 1.5],
        "n": np.int64(3),
        "by": {"a": (1,), 2: [0.5]},
    }
    case = LikeCase("f", "bf16", {"x": np.ones((2, 3), np.float32)}, given, None, {"x": "sliced"})
    case = dataclasses.replace(case, sizes={"...": (2,), "D": 3}, seed=7, interleaved=True)
    save_failure(tmp_path / "case.npz", case, [])
    again = load_failure(tmp_path / "case.npz")
    assert isinstance(again, LikeCase) and again.options == given and again.sizes == case.sizes
    assert {type(value).__module__ for value in again.options.values()} == {"builtins"}
    assert (again.layouts, again.seed, again.interleaved) == ({"x": "sliced"}, 7, True)
    about = {"op": "f", "dtype": "bf16", "layouts": {}, "interleaved": False}
    like = {"options": repr({"eps": 1e-5, "n": (2, None)}), "sizes": repr({"...": (2,)}), "seed": 1}
    before = LikeCase.of(about | {"like": like | {"operands": [("x", "float")]}}, case.arrays)
    assert before.options == {"eps": 1e-5, "n": (2, None)} and before.sizes == {"...": (2,)}
    save_failure(tmp_path / "case.npz", case.but(dtype=np.float32), [])
    with pytest.raises(ValueError, match=r"an option <class 'numpy.float32'>, which no file can"):
        load_failure(tmp_path / "case.npz")


def test_shapes_are_found_from_an_example(tmp_path: Path) -> None:
    ref = """
import numpy as np
EXAMPLES = {
    "f": (np.ones((4, 4)), np.ones((4, 4)), np.zeros(4, int), np.ones((6, 4)), 2),
    "heads": lambda: {"x": np.ones((3, 8)), "n": 4},
}
def f(x, w, ids, table, power):
    return (x @ w + table[ids]) ** power
def heads(x, n):
    return x.reshape(len(x), n, -1).sum(-1)
"""
    new = "def f(x, w, ids, table, power):\n    y = table[ids] + x @ w\n    return y * y\n"
    new += "def heads(x, n):\n    return x.reshape(len(x), n, -1).sum(2)\n"
    report = checked(tmp_path, new, "f", ref=ref)
    assert report.right, report.text()
    (tmp_path / "ref.py").write_text(ref, encoding="utf-8")
    subject = Source(str(tmp_path / "new.py"), like=str(tmp_path / "ref.py")).load()
    f = subject.pairs["f"].reference.declared  # type: ignore[attr-defined]
    x, w, ids, table = (f.arrays[n] for n in ("x", "w", "ids", "table"))
    assert x.axes[1] == w.axes[0] != w.axes[1] == table.axes[1] and ids.axes[0] == x.axes[0]
    assert ids.bounds == (("<", table.axes[0]),)
    heads = subject.pairs["heads"].reference.declared  # type: ignore[attr-defined]
    known = dict(heads.known)
    assert set(known[heads.arrays["x"].axes[1]]) >= {8, 16, 64}
    assert not {7, 17} & set(known[heads.arrays["x"].axes[1]])


# ---- the bound -----------------------------------------------------------------------------------


def test_the_bound_counts_terms_and_knows_jumps() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 129)).astype(np.float32)
    x[0, 0] = 1.0  # floor jumps here

    def f(arrays: Any, dtype: str) -> dict[str, Any]:
        kind = np.float64 if dtype == "float64" else np.float32
        given = arrays["x"].astype(kind)
        parts = {"each": np.exp(given), "sum": given.sum(-1), "floor": np.floor(given)}
        return {name: a.astype(np.float64) for name, a in parts.items()}

    truths = expect(f, {"x": x}, "float32", rng)
    assert truths["each"].magnitude.terms <= 2
    assert 100 <= truths["sum"].magnitude.terms <= 170
    assert truths["floor"].jumps[0, 0] and truths["floor"].jumps.mean() < 0.01
    floor = truths["floor"].exact.copy()
    floor[0, 0] = 0.0
    assert close(floor, truths["floor"], "float32", gradient=False).ok
    floor[0, 0] = 2.0
    assert not close(floor, truths["floor"], "float32", gradient=False).ok
    assert not close(
        truths["each"].exact * (1 + 1e-4), truths["each"], "float32", gradient=False
    ).ok


def test_infinity_and_nan_are_due_where_the_reference_has_them() -> None:
    x = np.array([[0.0, 1.0, 2.0, -1.0]], np.float32)

    def f(arrays: Any, dtype: str) -> dict[str, Any]:
        with np.errstate(all="ignore"):
            return {"out": np.log(arrays["x"]).astype(np.float64)}

    truth = expect(f, {"x": x}, "float32", np.random.default_rng(0))["out"]
    right = truth.exact.copy()
    assert close(right, truth, "float32", gradient=False).ok
    for at, value in ((0, -1e30), (3, 0.0), (1, np.nan)):
        wrong = right.copy()
        wrong[0, at] = value
        assert not close(wrong, truth, "float32", gradient=False).ok


def test_a_narrow_row_is_taken_with_those_beside_it() -> None:
    assert as_rows(np.zeros((7, 40))).shape == (7, 40)
    assert as_rows(np.zeros((7, 4, 5))).shape == (7, 20)
    assert as_rows(np.zeros((3, 2))).shape == (1, 6)
    assert as_rows(np.float64(1)).shape == (1, 1)
    assert Magnitude(np.ones(3), 1).terms == 1


def test_slopes_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((3, 2)), rng.standard_normal((3, 2))
    x[2, 1] = 0.0
    found = slopes(
        lambda given: {"out": np.abs(np.sin(given["x"]))}, {"x": x}, ["x"], {"out": dout}, rng
    )["x"]
    want = dout * np.cos(x) * np.sign(np.sin(x))
    calm = x != 0
    assert np.max(np.abs(found.value - want)[calm]) < 1e-9
    assert found.low[2, 1] < 0 < found.high[2, 1]  # the kink at zero
    assert np.abs(found.low[2, 1] + abs(dout[2, 1])) < 1e-6


def test_steps_are_as_long_as_the_row_is_large_and_what_bends_within_them_is_left_out() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3)) * np.array([[1e-12], [1.0], [1e6], [1e12]])
    dout = rng.standard_normal((4, 3))

    def norm(given: Any) -> dict[str, Any]:
        return {"out": given["x"] / np.sqrt(np.sum(given["x"] ** 2, axis=-1, keepdims=True))}

    found = slopes(norm, {"x": x}, ["x"], {"out": dout}, rng)["x"]
    r = 1 / np.sqrt(np.sum(x**2, axis=-1, keepdims=True))
    want = r * (dout - x * r * np.sum(x * r * dout, axis=-1, keepdims=True))
    tried = ~np.isnan(found.value)
    assert tried[[0, -1]].any(axis=-1).all()
    np.testing.assert_allclose((found.value * x)[tried], (want * x)[tried], rtol=1e-6)

    def wave(given: Any) -> dict[str, Any]:
        return {"out": np.sin(1e6 * given["x"])}

    x = np.linspace(1.0, 2.0, 7)
    assert np.isnan(slopes(wave, {"x": x}, ["x"], {"out": x}, rng)["x"].value).all()


def test_where_one_rounding_decides_nothing_is_asked_but_a_number_is() -> None:
    rng = np.random.default_rng(0)
    x = np.array([[3e8, 1e8, -2e8, 5e7]] * 8, np.float32)

    def softmax(arrays: Any, dtype: str) -> dict[str, Any]:
        z = arrays["x"].astype(np.float64 if dtype == "float64" else np.float32)
        e = np.exp(z - z.max(-1, keepdims=True))
        return {"out": (e / e.sum(-1, keepdims=True)).astype(np.float64)}

    truth = expect(softmax, {"x": x}, "float32", rng)["out"]
    assert not truth.judged.any() and truth.finite.all()

    def mean_over_none(arrays: Any, dtype: str) -> dict[str, Any]:
        z = arrays["x"].astype(np.float64 if dtype == "float64" else np.float32)
        c = z - z.mean(-1, keepdims=True)
        with np.errstate(all="ignore"):
            return {"out": (c / np.sqrt((c * c).mean(-1, keepdims=True))).astype(np.float64)}

    x = np.linspace(1.0, 2.0, 40, dtype=np.float32).reshape(2, 20)
    x[1] = 0.1  # all but one, which is next to it: a mean that is rounded makes them all alike
    x[1, 0] = np.nextafter(x[1, 0], np.float32(1))
    truth = expect(mean_over_none, {"x": x}, "float32", rng)["out"]
    assert truth.judged[0].all() and truth.finite[0].all()
    assert not truth.judged[1].any() and not truth.finite[1].any()


def test_an_expression_may_not_call_anything() -> None:
    with pytest.raises(DeclarationError):
        value_of("__import__('os')", {})
