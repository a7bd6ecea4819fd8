"""Warnings of the peers themselves are not ours to fix; a warning of ours is still an error."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for module in ("torch", "transformers", "huggingface_hub", "tokenizers"):
        config.addinivalue_line("filterwarnings", rf"ignore:::{module}(\..*)?$")
