"""The fixtures of the command line's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Served, Shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.kill_started()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    code = server.stop()
    server.kill_started()
    assert code == 0
