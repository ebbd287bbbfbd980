"""`babelbus clients`: who may connect. Changes the lists in the data folder, with or without a running server."""

import os
import signal
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from babelbus.cli.command import BusGroup, CommandError, ask_first, examples, json_option, yes_option
from babelbus.cli.output import note, print_all, print_json, print_line
from babelbus.cli.target import Target, folder_options, lock_owner

if TYPE_CHECKING:
    from babelbus.server.access import AccessLists, ClientEntry


@click.group(cls=BusGroup)
def clients() -> None:
    """Add, list, change and remove the clients that may connect to the server.

    A client is identified by the fingerprint of its certificate. A running server applies a change at once.
    """


@clients.command(
    "add",
    epilog=examples(
        "babelbus clients add console                          make a key for it, and say where",
        "babelbus clients add backup --admin --key-file backup.key",
        "babelbus clients add plant7 --fingerprint 7db0b01f... its owner keeps the key",
    ),
)
@click.argument("name")
@click.option("--admin", is_flag=True, help="The client may create and remove topics.")
@click.option("--fingerprint", metavar="HEX", help="Fingerprint of a certificate that the client has already.")
@click.option(
    "--key-file", metavar="FILE", help="Its key; made if it does not exist.  [default: <data>/conf/clients/NAME.key]"
)
@json_option
@folder_options
def add_client(
    target: Target, name: str, admin: bool, fingerprint: str | None, key_file: str | None, as_json: bool
) -> None:
    """Add a client. Without --fingerprint a key is made for it here."""
    from babelbus.server.access import ClientEntry

    if fingerprint and key_file:
        raise click.UsageError("--fingerprint means that the client has a key: leave --key-file out")
    target.existing_folder()
    lists = _lists(target)
    if any(entry.name == name for entry in lists.clients.values()):
        raise CommandError(f"there is a client {name!r} already; 'babelbus clients change' changes it")
    if fingerprint is None:
        key_file, fingerprint = _make_key(target, name, key_file)
    entry_of_key = lists.clients.get(fingerprint.lower())
    if entry_of_key is not None:
        raise CommandError(f"this certificate is that of client {entry_of_key.name!r} already")
    entry = ClientEntry(fingerprint.lower(), name, admin)
    lists.put(entry)
    effect = _apply(target)
    server = target.own_fingerprint()
    if as_json:
        extra = {"key_file": key_file, "server_fingerprint": server, "effective": effect.startswith("in effect")}
        print_json(_as_dict(entry) | extra)
        return
    print_line(f"client {name} may connect{' and administer' if admin else ''}: {entry.fingerprint}")
    if key_file:
        print_line(f"its key is {key_file}; keep it secret, and take it to the client")
    if server:
        print_line(f"the server's fingerprint, for the client to pin: {server}")
    print_line(effect)


@clients.command("list", epilog=examples("babelbus clients list", "babelbus clients list --json | jq -r .fingerprint"))
@json_option
@folder_options
def list_clients(target: Target, as_json: bool) -> None:
    """List the clients that may connect."""
    target.existing_folder()
    entries = sorted(_lists(target).clients.values(), key=lambda entry: entry.name)
    columns = {
        "Client": lambda entry: entry["name"],
        "Admin": lambda entry: "yes" if entry["admin"] else "no",
        "Fingerprint": lambda entry: entry["fingerprint"],
    }
    print_all([_as_dict(entry) for entry in entries], as_json, "", columns)
    if not as_json and (server := target.own_fingerprint()):
        note(f"the server's own fingerprint: {server}")


