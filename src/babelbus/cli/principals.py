"""`babelbus principals`: who there is, with which roles and credentials, of a running server (docs/access.md)."""

from collections.abc import Callable
from typing import Any

import click

from babelbus.cli.api import path_of
from babelbus.cli.command import BusGroup, ask_first, complete, examples, json_option, yes_option
from babelbus.cli.credentials import Asked, credential_options, show_secrets
from babelbus.cli.output import human_time, print_all, print_json, print_line, print_table
from babelbus.cli.quotas import quota_option, show_quotas
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options


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


@principals.command(
    "add",
    epilog=examples(
        "babelbus principals add sensor7 --role sensors --api-key",
        "babelbus principals add alice --role admin --password",
        "babelbus principals add grafana --token --expires 90d",
        "babelbus principals add acme --role tenants --root tenants/acme --token --quota connections=20",
    ),
)
@click.argument("name")
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="A role; may be given several times.")
@click.option("--root", metavar="SUBJECT", help="What all its subjects are relative to.")
@quota_option
@credential_options
@json_option
@bus_options
def add(
    target: Target,
    name: str,
    roles: tuple[str, ...],
    root: str | None,
    quotas: dict[str, int | None],
    as_json: bool,
    asked: Asked,
) -> None:
    """Add a principal. Secrets that the server makes are shown once; passwords are never arguments."""
    body: dict[str, object] = {"name": name, "roles": roles, "credentials": asked.credentials, "issue": asked.issue}
    body |= {} if root is None else {"root": root}
    body |= {"quotas": quotas} if quotas else {}
    made = target.api().call("POST", "/api/principals", body)
    if as_json:
        print_json(made)
    else:
        print_line(f"principal {name} is there; 'babelbus access grant {name} ACTION PATTERN' lets it do something")
        show_secrets(made)


@principals.command("list", epilog=examples("babelbus principals list", "babelbus principals list --json"))
@json_option
@bus_options
def list_principals(target: Target, as_json: bool) -> None:
    """List the principals."""
    found = target.api().call("GET", "/api/principals")["principals"]
    columns: dict[str, Callable[[Any], object]] = {
        "Principal": lambda one: one["name"],
        "Roles": lambda one: ", ".join(one["roles"]),
        "Root": lambda one: one.get("root", ""),
        "Credentials": lambda one: ", ".join(sorted({each["kind"] for each in one["credentials"]})),
        "From": lambda one: one["origin"],
    }
    print_all(found, as_json, "there are no principals; 'babelbus principals add' adds one", columns)


@principals.command("show", epilog=examples("babelbus principals show sensor7"))
@click.argument("name", shell_complete=complete("principals"))
@json_option
@bus_options
def show(target: Target, name: str, as_json: bool) -> None:
    """Show a principal: its roles, its credentials without their secrets, its quotas, and its rows."""
    found = target.api().call("GET", path_of("principals", name))
    if as_json:
        print_json(found)
        return
    print_line(f"{found['name']} ({found['origin']}), roles: {', '.join(found['roles']) or 'none'}")
    if "root" in found:
        print_line(f"its subjects are relative to {found['root']}")
    credentials = [
        (one["kind"], one["id"], human_time(one["created"]), human_time(one["expires"]) if one["expires"] else "never")
        for one in found["credentials"]
    ]
    if credentials:
        print_table(("Kind", "Credential", "Made", "Expires"), credentials)
    show_quotas(found)
    rows = [(row["who"], row["action"], row["pattern"], row["effect"]) for row in found["rows"]]
    print_table(("Who", "Action", "Pattern", "Effect"), rows)


@principals.command(
    "change",
    epilog=examples(
        "babelbus principals change sensor7 --role sensors --role readers",
        "babelbus principals change sensor7 --quota subscriptions=10 --quota topics=none",
    ),
)
@click.argument("name", shell_complete=complete("principals"))
@click.option("--role", "roles", multiple=True, metavar="ROLE", help="The roles from now on, each one.")
@click.option("--no-roles", is_flag=True, help="No roles from now on.")
@click.option("--root", metavar="SUBJECT", help="What all its subjects are relative to from now on.")
@click.option("--no-root", is_flag=True, help="Its subjects are absolute from now on.")
@quota_option
@credential_options
@click.option(
    "--remove-credential",
    "removed",
    multiple=True,
    metavar="ID",
    help="Id of a credential that goes, as 'show' has it.",
)
@json_option
@bus_options
def change(
    target: Target,
    name: str,
    roles: tuple[str, ...],
    no_roles: bool,
    root: str | None,
    no_root: bool,
    quotas: dict[str, int | None],
    removed: tuple[str, ...],
    as_json: bool,
    asked: Asked,
) -> None:
    """Replace the roles or the root of a principal, set quotas, add credentials, or remove them.

    With another root, its connections end. Quotas that are not named stay; the first quota of its own ends those of
    the server for the principal.
    """
    has_root = root is not None or no_root
    if root is not None and no_root:
        raise click.UsageError("give --root or --no-root")
    if (roles and no_roles) or not (roles or no_roles or quotas or removed or asked.kinds or has_root):
        raise click.UsageError(
            "give --role, once for each role, or --no-roles; --root or --no-root; a --quota; or a credential to add "
            "or to remove"
        )
    body: dict[str, object] = {"credentials": asked.credentials, "issue": asked.issue, "remove": removed}
    body |= {"roles": roles} if roles or no_roles else {}
    body |= {"root": root} if has_root else {}
    api, path = target.api(), path_of("principals", name)
    if quotas:  # the API replaces all of them
        body["quotas"] = api.call("GET", path).get("quotas", {}) | quotas
    made = api.call("PATCH", path, body)
    if as_json:
        print_json(made)
    else:
        kinds = ", ".join(sorted({one["kind"] for one in made["credentials"]}))
        print_line(f"principal {name} has the roles: {', '.join(made['roles']) or 'none'}")
        print_line(f"and the credentials: {kinds or 'none'}")
        show_secrets(made)


@principals.command("rotate", epilog=examples("babelbus principals rotate sensor7 --fingerprint 99aa01c2..."))
@click.argument("name", shell_complete=complete("principals"))
@credential_options
@json_option
@bus_options
def rotate(target: Target, name: str, as_json: bool, asked: Asked) -> None:
    """Replace the credentials of a kind: the old ones prove nothing from now on.

    To have the old and the new one for a while: 'babelbus principals change' adds and removes.
    """
    if len(asked.kinds) != 1:
        raise click.UsageError("give the new credential, of one kind, such as --token or --fingerprint HEX")
    (kind,) = asked.kinds
    made = target.api().call("PUT", path_of("principals", name, "credentials"), {"kind": kind} | asked.of(kind))
    if as_json:
        print_json(made)
    else:
        print_line(f"principal {name} has new credentials; the old ones are void")
        show_secrets(made)


@principals.command("remove", epilog=examples("babelbus principals remove sensor7 --yes"))
@click.argument("name", shell_complete=complete("principals"))
@yes_option
@json_option
@bus_options
def remove(target: Target, name: str, yes: bool, as_json: bool) -> None:
    """Remove a principal: its connections end, its rows stay."""
    ask_first(yes, f"remove principal {name}")
    made = target.api().call("DELETE", path_of("principals", name))
    if as_json:
        print_json(made)
    else:
        print_line(f"principal {name} is gone; 'babelbus access check' names the rows that it leaves")
