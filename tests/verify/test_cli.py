"""The command ``myllm verify``: exit status, JSON, saved cases, bad modules, golden vectors."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.verify import VerificationError, check_case, check_module, check_op, golden
from accel.verify.apart import WORKERS
from accel.verify.cli import UNTRIED
from accel.verify.files import case_file, load_failure, save_failure
from accel.verify.load import as_subject
from accel.verify.search import Dealer
from dist.cli import main
from reference import ops
from reference.ops import OPS
from reference.types import Array
from tests.helpers import ROOT
from tests.helpers.verified import WRONG

README = ROOT / "accel" / "verify" / "README.md"

GOOD = """
from reference import ops
softmax = ops.softmax
relu_forward, relu_backward = ops.relu_forward, ops.relu_backward
"""


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_right_module_gives_status_0_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "--module", write(tmp_path / "good.py", GOOD), "--examples", "10"]) == 0
    said = capsys.readouterr()
    assert re.search(r"softmax .*float32 .*10 .*out .*ok", said.out)
    assert "all as the reference" in said.out
    assert "4/4 " in said.err and "/4 softmax float64" in said.err  # progress


def test_a_kernel_s_threads_sleep_unless_the_user_says_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WORKERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    text = "import os\nraise ImportError('has ' + ' '.join(os.environ.get(n, '-') for n in NAMES))"
    module = write(tmp_path / "k.py", text.replace("NAMES", repr(list(WORKERS))))
    assert main(["verify", "--module", module]) == 1
    assert f"has 2 passive {2**30} {2**30}" in capsys.readouterr().err


def test_a_wrong_module_gives_status_1_a_file_and_a_command_that_runs_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "wrong.py", WRONG)
    arguments = ["verify", "--module", "wrong.py", "--dtype", "float32", "--examples", "20"]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert "FAIL relu: gradient dx (float32)" in said and "FAIL softmax: out" in said
    assert "out is 2 times what it should be" in said
    (again,) = re.findall(r"again: myllm (verify .*relu-dx.*npz)", said)
    with np.load(tmp_path / "verify-failures" / "wrong" / "relu-dx-float32.npz") as file:
        assert {"input.x", "dout", "expected.dx", "got.dx", "case"} <= set(file.files)
        wrong = file["got.dx"] != file["expected.dx"]
        assert wrong.any()
    assert main(again.split()) == 1
    assert "FAIL relu: gradient dx" in capsys.readouterr().out
    write(tmp_path / "wrong.py", GOOD)  # mended
    assert main(again.split()) == 0
    assert "relu is right in this case" in capsys.readouterr().out


def test_json_has_the_whole_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = write(tmp_path / "wrong.py", WRONG)
    assert main(["verify", "--module", module, "--op", "softmax", "--json", "--examples", "9"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and [op["op"] for op in report["ops"]] == ["softmax"] * 2
    result = report["ops"][0]["results"]["out"]
    assert result["cases"] == 9 and result["failed"] > 0 and result["worst_ratio"] > 1
    assert report["ops"][0]["failures"][0]["file"].endswith("softmax-out-float32.npz")


PASSED_OVER = """
import numpy as np
from reference import ops
from reference.ops import layernorm_forward as layer_norm_forward  # imported: a helper
def rmsnorm_forward(x, gain, *, eps, fast=True):
    return ops.rmsnorm_forward(x, gain, eps=eps)
def rmsnorm_bakward(dout, cache):
    return ops.rmsnorm_backward(dout, cache)
def softmax(x):
    return ops.softmax(x)
def softmax_backward(dout, cache):
    return np.zeros_like(dout)
def softmax_tile(x):  # lengthens the name of what is tried: a helper
    return x
def rms_norm_tile(x):
    return x
def relu_backward(dout, cache):
    return np.where(cache.x > 0, dout, 0)
