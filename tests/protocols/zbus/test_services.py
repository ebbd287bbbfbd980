"""Services of zbus as responders of the bus, and responders of the bus as services of zbus."""

from typing import Any

import pytest

from babelbus.core.access import CLIENT, SERVER
from babelbus.core.request import (
    NoRespondersError,
    Question,
    Reply,
    Request,
    RequestAbandonedError,
    RequestFailedError,
    RequestTimeoutError,
)
from babelbus.core.subject import below, exactly
from babelbus.records.record import Headers
from tests.protocols.zbus.peer import Client, House, Peer
from tests.protocols.zbus.test_session_web import reply_to, service
from tests.support.bus import in_loop, turns
from tests.support.zbus import command, request_of


def ask(house: House, payload: bytes | None = b"2+2", headers: Headers = (), subject: str = "Svc") -> Request[Reply]:
    request = house.bus.broker.request(subject, payload, headers, house.clock.monotonic() + 5, CLIENT)
    house.flush()
    return request


def answers(house: House, reply: Reply | None, subject: str = "Svc") -> list[Question]:
    """Register a responder that gives this reply, or none."""
    asked: list[Question] = []

    def answer(question: Question) -> None:
        asked.append(question)
        if reply is not None:
            house.bus.broker.respond(question.key, reply)

    house.bus.broker.responders.add(exactly(subject), answer, principal=SERVER)
    return asked


# -- services answer the bus -------------------------------------------------------------------------------------------


@in_loop
async def test_a_service_answers_a_request_of_the_bus_with_body_status_and_headers() -> None:
    house = House()
    worker = await service(house)
    request = ask(house, b"2+2", ((b"ce_source", b"eventmesh:G"), (b"colour", b"red"), (b"ce_id", b"q")))
    [call] = await worker.pushed()
    assert (call["body"], call["url"], "status" in call) == ("2+2", "/Svc", False)
    headers = call["headers"]
    assert (headers["ack"], headers["mq"], headers["colour"]) == ("false", "Svc", "red")
    assert headers["id"] != "q"
    worker.say(reply_to(call, {"sum": 4}, status=201))
    reply = (await request.wait()).reply
    assert reply is not None
    assert reply.payload == b'{"sum":4}'
    named = dict(reply.headers)
    assert (named[b"zbus.status"], named[b"content-type"]) == (b"201", b"application/json; charset=utf8")
    worker.say(reply_to(call, 5))  # nobody waits for it
    assert house.hub.calls.in_flight == 0


@pytest.mark.parametrize(
    ("payload", "content_type", "body"),
    [
        (b'{"a": [1]}', b"application/json", {"a": [1]}),
        (b'{"a": [1]}', b"text/plain", '{"a": [1]}'),
        (b"\xff\x00", b"application/octet-stream", "/wA="),
        (None, b"text/plain", None),
        (b"", b"text/plain", ""),
    ],
)
@in_loop
async def test_a_service_gets_every_kind_of_payload(payload: bytes | None, content_type: bytes, body: Any) -> None:
    house = House()
    worker = await service(house)
    ask(house, payload, ((b"content-type", content_type),))
    [call] = await worker.pushed()
    assert call.get("body") == body


@in_loop
async def test_a_request_of_the_bus_is_answered_by_who_was_handed_it_and_by_nobody_else() -> None:
    house = House()
    worker, forger = await service(house), Client(house)
    forger.do("create", mq="Svc", channel="mine")  # sees nothing of a call that it does not take
    request = ask(house)
    [call] = await worker.pushed()
    forger.say(reply_to(call, "forged"))
    [refused] = forger.messages()
    assert (refused["status"], refused["body"]) == (403, "only who took a request may answer it")
    assert not request.done
    worker.say(reply_to(call, "4"))
    reply = (await request.wait()).reply
    assert reply is not None
    assert reply.payload == b"4"
    forger.say(reply_to(call, "late"))  # nobody waits: neither refused nor delivered
    assert forger.messages() == []


@in_loop
async def test_a_requester_chooses_the_url_of_a_service() -> None:
    house = House()
    worker = await service(house)
    ask(house, b"[1,2]", ((b"zbus.url", b"/Svc/example/plus"), (b"zbus.status", b"404"), (b"target", b"x")))
    [call] = await worker.pushed()
    assert (call["url"], "status" in call, "target" in call["headers"]) == ("/Svc/example/plus", False, False)


@in_loop
async def test_an_mq_is_asked_while_it_has_subscribers_and_one_of_them_gets_each_question() -> None:
    house = House()
    workers = [await service(house) for _ in range(2)]
    for _ in range(4):
        ask(house)
    assert [len(await worker.pushed()) for worker in workers] == [2, 2]
    workers[0].session.close()
    assert not ask(house).done
    workers[1].session.close()
    assert isinstance(ask(house).error, NoRespondersError)


@in_loop
async def test_an_mq_that_nobody_answers_for_lets_the_request_time_out_and_goes_on() -> None:
    house = House()
    worker = await service(house)
    request = ask(house)
    assert len(await worker.pushed()) == 1
    house.clock.advance(6)
    house.hub.calls.tick()
    house.bus.broker.responders.requests.tick()
    assert isinstance(request.error, RequestTimeoutError)
    worker.say(command("pub", "x", mq="Svc"))
    assert [message.get("body") for message in await worker.pushed()][-1] == "x"


@in_loop
async def test_a_question_that_is_no_message_is_refused_and_one_to_a_removed_mq_too() -> None:
    house = House()
    worker = await service(house)
    request = ask(house, headers=tuple((b"h%d" % number, b"") for number in range(101)))
    assert isinstance(request.error, RequestFailedError)
    worker.do("remove", mq="Svc")
    await turns()
    assert isinstance(ask(house).error, RequestFailedError)


@in_loop
async def test_a_service_that_cannot_be_asked_leaves_the_request_to_another_group() -> None:
    house = House()
    await service(house)
    asked = answers(house, None)
    request = ask(house, headers=tuple((b"h%d" % number, b"") for number in range(101)))
    [question] = asked
    assert house.bus.broker.respond(question.key, Reply(b"4"))
    assert request.error is None


@in_loop
async def test_a_service_gets_no_question_whose_requester_is_gone() -> None:
    house = House()
    worker = await service(house)
    request = ask(house)
    house.bus.broker.responders.requests.abandon(request)
    assert house.hub.calls.in_flight == 0
    assert await worker.pushed() == []


@in_loop
async def test_a_server_that_stops_tells_who_asked_a_service() -> None:
    house = House()
    await service(house)
    request = ask(house)
    house.hub.stop()
    assert isinstance(request.error, RequestAbandonedError)


# -- responders of the bus answer calls --------------------------------------------------------------------------------


@in_loop
async def test_the_requests_of_a_caller_that_is_gone_end() -> None:
    house = House()
    asked = answers(house, None)
    web, socket = Peer(house), Client(house)
    web.send(request_of("POST", "/Svc", b"1"))
    socket.say({"headers": {"id": "2"}, "url": "/Svc", "body": "2"})
    requests = house.bus.broker.responders.requests
    assert (len(asked), requests.in_flight) == (2, 2)
    for caller in (web, socket):
        caller.leave()
    assert (requests.in_flight, house.hub.calls.in_flight) == (0, 0)


@in_loop
async def test_calls_of_other_protocols_that_were_given_up_leave_nothing_behind() -> None:
    house = House()
    asked: list[Question] = []
    house.bus.broker.responders.add(below("Svc"), asked.append, principal=SERVER)
    for number in range(3):
        caller = Peer(house)
        caller.send(request_of("POST", "/", b"?", cmd="pub", mq=f"Svc/{number}", ack="false"))
        caller.leave()
    subjects = [question.subject for question in asked]
    assert subjects == ["Svc/0", "Svc/1", "Svc/2"]
    assert not any(house.hub.calls.abandoned(subject) for subject in ("", *subjects))


