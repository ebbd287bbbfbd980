"""How messages stand on a TCP or unix connection, and that the cut of the bytes does not matter."""

import json

from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.worterbuch.lines import LINES
from tests.support.bus import in_loop
from tests.support.worterbuch import Talker, ack, get, make_hub, put, state


def test_lines_are_ascii_whatever_the_values_are() -> None:
    assert LINES.encode([b'{"a":1}', '"ü\U0001f600"'.encode()]) == b'{"a":1}\n"\\u00fc\\ud83d\\ude00"\n'


@given(st.lists(st.integers(min_value=1, max_value=60), min_size=1))
def test_answers_do_not_depend_on_how_the_bytes_were_cut(sizes: list[int]) -> None:
    @in_loop
    async def talk() -> None:
        _, hub = make_hub()
        talker = Talker(hub)
        data = b"".join(
            json.dumps(message).encode() + end
            for message, end in (
                (put(1, "größe", {"x": "ü"}), b"\n"),
                (put(2, "b", [1, 2]), b"\r\n"),
                (get(3, "größe"), b"\n\n\r\n"),
                (get(4, "b"), b"\n"),
            )
        )
        position = 0
        for size in (*sizes, len(data)):
            talker.say_bytes(data[position : position + size])
            position += size
        assert talker.heard() == [ack(1), ack(2), state(3, {"x": "ü"}), state(4, [1, 2])]
        assert talker.ended is None

    talk()
