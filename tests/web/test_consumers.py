"""Groups, their consumers and dead letters over the administration endpoint of a whole server."""

import json
from typing import Any

import pytest

from babelbus.core.access import SERVER
from babelbus.web import consumers
from tests.web.groups import GROUP, make_group, publish
from tests.web.test_state import Answer, Api, metric

pytestmark = pytest.mark.usefixtures("work")


def post(api: Api, path: str, **body: Any) -> Any:
    status, content = api("POST", path, json.dumps(body).encode())
    assert status in (200, 201), content
    return json.loads(content)


def consume(api: Api, **query: Any) -> tuple[Answer, str]:
    answer = api.open("GET", f"{GROUP}/consume", query)
    return answer, answer.line()["consumer"]


def numbers(line: Any) -> list[int]:
    return [one["number"] for one in line["deliveries"]]


def offsets(line: Any) -> list[int]:
    return [one["record"]["offset"] for one in line["deliveries"]]


def is_holding(api: Api) -> bool:
    """Whether a member has a lease."""
    group = api.live.server.broker.groups
    assert group is not None
    return api.live.call(lambda: any(member.in_flight for member in group.get("work", "g").members))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/groups"),
        ("POST", "/api/groups"),
        ("GET", GROUP),
        ("PATCH", GROUP),
        ("DELETE", GROUP),
        ("POST", f"{GROUP}/seek"),
        ("POST", f"{GROUP}/pause"),
        ("POST", f"{GROUP}/resume"),
        ("GET", f"{GROUP}/consume"),
        ("POST", "/api/consumers/x/ack"),
        ("POST", "/api/consumers/x/nack"),
        ("POST", "/api/consumers/x/leave"),
        ("GET", "/api/dead-letters"),
        ("GET", "/api/dead-letters/g"),
        ("GET", "/api/dead-letters/g/0"),
        ("POST", "/api/dead-letters/g/replay"),
        ("POST", "/api/dead-letters/g/purge"),
    ],
)
def test_nothing_of_it_works_without_the_token(api: Api, method: str, path: str) -> None:
    api.token = "wrong"
    assert api.fails(method, path) == (401, "unauthorized")


def test_every_mistake_has_its_status_and_word(api: Api) -> None:
    make_group(api)

    def make(**body: Any) -> tuple[int, str]:
        return api.fails("POST", "/api/groups", json.dumps({"topic": "work", "name": "h"} | body).encode())

    assert make(name="g") == (409, "group_exists")
    assert make(topic="no") == (404, "unknown_topic")
    assert make(name="a\nb") == (400, "invalid_group_name")
    assert make(settings={"ack_seconds": 0}) == (400, "invalid_setting")
    assert make(settings={"no": 0}) == (400, "invalid_setting")
    assert make(settings={"filter": "x", "filter_kind": "no"}) == (400, "unknown_filter")
    assert make(start={"at": "end", "partition": 9}) == (404, "unknown_partition")
    assert make(start={"at": "nowhere"}) == (400, "bad_request")
    assert api.fails("PATCH", GROUP, b'{"ack": "on_delivery"}') == (400, "invalid_setting")
    assert api.fails("GET", "/api/topics/work/groups/no") == (404, "unknown_group")
    assert api.fails("GET", f"{GROUP}/consume", window=0) == (400, "bad_request")
    assert api.fails("POST", "/api/consumers/x/ack", b'{"numbers": []}') == (410, "unknown_consumer")
    assert api.fails("GET", "/api/dead-letters/work") == (404, "no_dead_letters")
    assert api.fails("POST", "/api/dead-letters/g/replay", b'{"max": 0}') == (400, "bad_request")


def test_ensure_leaves_a_group_that_is_there_as_it_is(api: Api) -> None:
    make_group(api, ack_seconds=5)
    body = b'{"topic": "work", "name": "g", "ensure": true, "settings": {"ack_seconds": 9}}'
    assert api.json("POST", "/api/groups", body)["settings"]["ack_seconds"] == 5


def test_a_consumer_never_has_more_than_its_window_and_gets_as_many_as_it_answers(api: Api) -> None:
    publish(api, *(b"%d" % n for n in range(10)))
    make_group(api)
    answer, name = consume(api, window=3)
    with answer:
        line = answer.line()
        assert offsets(line) == [0, 1, 2]
        first, second, _ = numbers(line)
        assert post(api, f"/api/consumers/{name}/ack", numbers=[first, second]) == {"done": 2, "stale": 0}
        assert offsets(answer.line()) == [3, 4]
        assert post(api, f"/api/consumers/{name}/ack", numbers=[first, 99]) == {"done": 0, "stale": 2}
        assert api.json("GET", GROUP)["in_flight"] == 3


