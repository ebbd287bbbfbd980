"""Publications that are taken together are answered, stored and refused as they would be one by one."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.zbus.codec import decode_message, decode_messages
from babelbus.protocols.zbus.errors import RequestError
from babelbus.protocols.zbus.messages import HEADERS_MAX, Item, Message, Run
from babelbus.protocols.zbus.web_options import WebOptions
from babelbus.wire.browsers import BrowserGuard
from babelbus.wire.cors import Cors
from babelbus.wire.websocket import encode_texts
from tests.protocols.zbus.peer import Client, House, Peer, command, request_of
from tests.protocols.zbus.strategies import texts, values
from tests.storage.faults import FaultyFiles
from tests.support.bus import Gate, in_loop, payloads, read, turns

MANY = 20

odd_ids = st.sampled_from(["", "1", "a-b", 'say "hi"', "\\", "é", "中", "\n", "x" * 200])
bodies = values | texts | st.just("plain") | st.just(["plain", 1])
publications = st.builds(
    lambda request_id, body, extra: {
        "headers": {"cmd": "pub", "mq": "Q", **({} if request_id is None else {"id": request_id}), **extra},
        **({} if body is None else {"body": body}),
    },
    st.none() | odd_ids,
    bodies,
    st.sampled_from([{}, {"tag": "t"}, {"ack": "false"}, {"mq": "missing"}, {"MQ": "Q"}, {"ID": "other"}, {"x": "1"}]),
)
others = st.sampled_from(
    [
        {"headers": {"cmd": "query", "mq": "Q", "id": "q"}},
        {"headers": {"cmd": "pub", "mq": "Q", "id": 7}, "body": 1},
        {"headers": {"cmd": "PUB", "mq": "Q", "id": "u"}, "body": 1},
        {"headers": {"cmd": "pub", "mq": "Q", "id": "w"}, "url": "/u", "method": "GET", "body": 1},
        {"headers": {"cmd": "ping"}},
        {"cmd": "pub", "mq": "Q", "body": "alpha"},
        {"body": 1},
        [1],
        "no message",
    ]
)
sent_messages = st.lists(st.tuples(publications | others, st.integers(1, 6)), max_size=6)


def spread(sent: list[tuple[Any, int]]) -> list[bytes]:
    return [msgspec.json.encode(one) for one, times in sent for _ in range(times)]


def plain(items: list[Item]) -> list[Any]:
    """The messages, those of runs one by one; what was refused as status and text."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, Run):
            found += item.messages()
        else:
            found.append((item.status, item.text) if isinstance(item, RequestError) else item)
    return found


def decoded(text: bytes) -> Any:
    try:
        return decode_message(text)
    except RequestError as error:
        return error.status, error.text


@given(sent_messages, st.binary(max_size=5))
def test_frames_that_are_read_together_say_what_each_of_them_says(sent: list[tuple[Any, int]], rubbish: bytes) -> None:
    for frames in (spread(sent), [*spread(sent), rubbish], spread(sent)):
        assert plain(decode_messages(frames)) == [decoded(frame) for frame in frames]


known_frames = st.sampled_from(
    [
        b'{"headers":{"cmd":"pub","mq":"Q","id":"%b"},"body":"%b"}',
        b'{"body": "%b", "headers": {"id": "%b", "cmd": "pub", "mq": "Q"}}',
        b'{"headers":{"cmd":"pub","mq":"Q"},"body":"%b%b"}',
        b'{"headers":{"cmd":"pub","mq":"Q","tag":"\xc3\xa9","id":"%b"},"body":"%b"} ',
        b'{"headers":{"cmd":"pub","mq":"Q","x":"\\u0041","id":"%b"},"body":"%b"}',
        b'{"headers":{"cmd":"pub","mq":"Q","id":"%b","id":"2"},"body":"%b"}',
        b'{"headers":{"cmd":"pub","mq":"Q","id":"%b"},"body":"%b","body":"3"}',
        b'{"headers":{"cmd":"pub","mq":"Q",\n"id":"%b"},"body":"%b"}',
        b'{"headers":{"cmd":"pub","mq":"Q","id":"%b","\\u0069d":"2"},"body":"%b"}',
        b'{"headers":{"cmd":"pub","mq":"Q","body":"%b"},"body":"%b"}',
        b'{"headers":{"cmd":"pub","mq":"Q","id":"%b"},"body":1e999,"body":"%b"}',
    ]
)
known_values = st.sampled_from(
    [
        b"",
        b"1",
        b"text",
        b"~\x7f",
        b"\xc3\xa9",
        b"\xff",
        b"\t",
        b"\n",
        b'"',
        b"\\",
        b"\\n",
        b"mark",
        b'","id":"2',
        b'"}\n{"',
    ]
)


