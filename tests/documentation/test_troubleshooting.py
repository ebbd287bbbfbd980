"""docs/troubleshooting.md: each message, code and metric that it quotes is one of ours."""

import ast
import errno
import os
import re
from functools import cache

import click
import pytest

from babelbus.cli import program
from babelbus.config import describe
from babelbus.metrics import Metrics
from tests.cli.test_man import commands
from tests.documentation.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTE = re.compile(r"`([^`]+)`")
GAPS = re.compile(r"\.\.\.|;|\b\d+\b|\b[A-Z]{1,9}\b")
"""What a message has in the place of names and numbers."""


@cache
def texts() -> str:
    """Return all texts in our sources, and those of the system that our messages carry on."""
    found = [os.strerror(errno.EADDRINUSE).lower()]
    for file in ROOT.glob("src/babelbus/**/*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str]
    return "\n".join(found)


def quotes() -> list[str]:
    """Return what the first cells of the tables quote: what a reader has in front of them."""
    cells = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [quote for cell in cells for quote in QUOTE.findall(cell)]


def test_the_page_has_messages() -> None:
    assert len([quote for quote in quotes() if " " in quote]) > 5


@pytest.mark.parametrize("quote", quotes())
def test_a_message_is_one_that_we_write(quote: str) -> None:
    if quote.startswith("babelbus "):
        return  # a command, which the test of the commands in the pages knows
    parts = [part.strip(" ,;:()") for part in GAPS.split(quote)]
    assert [part for part in parts if part and part not in texts()] == []


def test_metrics_and_settings_exist() -> None:
    metrics = Metrics()
    names = {metric.name for metric in metrics.describe()} | {entry.key for entry in describe()}
    text = PAGE.read_text(encoding="utf-8")
    quoted = set(re.findall(r"`(babelbus_\w+|(?:server|state|access)\.\w+)`", text))
    assert len(quoted) > 4
    assert quoted <= names


def test_every_flag_exists_and_is_called_as_it_is_written() -> None:
    """`--PROTOCOL-...` is the flag of each protocol; a flag of true or false takes no value."""
    options = [option for _, command in commands(program, click.Context(program)) for option in command.params]
    written = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
    flags = re.findall(r"(--[A-Za-z][A-Za-z-]+)(?: (true|false)\b)?", PAGE.read_text(encoding="utf-8"))
    assert len(flags) > 4
    for flag, value in flags:
        option = written[flag.replace("PROTOCOL", "zbus")]
        assert not (value and isinstance(option, click.Option) and option.is_flag), flag