def test_a_record_that_is_given_back_comes_again_with_its_attempt(api: Api) -> None:
    publish(api, b"x")
    make_group(api)
    answer, name = consume(api)
    with answer:
        (number,) = numbers(answer.line())
        told = post(api, f"/api/consumers/{name}/nack", numbers=[number], reason="busy", delay_seconds=0)
        assert told == {"done": 1, "stale": 0}
        (again,) = answer.line()["deliveries"]
        assert (again["attempt"], again["number"]) == (2, number + 1)
        post(api, f"/api/consumers/{name}/nack", numbers=[number + 1], reason="never", final=True)
    while not api.json("GET", "/api/dead-letters")["dead_letters"]:
        pass
    while not (letters := api.json("GET", "/api/dead-letters/g/0")["letters"]):
        pass  # the topic is there before its letter
    (letter,) = letters
    assert (letter["origin"]["reason"], letter["origin"]["attempts"]) == ("never", 2)
    assert "headers" not in letter["record"]


def test_a_connection_that_ends_gives_its_records_to_others(api: Api) -> None:
    publish(api, b"x", b"y")
    make_group(api)
    answer, name = consume(api)
    with answer:
        assert offsets(answer.line()) == [0, 1]
    other, _ = consume(api)
    with other:
        found: list[Any] = []
        while len(found) < 2:
            found += other.line()["deliveries"]
        assert [(one["record"]["offset"], one["attempt"]) for one in found] == [(0, 2), (1, 2)]
    assert api.fails("POST", f"/api/consumers/{name}/ack", b'{"numbers": [1]}') == (410, "unknown_consumer")


def test_a_consumer_that_leaves_gives_its_records_back_and_uses_up_no_attempt(api: Api) -> None:
    publish(api, b"x", b"y", b"z")
    make_group(api, attempts_max=1)
    for _ in range(2):
        answer, name = consume(api, window=2)
        with answer:
            assert [one["attempt"] for one in answer.line()["deliveries"]] == [1, 1]
            assert post(api, f"/api/consumers/{name}/leave") == {"returned": 2}
            assert answer.line() == {"end": "left"}
            assert answer.line() is None
    assert api.json("GET", GROUP)["in_flight"] == 2
    assert api.fails("POST", f"/api/consumers/{name}/ack", b'{"numbers": [1]}') == (410, "unknown_consumer")


def test_a_consumer_of_a_group_without_acks_leaves_too(api: Api) -> None:
    publish(api, b"x")
    make_group(api, ack="on_delivery")
    answer, name = consume(api)
    with answer:
        assert numbers(answer.line()) == [1]
        assert post(api, f"/api/consumers/{name}/leave") == {"returned": 0}
        assert answer.line() == {"end": "left"}
    assert api.json("GET", GROUP)["lag"] == 0


def test_a_lease_that_ends_brings_no_more_records_and_its_ack_is_stale(api: Api) -> None:
    publish(api, b"x", b"y")
    make_group(api, ack_seconds=0.05, retry_seconds=0)
    answer, name = consume(api, window=1)
    with answer:
        (number,) = numbers(answer.line())
        while is_holding(api):
            pass
        assert api.json("GET", GROUP)["counts"]["delivered"] == 1
        assert post(api, f"/api/consumers/{name}/ack", numbers=[number]) == {"done": 0, "stale": 1}
        assert offsets(answer.line()) == [0]


def test_max_is_the_most_that_is_handed_out(api: Api) -> None:
    publish(api, *(b"%d" % n for n in range(10)))
    for ack in ("explicit", "on_delivery"):
        post(api, "/api/groups", topic="work", name=ack, settings={"ack": ack}, start={"at": "beginning"})
        answer = api.open("GET", f"/api/topics/work/groups/{ack}/consume", {"window": 4, "max": 6, "idle_ms": 200})
        with answer:
            name = answer.line()["consumer"]
            line = answer.line()
            assert len(line["deliveries"]) == 4
            post(api, f"/api/consumers/{name}/ack", numbers=numbers(line))
            line = answer.line()
            assert len(line["deliveries"]) == 2
            post(api, f"/api/consumers/{name}/ack", numbers=numbers(line))
            assert answer.line() == {"end": "idle"}
            assert answer.line() is None
        assert api.json("GET", f"/api/topics/work/groups/{ack}")["counts"]["delivered"] == 6


def test_a_consumer_that_holds_something_is_not_idle(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "HEARTBEAT_SECONDS", 0.05)
    publish(api, b"x")
    make_group(api)
    answer, name = consume(api, idle_ms=200)
    with answer:
        (number,) = numbers(answer.line())
        for _ in range(6):  # heartbeats, longer than the time to be idle
            assert answer.response.readline() == b"\n"
        post(api, f"/api/consumers/{name}/ack", numbers=[number])
        assert answer.line() == {"end": "idle"}


