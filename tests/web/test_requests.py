"""Requests and responders over the administration endpoint of a whole server."""

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from babelbus.core.access import CLIENT
from babelbus.core.request import Question, Reply, Request, TooManyRequestsError
from babelbus.core.subject import exactly
from babelbus.web import requests
from tests.support.bus import Bus, in_loop
from tests.support.server import LiveServer, configure
from tests.web.test_state import Answer, Api


class Asked:
    """A request that waits in a thread of its own."""

    def __init__(self, api: Api, **body: Any) -> None:
        self._api, self._body = api, {"subject": "s", "payload": "?"} | body
        self._answer: tuple[int, Any] = (0, None)
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        status, content = self._api("POST", "/api/request", json.dumps(self._body).encode())
        self._answer = status, json.loads(content)

    def answer(self) -> tuple[int, Any]:
        self._thread.join()
        return self._answer


def respond(api: Api, **query: Any) -> tuple[Answer, str]:
    answer = api.open("GET", "/api/respond", {"subject": "s"} | query)
    return answer, answer.line()["responder"]


def reply(api: Api, responder: str, **body: Any) -> bool:
    answered = api.json("POST", f"/api/responders/{responder}/reply", json.dumps(body).encode())
    return bool(answered["delivered"])


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/request"), ("GET", "/api/respond"), ("POST", "/api/responders/x/reply")],
)
def test_nothing_of_it_works_without_the_token(api: Api, method: str, path: str) -> None:
    api.token = "wrong"
    assert api.fails(method, path) == (401, "unauthorized")


def test_every_mistake_has_its_status_and_word(api: Api) -> None:
    def ask(**body: Any) -> tuple[int, str]:
        return api.fails("POST", "/api/request", json.dumps({"subject": "s"} | body).encode())

    assert ask() == (404, "no_responders")
    assert ask(subject="") == (400, "invalid_event")
    assert ask(subject="$SYS/x") == (400, "invalid_event")
    assert ask(subject="x" * 70_000) == (400, "invalid_event")
    assert ask(key="k") == (400, "invalid_event")
    assert ask(headers={"ce_source": "zbus:#me"}) == (400, "invalid_event")
    assert ask(timeout_seconds=0) == (400, "bad_request")
    assert ask(timeout_seconds=3601) == (400, "bad_request")
    assert api.fails("GET", "/api/respond") == (400, "bad_request")
    assert api.fails("GET", "/api/respond", subject="$SYS/x") == (400, "invalid_event")
    assert api.fails("GET", "/api/respond", subject="s", window=0) == (400, "bad_request")
    assert api.fails("POST", "/api/responders/x/reply", b'{"number": 1}') == (410, "unknown_responder")


def test_a_question_is_answered_once_with_payload_and_headers(api: Api) -> None:
    answer, name = respond(api)
    with answer:
        asked = Asked(api, payload_base64="/w==", headers={"a": "b"}, timeout_seconds=60)
        question = answer.line()["question"]
        assert question.pop("timeout_seconds") <= 60
        headers = {"a": "b", "ce_source": "admin"}
        assert question == {"number": 1, "subject": "s", "payload_base64": "/w==", "headers": headers}
        assert not reply(api, name, number=2)
        assert reply(api, name, number=1, payload="!", headers={"c": "d"})
        assert not reply(api, name, number=1, payload="again")
        assert asked.answer() == (200, {"payload": "!", "headers": {"c": "d", "ce_source": "admin"}})


def test_a_responder_that_fails_and_one_that_is_too_late_are_told(api: Api) -> None:
    answer, name = respond(api)
    with answer:
        asked = Asked(api)
        number = answer.line()["question"]["number"]
        assert reply(api, name, number=number, failed="no idea")
        told = {"error": "the responder has failed: no idea", "code": "responder_failed"}
        assert asked.answer() == (502, told)
        late = Asked(api, timeout_seconds=0.01)
        number = answer.line()["question"]["number"]
        assert late.answer() == (504, {"error": "no reply has come in time", "code": "no_reply"})
        assert not reply(api, name, number=number, payload="!")


def test_a_responder_gets_no_more_than_its_window_and_what_waits_goes_to_the_next(api: Api) -> None:
    first, _ = respond(api, window=2)
    with first:
        asked = [Asked(api, payload=str(number)) for number in range(4)]
        held = {first.line()["question"]["payload"] for _ in range(2)}
        assert len(held) == 2
        second, name = respond(api, window=4)
        with second:
            waited = [second.line()["question"] for _ in range(2)]
            assert held | {one["payload"] for one in waited} == set("0123")
            first.connection.close()
            first.response.close()
            taken = [second.line()["question"] for _ in range(2)]
            assert {one["payload"] for one in taken} == held
            for one in waited + taken:
                assert reply(api, name, number=one["number"], payload=one["payload"] + "!")
        assert [one.answer()[1]["payload"] for one in asked] == ["0!", "1!", "2!", "3!"]