@clients.command(
    "change",
    epilog=examples("babelbus clients change console --admin", "babelbus clients change console --name desk"),
)
@click.argument("who")
@click.option("--name", metavar="NAME", help="New name of the client.")
@click.option("--admin/--no-admin", default=None, help="Whether the client may create and remove topics.")
@json_option
@folder_options
def change_client(target: Target, who: str, name: str | None, admin: bool | None, as_json: bool) -> None:
    """Update the name or the rights of a client. WHO is its name or its fingerprint."""
    from babelbus.server.access import ClientEntry

    if name is None and admin is None:
        raise click.UsageError("nothing to change: give --name, --admin or --no-admin")
    target.existing_folder()
    lists = _lists(target)
    old = _find(lists, who)
    if name is not None and any(entry_.name == name and entry_ != old for entry_ in lists.clients.values()):
        raise CommandError(f"there is a client {name!r} already")
    entry = ClientEntry(old.fingerprint, old.name if name is None else name, old.admin if admin is None else admin)
    lists.put(entry)
    effect = _apply(target)
    if as_json:
        print_json(_as_dict(entry) | {"effective": effect.startswith("in effect")})
    else:
        print_line(f"client {entry.name} {'may' if entry.admin else 'may not'} administer")
        print_line(effect)


@clients.command("remove", epilog=examples("babelbus clients remove console", "babelbus clients remove console --yes"))
@click.argument("who")
@yes_option
@json_option
@folder_options
def remove_client(target: Target, who: str, yes: bool, as_json: bool) -> None:
    """Remove a client's right to connect; its connections are closed. Its key file is kept.

    WHO is its name or its fingerprint.
    """
    target.existing_folder()
    lists = _lists(target)
    entry = _find(lists, who)
    ask_first(yes, f"remove client {entry.name}, {entry.fingerprint}")
    lists.remove(entry.fingerprint)
    effect = _apply(target)
    if as_json:
        print_json({"removed": entry.fingerprint, "name": entry.name, "effective": effect.startswith("in effect")})
    else:
        print_line(f"client {entry.name} is removed")
        print_line(effect)


def _lists(target: Target) -> "AccessLists":
    from babelbus.server.access import AccessLists
    from babelbus.storage.files import LocalFiles

    lists = AccessLists(LocalFiles(), target.conf("").rstrip(os.sep))
    lists.reload()
    return lists


def _find(lists: "AccessLists", who: str) -> "ClientEntry":
    entries = [entry for entry in lists.clients.values() if who in (entry.name, entry.fingerprint)]
    if not entries:
        raise CommandError(f"there is no client {who!r}; 'babelbus clients list' shows all")
    if len(entries) > 1:
        raise CommandError(f"{len(entries)} clients have the name {who!r}; give the fingerprint of one of them")
    return entries[0]


def _make_key(target: Target, name: str, path: str | None) -> tuple[str, str]:
    """Return the path and the fingerprint of a client's key, which is made if it does not exist."""
    from babelbus.protocols.jebp.identity import Identity

    if path is None:
        folder = target.conf("clients")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, f"{quote(name, safe='')}.key")  # a name may hold a slash
    path = os.path.abspath(path)
    if not os.path.exists(path):
        Identity.generate().save(path, name=name)
    return path, Identity.load(path).fingerprint


def _apply(target: Target) -> str:
    """Send a running server the request to read its lists again, and return the outcome as a sentence.

    The administration endpoint answers when the lists are read; SIGHUP does the same where it is switched off.
    """
    pid = lock_owner(target.folder)
    if pid is None:
        return "no server runs on this data folder; the next start reads the list"
    running = target.running()
    if running is not None and "admin" in running.addresses:
        target.api().call("POST", "/api/reload")
        return f"in effect: the server (process {pid}) has read the list again"
    try:
        os.kill(pid, signal.SIGHUP)
    except OSError as error:
        return f"the server has not read the list: send SIGHUP to process {pid} ({error.strerror})"
    return f"in effect: the server (process {pid}) was sent SIGHUP to read the list again"


def _as_dict(entry: "ClientEntry") -> dict[str, object]:
    return {"name": entry.name, "fingerprint": entry.fingerprint, "admin": entry.admin}
