"""The tree as a file: gzip of one JSON document (docs/specifications/worterbuch.md, section 12.4).

A node is `{"v":<value>,"t":{"<element>":<node>,...}}`, both members optional; a value with a version is
`{"Cas":[<value>,<version>]}`. The format cannot tell that from a plain object of this shape: it becomes the former.
"""

import zlib
from collections.abc import Iterable, Iterator

import msgspec

from babelbus.core.state import SEPARATOR, check_key
from babelbus.errors import BabelbusError
from babelbus.protocols.worterbuch.values import parse_value, text_json

Entry = tuple[str, bytes, int]
"""Key, value, and its version (0: plain)."""

_GZIP = 31
_PIECES = 4096


class ArchiveError(BabelbusError):
    """A file is no exported tree, or too large."""


class _Node(msgspec.Struct, frozen=True):
    v: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    t: "dict[str, _Node]" = {}


class _Document(msgspec.Struct, frozen=True):
    data: _Node


class _Cas(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"cas": "Cas"}):
    cas: tuple[msgspec.Raw, int]


_read_document = msgspec.json.Decoder(_Document).decode
_read_cas = msgspec.json.Decoder(_Cas).decode


def pack(entries: Iterable[Entry], *, bytes_max: int) -> bytes:
    """Return the file of these keys. Costs the compressed bytes and what sorting the keys takes.

    Raises:
        ArchiveError: its JSON has more than `bytes_max` bytes, so that it could not be read back.
    """
    compressor = zlib.compressobj(wbits=_GZIP)
    packed: list[bytes] = []
    size = 0
    pieces: list[bytes] = []
    for piece in _document(entries):
        pieces.append(piece)
        if len(pieces) == _PIECES:
            size += _compress(pieces, compressor, packed)
            if size > bytes_max:
                break
    size += _compress(pieces, compressor, packed)
    if size > bytes_max:
        raise ArchiveError(f"the tree has more than {bytes_max} bytes of JSON, the limit of a message")
    packed.append(compressor.flush())
    return b"".join(packed)


def _compress(pieces: list[bytes], compressor: "zlib._Compress", packed: list[bytes]) -> int:
    data = b"".join(pieces)
    pieces.clear()
    packed.append(compressor.compress(data))
    return len(data)


def _document(entries: Iterable[Entry]) -> Iterator[bytes]:
    """Return the JSON piece by piece: sorted by elements, each key follows its parents and its siblings' children."""
    path: list[str] = []
    # What a node on the path, the root first, has so far: its value, then also children.
    parents: list[bool] = [False]
    valued: list[bool] = [False]
    yield b'{"data":{'
    for elements, value, version in sorted([(key.split(SEPARATOR), value, n) for key, value, n in entries]):
        common = 0
        for one, other in zip(path, elements, strict=False):
            if one != other:
                break
            common += 1
        yield _close(parents, len(path) - common)
        del parents[common + 1 :], valued[common + 1 :], path[common:]
        for element in elements[common:]:
            opening = b"," if parents[-1] else b',"t":{' if valued[-1] else b'"t":{'
            yield opening + text_json(element) + b":{"
            parents[-1] = True
            parents.append(False)
            valued.append(False)
            path.append(element)
        yield b'"v":{"Cas":[%b,%d]}' % (value, version) if version else b'"v":' + value
        valued[-1] = True
    yield _close(parents, len(path)) + (b"}}}" if parents[0] else b"}}")


def _close(parents: list[bool], count: int) -> bytes:
    return b"".join([b"}}" if parent else b"}" for parent in parents[len(parents) - count :]]) if count else b""


def unpack(data: bytes, *, bytes_max: int) -> list[Entry]:
    """Return what a file holds, all of it checked.

    Raises:
        ArchiveError: it is no such file, its JSON has more than `bytes_max` bytes, or a key or value cannot be.
    """
    text = _decompress(data, bytes_max)
    try:
        text.decode()
        document = _read_document(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArchiveError(f"no exported tree: {error}") from error
    except RecursionError as error:
        raise ArchiveError("no exported tree: keys with too many elements") from error
    entries: list[Entry] = []
    waiting = [("", "", document.data)]
    while waiting:
        key, before, node = waiting.pop()
        if not isinstance(node.v, msgspec.UnsetType):
            if node is document.data:
                raise ArchiveError("no exported tree: the root has a value")
            entries.append(_entry(key, bytes(node.v)))
        for element, child in node.t.items():
            if SEPARATOR in element:
                raise ArchiveError(f"no exported tree: '{element}' is no element of a key")
            waiting.append((before + element, before + element + SEPARATOR, child))
    return entries


def _entry(key: str, text: bytes) -> Entry:
    if check_key(key) is not None:
        raise ArchiveError(f"'{key}' has a wildcard where a key is needed")
    version = 0
    if b'"Cas"' in text[:32]:
        try:
            cas = _read_cas(text)
        except (msgspec.DecodeError, RecursionError):
            pass  # a plain value that only looks like one
        else:
            if cas.cas[1] >= 1:
                text, version = bytes(cas.cas[0]), cas.cas[1]
    try:
        return key, parse_value(text), version
    except (ValueError, msgspec.DecodeError) as error:
        raise ArchiveError(f"the value of '{key}': {error}") from error


def _decompress(data: bytes, bytes_max: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=_GZIP)
    try:
        text = decompressor.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise ArchiveError(f"no gzip: {error}") from error
    if len(text) > bytes_max:
        raise ArchiveError(f"a tree of more than {bytes_max} bytes of JSON, the limit of a message")
    if not decompressor.eof or decompressor.unused_data:
        raise ArchiveError("no gzip: it ends too early, or something follows it")
    return text
