"""The options of commands that make credentials, and how the secrets that the server made are shown, once."""

import sys
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import click
import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.output import note, print_line
from babelbus.units import UnitError, format_duration, parse_duration

Command = Callable[..., Any]
NAME_KINDS = ("uri", "dns", "cn")


def _read_lifetime(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    from babelbus.identities.credential import LIFETIME_MS_MAX

    try:
        lifetime_ms = round(parse_duration(value) * 1000)
    except UnitError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    if not 0 < lifetime_ms <= LIFETIME_MS_MAX:
        longest = format_duration(LIFETIME_MS_MAX / 1000)
        text = f"{value!r} is not between 1ms and {longest}; without --expires it is valid for ever"
        raise click.BadParameter(text, ctx, param)
    return lifetime_ms


class Asked(msgspec.Struct, frozen=True):
    """The credentials that the options ask for: `credentials` are sent as they are, `issue` the server makes."""

    credentials: list[dict[str, object]]
    issue: list[dict[str, object]]

    @property
    def kinds(self) -> list[str]:
        """The kinds of all of them, each once."""
        return list(dict.fromkeys(str(one["kind"]) for one in (*self.credentials, *self.issue)))

    def of(self, kind: str) -> dict[str, object]:
        """Return the part of a request with the credentials of a kind."""
        return {
            "credentials": [one for one in self.credentials if one["kind"] == kind],
            "issue": [one for one in self.issue if one["kind"] == kind],
        }


_OPTIONS = (
    click.option(
        "--password", is_flag=True, help="A password, which is asked for, or the first line of standard input."
    ),
    click.option("--new-password", is_flag=True, help="A password that the server makes and that is shown once."),
    click.option("--token", is_flag=True, help="A token that is shown once."),
    click.option("--api-key", is_flag=True, help="An API key for zbus, whose secret is shown once."),
    click.option(
        "--expires", "lifetime_ms", metavar="TIME", callback=_read_lifetime,
        help="How long password, token and API key are valid, as 90d.  [default: for ever]",
    ),
    click.option(
        "--fingerprint", "fingerprints", multiple=True, metavar="HEX", help="Fingerprint of a jebp certificate."
    ),
    click.option(
        "--tls-name", "tls_names", multiple=True, nargs=2, metavar="uri|dns|cn VALUE",
        help="Name in a client certificate of TLS.",
    ),
    click.option("--uid", "uids", multiple=True, type=click.IntRange(0), help="Number of a user of this machine."),
    click.option("--gid", "gids", multiple=True, type=click.IntRange(0), help="Number of a group of this machine."),
)  # fmt: skip


def credential_options(command: Command) -> Command:
    """Add the options; the command gets their values as `asked`."""

    def run(*arguments: Any, **values: Any) -> Any:
        names = ("password", "new_password", "token", "api_key", "lifetime_ms", "fingerprints", "tls_names", "uids")
        return command(*arguments, asked=_ask(**{name: values.pop(name) for name in (*names, "gids")}), **values)

    wrapped: Command = update_wrapper(run, command)
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def _ask(
    *,
    password: bool,
    new_password: bool,
    token: bool,
    api_key: bool,
    lifetime_ms: int | None,
    fingerprints: tuple[str, ...],
    tls_names: tuple[tuple[str, str], ...],
    uids: tuple[int, ...],
    gids: tuple[int, ...],
) -> Asked:
    if password and new_password:
        raise click.UsageError("--password asks for a password, --new-password makes one: give one of them")
    lifetime = {} if lifetime_ms is None else {"lifetime_ms": lifetime_ms}
    issue: list[dict[str, object]] = []
    if password or new_password:
        issue.append({"kind": "password", **({"password": read_password()} if password else {}), **lifetime})
    issue += [{"kind": "token", **lifetime}] if token else []
    issue += [{"kind": "api-key", **lifetime}] if api_key else []
    if lifetime and not issue:
        raise click.UsageError("--expires goes with --password, --new-password, --token or --api-key")
    for kind, value in tls_names:
        if kind not in NAME_KINDS:
            raise click.UsageError(f"--tls-name {kind}: a name is one of {', '.join(NAME_KINDS)}")
        issue.append({"kind": "tls", "name_kind": kind, "value": value})
    issue += [{"kind": "peer", "uid": number} for number in uids]
    issue += [{"kind": "peer", "gid": number} for number in gids]
    return Asked([jebp_credential(one) for one in fingerprints], issue)


def read_password(*, confirm: bool = True) -> str:
    """Read a password from the terminal without showing it, else the first line of standard input.

    Raises:
        CommandError: standard input has no password.
    """
    if sys.stdin.isatty():
        password: str = click.prompt("Password", hide_input=True, confirmation_prompt=confirm, err=True)
        return password
    line = sys.stdin.readline().rstrip("\n")
    if not line:
        raise CommandError("standard input has no password: its first line is the password")
    return line


def show_secrets(made: dict[str, Any]) -> None:
    """Print the secrets of an answer, which nobody can ask for again."""
    for one in made.get("secrets", ()):
        key = f" of key {one['key']}" if "key" in one else ""
        print_line(f"{one['kind']} {one['id']}{key}: {one['secret']}")
    if made.get("secrets"):
        note("what is shown here is kept nowhere, and cannot be shown again")


def jebp_credential(fingerprint: str) -> dict[str, object]:
    """Return the credential of a jebp certificate as the API takes it."""
    text = fingerprint.lower()
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise click.UsageError(f"{fingerprint!r} is no fingerprint (64 hex digits)")
    return {"kind": "jebp", "id": text, "data": {"fingerprint": text}}