@given(known_frames, st.lists(st.lists(st.tuples(known_values, known_values), min_size=4, max_size=8), max_size=4))
def test_frames_that_are_like_a_known_one_say_what_each_of_them_says(
    form: bytes, reads: list[list[tuple[bytes, bytes]]]
) -> None:
    for chunk in ([(b"%d" % number, b"text") for number in range(MANY)], *reads):
        frames = [form % pair for pair in chunk]
        assert plain(decode_messages(frames)) == [decoded(frame) for frame in frames]


def test_a_text_that_two_frames_make_only_together_is_not_what_a_known_frame_makes_of_it() -> None:
    form = b'{"headers":{"cmd":"pub","mq":"Q","id":"%b"},"body":"%b"}'
    frames = [form % (b"%d" % number, b"text") for number in range(MANY)]
    assert isinstance(decode_messages(frames)[0], Run)
    cut = 30
    for bad in (frames[0] + b"\n" + frames[1], frames[0] + frames[1]):
        crooked = [bad, *frames[2:], b""]
        assert plain(decode_messages(crooked)) == [decoded(frame) for frame in crooked]
    crooked = [frames[0] + b"\n" + frames[1][:cut], frames[1][cut:], *frames[2:]]
    assert plain(decode_messages(crooked)) == [decoded(frame) for frame in crooked]
    assert len(decode_messages(frames)) == 1


def test_frames_that_are_one_message_only_together_are_refused_one_by_one() -> None:
    frames = [b'{"headers":{"cmd":"pub"}', b'"body":1}', b'{"headers":{"cmd":"pub"},"body":1}', b"{}"]
    found = decode_messages(frames)
    assert isinstance(found[0], RequestError)
    assert isinstance(found[1], RequestError)


WHOLE = b'{"headers":{"cmd":"pub","mq":"Q","id":"1"},"body":1}'


@pytest.mark.parametrize(
    "odd",
    [
        *(b"1],[2", b"[1],[2]", WHOLE + b"," + WHOLE, WHOLE + WHOLE, WHOLE + b"]", b"[" + WHOLE, WHOLE + b"\x00"),
        *(WHOLE + b",", b"," + WHOLE, b"", b",", WHOLE[:-1], WHOLE[:-1] + b',"body":[1', b'{"headers":{},"body":"'),
        b'{"headers":{"cmd":"pub","mq":"Q","id":"1"},"body":1},{"headers":{"cmd":"pub","mq":"Q","id":"2"},"body":2}',
    ],
)
@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_frame_never_is_a_second_message_and_never_joins_its_neighbours(odd: bytes, at: int) -> None:
    frames = [WHOLE.replace(b"1", b"%d" % (number + 3)) for number in range(7)]
    crooked = [*frames[:at], odd, *frames[at:]]
    found = plain(decode_messages(crooked))
    assert len(found) == len(crooked)
    assert [one for one in found if isinstance(one, Message)] == [decode_message(frame) for frame in frames]
    assert found[at][0] == 400


def test_an_id_counts_among_the_headers_and_the_last_of_two_spellings_of_the_id_counts() -> None:
    most = {f"h{number}": "x" for number in range(HEADERS_MAX - 1)}
    said = [{**most, "id": "1"}, {**most, "h": "x", "id": "1"}, {"id": "1", "ID": "2"}, {"ID": "2", "id": "1"}]
    frames = [msgspec.json.encode({"headers": headers}) for headers in said] * 2
    assert plain(decode_messages(frames)) == [decoded(frame) for frame in frames]


