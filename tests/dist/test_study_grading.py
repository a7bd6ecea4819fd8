"""Exercises are graded by the reference: right answers, known mistakes, and files that are none."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from accel.verify import check
from accel.verify.load import import_file, load_op
from dist.cli import main
from dist.study import blank
from dist.study.exercise import Exercise, Mistake, mistaken, module_of, source_of
from dist.study.grade import grade, grade_module
from dist.study.tracks import EXERCISES
from tests.helpers import ROOT

FUNCTIONS = [e for e in EXERCISES.values() if e.cases is not None]
OPS = [e for e in EXERCISES.values() if e.cases is None]


def solution(exercise: Exercise, level: int = 1) -> str:
    """The text of an exercise with nothing blank."""
    wanted = blank.wanted(exercise, exercise.levels[level - 1])
    return blank.cut(source_of(exercise.home_of(level)), "", wanted)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def graded(exercise: Exercise, path: Path, examples: int = 12) -> check.Report:
    """The report on an op, made in this process and without looking for the smallest case."""
    options = check.Options((exercise.name,), ("float64",), examples=examples, shrink=False)
    return check.check_subject(load_op(path, exercise.name), options)


@pytest.mark.parametrize("exercise", FUNCTIONS, ids=lambda e: e.name)
def test_the_solution_of_a_function_is_right(exercise: Exercise) -> None:
    verdict = grade_module(exercise, module_of(solution(exercise), "solution"))
    assert verdict.right and verdict.calls >= 5, verdict.text


@pytest.mark.parametrize("exercise", OPS, ids=lambda e: e.name)
def test_the_solution_of_an_op_is_right(exercise: Exercise, tmp_path: Path) -> None:
    report = graded(exercise, write(tmp_path / "x.py", solution(exercise)), examples=8)
    assert report.ok and report.cases == 8


def test_a_gradient_of_another_dtype_is_refused(tmp_path: Path) -> None:
    text = solution(EXERCISES["rmsnorm"]).replace("return dx, dg", "return np.float64(dx), dg")
    verdict = grade(EXERCISES["rmsnorm"], write(tmp_path / "mine.py", text))
    assert not verdict.right and "dx is float64, but the inputs are float32" in verdict.text


def test_what_is_added_to_somebody_s_mathematics_is_not_asked_of_it(tmp_path: Path) -> None:
    """``out``, ``plus`` and ``keep_x`` are of the functions around it."""
    text = solution(EXERCISES["layernorm"]).replace("np.mean(dn * n, axis=-1, keepdims=True)", "0")
    text = text.replace("return dx, dg, db", "raise ValueError('never')")
    verdict = grade(EXERCISES["layernorm"], write(tmp_path / "mine.py", text))
    (line,) = [i for i, said in enumerate(text.splitlines(), 1) if "never" in said]
    assert f"ValueError: never (mine.py:{line})" in verdict.text
    subject = load_op(tmp_path / "mine.py", "layernorm")
    assert list(subject.signature("layernorm_backward") or ()) == ["dout", "cache"]


def mistakes_in(exercises: list[Exercise]) -> Iterator[tuple[Exercise, Mistake]]:
    for exercise in exercises:
        yield from ((exercise, mistake) for mistake in exercise.mistakes)


@pytest.mark.parametrize(
    ("exercise", "mistake"),
    [*mistakes_in(FUNCTIONS)],
    ids=lambda x: x.name if isinstance(x, Exercise) else x.says[:30],
)
def test_a_mistake_in_a_function_is_named_alone(exercise: Exercise, mistake: Mistake) -> None:
    verdict = grade_module(exercise, module_of(mistaken(exercise, mistake), "mistaken"))
    assert not verdict.right
    assert re.findall("hint: (.*)", verdict.text) == [mistake.says]


UNDER = """z = z - np.{}(z, axis=-1, keepdims=True)
    p = np.exp(z) / np.sum(np.exp(z), axis=-1, keepdims=True)"""


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("cross_entropy", "p = softmax(z)", UNDER.format("min")),
        ("cross_entropy", "p = softmax(z)", UNDER.format("mean")),
        ("schedule", "if span else 0.0", "if span else 1.0"),
    ],
)
def test_what_is_wrong_at_an_end_alone_is_refused(name: str, right: str, wrong: str) -> None:
    (exercise,) = (e for e in FUNCTIONS if e.name == name)
    text = solution(exercise)
    assert right in text
    assert not grade_module(exercise, module_of(text.replace(right, wrong), "wrong")).right


@pytest.mark.parametrize("taken", ["min", "mean"])
def test_a_softmax_that_overflows_is_refused(taken: str, tmp_path: Path) -> None:
    (exercise,) = (e for e in OPS if e.name == "softmax")
    text = solution(exercise).replace("np.max(", f"np.{taken}(")
    assert not graded(exercise, write(tmp_path / "x.py", text), examples=20).ok


# What a text asks for and no mistake is made of, left out.
CAUSAL = "        if self.causal:\n            may"
LEFT_OUT = [
    ("schedule", {"return peak * step / warmup_steps": "return step / warmup_steps"}),
    ("schedule", {"        return peak\n": "        return 1.0\n"}),
    ("schedule", {"    if step < warmup": "    step / warmup_steps\n    if step < warmup"}),
    ("visibility", {CAUSAL: CAUSAL.replace("causal", "causal or self.key_mask is not None")}),
    ("visibility", {CAUSAL: CAUSAL.replace("causal", "causal or self.documents is not None")}),
    ("visibility", {"if self.documents": "if self.key_mask is None and self.documents"}),
    ("sinusoidal", {".astype(dtype)": ""}),
    ("alibi", {".astype(dtype)": ""}),
    ("bpe_merge", {"    return out\n\n\ndef enc": "    symbols[:] = out\n    return symbols\n\n\n"
     "def enc"}),
    ("bpe_train", {"ids = [[first_id + byte": "ids = [[byte", "length[symbol - first_id]":
     "length[symbol]", "new = first_id + n": "new = n", "length[i - first_id]": "length[i]"}),
    ("bpe_train", {"new = first_id + n_symbols": "new = first_id + 256", "* n_symbols": "* 256"}),
    ("bpe_train", {"        if -negative < min_count:\n            break\n": ""}),
    ("bpe_train", {" and sum(length[i - first_id] for i in now) <= max_length": ""}),
    ("viterbi", {"self.edges(word, without):\n            score": "self.edges(word):\n            "
     "score"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), LEFT_OUT, ids=lambda x: x if type(x) is str else "")
def test_what_a_text_asks_for_is_asked_of_the_function(name: str, changes: dict[str, str]) -> None:
    text = mistaken(EXERCISES[name], Mistake("", changes))
    assert not grade_module(EXERCISES[name], module_of(text, "lenient")).right


def test_an_error_says_in_which_line(tmp_path: Path) -> None:
    text = solution(EXERCISES["clip"]).replace("return min(1.0,", "return least(1.0,")
    path = write(tmp_path / "mine.py", text)
    line = 1 + text[: text.index("return least")].count("\n")
    found = grade(EXERCISES["clip"], path).text
    assert f"raises NameError (mine.py:{line}): name 'least' is not defined" in found


def refusals() -> Iterator[tuple[Exercise, str]]:
    """Every refusal in a solution: its exercise, and the solution's file without it."""
    for exercise in FUNCTIONS:
        source = source_of(exercise.home)
        *_, name = exercise.function.split(".")
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef) and function.name == name:
                for node in ast.walk(function):
                    if isinstance(node, ast.Raise):
                        refusal = ast.get_source_segment(source, node)
                        assert refusal and source.count(refusal) == 1
                        yield exercise, source.replace(refusal, "return None")


