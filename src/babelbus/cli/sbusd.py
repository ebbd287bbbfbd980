"""`babelbus sbusd`, and `sbusd` alone: a drop-in for the reference daemon (docs/specifications/sbus.md, 13 to 17).

One bus without topics and other protocols, with the options, exit codes and habits of the original; faults of the
original against its own document (section 19) are not copied. Start-up is fast: heavy imports follow the options.
"""

import asyncio
import contextlib
import getopt
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click
import msgspec

from babelbus.cli.command import describe, examples

if TYPE_CHECKING:
    from babelbus.metrics import Metrics

USAGE = "usage: sbusd [-a address] [-f | -p pidfile] [-u user] ... [-cgor]"
ADDRESS = "/run/sbus.socket"
PID_FILE = "/run/sbus.pid"
NO_PID_FILE = "/dev/null"
DESCRIPTOR = "/dev/fd/"


_NAMES = {"-a": "address", "-c": "close_when_empty", "-f": "foreground", "-g": "group", "-o": "others",
          "-p": "pid_file", "-r": "replace"}  # fmt: skip


class Arguments(msgspec.Struct):
    """The parsed options."""

    address: str = ADDRESS
    close_when_empty: bool = False
    foreground: bool = False
    group: bool = False
    others: bool = False
    pid_file: str = PID_FILE
    replace: bool = False
    users: tuple[str, ...] = ()


def parse(arguments: Sequence[str]) -> Arguments | None:
    """Parse the options; return None if they are invalid."""
    try:
        options, operands = getopt.getopt(list(arguments), "a:cfgop:ru:")
    except getopt.GetoptError:
        return None
    if operands:
        return None
    parsed = Arguments()
    for option, value in options:
        if option == "-u":
            parsed.users += (value,)
        else:
            setattr(parsed, _NAMES[option], value or True)
    return parsed


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the daemon and end the process: 0 after an orderly end, 1 if it could not start."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    if parsed is None:
        _say(USAGE)
        sys.exit(1)
    from babelbus.errors import BabelbusError

    try:
        _run(parsed)
    except (BabelbusError, OSError) as error:
        _say(f"sbusd: {describe(error)}")
        sys.exit(1)
    sys.exit(0)


def _run(arguments: Arguments) -> None:
    from babelbus.protocols.sbus.packets import ABSTRACT, Door, open_door

    if (arguments.group or arguments.others) and arguments.address.startswith(DESCRIPTOR):
        _say("sbusd: -g and -o have no effect on a socket that was handed over")
    door = open_door(
        Door(arguments.address, arguments.group, arguments.others, arguments.users), replace=arguments.replace
    )
    if arguments.address == ABSTRACT:
        sys.stdout.write(door.address + "\n")
        sys.stdout.flush()
    if arguments.foreground:
        asyncio.run(_serve(door, arguments, _close_standard_streams))
        return
    # From here on relative paths would be wrong.
    pid_file = None if arguments.pid_file == NO_PID_FILE else os.path.abspath(arguments.pid_file)
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        # The starting command returns when the bus accepts connections; a closed pipe without a byte is a failure.
        signal_ = os.read(ready, 1)
        os._exit(0 if signal_ else 1)
    os.close(ready)
    os.setsid()
    if os.fork():
        os._exit(0)

    def report() -> None:
        _close_standard_streams()
        if os.isatty(2):
            _replace_stream(2)
        os.chdir("/")
        os.write(tell, b"1")
        os.close(tell)

    _write_pid_file(pid_file)
    try:
        asyncio.run(_serve(door, arguments, report))
    finally:
        if pid_file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(pid_file)


class _Uncounted:
    """Stands for every metric: nobody can read metrics of this daemon, and their library takes long to load."""

    def __getattr__(self, name: str) -> "_Uncounted":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Uncounted":
        return self


async def _serve(door: object, arguments: Arguments, report_ready: Callable[[], None]) -> None:
    from babelbus.config import SbusSettings
    from babelbus.core.router import Router
    from babelbus.protocols.sbus.hub import Hub
    from babelbus.protocols.sbus.packets import OpenDoor, PacketServer

    assert isinstance(door, OpenDoor)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Before the start is reported: a signal must find the handlers (section 17).
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if arguments.foreground:
        loop.add_signal_handler(signal.SIGHUP, ended.set)
    else:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    metrics, settings = cast("Metrics", _Uncounted()), SbusSettings()
    server = PacketServer(Hub(Router(), metrics, settings), metrics, settings)
    if arguments.close_when_empty:
        server.on_empty = ended.set
    server.listen(door)
    try:
        report_ready()
        await ended.wait()
    finally:
        server.close()


def _write_pid_file(path: str | None) -> None:
    if path is None:
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)  # whatever the umask
        file.write(b"%d\n" % os.getpid())


def _close_standard_streams() -> None:
    """Close standard input and output: a reader that waits for the end of our output then knows that we are ready."""
    _replace_stream(0)
    _replace_stream(1)


def _replace_stream(descriptor: int) -> None:
    # By /dev/null, because the next file that is opened must not become a standard stream by accident.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


EXAMPLES = examples(
    "babelbus sbusd -f -a /tmp/bus          one bus at /tmp/bus, until Ctrl-C",
    "babelbus sbusd -fgo -a /run/bus -u 7   everybody may connect, but only user 7 and your own are served",
)


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],  # the original has no -h either: its usage, and exit code 1
    },
    epilog=EXAMPLES,
    options_metavar="[-a address] [-f | -p pidfile] [-u user]... [-cgor]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
def sbusd(arguments: tuple[str, ...]) -> None:
    """Run a stand-alone sbus daemon with the options of the original."""
    main(arguments)
