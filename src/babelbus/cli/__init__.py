"""The command line `babelbus` (docs/operations.md, "Command line"): one module per group of commands.

A command's module is imported when the command is called, and imports the heavy parts of the bus inside the command,
so that the shell answers at once.
"""

import importlib
from typing import Any

import click

import babelbus

# command -> module and attribute, in the order of the help: from the first step to the rarest.
COMMANDS = {
    "serve": "serve:serve",
    "config": "serve:config",
    "topics": "topics:topics",
    "clients": "clients:clients",
    "principals": "principals:principals",
    "access": "access:access",
    "audit": "audit:audit",
    "publish": "publish:publish",
    "tail": "read:tail",
    "fetch": "read:fetch",
    "consume": "consume:consume",
    "groups": "groups:groups",
    "dead-letters": "dead_letters:dead_letters",
    "listen": "events:listen",
    "send": "events:send",
    "request": "requests:request",
    "respond": "requests:respond",
    "state": "state:state",
    "export": "export:export",
    "import": "restore:import_",
    "check": "repair:check",
    "repair": "repair:repair",
    "pipeline": "pipeline:pipeline",
    "bench": "bench:bench",
    "sbusd": "sbusd:sbusd",
}


class Commands(click.Group):
    """All commands, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(f"babelbus.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            ctx.fail(f"there is no command {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(babelbus.__version__, "-V", "--version", prog_name="babelbus", message="%(prog)s %(version)s")
def program() -> None:
    """Run Babelbus: one event bus that speaks five protocols over one durable log.

    On the machine of the server no options are needed:

    \b
      babelbus serve                          start a server, data in ./data
      babelbus topics create orders           in another shell
      babelbus publish orders 'first order'
      babelbus tail orders --from-offset 0
    """


def main(args: list[str] | None = None) -> Any:
    """Run the command line and end the process. Exit codes: 0 done, 1 failed, 2 wrong usage."""
    return program.main(args, prog_name="babelbus")
