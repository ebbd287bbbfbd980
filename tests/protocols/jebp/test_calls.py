"""The frame layer of calls on the server: what opens, answers, ends and fails, and what one frame carries."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from babelbus.core.access import NOBODY
from babelbus.core.catalog import UnknownTopicError
from babelbus.core.receipt import Promise
from babelbus.core.work import settled
from babelbus.errors import RemoteProtocolError, StorageError
from babelbus.protocols.jebp.calls.call import Call, Method, Stream
from babelbus.protocols.jebp.calls.errors import CallRefusedError
from babelbus.protocols.jebp.calls.methods import METHODS
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.items import CALLS_MAX
from babelbus.protocols.jebp.messages import CallItems, Data
from tests.support.bus import Bus, in_loop, turns
from tests.support.jebp import ADMIN, Conversation, subscribe

OPEN, MORE, CANCEL = range(3)
ITEM, END, ERROR = range(3)


class Add(msgspec.Struct, frozen=True, array_like=True):
    left: int
    right: int


class Nothing(msgspec.Struct, frozen=True, array_like=True):
    pass


class Echo(Stream):
    """Sends back what it gets, and notes what happens to it."""

    def __init__(self, call: Call, notes: list[object]) -> None:
        self.call = call
        self.notes = notes

    def receive(self, body: Data) -> None:
        if body == msgspec.msgpack.encode("wrong"):
            raise CallRefusedError("conflict", "not this", {"left": 3})
        if body == msgspec.msgpack.encode("bug"):
            raise ZeroDivisionError
        self.call.send(bytes(body))

    def resume(self) -> None:
        self.notes.append("resume")

    def access_changed(self) -> None:
        self.notes.append(self.call.principal.name)

    def close(self, *, lost: bool) -> None:
        self.notes.append("lost" if lost else "closed")


def fail(error: Exception) -> Callable[[Call, Any], object]:
    def answer(_call: Call, _parameters: Any) -> object:
        raise error

    return answer


class Fixture:
    """A conversation with methods of a test."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.notes: list[object] = []
        self.promise = Promise()
        self.reached = asyncio.Event()
        self.methods = {
            **METHODS,
            "add": Method(Add, lambda call, add: add.left + add.right),
            "who": Method(Nothing, lambda call, _: call.principal.name),
            "echo": Method(Nothing, lambda call, _: Echo(call, self.notes)),
            "wait": Method(Nothing, self._wait),
            "task": Method(Nothing, lambda call, _: call.run(self._task(call))),
            "large": Method(Nothing, lambda call, _: b"x" * call.body_bytes_max),
            "unknown": Method(Nothing, fail(UnknownTopicError("no topic 'x'"))),
            "disk": Method(Nothing, fail(StorageError("no room"))),
            "bug": Method(Nothing, fail(ZeroDivisionError())),
        }
        self.conversation = Conversation(self.bus, methods=self.methods).connect()
        self.call = self.conversation.call

    async def _wait(self, _call: Call, _parameters: object) -> str:
        await settled(self.promise)
        if self.promise.error is not None:
            raise self.promise.error
        return "waited"

    async def _task(self, call: Call) -> None:
        call.send(b"\x01")
        try:
            await self.reached.wait()
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            raise
        call.end("over")

    async def close(self) -> None:
        self.conversation.session.close()
        await self.bus.broker.close()


@in_loop
async def test_a_call_with_one_answer_and_its_number_is_free_again() -> None:
    fixture = Fixture()
    assert fixture.call((7, OPEN, ["add", [1, 2]])) == [(7, END, 3)]
    assert fixture.call((7, OPEN, ["who", []])) == [(7, END, "test")]
    await fixture.close()


@in_loop
async def test_the_methods_are_listed() -> None:
    fixture = Fixture()
    ((_, kind, names),) = fixture.call((0, OPEN, ["methods", []]))
    assert (kind, names) == (END, sorted(fixture.methods))
    await fixture.close()


