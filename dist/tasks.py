"""Questions with choices, answered by what the model finds most likely: ``myllm eval --tasks``.

Each choice is read behind the context, and scored by the log-probability of its tokens given that.
``accuracy`` counts how often the right one has the largest sum. Long choices have more factors, so
``accuracy per byte`` divides the sum by the choice's bytes first (Brown et al. 2020, section 2.4,
divide by tokens; bytes do not depend on the tokenizer). The chance level is beside both.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dist.model import Model
from dist.pack import eos_of
from dist.score import log_probabilities

if TYPE_CHECKING:
    from tokenizer import Tokenizer


class Question(NamedTuple):
    context: str
    choices: list[str]  # each as it stands behind the context, its space included
    answer: int  # of the choices, from 0


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its {name} must be a text, got {value!r:.40}")
    return value


def _texts(row: Mapping[str, Any], name: str) -> list[str]:
    texts = row[name]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"its {name} must be a list of texts")  # one text would be its letters
    return texts


def _number(row: Mapping[str, Any], name: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", f"{row[name]}") is None:  # text, as some write it, may be empty
        raise ValueError(f"its {name} must be a whole number, got {row[name]!r}")
    return int(row[name])


def _own(row: Mapping[str, Any]) -> Question:
    """{"context": …, "choices": [" …", …], "answer": 0}."""
    context = _text(row["context"], "context")
    return Question(context, _texts(row, "choices"), _number(row, "answer"))


def _hellaswag(row: Mapping[str, Any]) -> Question:
    """HellaSwag (Zellers et al. 2019): a beginning and four endings."""
    endings = [f" {end}" for end in _texts(row, "endings")]
    return Question(_text(row["ctx"], "ctx"), endings, _number(row, "label"))


def _arc(row: Mapping[str, Any]) -> Question:
    """ARC (Clark et al. 2018) and OpenBookQA: a question, lettered choices, the right letter."""
    asked, choices = row.get("question_stem") or row["question"], row.get("choices")
    if isinstance(asked, Mapping):  # as the files of the authors have it
        asked, own = asked["stem"], asked["choices"]
        choices = {field: [choice[field] for choice in own] for field in ("text", "label")}
    if not isinstance(choices, Mapping):
        raise ValueError("its choices must have text and label")
    letters, letter = choices["label"], row["answerKey"]
    if letter not in letters:
        raise ValueError(f"its answerKey {letter!r:.40} is none of the labels")
    return Question(
        f"Question: {_text(asked, 'question')}\nAnswer:",
        [f" {text}" for text in _texts(choices, "text")],
        letters.index(letter),
    )


def _piqa(row: Mapping[str, Any]) -> Question:
    """PIQA (Bisk et al. 2020): a goal and two ways to reach it."""
    solutions = [f" {_text(row[name], name)}" for name in ("sol1", "sol2")]
    asked = f"Question: {_text(row['goal'], 'goal')}\nAnswer:"
    return Question(asked, solutions, _number(row, "label"))


# a field that only rows of this form have -> what reads them
FORMS: dict[str, Callable[[Mapping[str, Any]], Question]] = {
    "endings": _hellaswag,
    "answerKey": _arc,
    "sol1": _piqa,
    "context": _own,
}


def questions(path: Path) -> Iterator[Question]:
    """Yield the questions of a JSON-lines file, one a line, each of a form in ``FORMS``.

    PIQA's authors keep the answers to ``valid.jsonl`` in ``valid-labels.lst`` beside it, one a
    line.

    Raises
    ------
    ValueError
        When there is no such file, or a line is no question; it names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028, which JSON may hold
        beside = path.with_name(f"{path.stem}-labels.lst")
        labels = beside.read_text(encoding="utf-8").split() if beside.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("it is no JSON object")
            if "sol1" in row and number <= len(labels):
                row.setdefault("label", labels[number - 1])
            read = next((FORMS[field] for field in FORMS if field in row), None)
            if read is None:
                raise ValueError(f"it has none of the fields {', '.join(FORMS)}")
            question = read(row)
            if not 0 <= question.answer < len(question.choices):
                raise ValueError(f"there is no choice {question.answer}")
            if not all(question.choices):
                raise ValueError("a choice is empty")
        except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            lacking = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number} is no question: {lacking}") from None
        except RecursionError:
            raise ValueError(f"{path}, line {number} is nested too deeply") from None
        yield question


class Score(NamedTuple):
    """How many questions were answered rightly."""

    n: int
    right: int
    right_per_byte: int
    chance: float  # the expected share of a guess

    def fields(self) -> dict[str, float]:
        """Return the figures for programs."""
        found: dict[str, float] = {}
        for name, right in (("accuracy", self.right), ("per_byte", self.right_per_byte)):
            p = right / self.n
            found |= {name: p, f"{name}_error": math.sqrt(p * (1 - p) / self.n)}
        return {**found, "chance": self.chance, "questions": self.n}

    def __str__(self) -> str:
        f = self.fields()
        return (
            f"accuracy {f['accuracy']:.3f} ± {f['accuracy_error']:.3f}, per byte "
            f"{f['per_byte']:.3f} ± {f['per_byte_error']:.3f}, by chance {self.chance:.3f} "
            f"({self.n} questions)"
        )


def answer(
    model: Model,
    tokenizer: "Tokenizer",
    path: Path,
    *,
    limit: int | None = None,
    tell: Callable[[int], None] = lambda done: None,
) -> Score:
    """Answer the questions of a file, the first ``limit`` of them.

    Raises
    ------
    ValueError
        When the file has no question, or a line that is none.
    """
    eos = eos_of(tokenizer)
    n = right = right_per_byte = 0
    chance = 0.0
    for question in questions(path):
        if n == limit:
            break
        before = [eos, *tokenizer.encode_ordinary(question.context)]
        sums, sizes = [], []
        for choice in question.choices:
            ids = tokenizer.encode_ordinary(choice)
            log_p = log_probabilities(model, before + ids)[len(before) - 1 :]
            # of bytes that the tokenizer lacks alone, a choice is no text at all, and not certain
            sums.append(float(np.sum(log_p)) if ids else -math.inf)
            sizes.append(len(choice.encode("utf-8", "surrogatepass")))
        n += 1
        right += int(np.argmax(sums)) == question.answer
        right_per_byte += int(np.argmax(np.divide(sums, sizes))) == question.answer
        chance += 1 / len(question.choices)
        tell(n)
    if not n:
        raise ValueError(f"{path} has no question")
    return Score(n, right, right_per_byte, chance / n)
