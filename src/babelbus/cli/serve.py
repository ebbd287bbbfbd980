"""`babelbus serve` and `babelbus config`: the settings as flags, a server, and its report when it is ready."""

import errno
import os
import re
import socket
import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli.command import BusCommand, CommandError, examples
from babelbus.cli.output import print_json, print_line
from babelbus.cli.target import Running, Target, load_config
from babelbus.config import Config, describe, render
from babelbus.errors import StorageError

if TYPE_CHECKING:
    from babelbus.server.process import Running as RunningServer

ADDRESSES_NAME = "addresses"


def flag_of(key: str) -> str:
    """Return the flag of a setting: `jebp.port` is --jebp-port."""
    return "--" + key.replace(".", "-").replace("_", "-")


def metavar_of(type_text: str) -> str:
    """Return how help shows the value of a setting: "duration or none" is DURATION|none."""
    kinds = {"size", "duration", "integer", "number", "text"}
    return "|".join(word.upper() if word in kinds else word for word in type_text.split(" or "))


class SettingOption(click.Option):
    """The flag of one setting. Its value is text, which the configuration reads like the environment."""

    def __init__(self, key: str, type_text: str, default: str, doc: str) -> None:
        self.key = key
        is_switch = type_text == "true or false"
        flag = flag_of(key)
        names = [f"{flag}/--no-{flag[2:]}" if is_switch else flag, "setting_" + key.replace(".", "_")]
        if key == "server.insecure":
            names.insert(1, "--insecure")
        metavar = None if is_switch else metavar_of(type_text)
        super().__init__(names, default=None, metavar=metavar, help=f"{doc}.  [default: {default}]")


