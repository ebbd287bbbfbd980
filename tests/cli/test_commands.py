import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import babelbus
from babelbus.cli import COMMANDS, program

PAGE = Path(__file__).parent.parent.parent / "docs" / "command-line.md"


def all_commands() -> list[list[str]]:
    found = []
    for name in COMMANDS:
        command = program.get_command(click.Context(program), name)
        if isinstance(command, click.Group):
            found += [[name, one] for one in command.commands]
        else:
            found.append([name])
    return found


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_the_help_of_a_command_teaches_with_an_example_of_itself(command: list[str]) -> None:
    result = CliRunner().invoke(program, [*command, "--help"])
    assert result.exit_code == 0
    assert f"babelbus {' '.join(command)}" in result.output.partition("Examples:")[2]


@pytest.mark.parametrize("command", all_commands(), ids=" ".join)
def test_the_page_mentions_a_command(command: list[str]) -> None:
    section = PAGE.read_text(encoding="utf-8")
    assert re.search(rf"babelbus {' '.join(command)}\b", section)


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(program, ["--version"]).output == f"babelbus {babelbus.__version__}\n"


def test_a_misspelt_command_names_the_near_one_and_ends_with_code_2() -> None:
    result = CliRunner().invoke(program, ["topic"])
    assert result.exit_code == 2
    assert "did you mean 'topics'?" in result.stderr


def test_debug_shows_where_a_failure_comes_from(tmp_path: Path) -> None:
    args = ["topics", "list", "--data-folder", str(tmp_path / "no")]
    plain = CliRunner().invoke(program, args)
    assert (plain.exit_code, plain.stderr.count("\n")) == (1, 1)
    assert "start a server there once" in plain.stderr
    assert type(CliRunner().invoke(program, [*args, "--debug"]).exception).__name__ == "CommandError"
