"""``--like`` and its two files: which functions are held to which, and what lies beside them."""

import shlex
from pathlib import Path

import pytest

from accel.verify.files import case_file
from dist.cli import main
from tests.helpers.like import checked

REF = """
import numpy as np
SHAPES = {"tanh": {"x": "N D"}, "double": {"x": "N D"}}
def tanh(x):
    return np.tanh(x)
def double(x):
    return 2 * x
"""
NEW = """
import numpy as np
def right(x):
    return np.tanh(x)
def wrong(x):
    return np.tanh(x) * x.dtype.type(1.5)
def double(x):
    return x + x
"""


def test_a_reference_is_for_every_function_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = ("tanh=wrong", "double", "tanh=right", "double=double")
    report = checked(tmp_path, NEW, *pairs, ref=REF, examples=4)
    assert [op.op for op in report.ops] == ["tanh=wrong", "double", "tanh=right"]
    assert [failure.op for failure in report.failures] == ["tanh=wrong"], report.text()
    assert "there is no wrong_backward(dout, *inputs)" in report.text()
    files = ["--like", "ref.py", "--module", "new.py", "--dtype", "float32", "--examples", "4"]
    words = [word for pair in pairs for word in ("--function", pair)]
    assert main(["verify", *files, *words]) == 1
    again = capsys.readouterr().out.partition("again: myllm ")[2].splitlines()[0]
    assert main(shlex.split(again)) == 1
    assert "FAIL tanh=wrong: out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "functions", "told"),
    [
        ("double_kernel", (), False),
        ("double_forward", (), False),
        ("double_backward_kernel", (), False),
        ("double_bakward", (), True),
        ("double_bwd", (), True),
        ("double_bakward", ("double",), True),
        ("tanh_bakward", ("double",), False),
        ("double_bakward", ("tanh=right",), False),
    ],
)
def test_nearly_the_name_of_a_backward_is_told_and_no_helper(
    tmp_path: Path, name: str, functions: tuple[str, ...], told: bool
) -> None:
    new = f"{NEW}def {name}(dout, x):\n    return 2 * dout\n"
    report = checked(tmp_path, new, *functions, ref=REF, examples=2)
    said = [f"{name} is not taken; a backward is called double_backward"] if told else []
    assert report.untried == said
    new += "def double_backward(dout, x):\n    return 2 * dout\n"
    assert not checked(tmp_path, new, *functions, ref=REF, examples=2).untried


def test_the_folder_of_many_functions_has_a_name_that_fits(tmp_path: Path) -> None:
    words = [f" --function {'f' * 30}_{i}" for i in range(12)]
    command = "--like ref.py --module new.py"
    folders = {
        case_file(tmp_path, command + "".join(words[:n]), "f", "float32", "out", "value").parent
        for n in range(12)
    }
    assert len(folders) == 12 and all(len(folder.name) <= 120 for folder in folders)
    assert tmp_path / "like-ref-py-module-new-py" in folders


def test_a_reference_that_refuses_what_is_drawn_leaves_the_others_to_be_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ref = REF.replace("    return 2 * x", "    raise ValueError('no such rows')")
    says = "double: the reference raised ValueError: no such rows for x "
    new = NEW.replace("right", "tanh")
    report = checked(tmp_path, new, ref=ref, examples=4, dtypes=("float32", "float64"))
    assert not report.right and not report.failures
    assert [op.error[: len(says)] for op in report.ops] == ["", "", says, says]
    assert [op.cases for op in report.ops] == [4, 4, 0, 0]
    files = ["--like", "ref.py", "--module", "new.py", "--examples", "4"]
    assert main(["verify", *files, *(f"--report=r.{end}" for end in ("json", "xml", "md"))]) == 1
    said = capsys.readouterr().out
    assert said.count(f"not checked: {says}") == 1 and "8 cases" in said
    assert all("no such rows" in Path(f"r.{end}").read_text("utf-8") for end in ("json", "xml"))
    assert "- not checked: double: the reference" in Path("r.md").read_text("utf-8")
    assert main(["verify", *files, "--function", "double"]) == 1
    assert says in capsys.readouterr().err