"""
SENTENCES = [
    "rmsnorm_forward has no rmsnorm_backward beside it: no gradient was checked",
    "rmsnorm_forward takes fast=, which the contract has not",
    "relu_backward has no relu_forward beside it: no value was checked",
    "rmsnorm_bakward is no function of the contract; rmsnorm_backward is",
    "softmax_backward is no function of the contract; softmax is",
]


def test_what_nobody_tries_is_said_and_fails_unless_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write(tmp_path / "over.py", PASSED_OVER)
    few = ["verify", "--module", module, "--examples", "4", "--dtype", "float32"]
    assert main([*few, "--json"]) == UNTRIED
    (report,) = json.loads(capsys.readouterr().out)
    assert sorted(report["untried"]) == sorted(SENTENCES)
    assert not report["ok"] and all(op["ok"] for op in report["ops"])
    assert main([*few, "--partial"]) == 0
    said = capsys.readouterr().out
    assert all(f"not tried: {sentence}" in said for sentence in SENTENCES)
    assert "not all was tried" in said and "all as the reference" not in said
    assert main([*few, "--op", "softmax"]) == UNTRIED
    said = capsys.readouterr().out
    assert SENTENCES[-1] in said and "rmsnorm" not in said
    with pytest.raises(VerificationError, match="softmax_backward is no function"):
        check_module(module, ops=["softmax"], examples=4)
    check_module(module, ops=["softmax"], examples=4, partial=True)


def test_no_backend_has_what_nobody_tries() -> None:
    assert as_subject(ops).untried(OPS.values()) == []


def test_a_table_fits_a_terminal_of_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write(tmp_path / "loss.py", LOSS)
    assert main(["verify", "--module", module, "--examples", "2", "--partial"]) == 0
    table = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in table if line.startswith(("linear_cross_entropy", "decode_step"))]
    assert len(rows) == 4 and all(len(line) <= 80 for line in table)


LOSS = """
from reference.ops import decode_step, linear_cross_entropy_backward, linear_cross_entropy_forward
"""


def test_cases_of_files_of_one_name_stay_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(write(tmp_path / folder / "wrong.py", WRONG))
    few = ["--op", "softmax", "--dtype", "float32", "--examples", "3"]
    assert main(["verify", "--module", "a/wrong.py", "--module", files[1], *few]) == 1
    saved = sorted(str(p) for p in Path("verify-failures").rglob("*.npz"))
    assert saved == [f"verify-failures/{f}/wrong/softmax-out-float32.npz" for f in "ab"]

    def folder_of(file: str) -> Path:
        kept = case_file(Path("kept"), f"--module {file}", "relu", "float32", "dx", "value")
        return kept.parent.relative_to("kept")

    # beyond the working directory a folder of its own for each file, and not its whole path
    beyond = [folder_of(f"/elsewhere/{f}/wrong.py") for f in "ab"]
    assert all(re.fullmatch(r"wrong-[0-9a-f]{8}", str(home)) for home in beyond)
    assert beyond[0] != beyond[1] and folder_of("a/wrong.py") == Path("a/wrong")


def test_a_budget_tries_fewer_cases_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write(tmp_path / "good.py", GOOD)
    assert main(["verify", "--module", module, "--budget", "1e-9"]) == 0
    rows = re.findall(r"^(?:softmax|relu).* (\d+)/(\d+) ", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 4 and all(0 < int(tried) < int(planned) for tried, planned in rows)


BAD = """
import numpy as np
from reference import ops
def softmax(x):
    raise RuntimeError("boom")
def rmsnorm_forward(x, gain, *, eps):
    return ops.rmsnorm_forward(x, gain, eps=eps)
def rmsnorm_backward(dout, cache):
    return dout
def relu_forward(x):
    return x * np.nan, x
def relu_backward(dout, cache):
    return "nothing"
def gelu_forward(x):
    return ops.gelu_forward(x)[0].T
def scale_forward(x, *, factor):
    return None
def merge_heads_forward(x):
    raise SystemExit(3)
def swiglu_forward(x, y):
    return x
def logits(x, head):
    return x @ head.T
