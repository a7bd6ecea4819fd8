"""Texts at which tokenizers that look alike part ways."""

from tests.helpers.tokenizer_texts import CHARACTERS

# Characters with several spellings, and what stands beside them.
SPELLINGS = [
    "cafe\u0301, cafe\u0301s, e\u0301e\u0301 Cafe\u0301\u0301",
    "q\u0307\u0323 q\u0323\u0307 a\u0301\u0323\u0308 \u0344",  # marks in one order
    "\u1112\u1161\u11ab\u1100\u1173\u11af \u1100\u1161\u11a7",  # Hangul of its letters
    "\u212b \u2126 \u212a \u0340 \u2000 \u037e \uf900 \U0002f800",  # one character for another
    "\u0958 \u0929 \u0928\u093c \u2adc \ufb1d",  # some of which stay apart
    "\u0301 at the start, 5\u0301 7\u20e3 \u00a0\u0301 x\n\u0301y <|user|>\u0338 <|end|\u0338>",
    "e\u200b\u0301 e\u034f\u0301 \u0b47\u0b3e \U000110a5\U000110ba " + "a" + "\u0323\u0301" * 40,
]
HARD = [
    "In 1984, 3.14159 and 1000000 cost $12.50; x2y3z, ½ ² Ⅷ ٣٤٥ १२३ 42",
    "  leading,   runs\t\tof \n\n\n white   space \r\n and a tail   ",
    "Größe Ελληνικά кириллица 中文字符 日本語のテキスト 한국어 العربية עברית हिन्दी ภาษาไทย",
    "👩‍👩‍👧 🇩🇪 e\u0301 \u200b zero\ufeffwidth \u2028 \u3000 <|user|> <|end|> <|eos|> <|pad|>",
    "I'll we've THEY'RE don't 'tis it's'd def f(x): return x**2  # {}[]()!?...---",
    # the long s left out, which llama.cpp does not take for the s of a contraction
    "".join(c for c in CHARACTERS if not "\ud800" <= c <= "\udfff" and c != "ſ"),
]
