"""``myllm study``: rungs are run, and exercises are made from the reference."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from dist.cli import main
from dist.study import blank
from dist.study import cli as study
from dist.study.exercise import Exercise, module_of, source_of
from dist.study.grade import grade
from dist.study.tracks import EXERCISES, TRACKS
from reference import study as rungs
from reference.study import LADDER

# ---- the list and the rungs ----------------------------------------------------------------------


def test_the_list_has_every_rung_in_order_and_twenty_exercises_in_four_tracks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["study"]) == 0
    said = capsys.readouterr().out
    names = [module.removeprefix("reference.study.") for module in LADDER]
    places = [said.index(f"\n  {name} ") for name in names]
    assert places == sorted(places) and len(places) >= 5
    assert len(TRACKS) == 4 and all(len(track) >= 4 for track in TRACKS.values())
    assert len(EXERCISES) == sum(map(len, TRACKS.values())) >= 20
    for name in EXERCISES:
        assert re.search(rf"^    {name} +\S", said, re.MULTILINE)
    assert max(map(len, said.splitlines())) <= 80


def test_a_rung_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "autoregression"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_blas_has_one_thread_in_a_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "threads.py").write_text(
        "import numpy, threadpoolctl\n"
        "print({pool['num_threads'] for pool in threadpoolctl.threadpool_info()\n"
        "       if pool['user_api'] == 'blas'})\n"
    )
    monkeypatch.setattr(study, "LADDER", ("reference.study.threads",))
    monkeypatch.setattr("reference.study.__path__", [*rungs.__path__, str(tmp_path)])
    with threadpool_limits(2, "blas"):
        assert main(["study", "threads"]) == 0
    assert capsys.readouterr().out == "{1}\n"


def test_a_rung_goes_before_an_exercise_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "LADDER", ("reference.study.relu", *LADDER))
    (tmp_path / "relu.py").write_text("print('the rung')")
    monkeypatch.setattr("reference.study.__path__", [*rungs.__path__, str(tmp_path)])
    assert main(["study", "relu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the rung\n") and "myllm study relu --level 1" in said
    assert main(["study", "relu", "--level", "1"]) == 0
    assert "study_relu.py: write backward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--level=1"], ["-omine.py"], ["--out=mine.py"], ["-o", "mine.py"], ["--force"]]
)
def test_an_option_of_an_exercise_in_any_spelling_asks_for_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"attention"} <= set(EXERCISES) & {m.split(".")[-1] for m in LADDER}
    monkeypatch.chdir(tmp_path)
    assert main(["study", "attention", *words]) == 0
    (written,) = tmp_path.iterdir()
    assert written.name == ("mine.py" if "mine" in str(words) else "study_attention.py")
    assert main(["study", "attention", f"--check={written}"]) == 1  # it is blank


@pytest.mark.parametrize("name", ["two words.py", r"C:\Users\name\x.py", "it's.py", "plain.py"])
def test_the_command_to_repeat_names_the_file_whatever_it_is_called(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no file") as error:
        grade(EXERCISES["relu"], Path(name))
    assert main(["study", "relu", "-o", name]) == 0
    text = Path(name).read_text(encoding="utf-8")
    stated = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    (in_file,) = (line.strip() for line in stated if "--check" in line)
    (printed,) = re.findall(r"then (.*)", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="2"):
        main(["study", "relu", "-o", name])
    (refused,) = re.findall(r"as it is: (.*) grades it", capsys.readouterr().err)
    for command in (in_file, printed, refused):
        assert shlex.split(command) == ["myllm", "study", "relu", "--check", name]
    (writing,) = re.findall(r"; (.*) writes it", str(error.value))
    assert shlex.split(writing) == ["myllm", "study", "relu", "-o", name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing_such"], "no rung and no exercise 'nothing_such'"),
        (["autoregression", "--level", "1"], "a rung, not an exercise"),
        (["rmsnorm", "--level", "4"], "1 backward, 2 forward, 3 _rmsnorm_backward"),
        (["clip", "--level", "0"], "clip has one level; leave out --level"),
        (["gpt", "--foo"], "gpt is a rung that takes no arguments, but --foo came"),
        (["--check", "x.py"], "say of which exercise"),
        (["--timeout", "5"], "say of which exercise"),
        (["clip", "--timeout", "5"], "--timeout is for --check"),
        (["clip", "--check", "x.py", "--timeout", "0"], "must be above 0, got 0"),
        (["clip", "--check", "x.py", "--timeout=-1"], "must be above 0, got -1"),
        (["clip", "--check", "x.py", "--timeout", "nan"], "must be above 0, got nan"),
        (["clip", "--check", "x.py", "--timeout", "soon"], "invalid seconds value: 'soon'"),
        (["clip", "--check", "no/such.py"], "there is no file no/such.py; myllm study clip -o"),
        (["clip", "--check", "."], ". is a folder; name a file"),
        (["rmsnorm", "--check", "x.py", "--level", "2"], "--level is for an exercise that is"),
        (["clip", "--check", "x.py", "-o", "y.py", "--force"], "-o and --force is for an"),
        (["clip", "-o", "."], ". is a folder; name a file"),
        (["clip", "-o", ".", "--force"], ". is a folder; name a file"),
        (["clip", "-o", "no/such.py"], "such.py cannot be written: No such file or directory"),
        (["rmsnorm", "--wrong"], "unrecognized arguments: --wrong"),
    ],
)
def test_wrong_usage_is_status_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["study", *arguments])
    assert end.value.code == 2 and says in capsys.readouterr().err


# ---- what is written -----------------------------------------------------------------------------


def levels() -> Iterator[tuple[Exercise, int]]:
    for exercise in EXERCISES.values():
        yield from ((exercise, n) for n in range(1, len(exercise.levels) + 1))


@pytest.mark.parametrize(("exercise", "level"), [*levels()], ids=lambda x: getattr(x, "name", x))
def test_an_exercise_is_the_source_with_one_function_blank(exercise: Exercise, level: int) -> None:
    text = blank.exercise_text(exercise, level, "COMMAND")
    tree = ast.parse(text)
    opening = ast.get_docstring(tree)
    assert opening and exercise.says.strip() in opening and "COMMAND" in opening
    assert len(re.findall(r"[.?](?=\s|$)", exercise.says)) in (3, 4, 5)
    raises = [n for n in ast.walk(tree) if isinstance(n, ast.Raise)]
    name = exercise.levels[level - 1].split(".")[-1]
    assert [
        r for r in raises if "NotImplementedError" in ast.unparse(r)
    ] and f"write {name}" in text
    # all that is given stands so in the source, and what was to be written is gone
    source = source_of(exercise.home_of(level)).replace("@jit(", "@njit(")
    (original,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    assert ast.unparse(original.body[-1]) not in ast.unparse(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name != name:
            assert ast.get_source_segment(text, node) in source
    if "_" != name[0]:
        compile(text, "exercise", "exec")
        module_of(text, "exercise")  # its imports are all there


def test_a_file_is_never_overwritten_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", "relu"]) == 0
    written = Path("study_relu.py").read_text(encoding="utf-8")
    Path("study_relu.py").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["study", "relu"])
    said = capsys.readouterr().err
    assert "study_relu.py is there already and stays as it is" in said and "--force" in said
    assert Path("study_relu.py").read_text(encoding="utf-8") == "mine"
    assert main(["study", "relu", "--force"]) == 0
    assert Path("study_relu.py").read_text(encoding="utf-8") == written
    assert main(["study", "relu", "--level", "2", "-o", "other.py"]) == 0
    assert 'write forward")' in Path("other.py").read_text(encoding="utf-8")


def test_how_the_solution_learns_merges_is_not_said_of_the_blank() -> None:
    text = blank.exercise_text(EXERCISES["bpe_train"], 1, "COMMAND")
    assert "import heapq" in text and "heap is lazy" not in text