"""


def test_nothing_that_a_module_does_stops_the_other_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write(tmp_path / "bad.py", BAD)
    other = write(tmp_path / "broken.py", "import nothing_of_that_name")
    arguments = ["--dtype", "float32", "--examples", "6", "--save", str(tmp_path)]
    assert main(["verify", "--module", other, "--module", module, *arguments]) == 1
    said = capsys.readouterr()
    assert "broken.py does not import: ModuleNotFoundError" in said.err and "(line 1)" in said.err
    for line in (
        r"FAIL softmax \(float32\): softmax raised RuntimeError: boom \(bad.py:5\)",
        r"FAIL rmsnorm \(float32\): rmsnorm_backward returned 1 gradient, but 2 are owed: dx, dg",
        r"FAIL relu: out \(float32\): out\[0, 0\] is nan",
        r"FAIL gelu: out \(float32\): out has shape \(.*\), should have .*; are axes swapped\?",
        r"FAIL scale: out \(float32\): out should be an array, but is None",
        r"FAIL merge_heads \(float32\): merge_heads_forward raised SystemExit: 3",
        r"FAIL swiglu \(float32\): swiglu_forward raised TypeError: .* argument: 'y'",
        r"logits .*float32 .*ok",
    ):
        assert re.search(line, said.out), line


CRASHING = """
import ctypes, os, time
import numpy as np
from reference import ops
print("something on stdout")
def softmax(x):
    return ctypes.string_at(0) if x.shape[-1] > 5 else ops.softmax(x)
def relu_forward(x):
    return os._exit(0) if x.ndim > 1 else ops.relu_forward(x)
def gelu_forward(x):
    if x.ndim > 2:
        time.sleep(60)
    return ops.gelu_forward(x)[0]
def logits(x, head, bias=None):
    return ops.logits(x, head, bias)