def test_publications_that_differ_in_id_and_body_alone_are_one_run() -> None:
    frames = [msgspec.json.encode(command("pub", f"text {number}", mq="Q", id=str(number))) for number in range(MANY)]
    [first], [second] = decode_messages(frames), decode_messages(frames)
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert first.message == second.message
    assert first.bodies == [b"text %d" % number for number in range(MANY)]
    assert first.ids == [str(number) for number in range(MANY)]


def stored(house: House) -> list[Any]:
    """What Q holds, without what the server chose."""
    found = []
    for record in read(house.bus.broker.topic("Q").partitions[0]):
        headers = sorted(pair for pair in record.headers if pair[0] not in (b"ce_id", b"ce_source"))
        request_id = dict(record.headers)[b"ce_id"] or b""
        found.append((record.payload, record.key, headers, request_id if len(request_id) != 36 else b"chosen"))
    return found


def answered(client: Client) -> list[Any]:
    found = client.messages()
    for one in found:
        if len(one["headers"].get("id", "")) == 36:
            one["headers"]["id"] = "chosen"
        if isinstance(one.get("body"), dict):
            one["body"] = "told"
    return found


@given(sent_messages)
def test_a_chunk_of_frames_is_answered_and_stored_as_its_frames_one_by_one(sent: list[tuple[Any, int]]) -> None:
    @in_loop
    async def check() -> None:
        results = []
        for together in (True, False):
            house = House()
            client = Client(house)
            client.do("create", mq="Q")
            frames = spread(sent)
            for chunk in [frames] if together else [[frame] for frame in frames]:
                client.send(encode_texts(chunk, mask=True))
            results.append((answered(client), stored(house)))
        assert results[0] == results[1]

    check()


requests = st.builds(
    lambda body, headers: request_of(body=body, cmd="pub", **headers),
    st.sampled_from([b"", b"x", b"hello", b"\xff", "中".encode(), b'"q"']),
    st.fixed_dictionaries(
        {"mq": st.sampled_from(["Q", "Q", "missing"])},
        optional={
            "id": st.sampled_from(["1", "22", "a b", "\xe4", "\xc3\xa9"]),
            "content_type": st.sampled_from(
                ["text/plain", "application/json", "text/plain; charset=latin1", "text/plain; charset=no", "x/y"]
            ),
            "tag": st.just("t"),
        },
    ),
)

query_requests = st.sampled_from(
    [
        *[request_of("POST", "/?cmd=pub&mq=Q", body=body, content_type="text/plain") for body in (b"", b"x", b"\xff")],
        *[request_of("POST", "/?cmd=pub&mq=Q&tag=t", id=number, body=b"hello") for number in ("1", "22", "\xe4")],
        request_of("POST", "/?cmd=pub&mq=Q&body=a%20b", body=b"other", content_type="text/plain"),
        request_of("GET", "/?cmd=pub&mq=Q&body=hello"),
        request_of("GET", "/?cmd=pub&mq=Q&body=hello", id="7", tag="t"),
        request_of("GET", "/?cmd=pub&mq=Q&body=hello&id=5", id="7"),
        request_of("GET", "/?cmd=pub&mq=Q&body="),
        request_of("GET", "/?cmd=pub&mq=Q"),
        request_of("GET", "/?cmd=pub&mq=missing&body=x"),
        request_of("GET", "/?cmd=pub&body=x"),
        request_of("GET", "/?cmd=query&mq=Q&id=8"),
        request_of("GET", "/?cmd=pub&mq=Q&body=%zz"),
    ]
)


@given(st.one_of(requests, query_requests))
def test_requests_that_are_alike_are_stored_and_answered_alike_whether_read_in_full_or_as_a_run(data: bytes) -> None:
    @in_loop
    async def check() -> None:
        house = House()
        web = Peer(house)
        web.ask(cmd="create", mq="Q")
        web.send(data * 5)
        answers = [
            (one.status, one.body, one.headers if len(one.headers.get("id", "")) < 36 else one.headers.keys())
            for one in web.responses()
        ]
        assert len(answers) == 5
        assert all(answer == answers[0] for answer in answers)
        records = stored(house)
        assert all(record == records[0] for record in records)
        assert len(records) in (0, 5)

    check()


