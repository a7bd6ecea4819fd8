"""Other ways to cut text into tokens, each in one short file, to be read beside byte-level BPE."""