@pytest.mark.parametrize(("exercise", "text"), [*refusals()], ids=lambda x: getattr(x, "name", ""))
def test_a_refusal_that_is_left_out_is_found(exercise: Exercise, text: str) -> None:
    assert not grade_module(exercise, module_of(text, "lenient")).right


def test_an_exercise_says_that_something_is_refused_where_it_is() -> None:
    refusing = {exercise.name for exercise, _ in refusals()}
    assert refusing == {e.name for e in FUNCTIONS if "ValueError" in e.says}


# Mistakes in an op: what stands in its file, what becomes of it, and what verify says.
KNOWN = [
    ("relu", "np.where(x > 0, dy, 0)", "np.where(dy > 0, dy, 0)", "does the mask ask dout rather"),
    ("relu", "np.where(x > 0, dy, 0)", "np.where(x > 0, 1.0, 0 * dy)", "is dout missing?"),
    ("relu", "np.where(x > 0", "np.where(x >= 0", "is the gradient passed on where x is 0?"),
    ("add", "np.asarray(np.sum(dy,", "np.asarray(np.mean(dy,", "mean for sum over what was"),
    ("add", "np.asarray(np.sum(dy, axis=(*range(new), *repeated)))", "dy[tuple(0 if i < new else "
     "slice(0, 1 if i in repeated else None) for i in range(dy.ndim))]", "broadcast not summed?"),
    ("linear", "np.sum(rows, axis=0)", "np.mean(rows, axis=0)", "mean for sum over the rows in db"),
    ("linear", ".T @ rows", ".T @ rows / len(rows)", "mean for sum over the rows in dweight"),
    ("swiglu", "dg = dy * u * sigma * (1 + g * (1 - sigma))", "dg = dy * u * sigma",
     "is the term gate · (1 - σ) missing in the derivative of SiLU?"),
    ("swiglu", "dg = dy * u * sigma * (1 + g * (1 - sigma))", "dg = dy * u * sigma * (1 - sigma)",
     "is it σ's derivative, σ (1 - σ)"),
    ("swiglu", "dg = dy * u * sigma", "dg = dy * sigma", "is the factor up missing in the gate's"),
    ("gelu", "(_normal_cdf(x) + x * density)", "_normal_cdf(x)", "is the density missing in the"),
    ("gelu", "+ x * density)", "+ density)", "is x missing beside the density"),
    ("gelu_tanh", "(1 - h * h) * _C * (1 + 3 * _A * x * x)", "(1 - h * h)",
     "is the derivative of what stands inside tanh missing"),
    ("gelu_tanh", " + 0.5 * x * (1 - h * h) * _C * (1 + 3 * _A * x * x)", "",
     "is the term with tanh's derivative missing?"),
    ("gelu_tanh", "(1 + 3 * _A", "(1 + _A", "is the factor 3 missing in the derivative"),
    ("rmsnorm", "np.mean(dn * n, axis=-1, keepdims=True)", "np.sum(dn * n, axis=-1, keepdims=True)",
     "sum for mean in the term n · mean(dn · n)?"),
    ("rmsnorm", "dn = dy * g", "dn = dy", "is the gain missing in dx?"),
    ("softmax", "np.sum(e, axis=-1, keepdims=True)", "np.sum(e)", "is the sum taken over all"),
    ("softmax", "np.sum(e, axis=-1", "np.sum(e, axis=0", "is the sum taken over the first axis?"),
    ("attention", "dq = scale * (ds @ k)", "dq = ds @ k", "is the scale missing in dq?"),
    ("attention", "dk = scale * np.sum(ds", "dk = np.sum(ds", "is the scale missing in dk?"),
    ("attention", "ds = softmax_backward(dP, P)", "ds = dP", "is dP taken for ds?"),
    ("attention", "ds = softmax_backward(dP, P)", "ds = P * dP", "is the term p · Σ dp p missing"),
    ("attention", "dv = np.sum(dropped", "dv = np.mean(dropped",
     "mean for sum over the query heads of a group in dv?"),
    ("adamw", "(np.sqrt(v_hat) + eps)", "np.sqrt(v_hat + eps)", "is eps inside the root?"),
    ("adamw", "g = grad * grad_scale", "g = grad * grad_scale\n    g[:n_decayed] += weight_decay * "
     "master[:n_decayed]\n    weight_decay = 0", "is the decay coupled, added to the gradient"),
    ("adamw", "    update[:n_decayed] += weight_decay", "    master[:n_decayed] -= weight_decay",
     "is the decay not multiplied by lr?"),
    ("embedding", "np.add.at(dtable, cache.ids.reshape(-1), rows)",
     "dtable[cache.ids.reshape(-1)] += rows", "overwritten rather than added"),
    ("layernorm", "dn - np.mean(dn, axis=-1, keepdims=True) - along_n", "dn - along_n",
     "is the term mean(dn) missing?"),
    ("layernorm", " - along_n)", ")", "is the term n · mean(dn · n) missing?"),
    ("rmsnorm", "(dn - n * np.mean(dn * n, axis=-1, keepdims=True))", "dn",
     "is the term n · mean(dn · n) missing?"),
    ("rope", "_rotate(dy, cos, -sin, rotate_heads)", "_rotate(dy, cos, sin, rotate_heads)",
     "does the backward turn the same way as the forward?"),
    ("rope", "base ** (-np.arange(0, d, 2) / d)", "base ** (np.arange(0, d, 2) / d)", "out"),
    ("adamw", "m_hat = m / (1 - beta1**step)\n    v_hat = v / (1 - beta2**step)", "m_hat, v_hat = "
     "m, v", "is the bias correction missing?"),
    ("linear", "dx = dy @ W.T", "dx = dy @ W", "raised ValueError"),
    ("softmax", "z - np.max(z, axis=-1, keepdims=True)", "z", "is the maximum not taken off?"),
    ("add", "np.asarray(np.sum(dy, axis=(*range(new), *repeated))).reshape(shape)", "dy",
     "should have"),
]  # fmt: skip


