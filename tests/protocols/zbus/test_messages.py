"""Headers as flags and integers, and the texts that clients and people read."""

import pytest

from babelbus.protocols.zbus import messages
from babelbus.protocols.zbus.errors import MalformedMessageError
from babelbus.protocols.zbus.messages import Mask, Message, flag, integer, json_reply, text_reply

TEXTS = [
    (messages.created("M"), "OK, CREATE (mq=M)"),
    (messages.created("M", "C"), "OK, CREATE (mq=M,channel=C)"),
    (messages.published("M"), "OK, PUB (mq=M)"),
    (messages.subscribed("M", "C"), "OK, SUB (mq=M,channel=C)"),
    (messages.removed("M"), "OK, REMOVE (mq=M)"),
    (messages.removed("M", "C"), "OK, REMOVE (mq=M,channel=C)"),
    (messages.bound("M"), "OK, BIND URL (mq=M)"),
    (messages.missing_mq("create"), "create command, missing mq field"),
    (messages.mq_not_found("M"), "MQ(M) Not Found"),
    (messages.channel_not_found("C"), "Channel(C) Not Found"),
    (messages.command_not_found("unsub"), "Command(unsub) Not Found"),
    (messages.url_not_found("/x"), "/x Not Found"),
    (messages.target_not_found("S"), "Target=S Not Found"),
    (messages.type_not_supported("db"), "mqType(db) Not Support"),
]


@pytest.mark.parametrize(("text", "wanted"), TEXTS)
def test_the_texts_are_those_of_the_specification(text: str, wanted: str) -> None:
    assert text == wanted


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("TRUE", True), ("false", False), ("1", False), ("", False), ("yes", False)]
)
def test_a_flag_is_true_only_for_the_word(text: str, value: bool) -> None:
    assert flag(Message({"ack": text}), "ack", default=not value) is value


def test_a_flag_that_is_absent_has_its_default() -> None:
    assert flag(Message({}), "ack", default=True)
    assert not flag(Message({}), "ack", default=False)


@pytest.mark.parametrize("value", [0, 1, -1, 100, 2**63 - 1, -(2**63)])
def test_an_integer_has_64_bits(value: int) -> None:
    assert integer(Message({"window": str(value)}), "window") == value


@pytest.mark.parametrize("text", ["", "x", "1.0", " 1", "1_0", "٣", str(2**63), "9" * 5000, "0x1", "-"])
def test_what_is_no_integer_is_a_bad_request(text: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        integer(Message({"window": text}), "window")
    assert caught.value.status == 400


def test_an_integer_that_is_absent_is_none() -> None:
    assert integer(Message({}), "window") is None


def test_replies_have_the_id_of_their_request_and_say_what_they_are() -> None:
    plain = "text/plain; charset=utf8"
    assert text_reply("7", 404, "no") == Message({"content-type": plain, "id": "7"}, None, None, 404, b"no", "text")
    assert text_reply(None, 200, "ok").headers == {"content-type": plain}
    listed = {"mq": "M", "channel": "C", "content-type": "application/json; charset=utf8", "id": "7"}
    assert json_reply("7", 200, b"[]", mq="M", channel="C") == Message(listed, None, None, 200, b"[]")


def test_the_bits_of_the_masks() -> None:
    assert [int(mask) for mask in (Mask.DELETE_ON_EXIT, Mask.EXCLUSIVE, Mask.TAKEOVER)] == [1, 2, 4]
