"""Requests: one reply each, until a deadline; who is asked, and what becomes of replies that are late."""

import asyncio

import pytest

from babelbus.core import request as requests
from babelbus.core.access import CLIENT, NOBODY, SERVER, AccessRefusedError
from babelbus.core.request import (
    NoRespondersError,
    Question,
    Reply,
    Request,
    RequestAbandonedError,
    RequestFailedError,
    Requests,
    RequestTimeoutError,
    TooManyRequestsError,
)
from babelbus.core.subject import below, exactly
from babelbus.errors import BabelbusError
from tests.support.bus import Bus, in_loop


def ask(bus: Bus, subject: str = "svc/a", seconds: float = 10.0) -> Request[Reply]:
    return bus.broker.request(subject, b"?", (), bus.clock.monotonic() + seconds, CLIENT)


def late_replies(bus: Bus) -> float | None:
    return bus.metrics.registry.get_sample_value("babelbus_requests_late_replies_total")


def in_flight(bus: Bus) -> float | None:
    return bus.metrics.registry.get_sample_value("babelbus_requests_in_flight")


def full(question: Question) -> BabelbusError | None:
    return TooManyRequestsError(question.subject)


@in_loop
async def test_a_question_reaches_a_responder_whose_reply_resolves_the_request() -> None:
    bus = Bus()
    asked: list[Question] = []
    bus.broker.responders.add(below("svc"), asked.append, principal=SERVER)
    request = ask(bus)
    assert not request.done
    assert [(one.subject, one.payload, one.principal) for one in asked] == [("svc/a", b"?", CLIENT)]
    assert in_flight(bus) == 1
    assert bus.broker.respond(asked[0].key, Reply(b"!"))
    assert (await request.wait()).reply == Reply(b"!")
    assert in_flight(bus) == 0
    assert not bus.broker.respond(asked[0].key, Reply(b"again"))
    assert (request.reply, late_replies(bus)) == (Reply(b"!"), 1)
    await bus.broker.close()


@in_loop
async def test_where_nobody_answers_the_requester_is_told_at_once() -> None:
    bus = Bus()
    responder = bus.broker.responders.add(exactly("svc/a"), lambda _: None, principal=SERVER)
    assert isinstance(ask(bus, "svc/b").error, NoRespondersError)
    bus.broker.responders.remove(responder)
    assert isinstance(ask(bus).error, NoRespondersError)
    refused = bus.broker.request("svc/a", b"?", (), 10.0, NOBODY)
    assert isinstance(refused.error, AccessRefusedError)
    await bus.broker.close()


@in_loop
async def test_responders_of_a_group_share_the_work_and_of_several_groups_the_first_reply_counts() -> None:
    bus = Bus()
    asked: dict[str, list[Question]] = {name: [] for name in ("a1", "a2", "b")}
    for name, questions in asked.items():
        bus.broker.responders.add(below("svc"), questions.append, group=name[0], principal=SERVER)
    made = [ask(bus) for _ in range(4)]
    assert [len(questions) for questions in asked.values()] == [2, 2, 4]
    assert bus.broker.respond(asked["b"][0].key, Reply(b"b"))
    assert not bus.broker.respond(asked["a1"][0].key, Reply(b"a"))
    assert made[0].reply == Reply(b"b")
    await bus.broker.close()
    assert all(isinstance(request.error, RequestAbandonedError) for request in made[1:])


@in_loop
async def test_a_deadline_is_absolute_and_each_request_has_its_own() -> None:
    bus = Bus()
    asked: list[Question] = []
    bus.broker.responders.add(below("svc"), asked.append, principal=SERVER)
    long, short = ask(bus, seconds=10), ask(bus, seconds=1)
    bus.clock.advance(1)
    bus.broker.responders.requests.tick()
    assert isinstance(short.error, RequestTimeoutError)
    assert not long.done
    assert not bus.broker.respond(asked[1].key, Reply(b"late"))
    assert bus.broker.respond(asked[0].key, Reply(b"!"))
    assert (long.reply, late_replies(bus)) == (Reply(b"!"), 1)
    await bus.broker.close()


@in_loop
async def test_a_request_whose_time_is_over_ends_without_anybody_s_asking() -> None:
    bus = Bus()
    bus.broker.responders.add(below("svc"), lambda _: None, principal=SERVER)
    with pytest.raises(RequestTimeoutError):
        await ask(bus, seconds=0).wait()
    await bus.broker.close()


@in_loop
async def test_requests_of_one_source_and_id_are_answered_in_their_order() -> None:
    bus = Bus()
    made: Requests[str] = Requests(bus.clock, bus.broker._loop, bus.metrics)
    first, second = (made.begin("svc", ("me", "1"), 10.0) for _ in range(2))
    assert [made.respond(("me", "1"), text) for text in ("one", "two", "three")] == [True, True, False]
    assert (first.reply, second.reply) == ("one", "two")
    made.close()


