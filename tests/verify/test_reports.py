"""The reports of ``myllm verify`` as files: whatever a run finds stands in them."""

import json
import re
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from markdown_it import MarkdownIt

from accel.verify import Report, check_case, check_op
from accel.verify.calling import Judged
from accel.verify.cli import UNTRIED
from accel.verify.formats import to_junit, to_markdown
from accel.verify.golden import golden_cases
from accel.verify.load import as_subject
from accel.verify.report import first_difference
from accel.verify.search import Dealer, Failure, OpReport, Tally
from dist.cli import main
from reference import ops
from reference.ops import OPS
from tests.helpers.verified import WRONG

FORWARD = "from reference.ops import relu_forward\n"
BACKWARD = """
import numpy as np
def relu_backward(dout, inputs):
    return np.where(inputs.x > 0, dout, 0)
"""
RIGHT = FORWARD + "from reference.ops import relu_backward\n"
CASE = "verify-failures/wrong/relu-dx-float32.npz"
FILES = ("r/report.json", "report.xml", "report.md")
REPORTS = [word for file in FILES for word in ("--report", file)]
FEW = ("--dtype", "float32", "--examples", "6")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a folder of its own, with modules of which one is wrong."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("wrong", WRONG), ("forward", FORWARD), ("backward", BACKWARD)):
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    Path("right.py").write_text(RIGHT, encoding="utf-8")


def verify(*words: str) -> int:
    return main(["verify", *words])


def written() -> tuple[list[dict[str, Any]], list[ElementTree.Element], str]:
    """Return the reports as JSON, JUnit's suites and Markdown, and remove the files."""
    texts = [Path(file).read_text(encoding="utf-8") for file in FILES]
    for file in FILES:
        Path(file).unlink()
    return json.loads(texts[0]), list(ElementTree.fromstring(texts[1].encode())), texts[2]


def outcomes(suite: ElementTree.Element) -> dict[str, list[str]]:
    return {
        f"{case.attrib['classname']} {case.attrib['name']}": [part.tag for part in case]
        for case in suite
    }


def test_a_report_is_written_in_three_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--module", "wrong.py", *FEW, *REPORTS) == 1
    (report,), (suite,), page = written()
    assert not report["ok"] and not report["error"]
    assert suite.attrib["tests"] == "3" and suite.attrib["failures"] == "2"
    assert outcomes(suite) == {
        "wrong.py.relu float32-forward": [],
        "wrong.py.relu float32-backward": ["failure"],
        "wrong.py.softmax float32-forward": ["failure"],
    }
    assert "| softmax | float32 | 6 | out |" in page and "**FAIL** in" in page
    assert "### relu: gradient dx (float32)" in page and "again: myllm verify" in page
    with pytest.raises(SystemExit) as exit:
        verify("--module", "wrong.py", "--report", "report.doc")
    assert exit.value.code == 2
    assert "ends in .json, .xml, .md" in capsys.readouterr().err


def test_what_cannot_be_checked_stands_in_every_report_as_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("broken.py").write_text("import nothing_of_that_name", encoding="utf-8")
    modules = ("--module", "broken.py", "--module", "right.py")
    assert verify(*modules, "--backend", "nowhere", *FEW, *REPORTS, "--json") == 1
    says = "does not import: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    said = capsys.readouterr()
    reports, suites, page = written()
    assert json.loads(said.out) == reports
    broken, right, nowhere = reports
    assert broken["subject"] == "broken.py" and right["subject"] == "right.py"
    assert not broken["ok"] and says in broken["error"] and says in said.err
    assert right["ok"] and not right["error"]
    assert not nowhere["ok"] and "there is no backend 'nowhere'" in nowhere["error"]
    assert [suite.attrib["errors"] for suite in suites] == ["1", "0", "1"]
    assert outcomes(suites[0]) == {"broken.py can be checked": ["error"]}
    assert says in suites[0][0][0].attrib["message"]
    assert re.search(rf"## broken\.py: not checked\n\n```text\n.*{re.escape(says)}", page)


def test_a_case_that_is_run_again_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--module", "wrong.py", *FEW) == 1
    capsys.readouterr()
    modules = ("--module", "wrong.py", "--module", "right.py", "--module", "none.py")
    assert verify(*modules, "--case", CASE, *REPORTS, "--json") == 1
    reports, suites, page = written()
    assert json.loads(capsys.readouterr().out) == reports
    assert [report["ok"] for report in reports] == [False, True, False]
    assert [report["seed"] for report in reports[:2]] == [None, None]
    (failure,) = reports[0]["ops"][0]["failures"]
    assert failure["result"] == "dx" and failure["rerun"].endswith(f"wrong.py --case {CASE}")
    assert reports[1]["ops"][0]["results"]["dx"]["cases"] == 1
    assert "there is no file none.py" in reports[2]["error"]
    assert outcomes(suites[0]) == {
        "wrong.py.relu float32-forward": [],
        "wrong.py.relu float32-backward": ["failure"],
    }
    assert [suite.attrib["errors"] for suite in suites] == ["0", "0", "1"]
    assert "## right.py: all as the reference\n\n1 case.\n" in page


