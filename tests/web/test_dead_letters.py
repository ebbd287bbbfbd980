"""Dead letters over the administration endpoint of a whole server: shortened, those that wait, replay with progress."""

import json
from typing import Any

import pytest

from babelbus.core.access import SERVER
from babelbus.core.groups import dead_letter_topics
from babelbus.core.groups.dead_letters import DeadLetter, make
from babelbus.core.record import Record
from tests.web.test_state import Api

LETTERS = "dead-letters/g"
PATH = "/api/dead-letters/dead-letters%2Fg"


@pytest.fixture(autouse=True)
def letters_topic(api: Api, work: None) -> None:
    settings = {"ack": "written"}
    api.live.call(lambda: api.live.server.broker.create_topic(LETTERS, 1, settings, SERVER, source="work"))


def send(api: Api, *payloads: bytes, topic: str = "work", reason: str = "nack", **fields: Any) -> None:
    """Publish dead letters, as a group does."""
    events = [
        make(LETTERS, Record(payload, **fields), DeadLetter(topic, 0, number, "g", 3, reason, 1_700_000_000_000))
        for number, payload in enumerate(payloads)
    ]
    api.live.publish(events)


def letters(api: Api, **query: Any) -> Any:
    return api.json("GET", f"{PATH}/0", shortened=1, **query)


def replay(api: Api, **body: Any) -> list[Any]:
    with api.open("POST", f"{PATH}/replay", {}, json.dumps({"progress": True} | body).encode()) as answer:
        assert answer.response.status == 200
        return list(iter(answer.line, None))


def test_letters_are_shortened_with_where_they_came_from(api: Api) -> None:
    source = ((b"ce_source", b"jebp:alice"), (b"note", b"x" * 100_000))
    send(api, b"p" * 100_000, b"\xff", headers=source, key=b"k", reason="r" * 5_000)
    page = letters(api)
    assert (page["first_offset"], page["end_offset"], page["next_offset"]) == (0, 2, None)
    first, second = page["letters"]
    assert (first["record"]["payload_bytes"], first["record"]["clipped"]) == (100_000, True)
    assert len(json.dumps(first)) < 10_000
    assert first["record"]["origin"] == {"protocol": "jebp", "principal": "alice", "source": "jebp:alice"}
    assert not any(name.startswith("dead-") for name, *_ in first["record"]["headers"])
    origin = first["origin"]
    assert (origin["topic"], origin["partition"], origin["offset"], origin["group"]) == ("work", 0, 0, "g")
    assert (origin["attempts"], len(origin["reason"])) == (3, 1_003)
    assert second["record"]["payload_b64"] == "/w=="


def test_letters_that_were_replayed_may_be_left_out(api: Api) -> None:
    send(api, b"0", b"1", b"2", b"3")
    api.json("POST", f"{PATH}/replay", b'{"places": [[0, 0], [0, 2]]}')
    assert [letter["replayed"] for letter in letters(api)["letters"]] == [True, False, True, False]
    page = letters(api, waiting=1, max=1)
    assert [letter["record"]["offset"] for letter in page["letters"]] == [1]
    page = letters(api, waiting=1, offset=page["next_offset"])
    assert [letter["record"]["offset"] for letter in page["letters"]] == [3]


def test_a_replay_tells_how_far_it_is(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter_topics, "TAKE_COUNT", 2)
    send(api, b"0", b"1", b"2")
    send(api, b"3", topic="lost")
    *progress, last = replay(api)
    told = [(line["progress"]["replayed"], line["progress"]["failed"]) for line in progress]
    assert told == [(2, 0), (3, 1)]
    assert (last["done"]["replayed"], last["done"]["failed"], last["done"]["waiting"]) == (3, 1, 1)
    assert "'lost'" in last["done"]["failures"][0]["reason"]
    assert api.json("GET", "/api/topics/work")["partitions"][0]["next_offset"] == 3


def test_a_mistake_is_answered_before_the_lines_begin(api: Api) -> None:
    body = b'{"progress": true}'
    assert api.fails("POST", "/api/dead-letters/none/replay", body) == (404, "no_dead_letters")
    assert api.fails("POST", f"{PATH}/replay", b'{"progress": true, "max": 0}') == (400, "bad_request")


def test_a_replay_beside_another_one_says_so_in_its_last_line(api: Api) -> None:
    send(api, b"0")
    broker = api.live.server.broker

    def join() -> None:
        groups = broker.groups
        group = groups.ensure(LETTERS, "$replay", dead_letter_topics.REPLAY_SETTINGS, principal=SERVER)
        group.join(lambda _: None, exclusive=True, credit=0, principal=SERVER)

    api.live.call(join)
    (line,) = replay(api)
    assert "has an exclusive member" in line["error"]


def test_a_topic_names_the_groups_that_send_there(api: Api) -> None:
    for name in ("g", "h"):
        settings = {"ack": "explicit", "dead_letter_topic": LETTERS}
        assert api("POST", "/api/groups", json.dumps({"topic": "work", "name": name, "settings": settings}).encode())
    send(api, b"0")
    (topic,) = api.json("GET", "/api/dead-letters")["dead_letters"]
    assert [sender["group"] for sender in topic["senders"]] == ["g", "h"]
    assert topic == api.json("GET", PATH)
