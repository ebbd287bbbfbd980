"""The options that name the server of a command, and which of them counts: they fill the `Target` of the command."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import click

from babelbus.cli.command import complete
from babelbus.cli.contexts import CONTEXT_VARIABLE, LOCAL
from babelbus.cli.target import (
    ADMIN_VARIABLE,
    CA_VARIABLE,
    CLIENT_CERT_VARIABLE,
    FINGERPRINT_VARIABLE,
    HTTPS,
    IDENTITY_VARIABLE,
    SERVER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    USER_VARIABLE,
    Target,
)


def _check_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    scheme = HTTPS if param.name == "admin" and value.startswith(HTTPS) else ""
    host, _, port = value.removeprefix("http://").removeprefix(scheme).rstrip("/").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise click.BadParameter(f"{value!r} is no address: write HOST:PORT", ctx, param)
    return f"{scheme}{host}:{port}"


_OPTIONS = {
    "context": click.option(
        "--context", metavar="NAME", envvar=CONTEXT_VARIABLE, shell_complete=complete("contexts"),
        help=f"Context with the server, '{LOCAL}' for the data folder here; also {CONTEXT_VARIABLE}.  "
             "[default: of 'babelbus context use']",
    ),
    "server": click.option(
        "--server", metavar="HOST:PORT", envvar=SERVER_VARIABLE, callback=_check_address,
        help=f"Server to connect to; also {SERVER_VARIABLE}.  [default: of the context, else on the data folder]",
    ),
    "identity": click.option(
        "--identity", metavar="FILE", envvar=IDENTITY_VARIABLE,
        help=f"Key file to connect with; also {IDENTITY_VARIABLE}.  "
             "[default: of the context, else the administrator's of the data folder]",
    ),
    "server_fingerprint": click.option(
        "--server-fingerprint", metavar="HEX", envvar=FINGERPRINT_VARIABLE,
        help="Fingerprint that the server's certificate must have.  [default: of the context or data folder]",
    ),
    "admin": click.option(
        "--admin", metavar="HOST:PORT", envvar=ADMIN_VARIABLE, callback=_check_address,
        help=f"Administration endpoint, as https://HOST:PORT if it speaks TLS; also {ADMIN_VARIABLE}.  "
             "[default: of the server on the data folder]",
    ),
    "ca": click.option(
        "--ca", metavar="FILE", envvar=CA_VARIABLE,
        help="Certificates in PEM of those who sign that of the administration endpoint; "
             f"also {CA_VARIABLE}.  [default: those of the system]",
    ),
    "client_cert": click.option(
        "--client-cert", metavar="FILE", envvar=CLIENT_CERT_VARIABLE,
        help="Certificate and key in PEM, where the administration endpoint asks for a certificate; "
             f"also {CLIENT_CERT_VARIABLE}.",
    ),
    "user": click.option(
        "--user", metavar="NAME", envvar=USER_VARIABLE,
        help=f"Principal whose password is asked for; also {USER_VARIABLE}.  [default: the built-in administrator]",
    ),
    "token_file": click.option(
        "--token-file", metavar="FILE", envvar=TOKEN_FILE_VARIABLE,
        help=f"File with the token of a principal; also {TOKEN_FILE_VARIABLE}.",
    ),
    "data_folder": click.option(
        "--data-folder", metavar="FOLDER", help="The server's data folder.  [default: from the configuration]"
    ),
    "config_path": click.option(
        "--config", "config_path", metavar="FILE",
        help="The server's configuration.  [default: ./babelbus.toml if it is there]",
    ),
}  # fmt: skip


def _with_target(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command, whose first argument is the `Target` of their values."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**values: Any) -> Any:
            given = {name: values.pop(name) for name in names}
            if "context" in names:
                settle(given, click.get_current_context())
            target = Target(**given)
            try:
                return command(target, **values)
            finally:
                target.close()

        wrapped: Callable[..., Any] = update_wrapper(run, command)
        for name in reversed(names):
            wrapped = _OPTIONS[name](wrapped)
        return wrapped

    return decorate


def target_values(command: click.Context) -> dict[str, Any]:
    """Return the values of the options that name a server, for a command that is being completed."""
    given = {name: command.params.get(name) for name in _OPTIONS}
    settle(given, command)
    return given


_PLACES = ("server", "admin", "data_folder", "config_path")
"""Options that name a server as a context does."""


def settle(given: dict[str, Any], command: click.Context) -> None:
    """Drop what loses: of a context and the other options that name a server, an option wins over the environment.

    Raises:
        UsageError: options name a context and another server.
    """
    program = command.find_root()
    if given["context"] is None or _is_option(program, "context"):
        given["context"] = program.params.get("context") or given["context"]
    if given["context"] is None:
        return
    places = [name for name in _PLACES if given.get(name) is not None]
    options = [name for name in places if _is_option(command, name)]
    if not (_is_option(command, "context") or _is_option(program, "context")):
        if places:  # of two variables the address wins, which says more
            given["context"] = None
    elif options:
        flag = "--config" if options[0] == "config_path" else f"--{options[0].replace('_', '-')}"
        raise click.UsageError(f"--context and {flag} both name a server: give one of them")
    else:
        for name in places:
            given[name] = None


def _is_option(command: click.Context, name: str) -> bool:
    return command.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


folder_options = _with_target("data_folder", "config_path")
"""The options that name a data folder."""
client_options = _with_target("context", "server", "identity", "server_fingerprint", "data_folder", "config_path")
"""The options of commands with an `--admin` of their own."""
bus_options = _with_target(*_OPTIONS)
"""The options that name a server, and the identity to use there."""