def planted() -> Iterator[tuple[str, str, str]]:
    """Every mistake in an op: its name, the text with the mistake, what must be said."""
    for name, old, new, says in KNOWN:
        text = source_of(EXERCISES[name].home)
        assert text.count(old) == 1, (name, old)
        yield name, text.replace(old, new), says


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [*planted()],
    ids=[f"{name}: {says[:40]}" for name, _, says in planted()],
)
def test_a_mistake_in_an_op_is_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    report = graded(EXERCISES[name], write(tmp_path / "x.py", text))
    assert not report.ok
    assert says in report.text()


def test_every_exercise_has_a_mistake_that_is_named() -> None:
    assert {name for name, *_ in planted()} | {e.name for e, _ in mistakes_in(FUNCTIONS)} == set(
        EXERCISES
    )


class Attempt(NamedTuple):
    """What a learner might hand in, in words of their own, and what must be said (None: right)."""

    exercise: str
    text: str
    says: str | None


RMSNORM = """
import numpy as np
def forward(x, g, eps):
    r = (np.square(x).mean(-1)[..., None] + eps) ** -0.5
    return g * (x * r), (x, g, r)
def backward(dy, cache):
    x, g, r = cache
    D = x.shape[-1]
    dg = np.zeros_like(g)
    dx = np.empty_like(x)
    for row in np.ndindex(x.shape[:-1]):
        h = dy[row] * g
        dg += dy[row] * x[row] * r[row]
        dx[row] = r[row] * h - r[row] ** 3 * x[row] * (h @ x[row]) / D
    return dx, dg
"""
TRAIN = """
from collections import Counter
def train(words, n_merges, *, first_id=0, n_symbols=256, min_count=1, max_length=4096):
    ids = [[first_id + b for b in word] for word in words]
    merges, length = [], [1] * n_symbols
    while len(merges) < n_merges:
        pairs = Counter()
        for symbols, n in zip(ids, words.values()):
            for pair in zip(symbols, symbols[1:]):
                if length[pair[0] - first_id] + length[pair[1] - first_id] <= max_length:
                    pairs[pair] += n
        pairs = {pair: n for pair, n in pairs.items() if n >= min_count}
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        new = first_id + n_symbols + len(merges)
        length.append(length[best[0] - first_id] + length[best[1] - first_id])
        merges.append(best)
        for w, symbols in enumerate(ids):
            out = []
            for s in symbols:
                if out and (out[-1], s) == best:
                    out[-1] = new
                else:
                    out.append(s)
            ids[w] = out
    return merges
"""
TREE = """
def add_in_tree_order(accumulate, parts):
    for other in parts[1:]:
        accumulate(parts[0], other)
    return parts[0]
"""
SHARES = """
def shares(weights):
    counts = [round(w / sum(weights) * 1024) for w in weights]
    for j in range(1024 - sum(counts)):
        counts[j] += 1
    if 0 in counts:
        raise ValueError("too small a weight")
    return tuple(counts)
"""
ATTEMPTS = [
    Attempt("mixture", SHARES, "is each share rounded to the nearest?"),
    Attempt("rmsnorm", RMSNORM, None),
    Attempt("rmsnorm", RMSNORM.replace("(h @ x[row]) / D", "(h @ x[row])"), "sum for mean in the"),
    Attempt("rmsnorm", RMSNORM.replace("h = dy[row] * g", "h = dy[row]"), "is the gain missing in"),
    Attempt("rmsnorm", RMSNORM.replace("return dx, dg", ""), "returned None: is there a return?"),
    Attempt("rmsnorm", RMSNORM.replace("return dx, dg", "return dx"), "must return dx, dgain"),
    Attempt("bpe_train", TRAIN, None),
    Attempt("bpe_train", TRAIN.replace("+= n", "+= 1"), "is every word counted once?"),
    Attempt(
        "bpe_train",
        TRAIN.replace("min(pairs, key=lambda pair: (-pairs[pair], pair))", "max(pairs, key=lambda "
        "pair: (pairs[pair], pair))"),
        "do equal counts go to the greater pair?",
    ),
    Attempt("tree_sum", TREE, "are they added one after the other?"),
]  # fmt: skip


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda a: f"{a.exercise}: {a.says}")
def test_what_learners_write_in_words_of_their_own(attempt: Attempt, tmp_path: Path) -> None:
    exercise, path = EXERCISES[attempt.exercise], write(tmp_path / "mine.py", attempt.text)
    if exercise.cases is not None:
        verdict = grade_module(exercise, import_file(path))
        ok, said = verdict.right, verdict.text
    else:
        report = graded(exercise, path)
        ok, said = report.ok, report.text()
    assert ok == (attempt.says is None), said
    assert attempt.says is None or attempt.says in said


