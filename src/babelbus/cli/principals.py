"""`babelbus principals`: who there is, with which roles and credentials, of a running server (docs/access.md)."""

from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.access import jebp_credential
from babelbus.cli.api import path_of
from babelbus.cli.command import BusGroup, ask_first, examples, json_option, yes_option
from babelbus.cli.output import human_time, print_all, print_json, print_line, print_table
from babelbus.cli.target import Target, admin_options

fingerprint_option = click.option(
    "--fingerprint", "fingerprints", multiple=True, metavar="HEX", help="Fingerprint of a jebp certificate."
)


@click.group(
    cls=BusGroup,
    epilog=examples(
        "babelbus principals add sensor7 --role sensors --fingerprint 7db0b01f...",
        "babelbus principals rotate sensor7 --fingerprint 99aa01c2...",
        "babelbus principals list",
    ),
)
def principals() -> None:
    """Add, list, show, change, rotate and remove principals: whoever can prove who it is.

    Clients that 'babelbus clients' manages are principals too, and are changed there.
    """


@principals.command("add", epilog=examples("babelbus principals add sensor7 --role sensors"))
@click.argument("name")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="A role; may be given several times.")
@fingerprint_option
@json_option
@admin_options
def add(target: Target, name: str, roles: tuple[str, ...], fingerprints: tuple[str, ...], as_json: bool) -> None:
    """Add a principal."""
    body = {"name": name, "roles": roles, "credentials": [jebp_credential(one) for one in fingerprints]}
    made = target.api().call("POST", "/api/principals", body)
    if as_json:
        print_json(made)
    else:
        print_line(f"principal {name} is there; 'babelbus access grant {name} ACTION PATTERN' lets it do something")


@principals.command("list", epilog=examples("babelbus principals list", "babelbus principals list --json"))
@json_option
@admin_options
def list_principals(target: Target, as_json: bool) -> None:
    """List the principals."""
    found = target.api().call("GET", "/api/principals")["principals"]
    columns: dict[str, Callable[[Any], object]] = {
        "Principal": lambda one: one["name"],
        "Roles": lambda one: ", ".join(one["roles"]),
        "Credentials": lambda one: ", ".join(sorted({each["kind"] for each in one["credentials"]})),
        "From": lambda one: one["origin"],
    }
    print_all(found, as_json, "there are no principals; 'babelbus principals add' adds one", columns)


@principals.command("show", epilog=examples("babelbus principals show sensor7"))
@click.argument("name")
@json_option
@admin_options
def show(target: Target, name: str, as_json: bool) -> None:
    """Show a principal: its roles, its credentials without their secrets, and its rows."""
    found = target.api().call("GET", path_of("principals", name))
    if as_json:
        print_json(found)
        return
    print_line(f"{found['name']} ({found['origin']}), roles: {', '.join(found['roles']) or 'none'}")
    credentials = [
        (one["kind"], one["id"], human_time(one["created"]), human_time(one["expires"]) if one["expires"] else "never")
        for one in found["credentials"]
    ]
    if credentials:
        print_table(("Kind", "Credential", "Made", "Expires"), credentials)
    rows = [(row["who"], row["action"], row["pattern"], row["effect"]) for row in found["rows"]]
    print_table(("Who", "Action", "Pattern", "Effect"), rows)


@principals.command("change", epilog=examples("babelbus principals change sensor7 --role sensors --role readers"))
@click.argument("name")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="The roles from now on, each one.")
@click.option("--no-roles", is_flag=True, help="No roles from now on.")
@json_option
@admin_options
def change(target: Target, name: str, roles: tuple[str, ...], no_roles: bool, as_json: bool) -> None:
    """Replace the roles of a principal."""
    if bool(roles) == no_roles:
        raise click.UsageError("give --role, once for each role, or --no-roles")
    made = target.api().call("PATCH", path_of("principals", name), {"roles": roles})
    if as_json:
        print_json(made)
    else:
        print_line(f"principal {name} has the roles: {', '.join(made['roles']) or 'none'}")


@principals.command("rotate", epilog=examples("babelbus principals rotate sensor7 --fingerprint 99aa01c2..."))
@click.argument("name")
@fingerprint_option
@json_option
@admin_options
def rotate(target: Target, name: str, fingerprints: tuple[str, ...], as_json: bool) -> None:
    """Replace the credentials of a kind: the old ones prove nothing from now on."""
    if not fingerprints:
        raise click.UsageError("give --fingerprint with the new certificate")
    body = {"kind": "jebp", "credentials": [jebp_credential(one) for one in fingerprints]}
    made = target.api().call("PUT", path_of("principals", name, "credentials"), body)
    if as_json:
        print_json(made)
    else:
        print_line(f"principal {name} has new credentials; the old ones are void")


@principals.command("remove", epilog=examples("babelbus principals remove sensor7 --yes"))
@click.argument("name")
@yes_option
@json_option
@admin_options
def remove(target: Target, name: str, yes: bool, as_json: bool) -> None:
    """Remove a principal: its connections end, its rows stay."""
    ask_first(yes, f"remove principal {name}")
    made = target.api().call("DELETE", path_of("principals", name))
    if as_json:
        print_json(made)
    else:
        print_line(f"principal {name} is gone; 'babelbus access check' names the rows that it leaves")
