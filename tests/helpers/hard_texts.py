"""Texts at which tokenizers that look alike part ways."""

from tests.helpers.tokenizer_texts import CHARACTERS

HARD = [
    "In 1984, 3.14159 and 1000000 cost $12.50; x2y3z, ½ ² Ⅷ ٣٤٥ १२३ 42",
    "  leading,   runs\t\tof \n\n\n white   space \r\n and a tail   ",
    "Größe Ελληνικά кириллица 中文字符 日本語のテキスト 한국어 العربية עברית हिन्दी ภาษาไทย",
    "👩‍👩‍👧 🇩🇪 e\u0301 \u200b zero\ufeffwidth \u2028 \u3000 <|user|> <|end|> <|eos|> <|pad|>",
    "I'll we've THEY'RE don't 'tis it's'd def f(x): return x**2  # {}[]()!?...---",
    # the long s left out, which llama.cpp does not take for the s of a contraction
    "".join(c for c in CHARACTERS if not "\ud800" <= c <= "\udfff" and c != "ſ"),
]
