"""`babelbus man`: the manual pages of the command line, made from the help of its commands."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

import babelbus
from babelbus.cli.command import BusCommand, examples
from babelbus.cli.output import print_line

SECTION = "1"
EXAMPLES_HEADING = "Examples:\n"
_ROFF = str.maketrans({"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"})
"""Characters that man would show as something else."""


class RoffFormatter(click.HelpFormatter):
    """Writes the help of a command as a manual page (man(7)) instead of text for a terminal."""

    def __init__(self, name: str, summary: str) -> None:
        super().__init__(width=78)
        self.write(f'.TH {_quoted(name.upper())} {SECTION} "" {_quoted(f"babelbus {babelbus.__version__}")}\n')
        self.write(f".SH NAME\n{_escaped(name)} \\- {_escaped(summary)}\n")

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the synopsis."""
        self.write(f".SH SYNOPSIS\n.B {_escaped(prog)}\n{_escaped(args)}\n.SH DESCRIPTION\n")

    def write_heading(self, heading: str) -> None:
        """Write the heading of a section."""
        self.write(f".SH {_quoted(heading.upper())}\n")

    def write_paragraph(self) -> None:
        """Write nothing: each text begins its paragraph itself."""

    def write_text(self, text: str) -> None:
        """Write paragraphs; a paragraph behind the mark \\b keeps its lines."""
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            kept = paragraph.startswith("\b")
            lines = paragraph.lstrip("\b").strip("\n")
            if lines.startswith(EXAMPLES_HEADING):
                self.write_heading("Examples")
                lines = lines.removeprefix(EXAMPLES_HEADING)
            else:
                self.write(".PP\n")
            body = "".join(f"{_escaped(line)}\n" for line in lines.splitlines())
            self.write(f".nf\n{body}.fi\n" if kept else body)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write a list of terms with their texts."""
        for term, text in rows:
            self.write(f".TP\n.B {_escaped(term)}\n{_escaped(' '.join(text.split()))}\n")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Write what follows below a heading."""
        self.write_heading(name)
        yield


def _escaped(text: str) -> str:
    text = text.translate(_ROFF)
    return f"\\&{text}" if text.startswith(".") else text


def _quoted(text: str) -> str:
    return '"{}"'.format(_escaped(text).replace('"', "\\(dq"))


def make_pages(command: click.Command) -> dict[str, str]:
    """Return the pages of a command and of the commands below it: file name -> text."""
    return dict(_pages(command, click.Context(command, info_name="babelbus")))


def _pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    name = context.command_path.replace(" ", "-")
    formatter = RoffFormatter(name, command.get_short_help_str(70).rstrip("."))
    command.format_help(context, formatter)
    below = command.list_commands(context) if isinstance(command, click.Group) else []
    if below:
        formatter.write(".SH SEE ALSO\n" + ",\n".join(f".BR {_escaped(f'{name}-{one}')} ({SECTION})" for one in below))
        formatter.write("\n")
    yield f"{name}.{SECTION}", formatter.getvalue()
    for one in below:
        assert isinstance(command, click.Group)
        child = command.get_command(context, one)
        if child is not None:
            yield from _pages(child, click.Context(child, info_name=one, parent=context))


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus man ~/.local/share/man/man1        then: man babelbus-publish",
        "babelbus man /usr/local/share/man/man1      for all users of the machine",
    ),
)
@click.argument("folder", type=click.Path(file_okay=False))
def man(folder: str) -> None:
    """Write the manual pages of all commands into FOLDER, which is made if it does not exist."""
    from babelbus.cli import program

    os.makedirs(folder, exist_ok=True)
    pages = make_pages(program)
    for name, text in pages.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    print_line(f"{len(pages)} manual pages are in {folder}; 'man babelbus' shows the first")