def test_a_gradient_that_is_not_called_is_not_called_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verify("--module", "wrong.py", *FEW) == 1
    for name, lacks in (("forward", "a gradient"), ("backward", "the value")):
        capsys.readouterr()
        case = ("--module", f"{name}.py", "--case", CASE)
        assert verify(*case, *REPORTS) == UNTRIED
        sentence = f"the case is of {lacks} of relu, which {name}.py does not give"
        said = capsys.readouterr().out
        assert f"not tried: {sentence}" in said and "is right in this case, as far as" in said
        (report,), (suite,), page = written()
        assert not report["ok"] and sentence in report["untried"][0]
        assert suite.attrib["failures"] == "1" and sentence in page
        assert verify(*case, "--partial") == 0
        with pytest.raises(AssertionError, match=sentence):
            check_case(CASE, f"{name}.py")
    assert verify("--module", "right.py", "--case", CASE) == 0


def test_a_case_that_crashes_again_names_the_case_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "import os\ndef softmax(x):\n    os._exit(3)\n"
    Path("crash.py").write_text(text, encoding="utf-8")
    assert verify("--module", "crash.py", *FEW) == 1
    (again,) = re.findall(r"again: myllm verify (.*)", capsys.readouterr().out)
    assert "--case" in again
    assert verify(*shlex.split(again), *REPORTS) == 1
    assert f"again: myllm verify {again}\n" in capsys.readouterr().out
    (report,), _, _ = written()
    assert report["ops"][0]["failures"][0]["kind"] == "crash"


def test_a_case_without_a_module_is_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--module", "wrong.py", *FEW) == 1
    capsys.readouterr()
    assert verify("--case", CASE) == 0
    assert capsys.readouterr().out == "cpu (float32): relu is right in this case\n"


def test_an_op_that_a_subject_has_not_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--module", "wrong.py", *FEW) == 1
    capsys.readouterr()
    Path("other.py").write_text("from reference.ops import softmax\n", encoding="utf-8")
    assert verify("--module", "other.py", "--case", CASE, *REPORTS) == 1
    sentence = "other.py offers no relu, which the case is of"
    said = capsys.readouterr()
    assert said.err == f"myllm verify: {sentence}\n" and not said.out
    assert written()[0][0]["error"] == sentence


CRASHING = "import os\ndef gelu_forward(x):\n    os._exit(3)\n"


def test_a_failure_that_cannot_be_saved_is_told_without_its_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mixed.py").write_text(WRONG + CRASHING, encoding="utf-8")
    Path("verify-failures").write_text("a file of that name", encoding="utf-8")
    assert verify("--module", "mixed.py", *FEW) == 1
    said = capsys.readouterr().out
    for line in (
        "FAIL relu: gradient dx",
        "FAIL softmax: out",
        "FAIL gelu (float32): gelu_forward",
    ):
        assert line in said
    assert said.count("again: myllm verify --module mixed.py --op") == 3 and "  saved:" not in said
    note = "failing cases were not saved: verify-failures cannot be written to ("
    assert note in " ".join(said.split())
    few: dict[str, Any] = {"dtypes": ["float32"], "examples": 3, "raises": False}
    report = check_op("relu", forward=lambda x: x, save="verify-failures/here", **few)
    assert not report.right and note.replace(" cannot", "/here cannot") in report.notes[0]


def test_what_was_found_is_told_before_a_report_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("file").touch()
    assert verify("--module", "wrong.py", *FEW, "--report", "file/report.json") == 1
    said = capsys.readouterr()
    assert "FAIL softmax: out" in said.out
    assert "the report cannot be written to file/report.json" in said.err


def shown(page: str) -> str:
    """Return what a reader of Markdown sees."""
    found = [
        c for token in MarkdownIt().enable("table").parse(page) for c in token.children or [token]
    ]
    return " ".join(c.content for c in found if c.type in ("text", "code_block", "fence"))


@pytest.mark.parametrize(
    "text",
    [
        "__foo__ and *bar*",
        "<unknown> & [a](b)",
        "`x` | y",
        "```\nout\n```",
        "````",
        "1\\*2",
        "\x1b[1m",
    ],
)
def test_what_a_module_says_is_no_markup_in_a_report(text: str) -> None:
    case = as_subject(ops).draw(OPS["relu"], "float32", Dealer(0).picks([]))
    judged = Judged("", "raised", problem=text)
    failure = Failure("relu", "float32", "", "raised", case, judged, hints=[text])
    op = OpReport("relu", "float32", 1, 1, results={text: Tally(1)}, failures=[failure])
    report = Report(text, 0, [op], untried=[text])
    page, line = shown(to_markdown([report])), " ".join(text.split())
    assert page.count(line) >= 3 and f"hint: {text}" in page and f"{line}: not as" in page
    assert text in shown(to_markdown([Report(text, 0, error=text)]))
    (suite, broken) = ElementTree.fromstring(to_junit([report, Report(text, 0, error=text)]))
    name = f"myllm verify {text}".replace("\x1b", "�")
    assert suite.attrib["name"] == broken.attrib["name"] == name


