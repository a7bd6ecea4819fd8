"""Decode ids one by one, as a model makes them, without ever showing half a character."""

from tokenizer.tokenizer import Tokenizer, decode_utf8


class DecodeStream:
    """Turns a stream of ids into pieces of text that add up to the whole.

    A character of up to 4 bytes may be spread over several tokens; its first bytes are held back
    until it is whole, or can never be. For all ids: the pieces of ``step`` and then ``finish``,
    joined, are ``tokenizer.decode(ids, errors)``.

    Parameters
    ----------
    tokenizer : Tokenizer
        Knows the bytes of every id.
    errors : str
        As for ``Tokenizer.decode``.
    """

    def __init__(self, tokenizer: Tokenizer, errors: str = "replace"):
        decode_utf8(b"", errors)  # an unknown name is an error now, not in the middle of a text
        self._tokenizer = tokenizer
        self._errors = errors
        self._held = b""

    def step(self, token_id: int) -> str:
        """Take one id; return the text that is now certain, which may be empty."""
        data = self._held + self._tokenizer.token_bytes(token_id)
        cut = len(data) - unfinished(data)
        text = decode_utf8(data[:cut], self._errors)
        self._held = data[cut:]
        return text

    def finish(self) -> str:
        """Return what is left when no more ids come, and begin anew."""
        data, self._held = self._held, b""
        return decode_utf8(data, self._errors)


def unfinished(data: bytes) -> int:
    """Return how many bytes at the end (0 to 3) begin a character that more bytes could finish."""
    for size in range(1, min(3, len(data)) + 1):
        lead = data[-size]
        if lead < 0x80:
            return 0
        if lead < 0xC0:
            continue  # a continuation byte: its lead is further left
        need = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4
        if lead < 0xC2 or lead > 0xF4 or size >= need:
            return 0
        if size > 1:
            second = data[-size + 1]
            # Overlong forms and code points above U+10FFFF cannot be finished.
            if (lead == 0xE0 and second < 0xA0) or (lead == 0xF0 and second < 0x90):
                return 0
            if lead == 0xF4 and second > 0x8F:
                return 0
        return size
    return 0
