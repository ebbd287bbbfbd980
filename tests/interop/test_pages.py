"""The pages of the documentation that need a released client of others, run as they stand there (`make interop`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, Reader
from tests.interop.test_eventmesh import classpath
from tests.interop.test_worterbuch_js import program
from tests.interop.test_zbuspy import python

__all__ = ["classpath", "program", "python"]  # fixtures: where the clients were installed


@pytest.fixture
def readers() -> Iterator[list[Reader]]:
    everybody: list[Reader] = []
    yield everybody
    for reader in everybody:
        reader.close()


def follow(readers: list[Reader], reader: Reader, page: str) -> None:
    readers.append(reader)
    reader.follow(ROOT / page)


@pytest.mark.interop
def test_a_reader_of_the_javascript_tutorial_can_do_what_it_says(
    program: Path, readers: list[Reader], tmp_path: Path
) -> None:
    reader = Reader(tmp_path)
    reader.use(program, "node_modules")
    follow(readers, reader, "docs/tutorials/javascript.md")


@pytest.mark.interop
def test_a_reader_of_the_zbus_tutorial_can_do_what_it_says(python: Path, readers: list[Reader], tmp_path: Path) -> None:
    follow(readers, Reader(tmp_path, str(python)), "docs/tutorials/zbus.md")


@pytest.mark.interop
def test_a_reader_of_the_eventmesh_tutorial_can_do_what_it_says(
    classpath: str, readers: list[Reader], tmp_path: Path
) -> None:
    reader = Reader(tmp_path)
    (tmp_path / "classpath").write_text(classpath, encoding="utf-8")
    follow(readers, reader, "docs/tutorials/eventmesh.md")