def test_a_group_without_acks_takes_no_nack(api: Api) -> None:
    publish(api, b"x")
    make_group(api, ack="on_delivery")
    answer, name = consume(api)
    with answer:
        assert numbers(answer.line()) == [1]
        assert api.fails("POST", f"/api/consumers/{name}/nack", b'{"numbers": [1]}') == (409, "group_closed")
        assert post(api, f"/api/consumers/{name}/ack", numbers=[1]) == {"done": 1, "stale": 0}


def test_records_come_with_their_subject_and_what_is_no_text_as_base64(api: Api) -> None:
    publish(api, b"\xff\x00", subject="work/line1", key=b"\xfe", headers=((b"a", b"b"), (b"a", None)))
    make_group(api)
    answer, _ = consume(api)
    with answer:
        (one,) = answer.line()["deliveries"]
        assert one["subject"] == "work/line1"
        record = one["record"]
        assert (record["payload_base64"], record["key_base64"]) == ("/wA=", "/g==")
        assert record["headers_base64"] == [["YQ==", "Yg=="], ["YQ==", None]]


def test_so_many_consumers_and_no_more(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "CONSUMERS_MAX", 1)
    make_group(api)
    answer, _ = consume(api)
    with answer:
        assert api.fails("GET", f"{GROUP}/consume") == (503, "busy")


def test_what_a_consumer_does_not_read_is_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "QUEUE_BYTES_MAX", 10_000)
    publish(api, *(b"x" * 100_000 for _ in range(300)))
    make_group(api)
    answer, name = consume(api, window=300)
    with answer:
        # What the sockets and one turn of the group hold has gone out; the rest waits in the log.
        in_flight = api.json("GET", GROUP)["in_flight"]
        assert in_flight < 300
        got = 0
        while got < 300:
            line = answer.line()
            got += len(line["deliveries"])
            post(api, f"/api/consumers/{name}/ack", numbers=numbers(line))


def test_the_metrics_tell_what_groups_do(api: Api) -> None:
    publish(api, b"x", b"y", b"z")
    make_group(api)
    answer, name = consume(api, window=2)
    with answer:
        post(api, f"/api/consumers/{name}/ack", numbers=numbers(answer.line())[:1])
        assert (metric(api, "babelbus_groups "), metric(api, "babelbus_groups_lag")) == (1, 2)
        assert metric(api, "babelbus_groups_acknowledged_total") == 1
        assert metric(api, "babelbus_groups_delivered_total") >= 2
        assert metric(api, "babelbus_groups_read_ahead_bytes_max") == 64 * 2**20
        assert metric(api, "babelbus_staged_bytes_max") == 16 * 2**30
        assert metric(api, "babelbus_state_keys") > 0
    api.json("DELETE", GROUP)
    assert metric(api, "babelbus_groups_acknowledged_total") == 1


def test_the_end_of_a_group_is_told_to_its_consumers(api: Api) -> None:
    make_group(api)
    answer, _ = consume(api)
    with answer:
        assert api.json("DELETE", GROUP) == {"removed": "g", "topic": "work"}
        assert answer.line() == {"end": "group 'g' on topic 'work' was removed"}


def test_a_forged_letter_cannot_spoil_the_list(api: Api) -> None:
    api.live.call(lambda: api.live.server.broker.create_topic("dead-letters/g", principal=SERVER))
    headers = [(b"dead-reason", b"\x1b[2J"), (b"dead-topic", b"\xff"), (b"dead-group", b"g"), (b"dead-time", b"1")]
    headers += [(name, b"1") for name in (b"dead-attempts", b"dead-partition", b"dead-offset")]
    publish(api, b"x", subject="dead-letters/g", headers=tuple(headers))
    publish(api, b"y", subject="dead-letters/g")
    first, second = api.json("GET", "/api/dead-letters/g/0")["letters"]
    assert first["origin"]["topic"] == "\ufffd"
    assert second["origin"] is None
    page = api.json("GET", "/api/dead-letters/g/0", max=1)
    assert (len(page["letters"]), page["next_offset"]) == (1, 1)
    assert post(api, "/api/dead-letters/g/replay")["failed"] == 2
    assert api.fails("POST", "/api/dead-letters/g/purge", b"{}") == (409, "letters_waiting")


def test_administration_that_stops_ends_the_answers_of_consumers_and_followers(api: Api) -> None:
    make_group(api)
    answer, _ = consume(api)
    follower = api.open("GET", "/api/topics/work/follow", {})
    with answer, follower.begin():
        api.live.run(api.live.server.administration.stop)
        assert answer.line() == {"end": "the server stops"}
        assert follower.response.read() == b""  # the end, where a connection that is cut raises IncompleteRead
