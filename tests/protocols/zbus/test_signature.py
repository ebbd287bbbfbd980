"""Who sent it: the vectors of section 7.3, what may not be changed, and what a signature must cover."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.errors import AuthenticationError
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.signature import (
    canonical_text,
    digest,
    verify_frame,
    verify_request,
)
from tests.protocols.zbus.strategies import messages, stored_headers
from tests.support.signing import sign_frame, sign_request

API_KEY = "2ba912a8-4a8d-49d2-1a22-198fd285cb06"
SECRET = "461277322-943d-4b2f-b9b6-3f860d746ffd"
KEYS = {API_KEY: SECRET, "no secret": ""}
UUID = "00000000-0000-4000-8000-00000000000"
MISMATCHED = "signature mismatched"

# Canonical text with K for the apiKey, and its signature.
VECTORS = {
    "V1": (
        '{"body":[1,2],"headers":{"ack":"false","apiKey":"K","cmd":"pub","mq":"MyRpc"}}',
        "506fbe81435503b125f2dfe5dc5c9da6407a3e8672743efc72086e493896f80e",
    ),
    "V2": (
        '{"headers":{"apiKey":"K","channel":"MyChannel","cmd":"create",'
        f'"id":"{UUID}1","mq":"MyMQ","mqType":"disk"}}}}',
        "0014225ff51f14d6c024613c90f98c46c188d7cc7bc357fd92abf3175e4c814f",
    ),
    "V3": (
        '{"body":{"a":{"x":1e+21,"y":[true,null,2.5]},"name":"\\u4e2d\\u6587","z":1.0},'
        f'"headers":{{"apiKey":"K","cmd":"pub","id":"{UUID}2","mq":"MyMQ","tag":"a.b"}}}}',
        "004e5e3e8c4bb08ac4773de934af1334fad803b1c14061dc5f42af58e68542d0",
    ),
    "V4": (
        f'{{"body":[1,2],"headers":{{"apiKey":"K","id":"{UUID}3"}},"url":"/MyRpc/example/plus"}}',
        "bc428b3775ac5d6c52eda699e8f02a30d8dbec9224f8bf2bb31c07220788481f",
    ),
    "V5": (
        f'{{"headers":{{"apiKey":"K","channel":"MyChannel","cmd":"sub","id":"{UUID}4","mq":"MyMQ","window":1}}}}',
        "f8846f92b60c15c03988e3a6046693dfbae5f6f7bd24b18fb0239ed9f2b1a813",
    ),
    "V6": (
        '{"headers":{"apiKey":"K","channel":"MyRpc","cmd":"create",'
        f'"id":"{UUID}5","mq":"MyRpc","mqMask":null,"mqType":null}}}}',
        "7b06aa65723f912b9447f52b24e5dfe141e194a2b3515eb415d834256c7607ce",
    ),
    "V7": (
        '{"body":{"a":{"x":1e+21,"y":[true,null,2.5]},"name":"中文","z":1},'
        f'"headers":{{"apiKey":"K","cmd":"pub","id":"{UUID}2","mq":"MyMQ","tag":"a.b"}}}}',
        "af3cc03b6920da2d511d5d9fe5e7bb28e1b35da21cecb9cb5963ea9741f7c91f",
    ),
}
V8 = "352d03eaa32f61c962c2fc242ea0357182750c1411ce0f28ca87b91ac85ae700"
V9 = "a6e3e8e25b6616361f948b2a758905dc69553f1d331a6929c49c5843c96f520b"
V3_ON_THE_WIRE = (
    '{"headers": {"cmd": "pub", "mq": "MyMQ", "tag": "a.b", "id": "00000000-0000-4000-8000-000000000002", '
    '"apiKey": "2ba912a8-4a8d-49d2-1a22-198fd285cb06", '
    '"signature": "004e5e3e8c4bb08ac4773de934af1334fad803b1c14061dc5f42af58e68542d0"}, '
    '"body": {"name": "\\u4e2d\\u6587", "z": 1.0, "a": {"y": [true, null, 2.5], "x": 1e+21}}}'
)


def wire(text: str, signature: str, **more: str) -> str:
    """Put signature and other headers into a canonical text, in front."""
    added = "".join(f"{json.dumps(name)}:{json.dumps(value)}," for name, value in more.items())
    return text.replace('"K"', f'"{API_KEY}"').replace('"headers":{', f'"headers":{{"signature":"{signature}",{added}')


def verify(text: str, *, partial: bool = False) -> str:
    frame = text.encode()
    return verify_frame(decode_message(frame), frame, KEYS, partial=partial)


def refused(text: str) -> str:
    with pytest.raises(AuthenticationError) as caught:
        verify(text)
    assert caught.value.status == 403
    return caught.value.text


@pytest.mark.parametrize("name", VECTORS)
def test_the_vectors_of_the_specification_are_accepted(name: str) -> None:
    text, signature = VECTORS[name]
    assert digest(SECRET, text.replace('"K"', f'"{API_KEY}"').encode()) == signature
    assert verify(wire(text, signature)) == API_KEY


def test_a_frame_of_the_python_client_is_accepted_as_it_is_on_the_wire() -> None:
    assert verify(V3_ON_THE_WIRE) == API_KEY


@pytest.mark.parametrize("name", VECTORS)
def test_a_signature_may_have_capitals(name: str) -> None:
    text, signature = VECTORS[name]
    assert verify(wire(text, signature.upper())) == API_KEY


V8_FRAME = wire(VECTORS["V4"][0], V8, signFields="url,method,body")
V9_FRAME = wire(VECTORS["V1"][0], V9, signFields="url,method,body,h.*")


@pytest.mark.parametrize("frame", [V8_FRAME, V9_FRAME], ids=["V8", "V9"])
def test_the_vectors_with_sign_fields_are_accepted(frame: str) -> None:
    assert verify(frame) == API_KEY


@pytest.mark.parametrize("frame", [*(wire(*vector) for vector in VECTORS.values()), V3_ON_THE_WIRE, V9_FRAME])
def test_no_member_can_be_changed_added_or_doubled(frame: str) -> None:
    tampered = [
        frame.replace('"headers":', '"headers" :{}, "headers":', 1),
        frame[:-1] + ',"headers":null}',
        frame[:-1] + ',"url":"/Other"}',
        frame[:-1] + ',"body":[0]}',
        frame.replace('"apiKey"', '"ack":true,"apiKey"', 1),
        frame.replace('"apiKey"', '"MQ":"Other","cmd":"pub","apiKey"', 1),
        frame.replace('"apiKey"', '"apiKey":null,"apiKey"', 1),
        frame.replace('"MyMQ"', '"YourMQ"').replace('"MyRpc"', '"YourRpc"').replace("/MyRpc/", "/YourRpc/"),
    ]
    if "body" in frame:
        tampered.append(frame[:-1] + ',"body":null}')  # as a null that was not signed it would take the body away
    if "signFields" not in frame:
        tampered += [frame[:-1] + ',"extra":1}', frame[:-1] + ',"status":200}']
    for text in tampered:
        assert text != frame
        assert refused(text) in (MISMATCHED, "missing apiKey in request")


def test_null_members_that_were_not_signed_are_accepted_where_they_say_nothing() -> None:
    text, signature = VECTORS["V2"]
    frame = wire(text, signature)
    assert verify(frame.replace('"cmd"', '"mqMask":null,"cmd"')) == API_KEY
    assert verify(frame[:-1] + ',"body":null}') == API_KEY


def test_numbers_and_texts_that_mean_the_same_are_signed_as_they_were_written() -> None:
    text, signature = VECTORS["V3"]
    assert refused(wire(text.replace("1e+21", "1E21"), signature)) == MISMATCHED
    assert refused(wire(text.replace("\\u4e2d", "中"), signature)) == MISMATCHED
    assert refused(wire(text.replace("\\u4e2d", "\\u4E2D"), signature)) == MISMATCHED


def frame_of(**given: str) -> str:
    return json.dumps({"headers": {"cmd": "pub", **given}})


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (frame_of(), "missing apiKey in request"),
        (frame_of(signature="x"), "missing apiKey in request"),
        (frame_of(apiKey=API_KEY), "missing signature in request"),
        (frame_of(apiKey="unknown", signature="x"), "apiKey not exists"),
        (frame_of(apiKey="no secret", signature="x"), "secretKey not exists"),
        (frame_of(apiKey=API_KEY, signature="x"), MISMATCHED),
        (frame_of(apiKey=API_KEY, signature=""), MISMATCHED),
        (frame_of(apiKey=API_KEY, signature="é" * 64), MISMATCHED),
        (f'{{"cmd":"pub","apiKey":"{API_KEY}","signature":"x"}}', MISMATCHED),
    ],
)
def test_what_is_missing_is_said_in_the_order_of_the_table(frame: str, text: str) -> None:
    assert refused(frame) == text


def test_objects_are_sorted_at_every_level_and_lists_keep_their_order() -> None:
    text = b' { "b" : [ 2 , 1, {"z":"\\"}","a":[ ]} ] , "a" : { "\\u0061" : {} , "B" : null } } '
    assert canonical_text(text) == b'{"a":{"B":null,"\\u0061":{}},"b":[2,1,{"a":[],"z":"\\"}"}]}'
    assert canonical_text(text, nulls=False) == b'{"a":{"\\u0061":{}},"b":[2,1,{"a":[],"z":"\\"}"}]}'


def test_a_name_twice_in_one_object_is_refused_however_it_is_written() -> None:
    with pytest.raises(AuthenticationError):
        canonical_text(b'{"body":{"a":1,"\\u0061":2}}')


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"signFields": "url,method"}, "V4"),
        ({"signFields": ""}, "V4"),
        ({"signFields": "body,h.*"}, "V4"),
        ({"signFields": "url,body,h.cmd"}, "V1"),
        ({"signFields": "url,h.*"}, "V1"),
    ],
)
def test_lists_that_leave_what_matters_unsigned_need_the_option(more: dict[str, str], text: str) -> None:
    message = decode_message(VECTORS[text][0].replace('"apiKey":"K",', "").encode())
    frame = encode_message(sign_frame(message, API_KEY, SECRET, more["signFields"])).decode()
    assert refused(frame) == MISMATCHED
    assert verify(frame, partial=True) == API_KEY


def test_a_call_that_was_signed_cannot_be_made_a_command() -> None:
    assert refused(V8_FRAME.replace('"apiKey"', '"cmd":"remove","mq":"MyRpc","apiKey"')) == MISMATCHED


def test_a_list_of_all_headers_of_a_command_is_as_good_as_the_star() -> None:
    message = Message({"cmd": "pub", "mq": "M", "id": "1", "ack": "false"}, body=b"x", body_kind="text")
    signed = sign_frame(message, API_KEY, SECRET, " body, h.CMD ,h.mq,h.ack")
    assert verify(encode_message(signed).decode()) == API_KEY
    added = msgspec.structs.replace(signed, headers={**signed.headers, "tag": "x"})
    assert refused(encode_message(added).decode()) == MISMATCHED


@given(messages(stored_headers), st.none() | st.just("url,method,body,h.*"))
def test_what_we_sign_we_accept(message: Message, sign_fields: str | None) -> None:
    if "cmd" not in message.headers or message.body_kind == "bytes":
        message = msgspec.structs.replace(message, headers={**message.headers, "cmd": "pub"}, body=None)
    frame = encode_message(sign_frame(message, API_KEY, SECRET, sign_fields))
    assert verify_frame(decode_message(frame), frame, KEYS) == API_KEY


def request(body: bytes, content_type: str, **more: Any) -> Message:
    return Message({"host": "h", "content-type": content_type}, "/MyRpc/a b", "POST", None, body, **more)


@pytest.mark.parametrize(
    "message",
    [
        request(b'{"b": 1, "a": [1.0, null]}', "application/json", body_kind="text"),
        request(b"{", "application/json", body_kind="text"),
        request("привет".encode(), "text/plain", body_kind="text"),
        request(b"\xff", "image/png", body_kind="bytes"),
        request(b"", "text/plain", body_kind="text"),
    ],
)
def test_an_http_request_proves_itself_with_sign_fields(message: Message) -> None:
    signed = sign_request(message, API_KEY, SECRET, "url,method,body,h.content-type")
    assert verify_request(signed, KEYS) == API_KEY
    for changed in ({"url": "/MyRpc/b"}, {"body": b"[0]"}, {"method": "GET"}):
        with pytest.raises(AuthenticationError):
            verify_request(msgspec.structs.replace(signed, **changed), KEYS)


def test_json_in_a_request_counts_as_its_value_and_python_escapes_what_is_not_ascii() -> None:
    message = request(b'{"b": 1, "a": [1.0]}', "application/json", body_kind="text")
    canonical = {"headers": {"apiKey": API_KEY, "signFields": "url,body"}, "url": "/Ж/𝄞", "body": {"a": [1.0], "b": 1}}
    for ascii_only in (True, False):
        text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), ensure_ascii=ascii_only)
        proof = {"apiKey": API_KEY, "signFields": "url,body", "signature": digest(SECRET, text.encode())}
        assert verify_request(msgspec.structs.replace(message, url="/Ж/𝄞", headers=message.headers | proof), KEYS)


def test_an_http_request_without_sign_fields_is_refused() -> None:
    message = Message({"apiKey": API_KEY, "signature": "x"}, "/", "POST")
    with pytest.raises(AuthenticationError, match=MISMATCHED):
        verify_request(message, KEYS)


def test_a_deep_body_costs_no_stack() -> None:
    depth = 20_000
    text = b'{"body":' + b'{"a":[' * depth + b"]}" * depth + b"}"
    assert canonical_text(text) == text
