"""The command line `babelbus` (docs/command-line.md): one module per group of commands.

A command's module is imported when the command is called, and imports the heavy parts of the bus inside the command,
so that the shell answers at once. The list of all commands imports none of them.
"""

import importlib
import os
import sys
from typing import Any

import click

import babelbus

# command -> module and attribute, and the first words of its help; in the order of the help: from the first step to the
# rarest.
COMMANDS = {
    "serve": ("serve:serve", "Run a server until SIGTERM or Ctrl-C."),
    "config": ("serve:config", "Show the configuration as a babelbus.toml, and check it."),
    "login": ("login:login", "Connect to a server elsewhere for the first time, or check that it works."),
    "context": ("context:context", "Add, list, use, show and remove names of servers elsewhere."),
    "status": ("status:status", "Show how a server is, on one screen."),
    "top": (
        "status:top",
        "Show the rates, the lag and the slow consumers of a server live, by protocol,...",
    ),
    "console": ("console:console", "Print an address that logs a browser in at the console, and open it where..."),
    "cluster": ("cluster:cluster", "Show the members of a cluster, and move the data to another member."),
    "topics": ("topics:topics", "List, show, create, change and remove topics."),
    "clients": ("clients:clients", "Add, list, change and remove the clients that may connect to the server."),
    "principals": (
        "principals:principals",
        "Add, list, show, change, rotate and remove principals: whoever can prove who...",
    ),
    "access": ("access:access", "List, grant, deny, revoke and explain who may do what."),
    "audit": ("audit:audit", "Show the newest records of the audit."),
    "publish": ("publish:publish", "Publish records to a topic."),
    "tail": ("read:tail", "Follow a topic: print its records as they arrive, until Ctrl-C."),
    "fetch": (
        "read:fetch",
        "Print the stored records of a topic, up to its present end; one partition...",
    ),
    "search": (
        "search:search",
        "Print the records of TOPIC that match FILTER, up to the present end of the...",
    ),
    "consume": (
        "consume:consume",
        "Read records of TOPIC as a member of a consumer group, and ack each when it...",
    ),
    "groups": ("groups:groups", "List, show, create, change, seek, pause and remove consumer groups."),
    "dead-letters": (
        "dead_letters:dead_letters",
        "List, show, replay and purge dead letters: records that a group failed to...",
    ),
    "listen": ("events:listen", "Print the events whose subject matches PATTERN, as they happen, until Ctrl-C."),
    "send": (
        "events:send",
        "Publish one event under SUBJECT: to all subscribers of any protocol, and to...",
    ),
    "request": (
        "requests:request",
        "Send a request under SUBJECT to a responder of any protocol, and print the...",
    ),
    "respond": ("requests:respond", "Answer the requests of any protocol under SUBJECT with the output of a command."),
    "state": ("state:state", "Read, change and follow the state: the last value of each key."),
    "export": (
        "export:export",
        "Write a topic's records, up to where it ends now, to FILE ('-' is standard...",
    ),
    "import": (
        "restore:import_",
        "Publish the records of FILE ('-' is standard input; compressed files are...",
    ),
    "check": ("repair:check", "Read every record and every index of a data folder, and list the problems."),
    "migrate": ("migrate:migrate", "Move topics of a data folder into a cluster of NATS, with their offsets."),
    "repair": ("repair:repair", "Repair the problems that 'babelbus check' finds."),
    "pipeline": (
        "pipeline:pipeline",
        "Run data pipelines on Spark: files that name sources, steps in SQL or Python,...",
    ),
    "bench": (
        "bench:bench",
        "Measure the running server: publish records to a topic made for it, read them...",
    ),
    "completion": (
        "completion:completion",
        "Print the script that lets SHELL complete commands, options, contexts,...",
    ),
    "man": ("man:man", "Write the manual pages of all commands into FOLDER, which is made if it does..."),
    "sbusd": ("sbusd:sbusd", "Run a stand-alone sbus daemon with the options of the original."),
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
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"babelbus.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        room = formatter.width - 6 - max(map(len, COMMANDS))
        with formatter.section("Commands"):
            commands = [click.Command(name, help=text) for name, (_, text) in COMMANDS.items()]
            formatter.write_dl([(str(command.name), command.get_short_help_str(room)) for command in commands])

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
@click.option("--context", metavar="NAME", help="Context with the server of the command: 'babelbus context' has them.")
@click.version_option(babelbus.__version__, "-V", "--version", prog_name="babelbus", message="%(prog)s %(version)s")
def program(context: str | None) -> None:
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
    _open_standard_files()
    try:
        return program.main(args, prog_name="babelbus")
    except OSError as error:  # of a help or a version that cannot be written: commands handle their own
        from babelbus.cli.command import Failure, describe

        Failure(describe(error)).show()
        sys.exit(1)


def _open_standard_files() -> None:
    """Open standard input, output and error where the caller has closed them (`>&-`): nothing comes, all is dropped.

    Otherwise the next file or socket had their number, and what a child or a library in C writes there got into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            file = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - it stays open; the lowest free number
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)
