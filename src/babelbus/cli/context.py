"""`babelbus context`: servers elsewhere by name, and which server commands use (docs/command-line.md)."""

import os
from typing import Any

import click
import msgspec

from babelbus.cli import contexts
from babelbus.cli.command import BusGroup, CommandError, complete, examples, json_option
from babelbus.cli.contexts import LOCAL, Context
from babelbus.cli.output import print_all, print_json, print_line, print_table
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options


@click.group(
    cls=BusGroup,
    epilog=examples(
        "babelbus login prod --server bus.example.org:5310     make a context, check and pin its server",
        "babelbus context use prod                             all commands use it from now on",
        "babelbus topics list --context prod                   one command uses it",
        "babelbus context use none                             back to the data folder here",
    ),
)
def context() -> None:
    """Add, list, use, show and remove names of servers elsewhere.

    A command uses the server that its options name, else the environment (BABELBUS_SERVER, BABELBUS_CONTEXT), else the
    context in use, else the server on the data folder here. 'show' says which that is, and why.
    """


@context.command(
    "add",
    epilog=examples(
        "babelbus context add prod --server bus.example.org:5310 --identity ada.key --fingerprint 7db0b01f...",
        "babelbus context add prod --server bus.example.org:5310 --use",
    ),
)
@click.argument("name")
@click.option("--server", required=True, metavar="HOST:PORT", help="Address of the server's jebp listener.")
@click.option("--identity", metavar="FILE", help="Key file to connect with.  [default: that of 'babelbus login']")
@click.option("--fingerprint", metavar="HEX", help="Fingerprint of the server.  [default: 'babelbus login' pins it]")
@click.option("--use", is_flag=True, help="Let commands use it from now on.")
@click.option("--replace", is_flag=True, help="Replace a context of this name.")
@json_option
def add_context(
    name: str, server: str, identity: str | None, fingerprint: str | None, use: bool, replace: bool, as_json: bool
) -> None:
    """Add a server elsewhere under a name. Nothing is connected: 'babelbus login NAME' does that."""
    kept = contexts.load()
    path = None if identity is None else os.path.abspath(os.path.expanduser(identity))
    made = Context(server, path, None if fingerprint is None else fingerprint.lower())
    contexts.check(name, made)
    if name in kept.contexts and not replace:
        raise CommandError(f"there is a context {name!r} already; --replace replaces it")
    current = name if use else kept.current
    contexts.save(contexts.Contexts(current, kept.contexts | {name: made}))
    if as_json:
        print_json(_json(name, made, current))
        return
    print_line(f"context {name} is {server}")
    if made.fingerprint is None:
        print_line(f"its fingerprint is not pinned: 'babelbus login {name}' shows and pins it")
    if current != name:
        print_line(f"'babelbus context use {name}' lets commands use it")


@context.command("list", epilog=examples("babelbus context list", "babelbus context list --json | jq -r .name"))
@json_option
def list_contexts(as_json: bool) -> None:
    """List the contexts; '*' marks the context in use."""
    kept = contexts.load()
    columns = {
        "": lambda item: "*" if item["in_use"] else "",
        "Context": lambda item: item["name"],
        "Server": lambda item: item["server"],
        "Identity": lambda item: item["identity"],
        "Fingerprint": lambda item: item["fingerprint"] or "not pinned",
    }
    items = [_json(name, one, kept.current) for name, one in kept.contexts.items()]
    print_all(items, as_json, "there are no contexts; 'babelbus login NAME --server HOST:PORT' makes one", columns)


@context.command("use", epilog=examples("babelbus context use prod", "babelbus context use none"))
@click.argument("name", shell_complete=complete("contexts"))
@json_option
def use_context(name: str, as_json: bool) -> None:
    """Set the context that commands use from now on; 'none' is the data folder here."""
    kept = contexts.load()
    chosen = None if name == LOCAL else kept.get(name)
    contexts.save(msgspec.structs.replace(kept, current=None if chosen is None else name))
    if as_json:
        print_json({"current": None if chosen is None else name})
    elif chosen is None:
        print_line("commands use the server on the data folder here")
    else:
        print_line(f"commands use context {name}, {chosen.server}")


@context.command(
    "show", epilog=examples("babelbus context show", "babelbus context show --context prod --json | jq -r .server")
)
@json_option
@bus_options
def show_context(target: Target, as_json: bool) -> None:
    """Show the server and the identity that commands with these options would use, and why. Nothing is connected."""
    rows = _explain(target)
    if as_json:
        print_json({name: value for name, value, _ in rows} | {"context": target.chosen[0] if target.chosen else None})
    else:
        print_table(("Part", "Value", "From"), [(name, value or "-", why) for name, value, why in rows])


@context.command("remove", epilog=examples("babelbus context remove prod"))
@click.argument("name", shell_complete=complete("contexts"))
@json_option
def remove_context(name: str, as_json: bool) -> None:
    """Remove a context. Its key file is kept."""
    kept = contexts.load()
    kept.get(name)
    left = {other: one for other, one in kept.contexts.items() if other != name}
    contexts.save(contexts.Contexts(None if kept.current == name else kept.current, left))
    if as_json:
        print_json({"removed": name, "was_in_use": kept.current == name})
    else:
        end = ": commands use the server on the data folder here" if kept.current == name else ""
        print_line(f"context {name} is removed{end}")


def _json(name: str, one: Context, current: str | None) -> dict[str, Any]:
    identity = one.identity or contexts.own_key_path()
    return {
        "name": name,
        "server": one.server,
        "identity": identity,
        "fingerprint": one.fingerprint,
        "in_use": name == current,
    }


def _explain(target: Target) -> list[tuple[str, str | None, str]]:
    """Return name, value and origin of each part of the target."""
    command = click.get_current_context()

    def source(name: str) -> str:
        return target.origin(command, name)

    chosen = target.chosen
    where = f"context {chosen[0]}" if chosen else f"data folder {target.folder}"
    rows: list[tuple[str, str | None, str]] = []
    if target.admin:
        rows.append(("endpoint", target.admin, source("admin")))
    if target.server:
        rows.append(("server", target.server, source("server")))
    elif chosen:
        rows.append(("server", chosen[1].server, f"{where}, {source('context')}"))
    else:
        running = target.running()
        address = None if running is None else running.addresses.get("jebp")
        rows.append(("server", address, where if running else f"{where}, on which no server runs"))
    path = target.key_path()
    rows.append(("identity", path if os.path.exists(path) else None, _why_key(target, where, path, source)))
    if target.server_fingerprint:
        rows.append(("fingerprint", target.server_fingerprint.lower(), source("server_fingerprint")))
    elif chosen or target.server:
        pinned = chosen[1].fingerprint if chosen else None
        rows.append(("fingerprint", pinned, where if pinned else "not pinned: any server is taken"))
    else:
        rows.append(("fingerprint", target.own_fingerprint(), where))
    return rows


def _why_key(target: Target, where: str, path: str, source: Any) -> str:
    why: str = source("identity") if target.identity else where
    if not target.identity and path == contexts.own_key_path():
        why = "the key of 'babelbus login'"
    return why if os.path.exists(path) else f"there is no key file {path}"
