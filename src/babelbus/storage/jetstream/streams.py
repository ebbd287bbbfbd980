"""The streams that are the shards: made once, and looked at afterwards, because others may change or delete them.

A stream says in its metadata which installation it belongs to and which stream it is; `jetstream.json` in the data
folder has the same. So a stream that is gone is not made anew, and one that somebody put in its place is not taken.
"""

import asyncio
import logging
import secrets
from typing import Any

import msgspec

from babelbus.config import JetstreamSettings
from babelbus.storage.files import FileSystem
from babelbus.storage.jetstream.client import NO_STREAM, PURGE_SECONDS, ApiError, Nats
from babelbus.storage.jetstream.errors import NatsRefusedError, StreamAlteredError
from babelbus.storage.notes import Note

log = logging.getLogger(__name__)

NOTE_NAME = "jetstream.json"
OWNER, IDENTITY = "babelbus.installation", "babelbus.stream"
FIXED: dict[str, Any] = {
    "retention": "limits",
    "storage": "file",
    "discard": "new",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "allow_direct": True,
    "deny_delete": False,
    "deny_purge": False,
}
"""The configuration of a shard that must stay as it is; `max_bytes` may be set, since `discard` is `new`."""
MAY_DIFFER = ("max_bytes", "max_consumers")


class Installation(msgspec.Struct, frozen=True):
    """The note of the data folder about its streams: the prefix, and the identity of each stream."""

    installation: str
    prefix: str
    streams: dict[str, str]
    format: int = 1


def read_installation(files: FileSystem, folder: str, prefix: str) -> tuple[Note[Installation], Installation]:
    """Return the note of a data folder, and what it says.

    Raises:
        NatsRefusedError: the note is about another prefix.
        StorageError: it cannot be read.
    """
    note = Note(files, f"{folder}/{NOTE_NAME}", Installation)
    found = note.read()
    if found is None:
        found = Installation(secrets.token_hex(16), prefix, {})
        note.write(found)
    if found.prefix != prefix:
        raise NatsRefusedError(
            f"jetstream.prefix is {prefix!r}, and the topics of this data folder are under {found.prefix!r}: set that"
        )
    return note, found


async def prepare_streams(nats: Nats, settings: JetstreamSettings, note: Note[Installation]) -> list[str]:
    """Return the names of the streams; make those that were never made.

    Raises:
        StreamAlteredError: a stream is gone, altered, or of another installation.
        NatsRefusedError: JetStream cannot make a stream.
    """
    known = note.read()
    assert known is not None
    count = max(settings.shards, len(known.streams))
    for number in range(count):
        name = stream_name(settings.prefix, str(number))
        try:
            config = (await nats.api(f"STREAM.INFO.{name}"))["config"]
        except ApiError as error:
            if error.code != NO_STREAM:
                raise NatsRefusedError(f"stream {name}: {error}") from error
            if name in known.streams:
                raise gone(name) from error
            identity = secrets.token_hex(8)
            await make_stream(nats, settings, str(number), known.installation, identity)
            known = msgspec.structs.replace(known, streams=known.streams | {name: identity})
            await asyncio.to_thread(note.write, known)  # the note may be in NATS itself
            continue
        if name not in known.streams and config.get("metadata", {}).get(OWNER) == known.installation:
            # Made just before a crash, which the note did not survive.
            known = msgspec.structs.replace(known, streams=known.streams | {name: config["metadata"].get(IDENTITY, "")})
            await asyncio.to_thread(note.write, known)
        check_config(name, config, known.installation, known.streams.get(name, ""))
        if config["num_replicas"] != settings.replicas:
            log.warning(
                "stream %s has %d replicas, jetstream.replicas is %d: change the stream with NATS's own tools",
                name, config["num_replicas"], settings.replicas,
            )  # fmt: skip
    return [stream_name(settings.prefix, str(number)) for number in range(count)]


def stream_name(prefix: str, label: str) -> str:
    """Return the name of the stream of a shard."""
    return f"{prefix}-{label}"


def gone(name: str) -> StreamAlteredError:
    """Return the error of a stream that is not there any more."""
    return StreamAlteredError(
        f"stream {name} is gone: somebody deleted it, or jetstream.servers names another cluster; restore the stream"
        " from a backup of NATS ('nats stream restore')"
    )


async def make_stream(
    nats: Nats, settings: JetstreamSettings, label: str, installation: str, identity: str, fixed: dict[str, Any] = FIXED
) -> None:
    """Create the stream of a shard.

    Raises:
        NatsRefusedError: JetStream cannot make it.
    """
    name = stream_name(settings.prefix, label)
    config = fixed | {
        "name": name,
        "subjects": [f"{settings.prefix}.{label}.>"],
        "num_replicas": settings.replicas,
        "duplicate_window": 100_000_000,
        "metadata": {OWNER: installation, IDENTITY: identity},
    }
    try:
        await nats.api(f"STREAM.CREATE.{name}", config, PURGE_SECONDS)
    except ApiError as error:
        raise NatsRefusedError(
            f"stream {name} cannot be made with {settings.replicas} replicas (jetstream.replicas): {error}"
        ) from error
    log.info("stream %s made, %d replicas", name, settings.replicas)


def check_config(
    name: str, config: dict[str, Any], installation: str, identity: str, fixed: dict[str, Any] = FIXED
) -> None:
    """Check that a stream is the one that this installation made, as it made it.

    Raises:
        StreamAlteredError: it is not; nothing is changed.
    """
    metadata = config.get("metadata") or {}
    if metadata.get(OWNER) != installation:
        owner = metadata.get(OWNER)
        raise StreamAlteredError(
            f"stream {name} belongs to {f'another installation ({owner})' if owner else 'somebody else'}, this one is"
            f" {installation}: set another jetstream.prefix, or bring the data folder that the stream belongs to"
        )
    if metadata.get(IDENTITY) != identity:
        raise StreamAlteredError(
            f"stream {name} is not the one that this data folder knows: somebody deleted it and made another; restore"
            " the stream from a backup of NATS ('nats stream restore')"
        )
    wrong = [
        key for key, value in fixed.items() if key not in MAY_DIFFER and config.get(key, _ABSENT.get(key)) != value
    ]
    wrong += [key for key in ("mirror", "sources", "sealed", "subject_transform", "republish") if config.get(key)]
    if wrong:
        key = wrong[0]
        raise StreamAlteredError(
            f"stream {name} was altered: {key} is {config.get(key)!r}, it was made with {fixed.get(key)!r}; records may"
            f" be lost already; put it back with 'nats stream edit {name}'"
        )


_ABSENT: dict[str, Any] = {"deny_delete": False, "deny_purge": False, "max_age": 0, "allow_direct": False}
"""The meaning of keys that JetStream leaves out."""