def test_infinities_that_are_alike_are_no_difference() -> None:
    got, due = np.array([-np.inf, np.nan, -np.inf]), np.array([-np.inf, np.nan, 0.5])
    assert first_difference("out", got, due) == "first difference: out[2] is -inf, should be 0.5"
    assert "every element" in first_difference("out", due, due)


@pytest.mark.parametrize(
    "words", [("--golden", "g", "--report", "r.xml"), ("--golden", "g", "--json")]
)
def test_what_makes_no_report_says_so(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        verify(*words)
    assert exit.value.code == 2
    assert f"{words[0]} makes no report: leave out {words[2]}" in capsys.readouterr().err
    assert not Path("g").exists()


ADAPTERS = """
import numpy as np

def run_linear(d_in, d_out, weights, in_features):
    return in_features @ weights.T

def run_silu(in_features):
    return in_features / (1 + np.exp(in_features))

def run_softmax(in_features, dim):
    raise NotImplementedError
"""


def test_adapters_of_a_course_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    Path("adapters.py").write_text(ADAPTERS, encoding="utf-8")
    assert verify("--adapters", "adapters.py", "--examples", "3", *REPORTS, "--json") == 1
    said = capsys.readouterr()
    (report,), (suite,), page = written()
    assert json.loads(said.out) == [report]
    assert not report["ok"] and report["subject"] == "adapters.py" and report["seed"] == 0
    right, wrong, missing = (report["adapters"][f"run_{n}"] for n in ("linear", "silu", "softmax"))
    assert right["ok"] and right["cases"] == 3 and right["seconds"] > 0 and not right["problem"]
    assert not wrong["ok"] and wrong["problem"].startswith("FAIL run_silu")
    assert not missing["ok"] and missing["missing"] and not wrong["missing"]
    assert suite.attrib["tests"] == "13" and suite.attrib["failures"] == "12"
    found = {case.attrib["name"]: [(p.tag, p.attrib["message"]) for p in case] for case in suite}
    assert found["run_linear"] == [] and found["run_silu"] == [("failure", "FAIL")]
    assert found["run_softmax"] == [("failure", "missing")]
    (text,) = [case[0].text for case in suite if case.attrib["name"] == "run_silu"]
    assert text == wrong["problem"]
    assert page.startswith(r"## adapters.py: 1 of 13 adapters right, 1 wrong, 11 missing")
    assert r"| run\_linear | ok in 3 cases |" in page and r"| run\_silu | **FAIL** |" in page
    assert r"| run\_softmax | **missing** |" in page
    assert f"### run\\_silu\n\n```text\n{text}\n```" in page


def test_adapters_that_cannot_be_checked_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify("--adapters", "none.py", *REPORTS, "--json") == 1
    said = capsys.readouterr()
    (report,), (suite,), page = written()
    assert json.loads(said.out) == [report] and "there is no file none.py" in report["error"]
    assert said.err == f"myllm verify: {report['error']}\n"
    assert outcomes(suite) == {"none.py can be checked": ["error"]}
    assert "## none.py: not checked" in page and report["error"] in page


def test_results_of_golden_vectors_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    (vector, *_) = golden_cases(ops=["gelu"])
    Path("mine").mkdir()
    right = {name: a.astype(np.float32) for name, a in vector.plain.items()}
    np.savez("mine/gelu-0.npz", out=right["out"], dx=right["dx"] * np.float32(1.01))
    assert verify("--against", "mine", *REPORTS, "--json") == 1
    (report,), (suite,), page = written()
    assert json.loads(capsys.readouterr().out) == [report] and not report["ok"]
    assert outcomes(suite) == {
        "mine.gelu-0.npz out float32": [],
        "mine.gelu-0.npz dx float32": ["failure"],
        "mine all is there": ["skipped"],
    }
    assert "## mine: 2 results: not as the reference" in page
    assert "| gelu-0.npz out float32 | ok |" in page and re.search(
        r"\| gelu-0.npz dx float32 \| \*\*.* times what is allowed\*\* \|", page
    )
    np.savez("mine/gelu-0.npz", **right)
    np.savez("mine/gelu-x.npz", **right)
    assert verify("--against", "mine", *REPORTS) == UNTRIED
    (report,), (suite,), page = written()
    assert not report["ok"] and outcomes(suite)["mine all was tried"] == ["failure"]
    assert "gelu-x.npz: no golden vector" in page
    assert verify("--against", "mine", "--partial", *REPORTS) == 0
    (report,), (suite,), _ = written()
    assert report["ok"] and outcomes(suite)["mine all was tried"] == ["skipped"]
    assert verify("--against", "none", *REPORTS) == 1
    assert written()[0][0]["error"].startswith("there is no folder none")
