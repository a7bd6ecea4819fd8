"""The package as others get it: a wheel and a source archive that run outside of a checkout."""

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.runs import tables, text

PACKAGES = ("reference", "accel", "dist", "tokenizer")
NOT_PACKED = (".md", ".png", ".svg", ".gitignore", ".pyc", "board.json")  # nothing reads them

pytestmark = pytest.mark.slow


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of the tree, its source archive, and a wheel of that."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "setuptools>=77", "wheel", cwd=folder)
    backend = "import sys, setuptools.build_meta as b; print(b.build_{}(sys.argv[1]))"
    found = {}
    for kind in ("sdist", "wheel"):
        said = run(python, "-c", backend.format(kind), folder, cwd=tree, PYTHONPATH="")
        found[kind] = folder / said.splitlines()[-1]
    shutil.unpack_archive(found["sdist"], folder / "unpacked")
    (source,) = (folder / "unpacked").iterdir()
    (folder / "again").mkdir()
    said = run(python, "-c", backend.format("wheel"), folder / "again", cwd=source, PYTHONPATH="")
    return {"wheel": found["wheel"], "sdist": folder / "again" / said.splitlines()[-1]}


def test_nothing_that_is_read_is_left_out(built: dict[str, Path]) -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    files = [p for p in files if p.parent.parent.name != "sweep"]  # sweeps that were measured
    wanted = {str(path.relative_to(ROOT)) for path in files if not path.name.endswith(NOT_PACKED)}
    for kind in ("wheel", "sdist"):
        packed = set(zipfile.ZipFile(built[kind]).namelist())
        assert wanted <= packed, (kind, wanted - packed)
        assert not any(name.startswith("tests/") for name in packed)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_its_metadata_lack_nothing_but_leave_to_upload(kind: str, built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[kind]) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(packed.read(name))
        (points,) = (name for name in packed.namelist() if name.endswith("entry_points.txt"))
        assert "myllm = dist.cli:main" in packed.read(points).decode()
    for field in ("Version", "Summary", "Author", "Keywords", "Requires-Python"):
        assert said[field], field
    assert (said["Name"], said["License-Expression"]) == ("myllm", "Apache-2.0")
    assert said["License-File"] == "LICENSE"
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().startswith("# MyLLM")
    given = said.get_all("Classifier") or []
    assert [line for line in given if line.startswith("Private")] == ["Private :: Do Not Upload"]
    assert len(given) > 5
    extras = set(said.get_all("Provides-Extra") or [])
    assert extras >= {"mpi", "plot", "serve", "test", "cuda13"}


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_runs_outside_of_a_checkout(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
    run(*install, built[kind], cwd=tmp_path)
    work = tmp_path / "work"
    work.mkdir()

    def myllm(*words: str) -> str:
        command = [sys.executable, "-P", site / "bin" / "myllm", *words]
        return run(*command, cwd=work, PYTHONPATH=str(site))

    where = run(
        *(sys.executable, "-P", "-c", "import dist, reference; print(dist.__file__)"),
        cwd=work,
        PYTHONPATH=str(site),
    )
    assert where.startswith(str(site))
    lines = [json.dumps({"text": text(i)}) for i in range(300)]
    (work / "a.jsonl").write_text("\n".join(lines))
    myllm("tokenizer", "train", "a.jsonl", "--vocab-size", "320", "-o", "t.tok")
    myllm("pack", "a.jsonl", "--tokenizer", "t.tok", "-o", "data", "--heldout", "0.1")
    settings = tables(work, model__vocab_size=320, model__context_length=32, train__steps=2)
    settings["data"] = {"train": "data/train", "heldout": "data/heldout"}
    settings["run"]["out"] = "run"
    written = [
        f"[{table}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in rows.items())
        for table, rows in settings.items()
    ]
    (work / "run.toml").write_text("\n".join(written))
    assert "saved run/checkpoints/step-00000002" in myllm("train", "run.toml")
    how = ["--backend", "reference", "--tokens", "3"]
    assert myllm("generate", "run", "--prompt", "the", *how).startswith("the")
    myllm("inspect", "run", "--text", "the quick brown fox", "-o", "page.html")  # its template
    assert "1,055,231,744" in myllm("plan", "myllm-1b")  # a preset
    assert "/v1/chat/completions" in myllm("serve", "--help")
    how = ["--backend", "reference", "--op", "relu", "--dtype", "float32"]
    assert "relu" in myllm("verify", *how)  # in processes that find the package, too
    kernels = "from accel.cuda.sources import SOURCES, parts; print(*map(parts, SOURCES))"
    assert "KERNEL" in run(sys.executable, "-P", "-c", kernels, cwd=work, PYTHONPATH=str(site))
    myllm("study", "rmsnorm", "--level", "1", "-o", "exercise.py")  # made of the sources
    assert "def backward" in (work / "exercise.py").read_text(encoding="utf-8")
