"""Contexts: servers elsewhere by name, in a file of the user (docs/command-line.md, "Contexts").

current = "prod"

[contexts.prod]
server = "bus.example.org:5310"
identity = "/home/ada/.config/babelbus/identity.key"
fingerprint = "7db0b01f39d179aacf7b03dbd7dd9d71f641598bed40fb9839d3c1e1117e666f"
"""

import os
import re
import secrets
from typing import Final

import msgspec

from babelbus.cli.command import CommandError

CONTEXT_VARIABLE: Final = "BABELBUS_CONTEXT"
LOCAL: Final = "none"
"""The name that stands for no context: the data folder here."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A server elsewhere; without a fingerprint any server at the address is taken."""

    server: str
    identity: str | None = None
    fingerprint: str | None = None


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The contexts of a user, and the name of the context that commands use."""

    current: str | None = None
    contexts: dict[str, Context] = {}

    def get(self, name: str) -> Context:
        """Return a context.

        Raises:
            CommandError: there is no such context.
        """
        if name not in self.contexts:
            names = ", ".join(self.contexts) or "none so far"
            raise CommandError(f"there is no context {name!r} ({names}); 'babelbus context add NAME' makes one")
        return self.contexts[name]


def folder() -> str:
    """Return the folder of the user's configuration of Babelbus."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    # The specification of XDG: a path that is not absolute is ignored.
    return os.path.join(home if os.path.isabs(home) else os.path.expanduser("~/.config"), "babelbus")


def file_path() -> str:
    """Return the path of the file with the contexts."""
    return os.path.join(folder(), "contexts.toml")


def own_key_path() -> str:
    """Return the path of the identity key that `babelbus login` makes."""
    return os.path.join(folder(), "identity.key")


def load() -> Contexts:
    """Read the contexts; without a file there are none.

    Raises:
        CommandError: the file cannot be read, is damaged, or is open to others.
    """
    path = file_path()
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise CommandError(f"the file of contexts {path} cannot be read: {error.strerror}") from error
    import tomllib

    if mode & 0o077:
        # Who may write it chooses the server that we talk to.
        raise CommandError(f"the file of contexts {path} is open to others (mode {mode & 0o777:03o}): chmod 600 it")
    try:
        contexts = msgspec.convert(tomllib.loads(content.decode()), Contexts)
        for name, context in contexts.contexts.items():
            check(name, context)
        if contexts.current is not None:
            contexts.get(contexts.current)
    except (ValueError, msgspec.ValidationError, CommandError) as error:
        raise CommandError(f"the file of contexts {path} is wrong: {error}; correct it, or remove it") from error
    return contexts


def save(contexts: Contexts) -> None:
    """Write the contexts, whole or not at all, readable by their owner only."""
    path = file_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    draft = f"{path}.{secrets.token_hex(4)}.new"
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(render(contexts))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.unlink(draft)
        raise


def render(contexts: Contexts) -> str:
    """Return the text of the file."""
    lines = ["# The servers of the command line: 'babelbus context' changes this file."]
    if contexts.current is not None:
        lines.append(f"current = {_quote(contexts.current)}")
    for name, context in contexts.contexts.items():
        lines += ["", f"[contexts.{_quote(name)}]"]
        lines += [f"{field} = {_quote(value)}" for field, value in msgspec.to_builtins(context).items()]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    """Return a basic string of TOML, whose escapes are those of JSON."""
    return msgspec.json.encode(text).decode()


def check(name: str, context: Context) -> None:
    """Check the values of a context.

    Raises:
        CommandError: a value is wrong.
    """
    if name == LOCAL or not _NAME.fullmatch(name):
        raise CommandError(f"{name!r} is no name of a context: letters, digits, '.', '_' and '-', and not {LOCAL!r}")
    host, _, port = context.server.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CommandError(f"context {name}: {context.server!r} is no address: write HOST:PORT")
    if context.fingerprint is not None and not _FINGERPRINT.fullmatch(context.fingerprint):
        raise CommandError(f"context {name}: {context.fingerprint!r} is no fingerprint: 64 hex digits in small letters")
    if context.identity is not None and (not os.path.isabs(context.identity) or not context.identity.isprintable()):
        raise CommandError(f"context {name}: {context.identity!r} is no absolute path of a key file")
