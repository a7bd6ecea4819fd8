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


def minutes(text: str) -> float:
    """Return a time that an option gives: above 0, and not beyond ten million minutes."""
    n, most = float(text), 10_000_000
    if not 0 < n <= most:
        raise argparse.ArgumentTypeError(
            f"must be a number of minutes above 0, at most {most:,}, got {text}"
        )
    return n


class Wrapped(argparse.HelpFormatter):
    """Fills paragraphs, but those with lines further in, as examples are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = argparse.HelpFormatter._fill_text
        return "\n\n".join(
            part if "\n " in part else fill(self, part, width, indent)
            for part in text.strip().split("\n\n")
        )