@in_loop
async def test_a_page_that_asks_whether_it_may_publish_publishes_nothing() -> None:
    house = House()
    origin = "https://page.example"
    options = WebOptions(cors=Cors(frozenset({origin}), "POST", ""), guard=BrowserGuard(origins=frozenset({origin})))
    web = Peer(house, options=options)
    web.ask(cmd="create", mq="Q")
    web.send(request_of("OPTIONS", "/?cmd=pub&mq=Q&body=x", origin=origin, access_control_request_method="POST") * 5)
    assert [one.status for one in web.responses()] == [204] * 5
    assert stored(house) == []


@given(st.lists(st.tuples(st.one_of(requests, query_requests), st.integers(1, 6)), max_size=5))
def test_a_chunk_of_requests_is_answered_and_stored_as_its_requests_one_by_one(sent: list[tuple[bytes, int]]) -> None:
    @in_loop
    async def check() -> None:
        results = []
        for together in (True, False):
            house = House()
            web = Peer(house)
            web.ask(cmd="create", mq="Q")
            data = [one for one, times in sent for _ in range(times)]
            for chunk in [b"".join(data)] if together else data:
                web.send(chunk)
            responses = [
                (
                    one.status,
                    one.body,
                    {**one.headers, "id": "?"} if len(one.headers.get("id", "")) == 36 else one.headers,
                )
                for one in web.responses()
            ]
            results.append((responses, stored(house)))
        assert results[0] == results[1]

    check()


@in_loop
async def test_each_of_many_that_the_disk_refuses_hears_so() -> None:
    files = FaultyFiles()
    house = House(files)
    client, web = Client(house), Peer(house)
    client.do("create", mq="Q", mqType="disk")
    files.bytes_max = files.bytes_used
    client.say(*[command("pub", "x", mq="Q", id=str(number)) for number in range(MANY)])
    found = client.messages()
    assert [(one["status"], one["headers"]["id"]) for one in found] == [(500, str(number)) for number in range(MANY)]
    web.send(b"".join(request_of(body=b"x", cmd="pub", mq="Q", id=str(number)) for number in range(MANY)))
    responses = web.responses()
    assert [(one.status, one.headers["id"]) for one in responses] == [(500, str(number)) for number in range(MANY)]


def test_a_run_gives_its_messages_one_by_one() -> None:
    run = Run(Message({"cmd": "pub"}, body_kind="text"), ["1", None], [b"a", b"b"])
    assert list(run.messages()) == [
        Message({"cmd": "pub", "id": "1"}, body=b"a", body_kind="text"),
        Message({"cmd": "pub"}, body=b"b", body_kind="text"),
    ]


@in_loop
async def test_a_request_at_a_time_is_answered_in_order_also_when_the_disk_is_full_in_between() -> None:
    files = FaultyFiles()
    house = House(files)
    web = Peer(house)
    web.ask(cmd="create", mq="Q", mqType="disk")
    room = files.bytes_max
    found = []
    for number in range(3 * MANY):
        files.bytes_max = files.bytes_used if MANY <= number < 2 * MANY else room
        response = web.ask(cmd="pub", mq="Q", id=str(number), content_type="text/plain", body=b"x%d" % number)
        found.append((response.status, response.headers["id"]))
    assert found == [(500 if MANY <= number < 2 * MANY else 200, str(number)) for number in range(3 * MANY)]
    kept = [*range(MANY), *range(2 * MANY, 3 * MANY)]
    assert [one[0] for one in stored(house)] == [b"x%d" % number for number in kept]


@in_loop
async def test_an_mq_that_is_removed_between_two_requests_that_are_alike_is_not_found() -> None:
    house = House()
    web, other = Peer(house), Peer(house)
    other.ask(cmd="create", mq="Q")
    for _ in range(5):
        assert web.ask(cmd="pub", mq="Q", body=b"x").status == 200
    other.ask(cmd="remove", mq="Q")
    assert web.ask(cmd="pub", mq="Q", body=b"x").status == 404