def test_the_requesters_are_told_when_the_last_responder_goes(api: Api) -> None:
    answer, _ = respond(api)
    asked = [Asked(api) for _ in range(2)]
    answer.line()
    answer.__exit__()
    assert [one.answer()[1]["code"] for one in asked] == ["no_responders"] * 2


def test_a_responder_that_takes_so_many_gets_no_more(api: Api) -> None:
    answer, name = respond(api, max=1)
    with answer:
        asked = Asked(api)
        number = answer.line()["question"]["number"]
        assert Asked(api).answer()[1]["code"] == "no_responders"
        assert reply(api, name, number=number, payload="!")
        assert asked.answer()[0] == 200


def test_every_group_is_asked_and_the_first_reply_counts(api: Api) -> None:
    (one, first), (other, second) = respond(api, group="a"), respond(api, group="b")
    with one, other:
        asked = Asked(api)
        numbers = [answer.line()["question"]["number"] for answer in (one, other)]
        assert reply(api, second, number=numbers[1], payload="b")
        assert not reply(api, first, number=numbers[0], payload="a")
        assert asked.answer()[1]["payload"] == "b"


@pytest.mark.parametrize("group", ["a", "b"])
@in_loop
async def test_others_answer_a_question_whose_responder_goes(group: str) -> None:
    bus = Bus()
    pool, responder = requests._Pool(bus.broker, "s", "a"), requests._Responder(1, None, CLIENT)
    questions: list[Question] = []
    pool.join(responder)
    bus.broker.responders.add(exactly("s"), questions.append, group, CLIENT)
    request = bus.broker.request("s", b"?", (), bus.clock.monotonic() + 10, CLIENT)
    assert responder.held
    assert pool.leave(responder)
    assert [question.key for question in questions] == [request.key]
    assert bus.broker.respond(request.key, Reply(b"!"))
    assert request.error is None
    await bus.broker.close()


@in_loop
async def test_full_responders_leave_a_request_to_others_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "QUESTIONS_MAX", 1)
    bus = Bus()
    pool, questions = requests._Pool(bus.broker, "s", "g"), list[Question]()
    for _ in range(2):
        pool.join(requests._Responder(1, None, CLIENT))

    def ask() -> Request[Reply]:
        return bus.broker.request("s", b"?", (), bus.clock.monotonic() + 10, CLIENT)

    held = [ask() for _ in range(3)]
    assert isinstance(ask().error, TooManyRequestsError)
    bus.broker.responders.add(exactly("s"), questions.append, "g", CLIENT)
    asked = [ask() for _ in range(4)]
    assert [question.key for question in questions] == [request.key for request in asked]
    assert not any(request.done for request in held + asked)
    await bus.broker.close()


def test_limits_hold(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "RESPONDERS_MAX", 1)
    monkeypatch.setattr(requests, "QUESTIONS_MAX", 1)
    answer, _ = respond(api)
    with answer:
        assert api.fails("GET", "/api/respond", subject="other") == (503, "busy")
        first = Asked(api, timeout_seconds=0.01)
        answer.line()
        assert first.answer()[1]["code"] == "no_reply"
        waiting = Asked(api)  # its window is full
        broker = api.live.server.broker
        api.live.until(lambda: broker.responders.requests.in_flight == 1)
        assert Asked(api).answer() == (
            503, {"error": "1 requests wait for the responders of 's', no more are taken", "code": "busy"},
        )  # fmt: skip
    assert waiting.answer()[1]["code"] == "no_responders"


def test_a_requester_that_disconnects_is_forgotten(api: Api) -> None:
    answer, name = respond(api)
    with answer:
        gone = api_socket(api)
        number = answer.line()["question"]["number"]
        gone.close()
        requests_ = api.live.server.broker.responders.requests
        api.live.until(lambda: requests_.in_flight == 0)
        assert not reply(api, name, number=number, payload="!")


def api_socket(api: Api) -> Any:
    """A request whose answer nobody has read."""
    host, port = api.live.server.addresses["admin"].rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("POST", "/api/request", b'{"subject": "s"}', {"Authorization": f"Bearer {api.token}"})
    return connection


def test_a_server_that_stops_ends_responders_in_order(tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, admin=True)) as live:
        answer, _ = respond(Api(live))
        live.ask_to_stop()
        assert answer.line() == {"end": "the server stops"}
        answer.__exit__()
