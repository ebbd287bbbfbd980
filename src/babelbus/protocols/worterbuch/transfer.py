"""Files over the HTTP port of Wörterbuch: exports, imports and the operator's files.

Specification: docs/specifications/worterbuch.md, 12.4.

Long work runs in a thread, or slice by slice: other clients have their turn in between.
"""

import asyncio
import base64
import binascii

from babelbus.core.receipt import Promise, settled
from babelbus.core.state import KeyPattern, size_fault, store_pattern
from babelbus.core.subject import is_secret
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.archive import ArchiveError, Entry, pack, unpack
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.names import is_below_sys
from babelbus.protocols.worterbuch.rest import TEXT_TYPE, Reply
from babelbus.protocols.worterbuch.routes import RequestRefusedError
from babelbus.wire.http import FileRefusedError, Files

IMPORT_SLICE = 4096
"""Keys that an import stores in one go, before others have their turn."""
EVERYTHING = KeyPattern((), rest=True)


async def export_tree(hub: Hub, access: Access, name: str, *, as_text: bool) -> Reply:
    """Return all that is stored and may be seen as a file, `name` without its ending; with `as_text` in base64.

    Raises:
        AccessRefusedError: nothing may be seen.
        RequestRefusedError: it is too large, or changes that it shows could not be stored.
    """
    identity = access.identity
    everything = EVERYTHING if identity.root is None else store_pattern(identity.absolute("#"))
    entries = [entry for entry in access.state.entries(everything) if is_kept(entry[0])]
    if identity.root is not None:
        entries = [(identity.relative(key), value, version) for key, value, version in entries]
    await _stored(hub.state.commit(access.source))

    def make() -> bytes:
        data = pack(entries, bytes_max=hub.settings.message_bytes_max)
        return base64.b64encode(data) if as_text else data

    try:
        body = await asyncio.get_running_loop().run_in_executor(None, make)
    except ArchiveError as error:
        raise RequestRefusedError(500, str(error)) from error
    disposition = f"attachment; filename={name}.json.gz"
    content_type = TEXT_TYPE if as_text else "application/gzip"
    return Reply(body, headers=(("content-type", content_type), ("content-disposition", disposition)))


async def import_tree(hub: Hub, access: Access, body: bytes, *, as_text: bool) -> Reply:
    """Import a file, slice by slice: subscribers receive the changes, and other clients have their turn in between.

    Raises:
        AccessRefusedError: the client may not set a key of the file; nothing was changed, unless its rights shrank
            in the middle.
        RequestRefusedError: the file is no exported tree, or its entries could not be stored.
    """
    bytes_max = hub.settings.message_bytes_max

    def read() -> list[Entry]:
        entries = unpack(_decode_base64(body) if as_text else body, bytes_max=bytes_max)
        if access.identity.root is not None:
            entries = [(access.identity.absolute(key), value, version) for key, value, version in entries]
        for key, _, _ in entries:
            fault = size_fault(key, hub.state.key_bytes_max)
            if fault is not None:
                raise ArchiveError(f"the key '{key[:80]}...' {fault}")
        return entries

    try:
        entries = await asyncio.get_running_loop().run_in_executor(None, read)
    except ArchiveError as error:
        raise RequestRefusedError(400, str(error)) from error
    entries = [entry for entry in entries if is_kept(entry[0])]
    access.check_all([key for key, _, _ in entries])
    for begin in range(0, len(entries), IMPORT_SLICE):
        access.state.put_all(entries[begin : begin + IMPORT_SLICE])
        receipt = hub.state.commit(access.source)
        await asyncio.sleep(0)
        await _stored(receipt)
    return Reply(headers=())


def is_kept(key: str) -> bool:
    """Return whether exports and imports have a key."""
    return not is_below_sys(key) and not is_secret(key)


async def read_file(files: Files, path: str) -> Reply:
    """Return what the operator serves at a path.

    Raises:
        RequestRefusedError: there is nothing, or it cannot be read.
    """
    try:
        found = await asyncio.get_running_loop().run_in_executor(None, lambda: files.read(path, always=True))
    except FileRefusedError as error:
        raise RequestRefusedError(500, str(error)) from error
    if found is None:
        raise RequestRefusedError(404, "not found")
    return Reply(found.data, headers=(("content-type", found.content_type),))


async def _stored(promise: Promise) -> None:
    """Wait until the changes are stored.

    Raises:
        RequestRefusedError: the changes are not stored.
    """
    error = await settled((promise,))
    if error is not None:
        raise RequestRefusedError(500, str(error))


def _decode_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ArchiveError(f"no base64: {error}") from error