@in_loop
async def test_the_answers_to_requests_that_wait_for_the_disk_keep_their_order() -> None:
    files = FaultyFiles()
    gate = Gate(files)
    house = House(files, ack="flushed")
    web = Peer(house)
    web.send(request_of(cmd="create", mq="Q", mqType="disk", channel="C"))
    for _ in range(4):
        web.send(request_of(cmd="pub", mq="Q", id="1", body=b"x"))
        while web.outbox.waiting:
            await turns()
    assert [one.status for one in web.responses()] == [200] * 5
    gate.shut()
    for number in range(3):
        web.send(request_of(cmd="pub", mq="Q", id=str(number), body=b"x"))
    web.send(request_of(cmd="pub", mq="missing", id="3", body=b"x"))
    await turns()
    assert web.responses() == []
    gate.open()
    while house.bus.broker.topic("Q").partitions[0].high_watermark < 7 or web.outbox.waiting:
        await turns()
    assert [(one.status, one.headers["id"]) for one in web.responses()] == [
        (200, "0"),
        (200, "1"),
        (200, "2"),
        (404, "3"),
    ]


single_requests = st.sampled_from(
    [
        *[request_of(cmd="pub", mq="Q", body=body) for body in (b"hello", b"HELLO", b"\xff\xfe...", b"x")],
        *[request_of(cmd="pub", mq="Q", id=number, body=b"hello") for number in ("1", "2", "a b")],
        request_of(cmd="pub", mq="R", body=b"hello"),
        request_of(cmd="pub", mq="missing", body=b"hello"),
        request_of("GET", "/?cmd=query&mq=Q"),
        request_of("GET", "/?cmd=create&mq=R"),
        request_of("GET", "/?cmd=remove&mq=R"),
        b"POST / HTTP/1.1\r\n",
        b"Host: a\r\n\r\n",
        b"rubbish\r\n\r\n",
    ]
)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), single_requests, st.integers(1, 4)), max_size=6), max_size=4))
def test_what_connections_ask_for_in_one_turn_is_answered_as_if_each_had_been_alone(
    turns_of: list[list[tuple[int, bytes, int]]],
) -> None:
    """Order counts within a connection; what several do to an MQ of one of them may be seen or not, so R is one's."""

    @in_loop
    async def check() -> None:
        results = []
        for together in (True, False):
            house = House()
            webs = [Peer(house) for _ in range(3)]
            webs[0].ask(cmd="create", mq="Q")
            ended: set[int] = set()
            for web in webs:
                for _ in range(3):
                    web.ask(cmd="pub", mq="Q", body=b"hello")
            for turn in turns_of:
                for number, data, times in turn:
                    if number and (b"mq: R" in data or b"mq=R" in data):
                        continue
                    for _ in range(times):
                        if number in ended:
                            break
                        try:
                            webs[number].send_in_turn(data)
                        except RemoteProtocolError:
                            ended.add(number)
                        if not together:
                            house.flush()
                house.flush()
            answers = [
                [(one.status, len(one.headers["id"]) if "id" in one.headers else 0) for one in web.responses()]
                for web in webs
            ]
            results.append((answers, sorted(map(repr, stored(house)))))
        assert results[0] == results[1]

    check()


def repeating(house: House, mq: str = "Q") -> Peer:
    """A connection that has published the same before."""
    web = Peer(house)
    web.ask(cmd="create", mq=mq)
    for _ in range(3):
        assert web.ask(cmd="pub", mq=mq, body=b"x").status == 200
    return web


@in_loop
async def test_a_publication_is_not_done_before_the_end_of_its_turn_and_is_done_although_its_client_left() -> None:
    house = House()
    web, gone = repeating(house), repeating(house)
    for peer in (web, gone):
        peer.send_in_turn(request_of(cmd="pub", mq="Q", body=b"y"))
        assert peer.responses() == []
    gone.leave()
    await turns()
    assert [one.status for one in web.responses()] == [200]
    assert gone.responses() == []
    assert [one[0] for one in stored(house)] == [b"x"] * 6 + [b"y"] * 2


@in_loop
async def test_a_fault_of_the_server_in_one_mq_leaves_nobody_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House()
    webs = [repeating(house, mq) for mq in "QR"]

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(house.bus.broker.topic("Q").partitions[0], "append", fail)
    for web, mq in zip(webs, "QR", strict=True):
        web.send_in_turn(request_of(cmd="pub", mq=mq, body=b"y"))
    house.flush()
    assert [[one.status for one in web.responses()] for web in webs] == [[500], [200]]
    assert payloads(house.bus.broker.topic("R").partitions[0])[-1:] == [b"y"]
