r"""Pre-tokenization patterns: where text is cut into the words that merges may not cross.

``GPT4`` and ``GPT2`` are the patterns of OpenAI's cl100k_base and r50k_base. A pattern that means
one of them (with any number of digits per piece) has a state machine of its own, ``Machine``, in
``tokenizer.kernels.split``; any other is matched by ``regex``, some ten times slower.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import regex

# What a pattern may take before it is given up: `(a|aa)+$` takes twice as long with each letter.
# Ordinary ones take about a microsecond a character.
SECONDS = 10.0
SECONDS_PER_CHARACTER = 1e-4

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT4 = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
# GPT-4's with each digit by itself
QWEN2 = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
# GPT-2's, applied to what is left when each digit is a piece of its own (SmolLM): white space
# before a digit stands at the end of such a rest.
DIGITS_GPT2 = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"""
    r"""|\s+(?=\p{N})|\s+(?!\S)|\s+"""
)
NAMED = {"gpt2": GPT2, "gpt4": GPT4}


class Machine(NamedTuple):
    """Which state machine stands for a pattern."""

    kind: int  # 2 or 4: of GPT-2 or of GPT-4
    max_digits: int  # digits in one piece, at most (GPT-4 only)
    whole_tail: bool  # white space before the end of the text is one piece, newlines or not


# The parts of the GPT-4 pattern as they are spelled by OpenAI, rustbpe, Llama 3 and Qwen.
_CONTRACTION = (
    r"'(?i:[sdmt]|ll|ve|re)",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
)
_WORD = (r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}++")
_SIGNS = (
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*+",
)
_SPACES = (
    r"\s*[\r\n]|\s+(?!\S)|\s+",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s*[\r\n]|\s+(?!\S)|\s",
    r"\s*[\r\n]+|\s+(?!\S)|\s",
)
_GPT2_SPELLINGS = (
    GPT2,
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
)


def machine_of(pattern: str) -> Machine | None:
    """Return the state machine that cuts exactly as ``pattern`` does; None if there is none."""
    if pattern in _GPT2_SPELLINGS:
        return Machine(2, 1, False)
    for contraction in _CONTRACTION:
        for word in _WORD:
            head = f"{contraction}|{word}|"
            if not pattern.startswith(head):
                continue
            number, _, rest = pattern[len(head) :].partition("|")
            digits = regex.fullmatch(r"\\p\{N\}(?:\{1,([1-9])\}\+?)?", number)
            if digits is None:
                continue
            for signs in _SIGNS:
                for tail in ("", r"\s++$|"):
                    if any(rest == f"{signs}|{tail}{spaces}" for spaces in _SPACES):
                        return Machine(4, int(digits[1] or 1), bool(tail))
    return None


# What a pattern is made of, outside of classes and inside. White space up to the end is one and the
# same in all dialects, however the end is spelled.
_ESCAPE = r"\\[pP](?:\{[^}]*\}|.)|\\x\{[\da-fA-F]{1,8}\}|\\U[\da-fA-F]{8}|\\."
_OUTSIDE = re.compile(
    rf"\\s\+\+(?:\$|\\z)|{_ESCAPE}|\[\^?\]?|\(\?(?:[\w^-]+[:)]|>)|\{{(?:\d+,?\d*|,\d+)\}}[+?]?|.",
    re.DOTALL,
)
_INSIDE = re.compile(rf"{_ESCAPE}|\[:\^?\w+:\]|\[\^?\]?|&&|--|\|\||~~|.", re.DOTALL)

# What means something else elsewhere, with a [ before what stands in a class: to all others; to
# tiktoken, whose $ is the end alone and \Z is not; to Hugging Face, where ^ and $ stand at every
# line, and \Z also before a last newline.
ODD = r"\[?\\[hHN]|\[(?:--|\|\||~~)"
ODD_TO_TIKTOKEN = rf"{ODD}|\$|\\[Z<>]|\[\[:.*"
ODD_TO_HUGGINGFACE = rf"{ODD}|[$^]|\\[ZbBmM]|\[\[:\^?digit:\]|\[?\\[pP]\{{\^?(?i:xdigit|word)\}}"


def elements(pattern: str) -> Iterator[tuple[str, int]]:
    """Yield what a pattern is made of, and in how many classes each stands; last, "" for its end.

    Classes in classes are seen as others see them: a [ in a class begins one.
    """
    at = depth = 0
    while found := (_INSIDE if depth else _OUTSIDE).match(pattern, at):
        text, at = found[0], found.end()
        yield text, depth
        if text[0] == "[" and text[1:2] != ":":
            depth += 1
        elif text == "]" and depth:
            depth -= 1
    yield "", depth


def check_dialect(pattern: str, odd: str, where: str) -> None:
    """Refuse a pattern that means something else elsewhere.

    Raises
    ------
    ValueError
        If it has what matches ``odd``, flags behind its start, or in a class a [ that begins none,
        or an && without a side.
    """
    before = ""
    for text, depth in elements(pattern):
        flags = before and not depth and re.fullmatch(r"\(\?[\w^-]+\)", text)
        half = depth and f"{before} {text}" in ("[ &&", "[^ &&", "&& &&", "&& ]")
        if flags or half or (depth and not text) or re.fullmatch(odd, "[" * bool(depth) + text):
            raise ValueError(
                f"the pattern {pattern!r} has {text or '[ in a class'}, which means something else "
                f"{where} than here: spell it otherwise, a sign in a class behind a backslash (\\A "
                "is the start of a text everywhere)"
            )
        before = text


def _has_sets(pattern: str) -> bool:
    """Tell whether a pattern has classes in classes, all closed, or what two classes share."""
    *found, (_, unclosed) = elements(pattern)
    return not unclosed and any(
        depth and (text == "&&" or (text[0] == "[" and text[1:2] != ":")) for text, depth in found
    )


def compiled(pattern: str) -> "regex.Pattern[str]":
    """Compile a pattern given by its name or its text.

    Raises
    ------
    ValueError
        If it is not a regular expression.
    """
    pattern = NAMED.get(pattern, pattern)
    try:
        return regex.compile(pattern, regex.V1 if _has_sets(pattern) else 0)
    except (regex.error, RecursionError) as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from None


def matches(pattern: "regex.Pattern[str]", text: str) -> Iterator["regex.Match[str]"]:
    """Yield the matches of a pattern, one after the other, in bounded time.

    Raises
    ------
    ValueError
        If the pattern takes too long, or too much memory, on this text.
    """
    limit = SECONDS + SECONDS_PER_CHARACTER * len(text)
    try:
        yield from pattern.finditer(text, timeout=limit)
    except (TimeoutError, MemoryError) as error:
        took = f"{limit:.0f} s" if isinstance(error, TimeoutError) else "all memory it may have"
        raise ValueError(
            f"pattern {pattern.pattern!r} took {took} on a text of {len(text):,} characters that "
            f"begins with {text[:20]!r}: do not repeat what repeats, or use possessive "
            "quantifiers, such as ++"
        ) from None
