"""`babelbus clients`: who may connect. Asks the server, or changes the lists in the data folder if no server runs."""

import os
import signal
from typing import Any, Protocol
from urllib.parse import quote

import click

from babelbus.cli.api import path_of
from babelbus.cli.command import BusGroup, CommandError, ask_first, complete, examples, json_option, yes_option
from babelbus.cli.output import print_all, print_json, print_line
from babelbus.cli.target import Target, lock_owner
from babelbus.cli.target_options import client_options
from babelbus.storage.notes import MEMBERSHIP_NAME

Client = dict[str, Any]
"""Name, fingerprint and right of a client: `name`, `fingerprint`, `admin`."""


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
    "--key-file",
    metavar="FILE",
    help="Its key; made if missing.  [default: <data>/conf/clients/NAME.key; elsewhere ./NAME.key]",
)
@json_option
@client_options
def add_client(
    target: Target, name: str, admin: bool, fingerprint: str | None, key_file: str | None, as_json: bool
) -> None:
    """Add a client. Without --fingerprint a key is made for it here."""
    if fingerprint and key_file:
        raise click.UsageError("--fingerprint means that the client has a key: leave --key-file out")
    from babelbus.core.access.model import check_name

    check_name(name)  # before a key is made for it
    lists = _lists(target)
    entries = lists.entries()
    if any(entry["name"] == name for entry in entries):
        raise CommandError(f"there is a client {name!r} already; 'babelbus clients change' changes it")
    if fingerprint is None:
        key_file, fingerprint = _make_key(target, name, key_file)
    owner = next((entry["name"] for entry in entries if entry["fingerprint"] == fingerprint.lower()), None)
    if owner is not None:
        raise CommandError(f"this certificate is that of client {owner!r} already")
    entry = {"name": name, "fingerprint": fingerprint.lower(), "admin": admin}
    lists.add(entry)
    effect, server = lists.effect(), lists.server_fingerprint
    if as_json:
        extra = {"key_file": key_file, "server_fingerprint": server, "effective": effect.startswith("in effect")}
        print_json(entry | extra)
        return
    print_line(f"client {name} may connect{' and administer' if admin else ''}: {entry['fingerprint']}")
    if key_file:
        print_line(f"its key is {key_file}; keep it secret, and take it to the client")
    if server:
        print_line(f"the server's fingerprint, for the client to pin: {server}")
    print_line(effect)


@clients.command("list", epilog=examples("babelbus clients list", "babelbus clients list --json | jq -r .fingerprint"))
@json_option
@client_options
def list_clients(target: Target, as_json: bool) -> None:
    """List the clients that may connect, and the fingerprint of the server."""
    lists = _lists(target)
    columns = {
        "Client": lambda entry: entry["name"],
        "Admin": lambda entry: "yes" if entry["admin"] else "no",
        "Fingerprint": lambda entry: entry["fingerprint"],
    }
    entries = sorted(lists.entries(), key=lambda entry: str(entry["name"]))
    server = lists.server_fingerprint
    print_all([entry | {"server_fingerprint": server} for entry in entries], as_json, "there are no clients", columns)
    if not as_json and server:
        print_line(f"the server's own fingerprint: {server}")


@clients.command(
    "change",
    epilog=examples("babelbus clients change console --admin", "babelbus clients change console --name desk"),
)
@click.argument("who", shell_complete=complete("clients"))
@click.option("--name", metavar="NAME", help="New name of the client.")
@click.option("--admin/--no-admin", default=None, help="Whether the client may create and remove topics.")
@json_option
@client_options
def change_client(target: Target, who: str, name: str | None, admin: bool | None, as_json: bool) -> None:
    """Update the name or the rights of a client. WHO is its name or its fingerprint."""
    if name is None and admin is None:
        raise click.UsageError("nothing to change: give --name, --admin or --no-admin")
    lists = _lists(target)
    entries = lists.entries()
    old = _find(entries, who)
    if name is not None and any(one["name"] == name and one != old for one in entries):
        raise CommandError(f"there is a client {name!r} already")
    entry = old | {"name": old["name"] if name is None else name, "admin": old["admin"] if admin is None else admin}
    lists.change(entry)
    effect = lists.effect()
    if as_json:
        print_json(entry | {"effective": effect.startswith("in effect")})
    else:
        print_line(f"client {entry['name']} {'may' if entry['admin'] else 'may not'} administer")
        print_line(effect)


@clients.command("remove", epilog=examples("babelbus clients remove console", "babelbus clients remove console --yes"))
@click.argument("who", shell_complete=complete("clients"))
@yes_option
@json_option
@client_options
def remove_client(target: Target, who: str, yes: bool, as_json: bool) -> None:
    """Remove a client's right to connect; its connections are closed. Its key file is kept.

    WHO is its name or its fingerprint.
    """
    lists = _lists(target)
    entry = _find(lists.entries(), who)
    ask_first(yes, f"remove client {entry['name']}, {entry['fingerprint']}")
    lists.remove(entry["fingerprint"])
    effect = lists.effect()
    if as_json:
        print_json(
            {"removed": entry["fingerprint"], "name": entry["name"], "effective": effect.startswith("in effect")}
        )
    else:
        print_line(f"client {entry['name']} is removed")
        print_line(effect)


