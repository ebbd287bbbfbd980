"""The manual pages: one for each command, with its options, which the system formats without a warning."""

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from babelbus.cli import program
from babelbus.cli.man import make_pages

PAGES = make_pages(program)


def commands(command: click.Command, context: click.Context) -> list[tuple[str, click.Command]]:
    found = [(context.command_path.replace(" ", "-"), command)]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            found += commands(child, click.Context(child, info_name=name, parent=context))
    return found


ALL = commands(program, click.Context(program, info_name="babelbus"))


def test_each_command_has_a_page() -> None:
    assert set(PAGES) == {f"{name}.1" for name, _ in ALL}


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_a_page_has_the_options_and_examples_of_its_command(name: str, command: click.Command) -> None:
    text = PAGES[f"{name}.1"].replace("\\-", "-")
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            assert re.search(rf"^\.B .*{re.escape(max(param.opts, key=len))}\b", text, re.MULTILINE), param
    assert ("Examples:" in (command.epilog or "")) == ('.SH "EXAMPLES"' in text)


def test_the_command_writes_pages_that_the_system_formats_without_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "share" / "man1"
    done = CliRunner().invoke(program, ["man", str(folder)])
    assert done.exit_code == 0
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == PAGES
    if (groff := shutil.which("groff")) is None:
        pytest.skip("the pages are not formatted: groff is not installed")
    command = [groff, "-man", "-Tutf8", "-ww", "-K", "utf8", *map(str, sorted(folder.iterdir()))]
    formatted = subprocess.run(command, capture_output=True, text=True, check=True)
    assert formatted.stderr == ""
    plain = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", formatted.stdout)
    assert "babelbus publish orders 'first order'" in plain
    assert "--server-fingerprint HEX" in plain
