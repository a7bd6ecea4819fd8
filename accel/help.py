"""The parsers of commands: their help fits a terminal."""

import argparse


def parser(name: str, about: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand of ``myllm``, with an example at the end of its help."""
    return argparse.ArgumentParser(
        prog=f"myllm {name}",
        description=about,
        epilog=f"example:\n  {example}",
        formatter_class=Wrapped,
    )


class Wrapped(argparse.HelpFormatter):
    """Fills paragraphs, but those with lines further in, as examples are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = argparse.HelpFormatter._fill_text
        return "\n\n".join(
            part if "\n " in part else fill(self, part, width, indent)
            for part in text.strip().split("\n\n")
        )