class _Lists(Protocol):
    """The list of clients of one server."""

    server_fingerprint: str | None
    """Fingerprint of the server; `None` before its first start."""

    def entries(self) -> list[Client]:
        """Return the clients."""

    def add(self, entry: Client) -> None:
        """Add a client."""

    def change(self, entry: Client) -> None:
        """Replace the client with the fingerprint of the entry."""

    def remove(self, fingerprint: str) -> None:
        """Remove a client."""

    def effect(self) -> str:
        """Return a sentence that says whether a change is in effect; it begins with "in effect" if so."""


class _ServerLists:
    """The list of a running server, through its API."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._api = target.api()
        self._effect = "in effect: the server has taken it"
        self.server_fingerprint: str | None = None

    def entries(self) -> list[Client]:
        answer = self._api.call("GET", "/api/clients")
        self.server_fingerprint = answer["server_fingerprint"]
        entries: list[Client] = answer["clients"]
        return entries

    def add(self, entry: Client) -> None:
        self._api.call("POST", "/api/clients", entry)

    def change(self, entry: Client) -> None:
        """Replace the client with the fingerprint of the entry."""
        body = {"name": entry["name"], "admin": entry["admin"]}
        self._api.call("PATCH", path_of("clients", entry["fingerprint"]), body)

    def remove(self, fingerprint: str) -> None:
        try:
            self._api.call("DELETE", path_of("clients", fingerprint))
        except CommandError:
            if not self._is_refused():
                raise
            # The server closes the connections of a client that it removes, before it answers.
            self._effect = "in effect: it was the client of this command, which the server refuses from now on"

    def _is_refused(self) -> bool:
        """Return whether the server does not know the client of this command any more."""
        if self._target.remote is None:
            return False
        from babelbus.client import NotAuthorisedError

        self._target.close()
        try:
            with self._target.connect():
                return False
        except CommandError as error:
            return isinstance(error.__cause__, NotAuthorisedError)

    def effect(self) -> str:
        return self._effect


class _FolderLists:
    """The list in a data folder, on which no server with an endpoint runs."""

    def __init__(self, target: Target) -> None:
        from babelbus.server.access import AccessLists
        from babelbus.storage.files import LocalFiles

        target.existing_folder()
        self._target = target
        self._lists = AccessLists(LocalFiles(), target.conf("").rstrip(os.sep))
        self._lists.reload()
        self.server_fingerprint = target.own_fingerprint()

    def entries(self) -> list[Client]:
        clients = self._lists.clients.values()
        return [{"name": one.name, "fingerprint": one.fingerprint, "admin": one.admin} for one in clients]

    def add(self, entry: Client) -> None:
        from babelbus.server.access import ClientEntry

        self._lists.put(ClientEntry(entry["fingerprint"], entry["name"], entry["admin"]))

    def change(self, entry: Client) -> None:
        """Replace the client with the fingerprint of the entry."""
        self.add(entry)

    def remove(self, fingerprint: str) -> None:
        self._lists.remove(fingerprint)

    def effect(self) -> str:
        """Send a running server the signal to read its list again, and return the outcome as a sentence."""
        pid = lock_owner(self._target.folder)
        if pid is None:
            return "no server runs on this data folder; the next start reads the list"
        try:
            os.kill(pid, signal.SIGHUP)
        except OSError as error:
            return f"the server has not read the list: send SIGHUP to process {pid} ({error.strerror})"
        return f"in effect: the server (process {pid}) was sent SIGHUP to read the list again"


def _lists(target: Target) -> _Lists:
    """Return the list of the server elsewhere, or of the server or the folder here."""
    if target.remote is None:
        running = target.running()
        if running is None or "admin" not in running.addresses:
            if os.path.exists(os.path.join(target.folder, MEMBERSHIP_NAME)):
                raise CommandError(
                    "the lists of clients are in the cluster: call this on the machine of its owner while it runs, with"
                    " admin.enabled"
                )
            return _FolderLists(target)
    return _ServerLists(target)


def _find(entries: list[Client], who: str) -> Client:
    entries = [entry for entry in entries if who in (entry["name"], entry["fingerprint"])]
    if not entries:
        raise CommandError(f"there is no client {who!r}; 'babelbus clients list' shows all")
    if len(entries) > 1:
        raise CommandError(f"{len(entries)} clients have the name {who!r}; give the fingerprint of one of them")
    return entries[0]


def _make_key(target: Target, name: str, path: str | None) -> tuple[str, str]:
    """Return the path and the fingerprint of a client's key, which is made if it does not exist."""
    from babelbus.protocols.jebp.identity import Identity

    file = f"{quote(name, safe='')}.key"  # a name may hold a slash
    if path is None and target.remote:
        path = file
    elif path is None:
        folder = target.conf("clients")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = os.path.join(folder, file)
    path = os.path.abspath(path)
    if not os.path.exists(path):
        Identity.generate().save(path, name=name)
    return path, Identity.load(path).fingerprint
