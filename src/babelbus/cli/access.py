"""`babelbus access`: the table of who may do what, of a running server (docs/access.md)."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from babelbus.cli.command import BusGroup, CommandError, ask_first, complete, examples, json_option, yes_option
from babelbus.cli.credentials import Asked, credential_options, show_secrets
from babelbus.cli.output import plural, print_all, print_json, print_line
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options

ACTIONS = ("publish", "subscribe", "read", "consume", "write-state", "manage", "admin", "*")
Command = Callable[..., Any]

version_option = click.option(
    "--version", "version", type=click.IntRange(0), metavar="N", help="Only if the table still has this version."
)


def _row_arguments(command: Command) -> Command:
    for part in reversed(
        (
            click.argument("who"),
            click.argument("action", type=click.Choice(ACTIONS), metavar="ACTION"),
            click.argument("pattern"),
            version_option,
            json_option,
            bus_options,
        )
    ):
        command = part(command)
    return command


@click.group(
    cls=BusGroup,
    epilog=examples(
        "babelbus access grant role:sensors publish 'plant/{name}/#'",
        "babelbus access deny '*' '*' 'plant/secret/#'",
        "babelbus access explain alice publish plant/line1/heat",
        "babelbus access enable --administrator alice",
    ),
)
def access() -> None:
    """List, grant, deny, revoke and explain who may do what.

    WHO is a principal, role:NAME, or '*' for everybody. In a PATTERN, '?' is one element, '#' at the end the element
    before it and all below, and {name} the name of the principal. Any row that denies wins.
    """


@access.command("list", epilog=examples("babelbus access list", "babelbus access list alice --json"))
@click.argument("who", required=False)
@json_option
@bus_options
def list_rows(target: Target, who: str | None, as_json: bool) -> None:
    """List the rows of the table, or those of WHO."""
    table = target.api().call("GET", "/api/access")
    rows = [row for row in table["rows"] if who in (None, row["who"])]
    columns: dict[str, Callable[[Any], object]] = {
        "Who": lambda row: row["who"],
        "Action": lambda row: row["action"],
        "Pattern": lambda row: row["pattern"],
        "Effect": lambda row: row["effect"],
        "From": lambda row: row["origin"],
    }
    print_all(rows, as_json, "the table has no such rows; 'babelbus access grant' adds one", columns)
    if not as_json:
        state = "on" if table["enforcing"] else "off ('babelbus access enable' turns it on)"
        print_line(f"version {table['version']}; the gate is {state}")


@access.command("grant", epilog=examples("babelbus access grant alice consume 'orders/#'"))
@_row_arguments
def grant(target: Target, who: str, action: str, pattern: str, version: int | None, as_json: bool) -> None:
    """Add a row that allows WHO an action on the subjects of a PATTERN."""
    _put(target, who, action, pattern, "allow", version, as_json)


@access.command("deny", epilog=examples("babelbus access deny role:guests '*' 'plant/secret/#'"))
@_row_arguments
def deny(target: Target, who: str, action: str, pattern: str, version: int | None, as_json: bool) -> None:
    """Add a row that denies WHO an action on the subjects of a PATTERN, whatever other rows allow."""
    _put(target, who, action, pattern, "deny", version, as_json)


def _put(target: Target, who: str, action: str, pattern: str, effect: str, version: int | None, as_json: bool) -> None:
    row = {"who": who, "action": action, "pattern": pattern, "effect": effect}
    made = target.api().call("POST", "/api/access/rows", {"rows": [row], "version": version})
    if as_json:
        print_json(row | made)
    else:
        print_line(f"{effect} {who} {action} {pattern}: version {made['version']}")


@access.command("revoke", epilog=examples("babelbus access revoke alice consume 'orders/#'"))
@click.option("--deny", "denied", is_flag=True, help="Remove the row that denies, not the one that allows.")
@_row_arguments
def revoke(
    target: Target, who: str, action: str, pattern: str, version: int | None, as_json: bool, denied: bool
) -> None:
    """Remove a row of the table; it takes effect at once."""
    row = {"who": who, "action": action, "pattern": pattern, "effect": "deny" if denied else "allow"}
    made = target.api().call("DELETE", "/api/access/rows", {"rows": [row], "version": version})
    if as_json:
        print_json(row | made)
    else:
        print_line(f"removed {row['effect']} {who} {action} {pattern}: version {made['version']}")
        for other in made.get("allowing", ()):  # a server of an earlier release does not say it
            command = shlex.join(["babelbus", "access", "deny", who, action, pattern])
            print_line(f"{who} still may, because of the row: {_text(other)}; to except {pattern} from it: {command}")


@access.command("roles", epilog=examples("babelbus access roles", "babelbus access roles --json"))
@json_option
@bus_options
def roles(target: Target, as_json: bool) -> None:
    """List the roles and the principals that have them."""
    found = target.api().call("GET", "/api/access")["roles"]
    items = [{"role": role, "principals": names} for role, names in found.items()]
    columns: dict[str, Callable[[Any], object]] = {
        "Role": lambda item: item["role"],
        "Principals": lambda item: ", ".join(item["principals"]),
    }
    print_all(items, as_json, "there are no roles", columns)


@access.command("explain", epilog=examples("babelbus access explain alice publish plant/line1/heat"))
@click.argument("principal", shell_complete=complete("principals"))
@click.argument("action", type=click.Choice(ACTIONS[:-1]), metavar="ACTION")
@click.argument("subject")
@json_option
@bus_options
def explain(target: Target, principal: str, action: str, subject: str, as_json: bool) -> None:
    """Show whether a principal may do something, and the row that decides."""
    query = {"principal": principal, "action": action, "subject": subject}
    found: dict[str, Any] = target.api().ask("GET", "/api/access/explain", query, dict[str, Any])
    if as_json:
        print_json(found)
        return
    print_line(f"{principal} {'may' if found['allowed'] else 'may not'} {action} {found['subject']}")
    row = found["row"]
    if row is not None:
        print_line(f"because of the row: {_text(row)}")
    elif not found["exists"]:
        print_line(f"because there is no principal {principal}")
    else:
        print_line("because no row allows it")
    if not found["enforcing"]:
        print_line("the gate is off: nobody is asked yet")


def _text(row: dict[str, str]) -> str:
    return f"{row['effect']} {row['who']} {row['action']} {row['pattern']} ({row['origin']})"


@access.command("check", epilog=examples("babelbus access check"))
@json_option
@bus_options
def check(target: Target, as_json: bool) -> None:
    """Check the table: rows that can never match, and principals without rows. Exit code 1 if there are any."""
    faults = target.api().call("GET", "/api/access/faults")["faults"]
    if as_json:
        print_json({"faults": faults})
    for fault in () if as_json else faults:
        print_line(fault)
    if faults:
        raise CommandError(f"{plural(len(faults), 'row or principal')} without effect" if len(faults) == 1
                           else f"{len(faults)} rows or principals without effect")  # fmt: skip
    if not as_json:
        print_line("every row can match, and every principal has rows")


@access.command(
    "enable", epilog=examples("babelbus access enable --administrator alice --password", "babelbus access enable --off")
)
@click.option("--administrator", "admin_name", metavar="NAME", help="Principal that gets the role admin.")
@credential_options
@click.option("--off", is_flag=True, help="Turn the gate off again.")
@yes_option
@json_option
@bus_options
def enable(target: Target, admin_name: str | None, off: bool, yes: bool, as_json: bool, asked: Asked) -> None:
    """Start to ask: from now on principals do what the table grants, and nothing else.

    The token of the data folder stays an administrator.
    """
    if asked.kinds and not admin_name:
        raise click.UsageError("credentials go with --administrator")
    ask_first(yes, f"turn the gate {'off' if off else 'on'}")
    body = {"enforce": not off, "admin": admin_name, "credentials": asked.credentials, "issue": asked.issue}
    state = target.api().call("PUT", "/api/access/mode", body)
    if as_json:
        print_json(state)
    elif off and state["enforcing"]:
        print_line('the gate stays on: the server\'s configuration has access.mode = "enforce"')
    else:
        print_line(f"the gate is {'on' if state['enforcing'] else 'off'}")
        show_secrets(state)


@access.command("apply", epilog=examples("babelbus access apply table.toml"))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@version_option
@json_option
@bus_options
def apply(target: Target, file: Path, version: int | None, as_json: bool) -> None:
    """Replace what the last table file brought by the rows and principals of FILE (TOML)."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{file} is not UTF-8: {error}") from error
    made = target.api().call("POST", "/api/access/apply", {"text": text, "path": str(file), "version": version})
    if as_json:
        print_json(made)
    else:
        print_line(f"the table has version {made['version']}")
