"""Header blocks of HTTP/2 (HPACK, RFC 7541): decoded by the library hpack, with a cache; encoded without a table."""

from collections.abc import Iterable

from hpack import Decoder
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from babelbus.wire.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, Http2Error
from babelbus.wire.http2.requests import Head, read_head

LIST_BYTES_MAX = 16_384
"""Limit of the header fields of a request: names, values, and 32 bytes for each field."""
CACHED_MAX = 64
CACHED_BYTES_MAX = 1024
"""Longer blocks are not kept."""


class _Table(HeaderTable):
    """A table that counts its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)

    @property
    def maxsize(self) -> int:
        """The limit of the table, in bytes."""
        return self._maxsize

    @maxsize.setter
    def maxsize(self, size_bytes: int) -> None:
        self.changes += 1
        self._maxsize = size_bytes
        self._shrink()


class HeaderDecoder:
    """Decodes the header blocks of one connection, in the order of their arrival.

    A client of gRPC sends the same block for each call of a method, once its fields are in the table. Such a block
    has the same meaning until the table changes.
    """

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=LIST_BYTES_MAX)
        self._table = self._decoder.header_table = _Table()
        self._cached: dict[bytes, Head] = {}

    def decode(self, block: bytes) -> Head:
        """Return what a block says.

        Raises:
            Http2Error: the block cannot be decoded; the state of the decoder is lost.
        """
        head = self._cached.get(block)
        if head is not None:
            return head
        changes = self._table.changes
        try:
            found = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise Http2Error(ENHANCE_YOUR_CALM, f"header fields of more than {LIST_BYTES_MAX} bytes") from None
        except (HPACKError, IndexError):
            raise Http2Error(COMPRESSION_ERROR, "a header block cannot be decoded") from None
        head = read_head([(bytes(name), bytes(value)) for name, value in found])
        if self._table.changes != changes:
            self._cached.clear()
        elif len(block) <= CACHED_BYTES_MAX:
            if len(self._cached) >= CACHED_MAX:
                self._cached.clear()
            self._cached[block] = head
        return head


def encode_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block of literals that no table of the client has to keep (RFC 7541, 6.2.2)."""
    return b"".join(b"\x00" + _encode_text(name) + _encode_text(value) for name, value in fields)


def _encode_text(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    encoded = bytearray(b"\x7f")
    size -= 127
    while size >= 128:
        encoded.append(size & 127 | 128)
        size >>= 7
    encoded.append(size)
    return bytes(encoded) + text