"""


def test_a_crash_or_a_hang_ends_one_check_and_leaves_its_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "crashing.py", CRASHING)
    arguments = ["--module", "crashing.py", "--dtype", "float32"]
    assert main(["verify", *arguments, "--examples", "12", "--timeout", "3"]) == 1
    said = capsys.readouterr()
    for line in (
        r"FAIL softmax \(float32\): softmax ended the process by SIGSEGV .*\(crashing.py:7\)",
        r"FAIL relu \(float32\): relu_forward ended the process with status 0",
        r"FAIL gelu \(float32\): gelu_forward gave no answer within 3 s and was stopped",
        r"logits .*float32 .*12 .*ok",
    ):
        assert re.search(line, said.out), line
    assert "4/4 " in said.err and "/4 logits float32" in said.err
    (again,) = re.findall(r"again: myllm (verify .*softmax-crash.*npz)", said.out)
    assert main(again.split()) == 1
    assert "softmax ended the process by SIGSEGV" in capsys.readouterr().out
    assert main(["verify", *arguments, "--op", "logits", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["ok"]


def test_a_module_that_crashes_when_imported_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write(tmp_path / "ends.py", "import os\nos.abort()\n")
    assert main(["verify", "--module", module]) == 1
    assert "ends.py: importing it ended the process by SIGABRT" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--op", "nope"], ["--dtype", "fp8"], ["--examples", "0"], ["--wings"], ["--seed", "x"]],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["verify", *arguments])
    assert exit.value.code == 2
    assert "myllm verify: error:" in capsys.readouterr().err


def test_an_op_outside_the_contract_is_shown_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--op", "groupnorm"])
    assert "myllm verify --like REF.py" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no op 'groupnorm'.*myllm verify --like REF\.py"):
        check_op("groupnorm", forward=lambda x: x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "abacus"], "there is no backend 'abacus'"),
        (["--against", "nowhere"], "there is no folder nowhere"),
        (["--backend", "reference", "--case", "none.npz"], "none.npz is no .npz of a case"),
        (["--module", "none.py"], "there is no file none.py"),
        (["--golden", "notes.md"], "notes.md is a file: give --golden the name of a folder"),
        (["--case", "notes.md"], "notes.md is no .npz of a case: it is of another kind, or cut sh"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("Notes.")
    assert main(["verify", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_the_line_at_which_an_import_fails_is_named_for_a_path_from_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "broken.py", "import os\nimport nothing_of_that_name")
    assert main(["verify", "--module", "broken.py"]) == 1
    assert "'nothing_of_that_name' (line 2)" in capsys.readouterr().err


def test_brackets_in_what_a_module_says_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write(tmp_path / "bad.py", "raise RuntimeError('nvcc failed: see [/tmp/log] [bold]')")
    good = write(tmp_path / "good.py", GOOD)
    few = ["--examples", "3", "--op", "softmax"]
    assert main(["verify", "--module", bad, "--module", good, *few]) == 1
    said = capsys.readouterr()
    assert "RuntimeError: nvcc failed: see [/tmp/log] [bold]" in said.err
    assert re.search(r"softmax .*ok", said.out)


def test_the_command_that_runs_a_case_again_is_one_for_a_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my kernels"
    folder.mkdir()
    module = write(folder / "w r.py", WRONG)
    arguments = ["--op", "softmax", "--dtype", "float32", "--save", str(folder / "failures")]
    assert main(["verify", "--module", module, *arguments, "--examples", "5"]) == 1
    (again,) = re.findall(r"again: myllm (verify .*)", capsys.readouterr().out)
    assert main(shlex.split(again)) == 1
    assert "FAIL softmax: out" in capsys.readouterr().out


def test_the_call_that_runs_a_case_again_is_one_for_python(tmp_path: Path) -> None:
    def forward(x: Array) -> Array:
        return ops.softmax(x) * 2

    few: dict[str, Any] = {"dtypes": ["float32"], "examples": 5, "raises": False}
    said = {}
    for name, save in (("saved", tmp_path), ("drawn", None)):
        text = check_op("softmax", forward=forward, **few, save=save).text()
        (said[name],) = re.findall(r"again: (.*)", text)
    known = {"forward": forward, "check_case": check_case, "check_op": check_op}
    for again in said.values():
        again = re.sub(r"forward=[\w.<>]*forward", "forward=forward", again)
        with pytest.raises(AssertionError, match="softmax: out"):
            eval(again, known)
    assert "examples=5" in said["drawn"] and "check_case(" in said["saved"]
    check_case(next(tmp_path.rglob("*.npz")), forward=ops.softmax)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04junk", b"PK"])
def test_a_damaged_case_is_refused_in_a_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "case.npz"
    path.write_bytes(content)
    assert main(["verify", "--case", str(path)]) == 1
    assert "case.npz is no .npz of a case" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"case\.npz is no readable \.npz"):
        golden.read_tensors(path)


@pytest.mark.parametrize("op", OPS)
def test_a_case_of_every_op_is_read_as_it_was_written(op: str, tmp_path: Path) -> None:
    subject, path = as_subject(ops), tmp_path / "case.npz"
    dealer, options = Dealer(0, subject.hard(OPS[op]), short=True), set[str]()
    for _ in range(12):
        case = subject.draw(OPS[op], "float32", dealer.picks([]))
        save_failure(path, case, [])
        again = load_failure(path)
        assert again.describe() == case.describe() and again.options.keys() == case.options.keys()
        assert all(result.ok for result in subject.run(again)), case.describe()
        options |= case.options.keys()
    parameters = inspect.signature(getattr(ops, OPS[op].forward_name)).parameters.values()
    given = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert options >= given - {*OPS[op].needs, "plus"}  # which are no part of a case


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert "myllm verify --module mykernels.py" in capsys.readouterr().out


def test_the_worked_example_says_what_the_readme_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    first, repeat, zeros, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    outputs = re.findall(r"```\n((?:FAIL|not tried).*?)\n```", text, re.DOTALL)
    run = ["verify", "--module", "mykernels.py", "--dtype", "float32"]

    write(tmp_path / "mykernels.py", first)
    assert main(run) == 1
    assert outputs[0] in capsys.readouterr().out

    second = re.sub(r"    k = np.tile.*\n    v = np.tile.*\n", repeat, first)
    write(tmp_path / "mykernels.py", second)
    assert main(run) == 1
    assert "the first queries may attend to nothing" in outputs[1]
    assert "the first queries may attend to nothing" in capsys.readouterr().out

    write(
        tmp_path / "mykernels.py",
        second.replace("    return np.eins", zeros + "    return np.eins"),
    )
    assert main(run) == UNTRIED
    said = capsys.readouterr().out
    assert "attention takes no alibi" in said and outputs[2] in said.replace("\n", " ")
    assert main([*run, "--partial"]) == 0


# ---- golden vectors ------------------------------------------------------------------------------


def test_golden_vectors_hold_their_own_results(tmp_path: Path) -> None:
    assert main(["verify", "--golden", str(tmp_path)]) == 0
    vectors = golden.golden_cases()
    names = {vector.name.rsplit("-", 1)[0] for vector in vectors}
    assert names == {*OPS} - {"kv_cache"} | {"model"}
    assert len(vectors) == golden.CASES * (len(names) - 1) + 1
    results = tmp_path / "results"
    results.mkdir()
    for vector in vectors:
        tensors = golden.read_tensors(tmp_path / f"{vector.name}.safetensors")
        expected = {n.removeprefix("expected."): a for n, a in tensors.items() if "expected." in n}
        np.savez(results / f"{vector.name}.npz", **expected)
    assert main(["verify", "--against", str(results)]) == 0
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "attention-0" in readme and "safetensors" in readme


def test_wrong_results_are_found_by_file_and_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vector,) = [v for v in golden.golden_cases(ops=["gelu"]) if v.name == "gelu-1"]
    right = {n: a.astype(np.float32) for n, a in vector.plain.items()}
    np.savez(tmp_path / "gelu-1.npz", out=right["out"], dx=right["dx"] * np.float32(1.001))
    (tmp_path / "relu-0.safetensors").write_bytes(b"not one")
    np.savez(tmp_path / "relu-1.npz", out=right["out"])
    assert main(["verify", "--against", str(tmp_path), "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    found = {(r["file"], r["result"]): r for r in report["results"]}
    assert found["gelu-1.npz", "out"]["ok"] and not found["gelu-1.npz", "dx"]["ok"]
    assert "no readable safetensors" in found["relu-0.safetensors", ""]["problem"]
    assert "dx is missing" in found["relu-1.npz", "dx"]["problem"]
    assert "attention-0" in report["missing"]


def test_files_of_no_golden_vector_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (vector, *_) = golden.golden_cases(ops=["gelu"])
    for name in ("gelu-0.npz", "gelu-7.npz", "gelu0.npz"):
        np.savez(tmp_path / name, **vector.exact)
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["verify", "--against", str(tmp_path)]) == UNTRIED
    assert "not tried: gelu-7.npz, gelu0.npz: no golden vector" in capsys.readouterr().out
    assert main(["verify", "--against", str(tmp_path), "--partial", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["unread"] == ["gelu-7.npz", "gelu0.npz"]


def test_bf16_results_are_read_and_held_to_bf16(tmp_path: Path) -> None:
    (vector, *_) = golden.golden_cases(ops=["gelu"])
    path = tmp_path / "gelu-0.safetensors"
    parts, header, at = [], {}, 0
    for name, exact in vector.exact.items():
        bits = (exact.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        header[name] = {
            "dtype": "BF16",
            "shape": list(exact.shape),
            "data_offsets": [at, at + bits.nbytes],
        }
        parts.append(bits.tobytes())
        at += bits.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))
    report = golden.check_results(tmp_path)
    assert report.ok and {row[2] for row in report.rows} == {"bf16"}


def test_a_c_program_reads_the_golden_vectors(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) on this machine")
    source, program = ROOT / "tests" / "verify" / "golden_reader.c", tmp_path / "golden_reader"
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 100
    subprocess.run([compiler, "-O2", "-o", program, source, "-lm"], check=True)
    golden.write_golden(tmp_path / "golden", ops=["rmsnorm"])
    results = tmp_path / "results"
    results.mkdir()
    for i in range(golden.CASES):
        name = f"rmsnorm-{i}.safetensors"
        command = [program, tmp_path / "golden" / name, results / name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        errors = [float(word) for word in said.split()[1::2]]
        assert len(errors) == 3 and max(errors) < 1e-5
    report = golden.check_results(results)
    assert report.ok and len(report.rows) == 3 * golden.CASES


def test_a_precision_that_a_file_never_manages_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "narrow.py").write_text(
        "import numpy as np\n\n\ndef softmax(x):\n"
        "    if x.dtype != np.float32:\n        raise TypeError('float32 only')\n"
        "    e = np.exp(x - x.max(-1, keepdims=True))\n    return e / e.sum(-1, keepdims=True)\n"
    )
    words = ["--module", str(tmp_path / "narrow.py"), "--save", str(tmp_path / "saved")]
    assert main(["verify", *words, "--examples", "6"]) == 0
    said = capsys.readouterr().out
    assert "softmax does not work in float64" in said and "float32 only" in said
    assert not (tmp_path / "saved").exists()  # its case is not kept either
