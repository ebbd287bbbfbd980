"""Which cluster a data folder belongs to, and the stream of the cluster's files."""

import secrets
from typing import Any
from urllib.parse import quote

import msgspec

from babelbus.storage.files import FileSystem
from babelbus.storage.jetstream.client import NO_STREAM, ApiError
from babelbus.storage.jetstream.errors import NatsAwayError, NatsRefusedError, StreamAlteredError
from babelbus.storage.jetstream.frame import Kind, decode
from babelbus.storage.jetstream.ownership import Ownership
from babelbus.storage.jetstream.streams import (
    FIXED,
    IDENTITY,
    OWNER,
    Installation,
    check_config,
    gone,
    make_stream,
    stream_name,
)
from babelbus.storage.jetstream.streams import NOTE_NAME as STREAMS_NAME
from babelbus.storage.notes import MEMBERSHIP_NAME, Note

LABEL = "files"
FILE = "$file"
FIXED_FILES = FIXED | {"max_msgs_per_subject": 2}
"""The message before the last one stays, in case that the last one is of an owner whose time was over."""
OWN_NAMES = ("topics", "groups.0", "groups.1", "staging", "jetstream.json", "db.sqlite", "conf/server_key")
"""Entries of the data folder of a server that is in no cluster."""


class Membership(msgspec.Struct, frozen=True):
    """The note in the folder of a member: which cluster the folder belongs to."""

    installation: str
    prefix: str
    stream: str
    """The identity of the stream of the files."""
    format: int = 1


def join(ownership: Ownership, local: FileSystem, folder: str) -> None:
    """Check, without the lease, that a data folder belongs to the cluster of its prefix, or may; wait for NATS.

    Raises: as `open_membership`.
    """
    ownership.patiently(lambda: open_membership(ownership, local, folder, make=False))


def read_small_file(ownership: Ownership, name: str) -> bytes | None:
    """Return a file of the cluster without the lease, as the last owner stored it; `None` if there is no such file.

    Raises:
        NatsAwayError: NATS does not answer.
        StreamAlteredError: the file is damaged, or is too large for one message.
    """
    prefix = ownership.settings.prefix
    stream, subject = stream_name(prefix, LABEL), file_subject(prefix, name)

    async def read() -> bytes | None:
        try:
            message = await ownership.nats.get_from_leader(stream, last_by_subj=subject)
        except ApiError as error:
            if error.code == NO_STREAM:
                return None
            raise NatsAwayError(f"stream {stream}: {error}") from error
        frame = None if message is None else decode(message.data, message.sequence)
        if message is None or (frame is not None and frame.head.kind == Kind.GONE):
            return None
        if frame is None or frame.data is None or frame.head.kind != Kind.FILE:
            raise StreamAlteredError(f"stream {stream}, sequence {message.sequence}: {name} cannot be read")
        return frame.data

    return ownership.nats.call(read(), ownership.settings.timeout_seconds)


def file_subject(prefix: str, name: str) -> str:
    """Return the subject of a file, whose name is below the data folder."""
    return ".".join((prefix, LABEL, FILE, *map(token_of, name.split("/"))))


def token_of(part: str) -> str:
    """Return a part of a name as a token of a subject."""
    return quote(part, safe="").replace(".", "%2E")


async def open_membership(
    ownership: Ownership, local: FileSystem, folder: str, *, make: bool, moves_in: bool = False
) -> Membership | None:
    """Return the cluster of a data folder: check the stream, or make it if it never was and `make` says so.

    With `moves_in`, the folder has the data of a server, and the stream must be new, or of a run before.

    Raises:
        StreamAlteredError: the stream is gone, altered, or of another cluster than the folder.
        NatsRefusedError: the folder is of a server of its own, or JetStream cannot make the stream.
    """
    prefix = ownership.settings.prefix
    note = Note(local, f"{folder}/{MEMBERSHIP_NAME}", Membership)
    known = note.read()
    if known is not None and known.prefix != prefix:
        raise NatsRefusedError(f"jetstream.prefix is {prefix!r}, and this data folder belongs to {known.prefix!r}")
    name = stream_name(prefix, LABEL)
    config = await config_of(ownership, name)
    if config is None:
        if known is not None:
            raise gone(name)
        streams = Note(local, f"{folder}/{STREAMS_NAME}", Installation).read() if moves_in else None
        if streams is None and await config_of(ownership, stream_name(prefix, "0")) is not None:
            raise NatsRefusedError(
                f"stream {name} is not there, and {stream_name(prefix, '0')} is: the streams are of a server that is in"
                " no cluster ('babelbus migrate' moves its data folder in), or somebody deleted the stream"
            )
        if not moves_in:
            _check_free(local, folder)
        if not make:
            return None
        installation = secrets.token_hex(16) if streams is None else streams.installation
        made = Membership(installation, prefix, secrets.token_hex(8))
        await make_stream(ownership.nats, ownership.settings, LABEL, made.installation, made.stream, FIXED_FILES)
        note.write(made)
        return made
    if known is not None:
        check_config(name, config, known.installation, known.stream, FIXED_FILES)
        return known
    metadata = config.get("metadata") or {}
    known = Membership(metadata.get(OWNER, ""), prefix, metadata.get(IDENTITY, ""))
    if not moves_in:
        _check_free(local, folder)
    elif await ownership.subjects(name, f"{prefix}.{LABEL}.{FILE}.>"):
        raise NatsRefusedError(f"stream {name} has the data of a cluster already: set another jetstream.prefix")
    check_config(name, config, known.installation, known.stream, FIXED_FILES)
    note.write(known)
    return known


async def config_of(ownership: Ownership, stream: str) -> dict[str, Any] | None:
    """Return the configuration of a stream, `None` if there is no such stream."""
    try:
        config: dict[str, Any] = (await ownership.nats.api(f"STREAM.INFO.{stream}"))["config"]
    except ApiError as error:
        if error.code != NO_STREAM:
            raise NatsAwayError(f"stream {stream}: {error}") from error
        return None
    return config


def _check_free(local: FileSystem, folder: str) -> None:
    """Check that a folder has no server of its own.

    Raises:
        NatsRefusedError: it has.
    """
    for name in OWN_NAMES:
        if local.exists(f"{folder}/{name}"):
            raise NatsRefusedError(
                f"data.folder {folder} has the data of a server that is in no cluster ({name}): move it in with"
                " 'babelbus migrate', or name an empty folder"
            )
