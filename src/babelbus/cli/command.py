"""Commands fail alike: one line on standard error with the cause and the remedy, and exit code 1."""

import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from babelbus.errors import BabelbusError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class CommandError(BabelbusError):
    """A command failed; the message says what to do about it."""

    exit_code = 1


class Failure(click.ClickException):
    """A failure as it is shown: `babelbus: what happened`, on one line."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the line to standard error."""
        from babelbus.cli.output import escape

        # The message may have text of a peer, which must not control the terminal.
        click.echo(f"babelbus: {escape(' '.join(self.message.split()))}", file=file or sys.stderr)


class BusCommand(click.Command):
    """A command whose expected failures end in a `Failure`; with `--debug`, in a traceback."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        debug = click.Option(["--debug"], is_flag=True, expose_value=False, callback=_note_debug, is_eager=True)
        debug.help = "Show the traceback of a failure."
        self.params.append(debug)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            advice = _advice_on_package(error.name or "")
            if ctx.meta.get(DEBUG) or advice is None:
                raise
            raise Failure(advice) from error
        except (BabelbusError, OSError) as error:
            # The reader of our output has gone (`| head`): click ends the process without a message.
            if ctx.meta.get(DEBUG) or (isinstance(error, OSError) and error.errno == errno.EPIPE):
                raise
            failure = Failure(describe(error))
            failure.exit_code = error.exit_code if isinstance(error, CommandError) else 1  # type: ignore[misc]
            raise failure from error
        except UnicodeEncodeError as error:  # an argument in other bytes than UTF-8, or a terminal without UTF-8
            if ctx.meta.get(DEBUG):
                raise
            raise Failure(f"{error.object[:100]!r} cannot be written as {error.encoding}") from error
        except KeyboardInterrupt as error:
            if ctx.meta.get(DEBUG):
                raise
            told = ctx.meta.get(DONE)
            raise Failure("stopped by Ctrl-C" + (f": {told()}" if told else "")) from error


EXTRAS = {
    "server": "aiohttp cryptography google google_crc32c hpack jwt numpy prometheus_client sqlalchemy",
    "postgres": "psycopg",
    "spark": "pyarrow pyspark yaml",
}
"""The packages that are installed with each extra only, by the name of their modules."""


def _advice_on_package(module: str) -> str | None:
    """Return what to install for a module that is missing; `None` if no extra has the module."""
    package = module.partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages.split():
            return f"this needs the package {package}, which is not installed: pip install 'babelbus[{extra}]'"
    return None


class BusGroup(click.Group):
    """A group of commands (`topics`, `clients`)."""

    command_class = BusCommand


DEBUG = "babelbus.debug"
DONE = "babelbus.done"


def tell_done_at_interrupt(told: Callable[[], str]) -> None:
    """Set the function that returns what was done, for Ctrl-C."""
    click.get_current_context().meta[DONE] = told


def _note_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[DEBUG] = ctx.meta.get(DEBUG, False) or value


def describe(error: BaseException) -> str:
    """Return one line that describes an error."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if not error.filename else f"{os.fspath(error.filename)!s}: {error.strerror}"
        return f"{text} (error {error.errno})" if error.filename is None else text
    return str(error) or type(error).__name__


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
summary_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the summary as JSON, on standard error if the data is on the output."
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
max_option = click.option("--max", "count_max", type=click.IntRange(1), metavar="N", help="Stop after N.")
partition_option = click.option("--partition", type=click.IntRange(0), help="One partition.  [default: all]")


def complete(kind: str) -> "Callable[[click.Context, click.Parameter, str], list[CompletionItem]]":
    """Return the function that completes an argument in a shell, with words of the server (`cli.completion.KINDS`)."""

    def find(command: click.Context, _: click.Parameter, begun: str) -> "list[CompletionItem]":
        # By name, as commands are: completion knows the options of commands, which know this.
        module = importlib.import_module("babelbus.cli.completion")
        found: list[CompletionItem] = module.complete(kind, command, begun)
        return found

    return find


def ask_first(yes: bool, action: str, warning: str = "") -> None:
    """Continue if `yes`, or if the user of this terminal confirms `action`; abort the command if not.

    Raises:
        CommandError: there is no terminal to ask.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError(f"this would {action}: add --yes if that is meant")
    click.confirm(f"{action[0].upper()}{action[1:]}?{warning}", abort=True, err=True)


def examples(*lines: str) -> str:
    """Return the examples at the end of a command's help: `("babelbus tail orders", "what it does")` a line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
