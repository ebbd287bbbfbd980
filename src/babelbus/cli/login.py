"""`babelbus login`: an identity for the user, a connection to a server elsewhere, and its fingerprint."""

import getpass
import os
from typing import TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli import contexts
from babelbus.cli.command import BusCommand, CommandError, ask_first, complete, examples, json_option
from babelbus.cli.contexts import Context
from babelbus.cli.output import note, print_json, print_line

if TYPE_CHECKING:
    from babelbus.client import BlockingClient, Identity

NAME = "default"


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus login prod --server bus.example.org:5310      the first time: make context and key, check, pin",
        "babelbus login prod                                    check again",
        "babelbus login prod --server bus:5310 --fingerprint 7db0b01f... --use    without a question",
    ),
)
@click.argument("name", required=False, shell_complete=complete("contexts"))
@click.option("--server", metavar="HOST:PORT", help="Address of the server's jebp listener.  [default: of the context]")
@click.option("--identity", metavar="FILE", help="Key file to connect with.  [default: yours, made if missing]")
@click.option("--fingerprint", metavar="HEX", help="The server's, as its administrator told you: nothing is asked.")
@click.option("--repin", is_flag=True, help="Take another fingerprint than the pinned one: the server has a new key.")
@click.option("--use", is_flag=True, help="Let commands use the context from now on.")
@click.option("--yes", is_flag=True, help="Pin the fingerprint of the server that answers without a question.")
@json_option
def login(
    name: str | None,
    server: str | None,
    identity: str | None,
    fingerprint: str | None,
    repin: bool,
    use: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Connect to a server elsewhere for the first time, or check that it works.

    Makes an identity key if you have none, and shows its fingerprint, which the administrator of the server must add
    once. Then connects, shows the fingerprint of the server, and pins it in the context NAME: from then on commands
    talk to this server only. Without NAME the context is the one in use, or 'default'.
    """
    kept = contexts.load()
    name = name or kept.current or NAME
    old = kept.contexts.get(name)
    if server is None and old is None:
        raise click.UsageError(f"there is no context {name!r} yet: add --server HOST:PORT")
    if server is not None and old is not None and old.server != server and not repin:
        old = Context(server, old.identity)  # another server has another fingerprint
    key = contexts.own_key_path() if identity is None else os.path.abspath(os.path.expanduser(identity))
    if identity is None and old is not None and old.identity is not None:
        key = old.identity
    context = Context(server or (old.server if old else ""), key, old.fingerprint if old and not repin else None)
    expected = context.fingerprint if fingerprint is None else fingerprint.lower()
    contexts.check(name, msgspec.structs.replace(context, fingerprint=expected))
    own, made = _identity(key)
    if made and not as_json:
        print_line(f"made an identity key for you: {key}; keep it secret")
    contexts.save(contexts.Contexts(name if use else kept.current, kept.contexts | {name: context}))
    client = _connect(name, context, own, expected)
    try:
        answered, version = client.server_fingerprint, _version(client)
    finally:
        client.close()
    if expected is None:
        note(f"the server at {context.server} has the fingerprint {answered}")
        note("'babelbus clients list' on the server's machine shows it: compare the two")
        ask_first(yes, f"pin this fingerprint in context {name}")
    pinned = msgspec.structs.replace(context, fingerprint=answered)
    contexts.save(contexts.Contexts(name if use else kept.current, kept.contexts | {name: pinned}))
    done: dict[str, Any] = {
        "context": name,
        "server": context.server,
        "version": version,
        "server_fingerprint": answered,
        "identity": key,
        "fingerprint": own.fingerprint,
        "identity_made": made,
        "in_use": use or kept.current == name,
    }
    if as_json:
        print_json(done)
        return
    print_line(f"your fingerprint: {own.fingerprint}")
    print_line(f"context {name}: connected to {context.server}, {version}, pinned {answered}")
    if not done["in_use"]:
        print_line(f"'babelbus context use {name}' lets commands use it")


def _identity(path: str) -> "tuple[Identity, bool]":
    """Return the identity of a key file, and whether the file was made now."""
    from babelbus.client import Identity

    made = not os.path.exists(path)
    if made:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        Identity.generate().save(path, name=getpass.getuser())
    return Identity.load(path), made


def _connect(name: str, context: Context, own: "Identity", expected: str | None) -> "BlockingClient":
    """Return a connected client.

    Raises:
        CommandError: it cannot connect; the message says what to do.
    """
    from babelbus.client import BlockingClient, ConnectionLostError, NotAuthorisedError, UntrustedServerError

    client = BlockingClient(context.server, identity=own, server_fingerprint=expected, reconnect=False)
    try:
        return client.__enter__()
    except NotAuthorisedError:
        user = "".join(letter for letter in getpass.getuser() if letter.isalnum()) or "you"
        raise CommandError(
            f"the server at {context.server} does not know you yet. Ask its administrator to run "
            f"'babelbus clients add {user} --fingerprint {own.fingerprint}' (with --admin if you administer), "
            f"then run 'babelbus login {name}' again"
        ) from None
    except UntrustedServerError as error:
        raise CommandError(
            f"the server at {context.server} has the fingerprint {error.fingerprint}, not {error.expected}: it is "
            f"another server, or it has a new key. If its administrator says that this is right, "
            f"'babelbus login {name} --repin' takes it"
        ) from None
    except ConnectionLostError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise CommandError(
                f"nothing listens on {context.server}: check the address; on the server's machine 'babelbus config' "
                "shows jebp.host and jebp.port (127.0.0.1 is that machine alone)"
            ) from None
        raise


def _version(client: "BlockingClient") -> str:
    """Return the version of the server, as a phrase."""
    from babelbus.client import UnsupportedByServerError, admin_of

    try:
        status, body = admin_of(client).ask("GET", "/api/server", b"", 10.0)
    except UnsupportedByServerError as error:
        return f"a server without administration over jebp ({error})"
    if status != 200:
        return "a server whose version you may not see"
    return "babelbus " + str(msgspec.json.decode(body, type=dict[str, Any])["version"])
