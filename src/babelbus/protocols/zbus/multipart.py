"""Forms in a request body: `multipart/form-data` and `application/x-www-form-urlencoded`.

Specification: docs/specifications/zbus.md, 2.4.

Both become the JSON object `{"attributes":{name:value},"files":{field:[{"fileName","contentType","data"}]}}`.
"""

import base64
from typing import Final

import msgspec

from babelbus.protocols.zbus.content import parse_parameters
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.wire.http import parse_form

PARTS_MAX: Final = 1000
PART_HEAD_BYTES_MAX: Final = 8192
BOUNDARY_LENGTH_MAX: Final = 70
"""As RFC 2046 has it, section 5.1.1."""


Attributes = dict[str, str]
"""Of several attributes of one name the last stays."""
Uploads = dict[str, list[dict[str, str]]]
"""The uploaded files of each field; `data` is base64."""

_encode = msgspec.json.Encoder().encode


def read_urlencoded(body: bytes) -> bytes:
    """Return the JSON text of an urlencoded form.

    Raises:
        MalformedMessageError: it is no UTF-8, or has more than `PARTS_MAX` fields.
    """
    try:
        pairs = parse_form(body.decode(), PARTS_MAX)
    except ValueError as error:
        raise MalformedMessageError(f"a form of more than {PARTS_MAX} fields, or no UTF-8") from error
    return _encode({"attributes": dict(pairs), "files": {}})


def read_multipart(body: bytes, boundary: str) -> bytes:
    """Return the JSON text of a form in parts.

    Raises:
        MalformedMessageError: it is no such form, or has more than `PARTS_MAX` parts.
    """
    if not 1 <= len(boundary) <= BOUNDARY_LENGTH_MAX or not boundary.isascii():
        raise MalformedMessageError("multipart: no boundary")
    # The first delimiter may stand at the very beginning, where the others have a line end in front.
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), PARTS_MAX + 2)
    attributes: Attributes = {}
    uploads: Uploads = {}
    for number, part in enumerate(parts):
        if part.startswith(b"--"):
            return _encode({"attributes": attributes, "files": uploads})
        if number == PARTS_MAX:
            raise MalformedMessageError(f"multipart: more than {PARTS_MAX} parts")
        _add_part(attributes, uploads, part)
    raise MalformedMessageError("multipart: the end is missing")


def _add_part(attributes: Attributes, uploads: Uploads, part: bytes) -> None:
    padding, line_end, rest = part.partition(b"\r\n")
    # A part without headers has its empty line at once; it has no name then.
    head, end, data = rest.partition(b"\r\n\r\n")
    if padding.strip(b" \t") or not line_end or not end or len(head) > PART_HEAD_BYTES_MAX:
        raise MalformedMessageError("multipart: a part has no head")
    try:
        headers = dict(_header(line) for line in head.decode().split("\r\n"))
        disposition = parse_parameters(headers.get("content-disposition", ""))
        name = disposition.parameters.get("name")
        if disposition.name != "form-data" or name is None:
            raise MalformedMessageError("multipart: a part has no name")
        file_name = disposition.parameters.get("filename")
        if file_name is None:
            attributes[name] = data.decode()
            return
    except UnicodeDecodeError as error:
        raise MalformedMessageError("multipart: a name or a text is no UTF-8") from error
    content_type = headers.get("content-type", "application/octet-stream")
    file = {"fileName": file_name, "contentType": content_type, "data": base64.b64encode(data).decode()}
    uploads.setdefault(name, []).append(file)


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()