def test_a_jacobian_and_a_list_of_gradients_are_right(tmp_path: Path) -> None:
    text = solution(EXERCISES["rmsnorm"])
    start = text.index("def backward")
    text = (
        text[:start]
        + """def backward(dy, cache):
    x, g, r = cache
    n, D = x * r, x.shape[-1]
    jacobian = np.eye(D, dtype=x.dtype) - n[..., :, None] * n[..., None, :] / D
    dx = r * np.einsum("...ij,...j->...i", jacobian, dy * g)
    return [dx, np.sum(dy * n, axis=tuple(range(dy.ndim - 1)))]
"""
    )
    found = grade(EXERCISES["rmsnorm"], write(tmp_path / "mine.py", text))
    assert found.right and found.calls >= 50, found.text


@pytest.mark.parametrize(
    ("dg", "hint"),
    [
        ("np.sum(dy * n, axis=0)", "taken over axis 0?"),
        ("np.sum(dy * n)", "taken over all axes?"),
        ("dy * n", "is the sum of"),
    ],
)
def test_a_gradient_of_another_shape_is_said_to_have_it_alone(
    dg: str, hint: str, tmp_path: Path
) -> None:
    right = "np.sum(dy * n, axis=tuple(range(dy.ndim - 1)))"
    text = solution(EXERCISES["rmsnorm"]).replace(right, dg)
    found = grade(EXERCISES["rmsnorm"], write(tmp_path / "mine.py", text))
    assert found.text.startswith("FAIL rmsnorm: gradient dgain (float64): dgain has shape (")
    assert found.text.count("FAIL") == 1 and "raised" not in found.text
    first, *rest = (line for line in found.text.splitlines() if "hint:" in line)
    assert hint in first and not any("missing" in line for line in rest), found.text