@in_loop
async def test_many_items_of_one_frame_are_answered_in_one_frame() -> None:
    fixture = Fixture()
    answers = fixture.call(*[(number, OPEN, ["add", [number, 1]]) for number in range(50)])
    assert answers == [(number, END, number + 1) for number in range(50)]
    assert fixture.conversation.wire.frames == 1
    await fixture.close()


@in_loop
async def test_what_is_answered_later_does_not_hold_up_what_is_answered_now() -> None:
    fixture = Fixture()
    assert fixture.call((1, OPEN, ["wait", []]), (2, OPEN, ["add", [1, 1]])) == [(2, END, 2)]
    assert fixture.call((1, CANCEL, None), (1, MORE, None)) == []  # it is answered all the same
    fixture.promise.resolve()
    assert await fixture.conversation.next_items() == [(1, END, "waited")]
    await fixture.close()


@in_loop
async def test_a_coroutine_that_fails_is_an_error() -> None:
    fixture = Fixture()
    fixture.call((1, OPEN, ["wait", []]))
    fixture.promise.resolve(StorageError("no room"))
    assert await fixture.conversation.next_items() == [(1, ERROR, ["disk", "no room", None])]
    await fixture.close()


@in_loop
async def test_calls_do_not_wait_for_the_answers_to_requests_before_them() -> None:
    fixture = Fixture()
    fixture.conversation.outbox.answer_when([fixture.promise], lambda: b"")
    assert fixture.call((1, OPEN, ["add", [1, 1]])) == [(1, END, 2)]
    fixture.promise.resolve()
    assert await fixture.conversation.say(subscribe()) == ["a030"]
    await fixture.close()


@pytest.mark.parametrize(
    ("opening", "code"),
    [
        (["nothing of ours", []], "unsupported"),
        (["add", [1]], "bad_argument"),
        (["add", ["one", 2]], "bad_argument"),
        (["add"], "bad_argument"),
        ("add", "bad_argument"),
        (["add", msgspec.Raw(b"\x91" * 100_000 + b"\xc0")], "bad_argument"),
        (["emit", msgspec.Raw(b"\x92\xa1\xff\xc0")], "bad_argument"),
        ([msgspec.Raw(b"\xa1\xff"), []], "bad_argument"),
        (["unknown", []], "unknown_topic"),
        (["disk", []], "disk"),
        (["bug", []], "failed"),
        (["large", []], "too_large"),
    ],
)
@in_loop
async def test_what_goes_wrong_is_the_error_of_that_call_alone(opening: object, code: str) -> None:
    fixture = Fixture()
    first, second = fixture.call((1, OPEN, opening), (2, OPEN, ["add", [1, 2]]))
    assert first[:2] == (1, ERROR)
    assert isinstance(first[2], list)
    assert first[2][0] == code
    assert first[2][1]
    assert second == (2, END, 3)
    await fixture.close()


@in_loop
async def test_calls_of_one_frame_wait_while_the_client_takes_no_answers() -> None:
    methods = {"large": Method(Nothing, lambda call, _: bytes(50_000))}
    talk = Conversation(Bus(), methods=methods, bytes_max=100_000).connect()
    talk.send(encode_request(CallItems([(n, OPEN, msgspec.msgpack.encode(["large", []])) for n in range(10)])))
    counts = []
    while talk.session.busy:
        assert len(talk.pipe.written) < 200_000
        counts.append(len(talk.items()))
        talk.session.resume()
    assert [*counts, len(talk.items())] == [3, 3, 3, 1]
    talk.session.close()


@in_loop
async def test_a_stream_answers_until_it_is_cancelled() -> None:
    fixture = Fixture()
    assert fixture.call((1, OPEN, ["echo", []])) == []
    assert fixture.call((1, MORE, "a"), (1, MORE, "b")) == [(1, ITEM, "a"), (1, ITEM, "b")]
    assert fixture.call((1, CANCEL, None), (1, MORE, "late"), (1, CANCEL, None)) == [(1, END, None)]
    assert fixture.notes == ["closed"]
    await fixture.close()


