"""Forms in parts: how the bytes may stand, and each way to be malformed."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.multipart import PART_HEAD_BYTES_MAX, PARTS_MAX, read_multipart

NAMED = b'Content-Disposition: form-data; name="a"'


def read(body: bytes, boundary: str = "B") -> dict[str, Any]:
    form: dict[str, Any] = json.loads(read_multipart(body, boundary))
    return form


def part(data: bytes, head: bytes = NAMED) -> bytes:
    return b"--B\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


@pytest.mark.parametrize(
    ("body", "attributes"),
    [
        (b"--B--", {}),
        (part(b"1") + b"--B--\r\n", {"a": "1"}),
        (b"preamble\r\n" + part(b"1") + b"--B--epilogue", {"a": "1"}),
        (part(b"") + b"--B--", {"a": ""}),
        (part(b"\r\n--C\r\n") + b"--B--", {"a": "\r\n--C\r\n"}),
        (part(b"1").replace(b"--B\r\n", b"--B \t\r\n") + b"--B--", {"a": "1"}),
        (part(b"1") + part(b"2") + b"--B--", {"a": "2"}),
        (part("é".encode(), b"content-DISPOSITION:Form-Data;NAME=a") + b"--B--", {"a": "é"}),
        (part(b"1", b'Content-Disposition: form-data; name="a;\\"b="') + b"--B--", {'a;"b=': "1"}),
    ],
)
def test_a_form_may_stand_like_this(body: bytes, attributes: dict[str, str]) -> None:
    assert read(body) == {"attributes": attributes, "files": {}}


def test_files_of_one_field_are_a_list_in_their_order() -> None:
    head = b'Content-Disposition: form-data; name="f"; filename="%b"'
    form = read(part(b"1", head % b"x") + part(b"2", head % b"y") + b"--B--")
    assert [(file["fileName"], file["data"]) for file in form["files"]["f"]] == [("x", "MQ=="), ("y", "Mg==")]
    assert form["files"]["f"][0]["contentType"] == "application/octet-stream"


@given(st.binary(max_size=100).filter(lambda data: b"\r\n--B" not in b"\r\n" + data))
def test_the_bytes_of_a_file_survive(data: bytes) -> None:
    form = read(part(data, NAMED + b"; filename=x") + b"--B--")
    assert base64.b64decode(form["files"]["a"][0]["data"]) == data


MALFORMED = [
    *(
        b"",
        b"x",
        b"--B",
        b"--B\r\n",
        part(b"1"),
        b"--B\r\n\r\n\r\n1\r\n--B--",
        b"--BX\r\n--B--",
        b"--B x\r\n\r\n\r\n--B--",
    ),
    part(b"1", b"Content-Type: text/plain") + b"--B--",
    part(b"1", b"Content-Disposition: attachment; name=a") + b"--B--",
    part(b"1", b"Content-Disposition: form-data") + b"--B--",
    part(b"\xff") + b"--B--",
    part(b"1", NAMED + b"\xff") + b"--B--",
    part(b"1", NAMED + b"\r\nX: " + b"x" * PART_HEAD_BYTES_MAX) + b"--B--",
]


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: repr(body[:40]))
def test_what_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        read(body)


@pytest.mark.parametrize("boundary", ["", "x" * 71, "é"])
def test_a_boundary_has_1_to_70_letters(boundary: str) -> None:
    with pytest.raises(MalformedMessageError):
        read(b"--" + boundary.encode() + b"--", boundary)


def test_a_form_has_a_limited_number_of_parts() -> None:
    assert read(part(b"1") * PARTS_MAX + b"--B--")["attributes"] == {"a": "1"}
    with pytest.raises(MalformedMessageError):
        read(part(b"1") * (PARTS_MAX + 1) + b"--B--")


@given(st.binary(max_size=80), st.text("B;-", max_size=3))
def test_garbage_is_a_form_or_our_error(body: bytes, boundary: str) -> None:
    try:
        read(body, boundary)
    except MalformedMessageError:
        pass