def test_the_command_grades_from_blank_to_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, wrong, right, says in (
        ("relu", "return dy", "return np.where(x > 0, dy, 0)", "FAIL relu: gradient dx"),
        ("clip", "return max_norm / norm", "", "FAIL clip: wrong in"),
    ):
        file = Path(f"study_{name}.py")
        assert main(["study", name]) == 0
        again = ["study", name, "--check", str(file)]
        assert main(again) == 1
        assert "is still blank; write it" in capsys.readouterr().err
        text = file.read_text(encoding="utf-8")
        (line,) = re.findall(r"raise NotImplementedError.*", text)
        file.write_text(text.replace(line, wrong), encoding="utf-8")
        assert main(again) == 1
        assert says in capsys.readouterr().out
        text = text.replace(line, right) if right else solution(EXERCISES[name])
        file.write_text(text, encoding="utf-8")
        assert main(again) == 0
        assert f"{name}: right in" in capsys.readouterr().out


def test_the_example_of_the_page_says_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "reference" / "README.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"<!-- exercise: rmsnorm -->\n```python\n(.*?)```", page, re.S)
    (shown,) = re.findall(r"<!-- output: rmsnorm -->\n```\n(.*?)```", page, re.S)
    (count,) = re.findall(r"and (\d+) exercises in four tracks", page)
    assert int(count) == len(EXERCISES)
    monkeypatch.chdir(tmp_path)
    assert main(["study", "rmsnorm"]) == 0
    file = Path("study_rmsnorm.py")
    blank_line = '    raise NotImplementedError("write backward")\n'
    file.write_text(file.read_text(encoding="utf-8").replace(blank_line, body), encoding="utf-8")
    capsys.readouterr()
    assert main(["study", "rmsnorm", "--check", "study_rmsnorm.py"]) == 1
    number = r"-?\d+\.\d*(?:e[+-]\d+)?"  # their last digits may be another processor's
    said = capsys.readouterr().out
    assert re.sub(number, "#", said).split() == re.sub(number, "#", shown).split()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "there is no file"),
        ("def f(: pass", "mine.py, line 1: this is no Python: invalid syntax"),
        ('"""Exercise gelu, level 1: write backward."""', "is of the exercise gelu"),
        ("x = 1", "has no function clip_scale: was it overwritten?"),
        ("def clip_scale(norm): return 1", "takes norm, but it is to take norm, max_norm"),
        (
            "def clip_scale(max_norm, norm): return 1",
            "takes max_norm, norm, but it is to take norm",
        ),
        ("import nothing_such\ndef clip_scale(a, b): return 1", "does not import"),
    ],
)
def test_what_is_no_attempt_is_said_in_a_sentence(
    text: str | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        write(path, text)
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        grade(EXERCISES["clip"], path)
    assert "\n" not in str(error.value) and "unknown" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "says"), [("while True: pass", "no answer within 2 s"), ("os._exit(4)", "status 4")]
)
def test_a_function_that_never_returns_or_ends_the_process_is_said(
    line: str, says: str, tmp_path: Path
) -> None:
    text = f"import os\ndef clip_scale(norm, max_norm):\n    {line}"
    timeout = 2 if "while" in line else 60
    verdict = grade(EXERCISES["clip"], write(tmp_path / "mine.py", text), timeout=timeout)
    assert not verdict.right and says in verdict.text


