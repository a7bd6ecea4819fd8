"""A model that saw chats, and a server of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dist import cli
from tests.helpers.runs import save_run_file
from tests.helpers.serving import Server, prepare_chats, serving


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a model that saw chats."""
    folder = tmp_path_factory.mktemp("run")
    config = prepare_chats(folder, train__steps=3)
    assert cli.main(["train", str(save_run_file(config, folder / "run.toml"))]) == 0
    return folder / "run"


@pytest.fixture(scope="package")
def shared(run: Path) -> Iterator[Server]:
    with serving(run) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """A server whose model is free to work, and idle afterwards."""
    shared.go.set()
    yield shared
    shared.go.set()
    shared.wait_until_idle()
