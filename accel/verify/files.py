"""Cases as files: what a failure leaves behind, and how it is run again."""

import json
import re
import shlex
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from accel.verify.calling import Judged
from accel.verify.contract import Case, contract_parameters
from accel.verify.like.case import LikeCase
from reference.config import Config
from reference.ops import OPS
from reference.types import Array, DropoutKey, RopeScaling

# What NumPy raises for a file that is no .npz, or a damaged one; NotImplementedError is zipfile's
# answer to a compression or a version of the format that it does not know.
LONGEST = 100  # letters of a folder's name
UNREADABLE = (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def unreadable(error: BaseException) -> str:
    """Say why a file is no ``.npz``; what NumPy says of other files is to read them as pickles."""
    said = str(error)
    return "it is of another kind, or cut short" if "pickle" in said or not said else said


def case_command(subject: str, path: str | Path) -> str:
    """Return what runs a saved case again: a command as a shell takes it, or a call in Python."""
    if subject.startswith("--"):
        return f"myllm verify {subject} --case {shlex.quote(str(path))}"
    return f"check_case({str(path)!r}, {subject})"


def search_command(subject: str, op: str, dtype: str, *, seed: int, cases: int) -> str:
    """Return what draws the cases of an op in one precision again, as ``case_command`` does."""
    if subject.startswith("--"):
        words = f"--op {op} --dtype {dtype} --seed {seed} --examples {cases}"
        return f"myllm verify {subject} {words}"
    return f"check_op({op!r}, {subject}, dtypes={dtype!r}, seed={seed}, examples={cases})"


def case_file(folder: Path, subject: str, op: str, dtype: str, name: str, kind: str) -> Path:
    """Return where the failing case of one result is kept, in a folder for each subject.

    Parameters
    ----------
    subject : str
        Its command (see ``Subject``). A file's folder is named by its path from the working
        directory, or beyond it by its name and a number, so that two files of one name stay apart.
    """
    words = shlex.split(subject)
    if words[0] == "--module":
        file = Path(words[1]).resolve().with_suffix("")
        here = Path.cwd().resolve()
        home = Path(f"{file.name}-{zlib.crc32(bytes(file)):08x}")
        if file.is_relative_to(here):
            home = file.relative_to(here)
    else:
        home = Path(_short(re.sub(r"\W+", "-", subject).strip("-")))
    what = re.sub(r"\W+", "", name) or kind
    if name and kind != "value":
        what += f"-{kind}"
    return folder / home / f"{op}-{what}-{dtype}.npz"


def _short(name: str) -> str:
    """Return a folder's name that every file system takes: of a long one its begin and a number."""
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}-{zlib.crc32(name.encode()):08x}"


def remove_case(path: Path, folder: Path) -> None:
    """Remove a saved case, and the folders down from ``folder`` that it leaves empty."""
    path.unlink(missing_ok=True)
    for parent in path.parents:
        if not parent.is_relative_to(folder) or any(parent.iterdir()):
            return
        parent.rmdir()


def options_to_json(options: dict[str, Any]) -> str:
    """Return the options of a case as JSON; arrays and keys become lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Config):
            return value.to_dict()
        if isinstance(value, np.ndarray):
            return value.tolist()
        return list(value) if isinstance(value, tuple) else value

    return json.dumps({name: plain(value) for name, value in options.items()})


def options_from_json(text: str) -> dict[str, Any]:
    """Return the options that ``options_to_json`` wrote."""
    options = json.loads(text)
    for name in ("key", "dropout_key"):
        if options.get(name) is not None:
            options[name] = DropoutKey(*options[name])
    if options.get("scaling") is not None:
        options["scaling"] = RopeScaling(*options["scaling"])
    for name in ("start", "position"):
        if isinstance(options.get(name), list):
            options[name] = np.array(options[name], np.int64)
    if "config" in options:
        options["config"] = Config(**options["config"])
    for name in ("heads", "parts"):
        if options.get(name) is not None:
            options[name] = tuple(options[name])
    return dict(options)


def save_failure(path: Path, case: Case, judged: list[Judged]) -> None:
    """Write a failing case: inputs, what was expected and what was got.

    The names in the file are ``input.q``, ``dout``, ``expected.dk``, ``got.dk``, and ``case``, the
    options and the manner of the call as JSON.
    """
    arrays: dict[str, Any] = {f"input.{n}": a for n, a in case.arrays.items() if a is not None}
    arrays |= cotangent_arrays(case.cotangent)
    arrays |= {f"expected.{name}": value for name, value in case.exact().items()}
    for result in judged:
        if result.known is not None:
            arrays.setdefault(f"expected.{result.name}", result.known)
        if result.got is not None and f"got.{result.name}" not in arrays:
            arrays[f"got.{result.name}"] = result.got
    arrays["case"] = np.array(
        json.dumps(
            {
                "op": case.op,
                "dtype": case.dtype,
                "options": "" if "like" in case.about() else options_to_json(case.options),
                "layouts": case.layouts,
                "out": case.out,
                "interleaved": case.interleaved,
                **case.about(),
            }
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def cotangent_arrays(cotangent: Any) -> dict[str, Array]:
    """Return a cotangent by name: dout, or dout[0], dout[1], … of several outputs."""
    if cotangent is None:
        return {}
    if isinstance(cotangent, tuple):
        return {f"dout[{i}]": part for i, part in enumerate(cotangent)}
    return {"dout": np.asarray(cotangent)}


def load_failure(path: str | Path) -> Case:
    """Read a case that ``save_failure`` wrote.

    Raises
    ------
    ValueError
        When the file is missing or holds no case.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            content = {name: file[name] for name in file.files}
    except UNREADABLE as error:
        raise ValueError(
            f"{path} is no .npz of a case: {unreadable(error)}; give a file that a failure left"
        ) from None
    try:
        about = json.loads(str(content["case"]))
        if "like" in about:
            inputs = {n.removeprefix("input."): a for n, a in content.items() if n[:6] == "input."}
            return LikeCase.of(about, inputs)
        spec = OPS[about["op"]]
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(
            f"{path} holds no case of myllm verify; give a file that a failure left behind"
        ) from None

    given = [n.removeprefix("input.") for n in content if n.startswith("input.")]
    lacking = [
        p.name
        for p in contract_parameters(spec.forward_name)
        if p.default is None and p.kind is p.POSITIONAL_OR_KEYWORD  # an array, and no option
    ]
    arrays: dict[str, Any] = dict.fromkeys([*given, *lacking])
    for name in given:
        arrays[name] = content[f"input.{name}"]
    dout: Any = None
    if "dout" in content:
        dout = content["dout"] if content["dout"].ndim else float(content["dout"])
    elif "dout[0]" in content:
        count = sum(name.startswith("dout[") for name in content)
        dout = tuple(content[f"dout[{i}]"] for i in range(count))
    return Case(
        spec.name,
        about["dtype"],
        arrays,
        options_from_json(about["options"]),
        dout,
        about["layouts"],
        about["out"],
        about["interleaved"],
    )