@pytest.mark.parametrize("name", ["relu", "clip"])
def test_of_what_a_file_prints_the_first_lines_are_shown(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = re.sub(r"( +)(return )", r"\1print('hello')\n\1\2", solution(EXERCISES[name]))
    mine = write(tmp_path / "mine.py", text)
    assert main(["study", name, "--check", str(mine)]) == 0
    out, told = capfd.readouterr()
    assert out.startswith(f"{name}: right in") and told.count("hello\n") == 10
    assert re.search(r"^\(\d+ more lines that it printed\)$", told, re.MULTILINE)


# ---- kernels -------------------------------------------------------------------------------------


def kernel_solution(name: str) -> str:
    return solution(EXERCISES[name], 3).replace("@jit(", "@njit(")


def loop_of(text: str, store: str) -> str:
    """A kernel's file with a plain loop in place of the backward's."""
    start = text.index("    for piece", text.index("def _relu_backward"))
    end = text.index("\n\n\n", start)
    return f"{text[:start]}    for i in prange(n):\n        {store}{text[end:]}"


@pytest.mark.slow  # it compiles
def test_the_shortest_kernel_is_right_and_a_wrong_name_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = loop_of(kernel_solution("relu"), "z[i] = dy[i] if x[i] > zero else zero")
    mine = write(tmp_path / "mine.py", text)
    assert main(["study", "relu", "--check", str(mine)]) == 0
    assert "Compare yours with accel/cpu/elementwise.py." in capsys.readouterr().out
    write(mine, text.replace("x[i] > zero", "xx[i] > zero"))
    assert main(["study", "relu", "--check", str(mine)]) == 1
    assert "raised TypingError: NameError: name 'xx' is not defined" in capsys.readouterr().out


@pytest.mark.slow  # it compiles
def test_a_kernel_is_graded_like_the_rest(tmp_path: Path) -> None:
    text = kernel_solution("relu")
    assert graded(EXERCISES["relu"], write(tmp_path / "right.py", text), examples=5).ok
    body = text[text.index("def _relu_backward") : text.index("def relu_forward")]
    assert body.count("as_type(like, u[i]) > zero") == 1
    wrong = body.replace("as_type(like, u[i]) > zero", "d[i] > zero")
    report = graded(
        EXERCISES["relu"], write(tmp_path / "wrong.py", text.replace(body, wrong)), examples=10
    )
    assert "does the mask ask dout rather than x?" in report.text()


@pytest.mark.slow
@pytest.mark.parametrize("name", [e.name for e in OPS if e.kernels])
def test_every_kernel_s_solution_is_right(name: str, tmp_path: Path) -> None:
    assert grade(EXERCISES[name], write(tmp_path / "right.py", kernel_solution(name))).right
