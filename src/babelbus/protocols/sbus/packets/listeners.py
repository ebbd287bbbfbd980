"""Doors of a bus for the processes of this machine: addresses, file modes, allowed users.

Specification: docs/specifications/sbus.md, 13 and 14.
"""

import contextlib
import os
import pwd
import secrets
import socket
import stat
import struct

import msgspec

from babelbus.errors import ConfigError
from babelbus.protocols.sbus.credentials import Credentials

ABSTRACT = "/dev/unix/abstract"
DESCRIPTOR = "/dev/fd/"
NAME_BYTES = 108
"""Size of `sun_path`; abstract names are bound with all of it."""
BACKLOG = 1024
SO_PEERGROUPS = 59
GROUPS_MAX = 1024
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Door(msgspec.Struct, frozen=True):
    """One address and who may come in through it. `users` are names or numbers; none means whoever the mode lets in."""

    address: str
    group: bool = False
    others: bool = False
    users: tuple[str, ...] = ()

    @property
    def mode(self) -> int:
        """Mode of the socket's file."""
        return 0o700 | (0o070 if self.group else 0) | (0o007 if self.others else 0)


class OpenDoor:
    """A socket that listens. `path` is the file that goes with it, or None; `address` is how it is reached."""

    def __init__(self, listener: socket.socket, address: str, path: str | None, users: frozenset[int] | None) -> None:
        self.listener = listener
        self.address = address
        self.users = users
        self._path = path
        self._file = _identity(path) if path is not None else None

    def lets_in(self, credentials: Credentials) -> bool:
        """Return whether this user is served; root is not exempt."""
        return self.users is None or credentials.uid in self.users

    def close(self) -> None:
        """Stop listening and remove the file, unless another one has taken its place."""
        self.listener.close()
        if self._path is not None and _identity(self._path) == self._file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def read_door(text: str) -> Door:
    """Read `ADDRESS[,group][,others][,user=NAME]...`, as the setting sbus.more_doors has it.

    Raises:
        ConfigError: a part of it is something else.
    """
    address, *options = text.split(",")
    users = tuple(option.removeprefix("user=") for option in options if option.startswith("user="))
    unknown = [one for one in options if one not in ("group", "others") and not one.startswith("user=")]
    if unknown or not address or "" in users:
        raise ConfigError(f"sbus door {text!r}: write ADDRESS[,group][,others][,user=NAME]...")
    return Door(address, "group" in options, "others" in options, users)


def open_door(door: Door, *, replace: bool = False, replace_stale: bool = False, any_length: bool = False) -> OpenDoor:
    """Open a listener; the mode is right from the moment the file exists.

    `replace` removes whatever is at the path first, `replace_stale` only a socket that nobody listens on. `any_length`
    takes a path longer than the 107 bytes that an address has room for, by way of its folder's descriptor.

    Raises:
        ConfigError: there is no such user, or the address is empty.
        OSError: the address cannot be bound; its `filename` says which.
    """
    users = frozenset({os.geteuid(), *map(_uid_of, door.users)}) if door.users else None
    address = door.address
    if not address or "\0" in address:
        raise ConfigError("an sbus address is not empty and has no NUL")
    descriptor = address.removeprefix(DESCRIPTOR)
    try:
        if address.startswith(DESCRIPTOR) and descriptor.isascii() and descriptor.isdigit():
            return OpenDoor(_adopt(int(descriptor)), address, None, users)
        name = _abstract_name(address)
        if name is not None:
            return OpenDoor(_bind(name, None), f"{ABSTRACT}/{name.hex()}", None, users)
        path = os.path.abspath(address)  # the working directory may change later
        if replace or (replace_stale and _is_stale(path)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return OpenDoor(_bind_path(path, door.mode, any_length), path, path, users)
    except OSError as error:
        error.filename = address
        raise


def credentials_of(connection: socket.socket) -> Credentials:
    """Return who connected, as the kernel noted it at that moment."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return Credentials(gid=gid, uid=uid, pid=pid, groups=_groups_of(connection))


def _groups_of(connection: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups of who connected; none if the kernel tells none, or if they are too many."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GROUPS_MAX * 4)
    except OSError:
        return ()
    return tuple(number for (number,) in struct.iter_unpack("I", raw))


def _uid_of(user: str) -> int:
    if user.isascii() and user.isdigit() and int(user) < 2**31:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigError(f"there is no user {user!r}") from None


def _abstract_name(address: str) -> bytes | None:
    """Return the name of an abstract address: all 108 bytes, as its clients have to give it too."""
    if address == ABSTRACT:
        return b"\0" + secrets.token_bytes(NAME_BYTES - 1)
    digits = address.removeprefix(f"{ABSTRACT}/")
    if digits == address or len(digits) % 2 or len(digits) > 2 * NAME_BYTES:
        return None
    if not digits or set(digits) - set("0123456789abcdefABCDEF"):
        return None
    return bytes.fromhex(digits).ljust(NAME_BYTES, b"\0")


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _adopt(descriptor: int) -> socket.socket:
    try:
        adopted = socket.socket(fileno=descriptor)
    except OverflowError:
        raise OSError(9, "Bad file descriptor") from None
    adopted.setblocking(False)
    if not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        adopted.listen(BACKLOG)
    return adopted


def _bind(name: bytes | str, mode: int | None) -> socket.socket:
    made = _socket()
    try:
        if mode is None:
            made.bind(name)
        else:
            # The file gets the socket's mode less the umask: set before bind, so that it is never more open.
            os.fchmod(made.fileno(), mode)
            before = os.umask(0)
            try:
                made.bind(name)
            finally:
                os.umask(before)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _bind_path(path: str, mode: int, any_length: bool) -> socket.socket:
    if len(os.fsencode(path)) < NAME_BYTES:
        return _bind(path, mode)
    if not any_length:
        raise OSError(36, "File name too long")
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        return _bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}", mode)
    finally:
        os.close(folder)


def _is_stale(path: str) -> bool:
    """Return whether a socket is left of a server that was killed."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with _socket() as probe:
            folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
            try:
                probe.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            finally:
                os.close(folder)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return which file this is; with its birth, for numbers of removed files are given again."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