@in_loop
async def test_what_waits_is_bounded_and_what_was_given_up_is_remembered_up_to_a_bound() -> None:
    bus = Bus()
    made: Requests[str] = Requests(bus.clock, bus.broker._loop, bus.metrics, in_flight_max=2)
    first, _ = (made.begin("svc", ("me", str(number)), 10.0) for number in range(2))
    assert isinstance(made.begin("svc", ("me", "3"), 10.0).error, TooManyRequestsError)
    made.abandon(first)
    assert list(made.abandoned("svc") or ()) == [("me", "0")]
    for number in range(requests.ABANDONED_MAX):
        made.abandon(made.begin("svc", ("you", str(number)), 10.0))
    found = made.abandoned("svc")
    assert found is not None
    assert (len(found), ("me", "0") in found) == (requests.ABANDONED_MAX, False)
    made.forget("svc")
    assert made.abandoned("svc") is None
    assert made.in_flight == 1
    made.close()
    assert made.in_flight == 0


@in_loop
async def test_a_server_that_stops_waits_for_replies_ends_what_has_none_and_takes_no_further_requests() -> None:
    bus = Bus()
    asked: list[Question] = []
    bus.broker.responders.add(below("svc"), asked.append, principal=SERVER)
    await bus.broker.settle_requests(3600)  # for nothing
    first, second = ask(bus), ask(bus)
    waiting = asyncio.ensure_future(bus.broker.settle_requests(3600))
    for question in asked:
        await asyncio.sleep(0)
        assert not waiting.done()
        bus.broker.respond(question.key, Reply(b"!"))
    await waiting
    assert (first.reply, second.reply) == (Reply(b"!"), Reply(b"!"))
    third = ask(bus)
    await bus.broker.settle_requests(0)
    assert not third.done
    bus.broker.end_requests()
    assert isinstance(third.error, RequestAbandonedError)
    assert isinstance(ask(bus).error, RequestAbandonedError)
    assert (len(asked), in_flight(bus)) == (3, 0)
    await bus.broker.close()


@in_loop
async def test_requests_that_are_answered_leave_nothing_behind_before_their_deadline() -> None:
    bus = Bus()
    made: Requests[str] = Requests(bus.clock, bus.broker._loop, bus.metrics)
    for number in range(1000):
        made.begin("svc", ("me", str(number)), 10.0)
        made.respond(("me", str(number)), "x")
    assert len(made._deadlines) <= 66
    made.close()


@in_loop
async def test_a_responder_may_say_that_it_has_no_reply() -> None:
    bus = Bus()
    asked: list[Question] = []
    bus.broker.responders.add(exactly("svc/a"), asked.append, principal=SERVER)
    assert (bus.broker.responders.answers("svc/a"), bus.broker.responders.answers("svc/b")) == (True, False)
    request = ask(bus)
    assert bus.broker.responders.requests.waits(asked[0].key)
    bus.broker.refuse(asked[0].key, RequestFailedError("no idea"))
    assert isinstance(request.error, RequestFailedError)
    bus.broker.refuse(asked[0].key, RequestFailedError("again"))
    assert not bus.broker.responders.requests.waits(asked[0].key)
    assert (in_flight(bus), late_replies(bus)) == (0, 0)
    await bus.broker.close()


@in_loop
async def test_the_bus_remembers_no_question_that_was_given_up() -> None:
    bus = Bus()
    bus.broker.responders.add(exactly("svc/a"), lambda _: None, principal=SERVER)
    bus.broker.responders.requests.abandon(ask(bus))
    assert bus.broker.responders.requests.abandoned("svc/a") is None
    await bus.broker.close()


@in_loop
async def test_a_responder_that_does_not_take_a_question_leaves_it_to_the_next_of_its_group() -> None:
    bus = Bus()
    asked: list[Question] = []
    bus.broker.responders.add(exactly("svc/a"), full, "g", SERVER)
    bus.broker.responders.add(exactly("svc/a"), asked.append, "g", SERVER)
    bus.broker.responders.add(exactly("svc/a"), full, "full", SERVER)
    requests = [ask(bus) for _ in range(4)]
    assert [request.done for request in requests] == [False] * 4
    assert [one.key for one in asked] == [request.key for request in requests]
    await bus.broker.close()


@in_loop
async def test_a_question_that_no_group_takes_or_that_all_have_declined_ends_at_once() -> None:
    bus = Bus()
    taken: list[Question] = []
    for group in ("a", "b"):
        bus.broker.responders.add(exactly("svc/a"), taken.append, group, SERVER)
        bus.broker.responders.add(exactly("svc/full"), full, group, SERVER)
    assert isinstance(ask(bus, "svc/full").error, TooManyRequestsError)
    request = ask(bus)
    bus.broker.responders.decline(request.key, "one has gone")
    assert not request.done
    bus.broker.responders.pass_on(taken[0], "gone")
    assert isinstance(request.error, NoRespondersError)
    bus.broker.responders.decline(request.key, "again")
    assert in_flight(bus) == 0
    await bus.broker.close()