class SettingsCommand(BusCommand):
    """A command that takes every setting as a flag; its help shows them by section."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [SettingOption(entry.key, entry.type, entry.default, entry.doc) for entry in describe()]

    def invoke(self, ctx: click.Context) -> Any:
        """Collect the values of the flags under their dotted keys."""
        options = [param for param in self.params if isinstance(param, SettingOption)]
        values = {option.key: ctx.params.pop(str(option.name)) for option in options}
        ctx.params["flags"] = {key: value for key, value in values.items() if value is not None}
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options: the command's own, then the settings below the name of their section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            name = f"Settings, {param.key.partition('.')[0]}" if isinstance(param, SettingOption) else "Options"
            if row is not None:
                sections.setdefault(name, []).append(row)
        for name, rows in sections.items():
            with formatter.section(name):
                formatter.write_dl(rows)


SERVE_EXAMPLES = examples(
    "babelbus serve                                   data in ./data, loopback only",
    "babelbus serve --data-folder /var/lib/babelbus --jebp-host 0.0.0.0",
    "babelbus serve --server-any-port --json       free ports, shown in one JSON line",
    "babelbus config --defaults > babelbus.toml       a file with every setting, to change",
)


@click.command(cls=SettingsCommand, epilog=SERVE_EXAMPLES)
@click.option(
    "--config", metavar="FILE", help="Read settings from this file.  [default: ./babelbus.toml if it is there]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line when ready.")
def serve(config: str | None, as_json: bool, flags: dict[str, object]) -> None:
    """Run a server until SIGTERM or Ctrl-C.

    The first start makes the data folder, the server's certificate and an administrator's identity, which the other
    commands on this machine find. A setting is read from its flag, else from its environment variable
    (--jebp-port is BABELBUS_JEBP_PORT), else from the file. SIGHUP reads the lists of clients and the certificates
    again.

    Exit code 0 after a graceful stop, 1 if it could not start.
    """
    settings = load_config(config, flags)
    from babelbus.server.logs import configure
    from babelbus.server.process import run

    # What the lines below say too is logged for files and supervisors; a person should read it once.
    told_here = not as_json and sys.stdout.isatty() and sys.stderr.isatty() and settings.log.level == "info"
    configure("warning" if told_here else settings.log.level, settings.log.format)
    folder = os.path.abspath(settings.data.folder)
    first_start = not os.path.exists(os.path.join(folder, "conf", "server_key"))
    noted: list[str] = []

    def ready(server: "RunningServer") -> None:
        path = os.path.join(folder, "conf", ADDRESSES_NAME)
        _note_addresses(path, server)
        noted.append(path)
        configure(settings.log.level, settings.log.format)
        _announce(server, first_start, as_json)

    try:
        run(settings, ready)
    except (OSError, StorageError) as error:
        text = _explain(settings, folder, error) if isinstance(error, OSError) else _explain_storage(folder, error)
        if text is None:
            raise
        raise CommandError(text) from error
    finally:
        for path in noted:
            if os.path.exists(path):
                os.unlink(path)


NO_SUCH_ADDRESS = "choose an address of this machine with the flags that end in -host"
NO_RIGHT = "let this user write there, or choose another folder with --data-folder"
FOLDER_ADVICE = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), NO_RIGHT),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or choose another folder with --data-folder"),
    **dict.fromkeys((errno.ENOTDIR, errno.ENOENT), "choose a folder that can be made with --data-folder"),
    errno.ENOLCK: "the file system has no locks; choose a folder of another one with --data-folder",
}


def _explain(settings: Config, folder: str, error: OSError) -> str | None:
    """Return why a start failed and what to do; `None` if the error is about neither an address nor the data folder."""
    if isinstance(error, socket.gaierror):
        return f"cannot listen: {error.strerror}; {NO_SUCH_ADDRESS}"
    if error.filename is None and error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen: {error.strerror}; {NO_SUCH_ADDRESS}"
    if error.filename is None and error.errno in (errno.EADDRINUSE, errno.EACCES):
        return f"cannot listen: {error.strerror}; {_advice(settings, str(error))}"
    path = folder if error.filename is None else os.path.abspath(os.fsdecode(error.filename))
    is_ours = path == folder or path.startswith(f"{folder}/") or folder.startswith(f"{path}/")
    advice = FOLDER_ADVICE.get(error.errno or 0)
    return f"{path}: {error.strerror}; {advice}" if is_ours and advice is not None else None


def _explain_storage(folder: str, error: StorageError) -> str | None:
    """Return why the data folder cannot be used and what to do; `None` if the error is about something else."""
    cause = error.__cause__
    if not isinstance(cause, OSError):
        return None
    advice = FOLDER_ADVICE.get(cause.errno or 0)
    return None if advice is None else f"{cause.filename or folder}: {cause.strerror}; {advice}"


def _advice(settings: Config, problem: str) -> str:
    """Return the flags that help when an address is taken: those of the port that the error names, or of all ports."""
    sections = {}
    for entry in describe():
        section, _, name = entry.key.partition(".")
        if name.endswith("port") and name != "any_port":
            sections[entry.key] = getattr(getattr(settings, section), name)
    taken = [key for key, port in sections.items() if port and re.search(rf"\D{port}\D", f" {problem} ")]
    if not taken:
        return "choose other ports with --server-any-port or the flags that end in -port, or stop what listens there"
    flags = " or ".join(map(flag_of, taken))
    hosts = " or ".join(dict.fromkeys(flag_of(f"{key.partition('.')[0]}.host") for key in taken))
    return f"choose another port with {flags} (0: any), another address with {hosts}, or stop what listens there"


def _note_addresses(path: str, server: "RunningServer") -> None:
    """Write the addresses of this server to a file, for the commands on this machine (see `target`)."""
    draft = f"{path}.new"
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode(Running(os.getpid(), server.addresses, server.admin_tls)) + b"\n")
    os.replace(draft, path)


def _announce(server: "RunningServer", first_start: bool, as_json: bool) -> None:
    import babelbus

    conf = os.path.join(server.folder, "conf")
    admin_key = os.path.join(conf, "admin_key")
    if as_json:
        print_json(
            {
                "ready": True,
                "version": babelbus.__version__,
                "pid": os.getpid(),
                "data_folder": server.folder,
                "addresses": server.addresses,
                "server_fingerprint": server.fingerprint,
                "admin_key": admin_key,
                "first_start": first_start,
            }
        )
        return
    print_line(f"babelbus {babelbus.__version__} serves {server.folder}")
    scheme = "https://" if server.admin_tls else "http://"
    for protocol, address in server.addresses.items():
        print_line(f"{protocol:6} listens on {scheme if protocol == 'admin' else ''}{address}")
    if not server.enforcing:
        print_line("access: nobody is asked for rights; 'babelbus access enable' turns the gate on")
    if first_start and server.fingerprint:
        print_line(
            f"first start: made the server's certificate {server.fingerprint} ({os.path.join(conf, 'server_key')}) "
            f"and an administrator's identity ({admin_key})"
        )
    if "admin" in server.addresses:
        folder = "" if os.path.abspath("data") == server.folder else f" --data-folder {server.folder}"
        print_line(f"next, in another shell: babelbus status{folder}; babelbus topics create orders{folder}")
        chosen = Target().chosen if not folder else None
        if chosen is not None:
            print_line(f"commands use context {chosen[0]}, not this server: 'babelbus context use none' changes that")
    if sys.stdout.isatty():
        print_line("Ctrl-C stops the server")


CONFIG_EXAMPLES = examples(
    "babelbus config                                the settings of a server started here",
    "babelbus config --defaults > babelbus.toml     a file with every setting and its meaning",
    "babelbus config --config /etc/bus.toml         check a file (exit code 1 if it is wrong)",
)


@click.command(cls=SettingsCommand, epilog=CONFIG_EXAMPLES)
@click.option(
    "--config", metavar="FILE", help="Read settings from this file.  [default: ./babelbus.toml if it is there]"
)
@click.option("--defaults", is_flag=True, help="Show the defaults, with the meaning of each setting.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def config(config: str | None, defaults: bool, as_json: bool, flags: dict[str, object]) -> None:
    """Show the configuration as a babelbus.toml, and check it.

    File, environment and flags are read as by 'serve'. The error for a wrong setting names its source.
    """
    settings = Config() if defaults else load_config(config, flags)
    if as_json:
        print_json(settings)
    else:
        print_line(render(settings, comments=defaults).strip())