@in_loop
async def test_a_stream_that_refuses_a_message_ends_with_the_error() -> None:
    fixture = Fixture()
    fixture.call((1, OPEN, ["echo", []]), (2, OPEN, ["echo", []]))
    assert fixture.call((1, MORE, "wrong")) == [(1, ERROR, ["conflict", "not this", {"left": 3}])]
    ((_, kind, failure),) = fixture.call((2, MORE, "bug"))
    assert (kind, failure) == (ERROR, ["failed", "the server failed; its log says more", None])
    assert fixture.notes == ["closed", "closed"]
    await fixture.close()


@in_loop
async def test_a_task_belongs_to_its_call() -> None:
    fixture = Fixture()
    fixture.call((1, OPEN, ["task", []]), (2, OPEN, ["task", []]))
    assert await fixture.conversation.next_items() == [(1, ITEM, 1), (2, ITEM, 1)]
    assert fixture.call((1, CANCEL, None)) == [(1, END, None)]
    fixture.reached.set()
    assert await fixture.conversation.next_items() == [(2, END, "over")]
    assert fixture.notes == ["cancelled"]
    await fixture.close()


@in_loop
async def test_a_number_that_is_in_use_ends_the_connection() -> None:
    fixture = Fixture()
    fixture.call((1, OPEN, ["echo", []]))
    with pytest.raises(RemoteProtocolError):
        fixture.call((1, OPEN, ["echo", []]))
    await fixture.close()


@in_loop
async def test_more_calls_than_the_limit_are_refused() -> None:
    fixture = Fixture()
    assert fixture.call(*[(number, OPEN, ["echo", []]) for number in range(CALLS_MAX)]) == []
    ((number, kind, failure),) = fixture.call((CALLS_MAX, OPEN, ["echo", []]))
    assert (number, kind) == (CALLS_MAX, ERROR)
    assert isinstance(failure, list)
    assert failure[0] == "quota"
    assert fixture.call((0, CANCEL, None), (0, OPEN, ["add", [1, 1]])) == [(0, END, None), (0, END, 2)]
    await fixture.close()


@in_loop
async def test_the_end_of_the_connection_ends_all_calls() -> None:
    fixture = Fixture()
    fixture.call((1, OPEN, ["echo", []]), (2, OPEN, ["task", []]), (3, OPEN, ["wait", []]))
    await turns(2)
    fixture.conversation.session.close()
    fixture.promise.resolve()
    await turns(2)
    assert fixture.notes == ["lost", "cancelled"]
    await fixture.bus.broker.close()


@in_loop
async def test_a_server_that_stops_closes_streams_in_order() -> None:
    fixture = Fixture()
    fixture.call((1, OPEN, ["echo", []]))
    fixture.conversation.session.end_waits()
    assert fixture.notes == ["closed"]
    await fixture.close()


@in_loop
async def test_a_reader_that_does_not_read_puts_off_its_calls_and_streams_resume_behind_it() -> None:
    fixture = Fixture()
    conversation = fixture.conversation
    fixture.call((1, OPEN, ["echo", []]))
    conversation.outbox.send(b"x" * conversation.outbox.bytes_max)
    assert conversation.outbox.full
    conversation.send(bytes.fromhex("4000000001010000000105"))
    assert conversation.session.busy
    streams = conversation.session._calls
    assert streams is not None
    assert streams.full
    conversation.pipe.written.clear()
    conversation.session.resume()
    conversation.session.release()
    conversation.session.release()
    assert fixture.notes == ["resume"]
    assert conversation.items() == [(1, ITEM, 5)]
    await fixture.close()


@in_loop
async def test_streams_hear_of_changed_rights() -> None:
    fixture = Fixture()
    allowed = fixture.conversation.session._authorise(ADMIN.fingerprint)
    fixture.call((1, OPEN, ["echo", []]))
    fixture.conversation.session.access_changed()
    fixture.conversation.session._authorise = lambda fingerprint: None
    fixture.conversation.session.access_changed()
    assert allowed is not None
    assert fixture.notes == [allowed.name, NOBODY.name]
    assert fixture.conversation.closed
    await fixture.close()
