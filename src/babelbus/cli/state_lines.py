"""Files of values: JSON lines {"key", "value", "version"}, which `state export` writes, and exports of Wörterbuch."""

import gzip
from collections.abc import Iterable, Iterator

import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.restore import open_file
from babelbus.errors import BabelbusError
from babelbus.units import GIB, MIB

BATCH_VALUES = 10_000
BATCH_BYTES = 4 * MIB
DOCUMENT_BYTES_MAX = GIB
"""Largest Wörterbuch export, unpacked: the export is one JSON document, which must fit into memory."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One value; a plain value has no `version`."""

    key: str
    value: msgspec.Raw
    version: int = 0


_DECODER = msgspec.json.Decoder(Line)


def read_file(file: str) -> Iterator[Line]:
    """Yield the values of a file of either kind ('-' is standard input).

    Raises:
        CommandError: a line is wrong (the lines before it were yielded), or the document is.
        OSError: the file cannot be read.
    """
    with open_file(file) as input_:
        head = input_.peek(64)[:64].lstrip()  # type: ignore[attr-defined]  # both kinds of readers have it
        if head[:1] == b"{" and head[1:].lstrip().startswith(b'"data"'):
            yield from _read_document(input_.read(DOCUMENT_BYTES_MAX + 1))
        else:
            yield from _read_lines(input_)


def is_key(text: str) -> bool:
    """Return whether a text names one key: none of its elements is a wildcard."""
    return not {"?", "#"} & set(text.split("/"))


def _read_lines(input_: Iterable[bytes]) -> Iterator[Line]:
    from babelbus.protocols.worterbuch.values import parse_value

    for number, text in enumerate(input_, 1):
        if not text.strip():
            continue
        try:
            line = _DECODER.decode(text)
            if not is_key(line.key):
                raise ValueError(f"{line.key!r} has a wildcard where a key is needed")
            parse_value(bytes(line.value))
        except (msgspec.DecodeError, ValueError) as error:
            raise CommandError(f"line {number} is no value: {error}") from error
        yield line


def _read_document(text: bytes) -> Iterator[Line]:
    from babelbus.protocols.worterbuch.archive import unpack

    if len(text) > DOCUMENT_BYTES_MAX:
        raise CommandError("the export is larger than 1 GiB: export it as JSON lines")
    try:
        entries = unpack(gzip.compress(text, 1), bytes_max=DOCUMENT_BYTES_MAX)
    except BabelbusError as error:
        raise CommandError(f"the file is no Wörterbuch export: {error}") from error
    for key, value, version in entries:
        yield Line(key, msgspec.Raw(value), version)


def batches(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Yield values in requests, in order. If a line is wrong, the values before it are yielded first."""
    batch: list[Line] = []
    size = 0
    try:
        for line in lines:
            batch.append(line)
            size += len(line.key) + len(bytes(line.value))
            if len(batch) >= BATCH_VALUES or size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    except CommandError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch
