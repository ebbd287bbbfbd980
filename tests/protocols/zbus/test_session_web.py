"""HTTP, urls and RPC: sections 2.3, 2.5, 6 and 7, and the monitor, by a scripted peer."""

import json
from typing import Any

import pytest

from babelbus.errors import PeerLeavesError, RemoteProtocolError
from babelbus.protocols.zbus.codec import decode_message, encode_message
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.web_options import WebOptions
from babelbus.wire.websocket import Close, encode_texts
from tests.protocols.zbus.peer import Client, House, Peer, command, request_of
from tests.storage.faults import FaultyFiles
from tests.support.bus import Gate, in_loop
from tests.support.signing import sign_frame, sign_request

KEYS = {"k": "secret"}


async def service(house: House, mq: str = "Svc") -> Client:
    """A service that waits for calls."""
    client = Client(house)
    client.say(command("create", mq=mq, channel=mq), command("sub", mq=mq, channel=mq))
    client.messages()
    return client


def reply_to(call: dict[str, Any], body: Any, **extra: Any) -> dict[str, Any]:
    headers = call["headers"]
    content_type = extra.pop("content_type", "application/json; charset=utf8")
    routed = {"cmd": "route", "target": headers["source"], "id": headers["id"], "content-type": content_type}
    return {"headers": routed, "body": body, **extra}


@pytest.mark.parametrize("query", ["cmd=pub&mq=Q&body=x", "cmd=pub&mq=missing", "cmd=query&mq=missing", "cmd=nothing"])
@in_loop
async def test_the_answer_to_a_command_in_a_query_has_the_id_of_the_query(query: str) -> None:
    house = House()
    web = Peer(house)
    web.ask(cmd="create", mq="Q")
    assert web.ask("GET", f"/?{query}&id=55").headers["id"] == "55"
    client = Client(house)
    client.say({"url": f"/?{query}&id=55"}, {"url": f"/?{query}&id=56", "headers": {"id": "7"}})
    assert [one["headers"]["id"] for one in client.messages()] == ["55", "56"]


@in_loop
async def test_the_refusal_of_an_unsigned_command_in_a_query_has_the_id_of_the_query() -> None:
    house = House()
    web, client = Peer(house, keys=KEYS), Client(house, keys=KEYS)
    refused = web.ask("GET", "/?cmd=create&mq=Q&id=55")
    assert (refused.status, refused.headers["id"]) == (403, "55")
    client.say({"url": "/?cmd=create&mq=Q&id=55"})
    [answer] = client.messages()
    assert (answer["status"], answer["headers"]["id"]) == (403, "55")


@in_loop
async def test_every_command_works_over_http_and_keeps_its_headers() -> None:
    house = House()
    web = Peer(house)
    made = web.ask(cmd="create", mq="Q", mqType="memory", channel="C", channelMask="8", id="1")
    assert (made.status, made.headers["id"], made.body) == (200, "1", b"OK, CREATE (mq=Q,channel=C)")
    sent = web.ask(body=b"hello", cmd="pub", mq="Q", id="42", content_type="text/plain")
    assert (sent.status, sent.headers["id"], sent.body) == (200, "42", b"OK, PUB (mq=Q)")
    assert sent.headers["content-type"] == "text/plain; charset=utf8"
    taken = web.ask(cmd="take", mq="Q", channel="C")
    assert (taken.status, taken.headers["mq"], taken.headers["channel"]) == (200, "Q", "C")
    [message] = json.loads(taken.body)
    assert (message["body"], message["url"], message["method"]) == ("hello", "/", "POST")
    assert message["headers"]["content-type"] == "text/plain"
    nothing = web.ask(cmd="take", mq="Q", channel="C")
    assert (nothing.status, nothing.body) == (604, b"[]")
    told = json.loads(web.ask(cmd="query", mq="Q", channel="C").body)
    assert told["mask"] == 8
    assert web.ask(cmd="bind", mq="Q", body=b'[{"url":"/x","mq":"Q"}]', content_type="application/json").status == 200
    assert web.ask(cmd="sub", mq="Q", channel="C").status == 400
    assert web.ask(cmd="ping").status == 200
    assert web.ask(cmd="remove", mq="Q").status == 200
    assert web.ask(cmd="route", target="nobody").status == 200


@in_loop
async def test_pipelined_requests_are_answered_in_order_with_one_write() -> None:
    house = House()
    web = Peer(house)
    web.ask(cmd="create", mq="Q", channel="C")
    before = len(web.wire.writes)
    web.send(
        request_of(body=b"a", cmd="pub", mq="Q", id="1")
        + request_of(body=b"b", cmd="pub", mq="missing", id="2")
        + request_of(cmd="take", mq="Q", channel="C", id="3")
        + request_of(body=b"c", cmd="pub", mq="Q", id="4")
    )
    assert len(web.wire.writes) == before + 1
    found = [(one.status, one.headers["id"]) for one in web.responses()]
    assert found == [(200, "1"), (404, "2"), (200, "3"), (200, "4")]


@in_loop
async def test_connection_close_and_http_1_0_end_the_connection_behind_their_answer() -> None:
    house = House()
    for request in (request_of(cmd="query", connection="close"), b"GET / HTTP/1.0\r\ncmd: query\r\n\r\n"):
        web = Peer(house)
        web.outbox.holding = True
        web.session.receive_data(request + request_of(cmd="create", mq="never"))
        web.outbox.release()
        with pytest.raises(PeerLeavesError):
            web.session.resume()
        [response] = web.responses()
        assert (response.status, response.headers["connection"]) == (200, "close")
    assert not house.hub.exists("never")


@in_loop
async def test_a_request_that_is_too_large_is_answered_with_413_and_one_that_is_none_with_400() -> None:
    house = House(package_bytes_max=2048)
    for request, status in (
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 2049\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
    ):
        web = Peer(house)
        web.send(request_of(cmd="query"))
        web.responses()
        web.send(request)
        with pytest.raises(RemoteProtocolError):
            web.session.resume()
        [response] = web.responses()
        assert response.status == status


@in_loop
async def test_a_frame_that_is_too_large_closes_the_websocket_with_1009() -> None:
    client = Client(House(package_bytes_max=2048))
    with pytest.raises(RemoteProtocolError):
        client.send(encode_texts([b"x" * 2049], mask=True))
    [close] = client.events()
    assert isinstance(close, Close)
    assert close.code == 1009


@in_loop
async def test_a_client_that_expects_it_is_told_to_continue() -> None:
    web = Peer(House())
    head, _, body = request_of(body=b"a", cmd="pub", mq="Q", expect="100-continue").partition(b"\r\n\r\n")
    web.send(head + b"\r\n\r\n")
    assert b"".join(web.wire.writes) == b"HTTP/1.1 100 Continue\r\n\r\n"
    web.wire.writes.clear()
    web.send(body)
    assert [one.status for one in web.responses()] == [404]


@in_loop
async def test_the_browsers_form_does_commands() -> None:
    web = Peer(House())
    assert web.ask("GET", "/?cmd=create&mq=Q&mqType=disk&channel=C").body == b"OK, CREATE (mq=Q,channel=C)"
    assert web.ask("GET", "/?cmd=pub&mq=Q&body=hi+you&tag=a").status == 200
    [message] = json.loads(web.ask("GET", "/?cmd=take&mq=Q&channel=C&window=5").body)
    assert (message["body"], message["headers"]["tag"]) == ("hi you", "a")
    assert json.loads(web.ask("GET", "/?cmd=query&mq=Q").body)["type"] == "disk"
    assert web.ask("GET", "/?cmd=remove&mq=Q").status == 200


@in_loop
async def test_the_icon_and_the_welcome_page_are_there_and_other_urls_are_not() -> None:
    house = House()
    web = Peer(house, keys=KEYS)
    icon = web.ask("GET", "/favicon.ico")
    assert (icon.status, icon.headers["content-type"], icon.body[:4]) == (200, "image/x-icon", b"\0\0\1\0")
    assert web.ask("GET", "/").status == 403
    web = Peer(house)
    page = web.ask("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    nowhere = web.ask("GET", "/no%20where?x=1")
    assert (nowhere.status, nowhere.body) == (404, b"/no where?x=1 Not Found")


@in_loop
async def test_the_monitor_shows_a_page_to_browsers_and_a_list_to_others() -> None:
    house = House()
    Client(house).do("create", mq="<Q>", channel="C")
    monitor = Peer(house, options=WebOptions(monitor=True))
    assert b"&lt;Q&gt;" in monitor.ask("GET", "/", accept="text/html,*/*").body
    assert [queue["name"] for queue in json.loads(monitor.ask("GET", "/").body)] == ["<Q>"]
    assert json.loads(monitor.ask("GET", "/?cmd=query&mq=%3CQ%3E").body)["channelCount"] == 1


@in_loop
async def test_a_service_answers_a_caller_over_http_with_status_type_and_body() -> None:
    house = House()
    worker, caller = await service(house), Peer(house)
    caller.send(request_of("GET", "/Svc/example/plus/1/2?k=v", id="c1"))
    [call] = await worker.pushed()
    assert (call["url"], call["method"], call["headers"]["ack"]) == ("/Svc/example/plus/1/2?k=v", "GET", "false")
    assert (call["headers"]["id"], call["headers"]["mq"], call["headers"]["channel"]) == ("c1", "Svc", "Svc")
    worker.say(reply_to(call, "<b>3</b>", status=201, content_type="text/html", ignored=1))
    [response] = caller.responses()
    assert (response.status, response.headers["content-type"], response.body) == (201, "text/html", b"<b>3</b>")
    assert "target" not in response.headers
    caller.send(request_of(body=b"[1,2]", url="/Svc/example/plus", content_type="application/json"))
    [call] = await worker.pushed()
    assert call["body"] == "[1,2]"
    worker.say(reply_to(call, 3))
    [response] = caller.responses()
    assert (response.status, response.body) == (200, b"3")


@in_loop
async def test_a_call_with_an_id_that_no_header_carries_is_answered_without_it() -> None:
    house = House()
    worker, caller = await service(house), Peer(house)
    caller.send(request_of("GET", "/?cmd=pub&mq=Svc&ack=false&id=%0A"))
    [call] = await worker.pushed()
    worker.say(reply_to(call, 3))
    [response] = caller.responses()
    assert (response.status, response.headers.get("id")) == (500, None)
    assert caller.ask("GET", "/").status == 200


@in_loop
async def test_cookies_of_a_caller_reach_the_service_and_each_of_its_own_has_a_header_for_itself() -> None:
    house = House()
    worker, caller = await service(house), Peer(house)
    cookies = ["a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT", "b=2"]
    caller.send(request_of("GET", "/Svc/login", cookie="c=3; d=4"))
    [call] = await worker.pushed()
    assert call["headers"]["cookie"] == "c=3; d=4"
    before = len(caller.wire.writes)
    reply = reply_to(call, "hi", content_type="text/html")
    reply["headers"] |= {"Set-Cookie": cookies, "x-list": ["a", "b"]}
    worker.say(reply)
    head = b"".join(caller.wire.writes[before:]).partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert [line for line in head if line.startswith("Set-Cookie")] == [f"Set-Cookie: {cookie}" for cookie in cookies]
    assert "x-list: a, b" in head
    caller.responses()
    caller.send(request_of("GET", "/Svc/login"))
    [call] = await worker.pushed()
    reply = reply_to(call, "hi")
    reply["headers"]["Set-Cookie"] = ["a=1", "b\r\nx: y"]
    worker.say(reply)
    assert [response.status for response in caller.responses()] == [500]


@in_loop
async def test_answers_of_services_keep_the_order_of_their_requests() -> None:
    house = House()
    worker, caller = await service(house), Peer(house)
    caller.send(request_of("GET", "/Svc/a", id="1") + request_of(cmd="query", id="2") + request_of("GET", "/Svc/b"))
    first, second = await worker.pushed()
    worker.say(reply_to(second, "late"))
    assert caller.responses() == []
    worker.say(reply_to(first, "early"))
    assert [(one.status, one.headers["id"]) for one in caller.responses()] == [
        (200, "1"), (200, "2"), (200, second["headers"]["id"]),
    ]  # fmt: skip


@in_loop
async def test_a_call_over_websocket_is_answered_by_id_and_acked_only_on_demand() -> None:
    house = House()
    worker, caller = await service(house), Client(house)
    caller.say({"headers": {"id": "I"}, "url": "/Svc/example/plus", "body": [1, 2]})
    [call] = await worker.pushed()
    assert call["body"] == [1, 2]
    worker.say(reply_to(call, 3, status=200))
    assert worker.messages() == []
    assert caller.messages() == [
        {"headers": {"id": "I", "content-type": "application/json; charset=utf8"}, "body": 3, "status": 200}
    ]
    answer = reply_to(call, 4, status=200)
    answer["headers"]["ack"] = True
    worker.say(answer)
    assert worker.messages()[0]["body"] == "OK"
    caller.leave()
    worker.say(answer)
    assert worker.messages()[0]["body"] == f"Target={caller.id} Not Found"


@in_loop
async def test_a_caller_whose_service_says_nothing_gets_504_and_its_call_is_not_handed_out_later() -> None:
    house = House(rpc_timeout_seconds=10.0)
    caller = Peer(house)
    caller.ask(cmd="create", mq="Svc", channel="Svc")
    caller.send(request_of("GET", "/Svc/a", id="1"))
    house.clock.advance(10)
    house.hub.calls.tick()
    [response] = caller.responses()
    assert (response.status, response.headers["id"]) == (504, "1")
    caller.send(request_of("GET", "/Svc/b", id="2"))
    worker = await service(house)
    assert [call["url"] for call in await worker.pushed()] == ["/Svc/b"]
    gone = Peer(house)
    gone.send(request_of("GET", "/Svc/c"))
    gone.leave()
    assert await worker.pushed() == []


@in_loop
async def test_a_call_whose_caller_is_gone_is_not_handed_out_and_its_answer_has_no_target() -> None:
    house = House()
    Client(house).do("create", mq="Svc", channel="Svc")
    caller = Peer(house)
    caller.send(request_of("GET", "/Svc/x"))
    source = caller.session.session.id
    caller.leave()
    worker = Client(house)
    worker.do("sub", mq="Svc", channel="Svc")
    worker.do("pub", "later", mq="Svc")
    pushed = await worker.pushed()
    assert [one.get("body") for one in pushed] == ["later"]
    assert worker.do("route", target=source, ack=True)["status"] == 404


@in_loop
async def test_expired_calls_are_kept_if_the_operator_says_so() -> None:
    house = House(rpc_keep_expired=True)
    caller = Peer(house)
    caller.ask(cmd="create", mq="Svc", channel="Svc")
    caller.send(request_of("GET", "/Svc/a"))
    house.clock.advance(10)
    house.hub.calls.tick()
    worker = await service(house)
    assert [call["url"] for call in await worker.pushed()] == ["/Svc/a"]


@in_loop
async def test_an_answer_that_would_smuggle_headers_becomes_500() -> None:
    house = House()
    worker, caller = await service(house), Peer(house)
    caller.send(request_of("GET", "/Svc/a"))
    [call] = await worker.pushed()
    answer = reply_to(call, "x")
    answer["headers"]["evil"] = "a\r\nset-cookie: b"
    worker.say(answer)
    [response] = caller.responses()
    assert response.status == 500
    assert "set-cookie" not in response.headers


@in_loop
async def test_bound_urls_win_over_names_and_the_names_of_both_releases_work() -> None:
    house = House()
    workers = {mq: await service(house, mq) for mq in ("/svc", "Svc", "Bound")}
    workers["Bound"].say(command("bind", [{"url": "/Svc/special", "mq": "Bound"}], mq="Bound"))
    assert workers["Bound"].messages()[0]["body"] == "OK, BIND URL (mq=Bound)"
    caller = Client(house)
    for url, mq in (("/svc/x", "/svc"), ("/Svc/x?y=1", "Svc"), ("/Svc/specialX", "Bound")):
        caller.say({"headers": {}, "url": url})
        [call] = await workers[mq].pushed()
        assert call["url"] == url
    caller.say({"headers": {}, "url": "/svcX"})
    assert caller.messages()[0]["status"] == 404


# -- who may do it (section 7) ----------------------------------------------------------------------------------------


def signed(message: dict[str, Any]) -> bytes:
    made = sign_frame(decode_message(json.dumps(message).encode()), "k", "secret")
    return encode_texts([encode_message(made)], mask=True)


@in_loop
async def test_with_keys_only_signed_messages_are_done() -> None:
    house = House()
    client = Client(house, keys=KEYS)
    client.send(signed(command("create", mq="Q", channel="C", id="1")))
    assert client.messages()[0]["status"] == 200
    assert client.do("create", mq="Q", id="2") == {
        "headers": {"content-type": "text/plain; charset=utf8", "id": "2"},
        "status": 403,
        "body": "missing apiKey in request",
    }
    assert client.do("create", mq="Q", apiKey="k", signature="00")["body"] == "signature mismatched"
    client.send(signed(command("pub", "x", mq="Q")))
    client.messages()
    client.send(signed(command("take", mq="Q", channel="C")))
    [message] = client.messages()[0]["body"]
    assert {"apiKey", "signature"}.isdisjoint(message["headers"])


@in_loop
async def test_over_http_the_signature_names_what_it_covers() -> None:
    house = House()
    web = Peer(house, keys=KEYS)
    fields = "url,method,body,h.cmd,h.mq"
    message = Message({"cmd": "create", "mq": "Q"}, "/", "POST")
    made = sign_request(message, "k", "secret", fields)
    proof: dict[str, Any] = dict(made.headers)
    assert web.ask(**proof).status == 200
    assert web.ask(**{**proof, "mq": "R"}).status == 403
    assert web.ask(**{**proof, "mqType": "disk"}).status == 403


@in_loop
async def test_a_replayed_message_is_refused_within_the_window_whether_it_has_an_id_or_not() -> None:
    house = House(replay_window_seconds=60.0)
    client = Client(house, keys=KEYS)
    frame = signed(command("create", mq="Q", channel="C", id="1"))
    refill = signed(command("sub", mq="Q", channel="C", window=1, ack="false"))
    for data in (frame, frame, refill, refill):
        client.send(data)
    assert [one["status"] for one in client.messages()] == [200, 403]
    thief = Client(house, keys=KEYS)
    for data in (frame, refill, signed(command("pub", mq="Q", ack="true"))):
        thief.send(data)
    assert [one["status"] for one in thief.messages()] == [403, 403, 200]
    house.clock.advance(60)
    client.send(frame)
    assert [one["status"] for one in client.messages()] == [200]


@in_loop
async def test_a_message_that_had_to_wait_is_no_replay_of_itself() -> None:
    files = FaultyFiles()
    gate = Gate(files)
    house = House(files, ack="flushed", replay_window_seconds=60.0)
    client = Client(house, keys=KEYS)
    client.send(signed(command("create", mq="D", channel="C", mqType="disk", id="c")))
    client.messages()
    gate.shut()
    client.send(signed(command("pub", 1, mq="D", id="p")) + signed(command("take", mq="D", channel="C", id="t")))
    await gate.reached()
    gate.open()
    answers: list[dict[str, Any]] = []
    while len(answers) < 2:
        answers += await client.pushed()
    assert [(one["headers"]["id"], one["status"]) for one in answers] == [("p", 200), ("t", 200)]