@in_loop
async def test_a_responder_answers_a_call_over_http_whose_url_names_its_subject() -> None:
    house = House()
    asked = answers(house, Reply(b"hello", ((b"colour", b"red"), (b"ce_source", b"eventmesh:G"), (b"ce_id", b"x"))))
    caller = Peer(house)
    caller.send(request_of("POST", "/Svc/a?b=c", b"who", id="1", content_type="text/plain", animal="cat"))
    [response] = caller.responses()
    assert (response.status, response.body, response.headers["id"]) == (200, b"hello", "1")
    assert (response.headers["colour"], response.headers["content-type"]) == ("red", "text/plain; charset=utf8")
    [question] = asked
    named = dict(question.headers)
    assert question.payload == b"who"
    assert (named[b"zbus.url"], named[b"zbus.method"], named[b"animal"]) == (b"/Svc/a?b=c", b"POST", b"cat")
    assert (named[b"ce_source"] or b"").startswith(b"zbus:#")
    assert house.hub.calls.in_flight == 0
    assert not house.bus.broker.has_topic("Svc")


@pytest.mark.parametrize(
    ("reply", "content_type", "body"),
    [
        (Reply(b'{"a":1}', ((b"content-type", b"application/json"),)), "application/json", b'{"a":1}'),
        (Reply(b"\xff\x00"), "application/octet-stream", b"\xff\x00"),
        (Reply(None), "application/json; charset=utf8", b""),
        (Reply(b"gone", ((b"zbus.status", b"410"),)), "text/plain; charset=utf8", b"gone"),
    ],
)
@in_loop
async def test_every_kind_of_reply_becomes_a_response(reply: Reply, content_type: str, body: bytes) -> None:
    house = House()
    answers(house, reply)
    response = Peer(house).ask("GET", "/Svc")
    assert (response.status, response.body) == (410 if body == b"gone" else 200, body)
    assert response.headers["content-type"] == content_type


@in_loop
async def test_a_call_that_no_responder_answers_is_504_and_one_that_fails_500_and_nobody_404() -> None:
    house = House(rpc_timeout_seconds=5)
    asked = answers(house, None)
    caller = Peer(house)
    caller.send(request_of("GET", "/Svc") + request_of("GET", "/Svc") + request_of("GET", "/nobody"))
    house.bus.broker.refuse(asked[1].key, RequestFailedError("the responder has failed: no idea"))
    assert caller.responses() == []  # in their order
    house.clock.advance(6)
    house.bus.broker.responders.requests.tick()
    house.hub.calls.tick()
    assert [(one.status, one.body) for one in caller.responses()] == [
        (504, b"no service has answered in time"),
        (500, b"the responder has failed: no idea"),
        (404, b"/nobody Not Found"),
    ]


@in_loop
async def test_a_service_of_zbus_comes_first_and_a_queue_without_subscribers_last() -> None:
    house = House()
    worker = await service(house)
    asked = answers(house, Reply(b"elsewhere"))
    caller = Peer(house)
    caller.send(request_of("GET", "/Svc"))
    [call] = await worker.pushed()
    worker.say(reply_to(call, "here"))
    assert [one.body for one in caller.responses()] == [b'"here"']
    worker.session.close()
    assert caller.ask("GET", "/Svc").body == b"elsewhere"
    assert len(asked) == 1
    assert caller.ask(body=b"x", cmd="pub", mq="Svc", ack="false").body == b"elsewhere"


@in_loop
async def test_a_call_over_websocket_is_answered_by_id_and_a_publication_is_none() -> None:
    house = House()
    asked = answers(house, Reply(b"hello"))
    caller = Client(house)
    caller.do("create", mq="Svc", channel="Svc")
    caller.say({"headers": {"id": "I"}, "url": "/Svc/plus", "body": [1, 2]})
    [answer] = caller.messages()
    assert (answer["headers"]["id"], answer["status"], answer["body"]) == ("I", 200, "hello")
    caller.say(command("pub", "kept", mq="Svc", ack="false"))
    assert caller.messages() == []
    assert caller.do("take", mq="Svc", channel="Svc")["body"][0]["body"] == "kept"
    assert len(asked) == 1
