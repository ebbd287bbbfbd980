"""Access and the audit over the administration endpoint of a whole server, as its pages ask for them."""

import base64
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest

from babelbus.core.state import KeyPattern, Testament
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import LiveServer
from tests.web.test_state import Api

PASSWORD = "correct horse battery staple"
TABLE_FILE = '[[rows]]\nwho = "anna"\naction = "admin"\npattern = "$access"\neffect = "deny"\n'


class AsAnna:
    """Requests of a principal with a password."""

    def __init__(self, live: LiveServer) -> None:
        self._address = live.server.addresses["admin"]
        self._proof = base64.b64encode(f"anna:{PASSWORD}".encode()).decode()

    def __call__(self, method: str, path: str, body: object = None, **query: str) -> tuple[int, Any]:
        connection = HTTPConnection(self._address, timeout=SAFETY_NET_SECONDS)
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, f"{path}?{urlencode(query)}", data, {"Authorization": f"Basic {self._proof}"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer


@pytest.fixture
def anna(api: Api) -> AsAnna:
    """An administrator by a role, in a server whose gate is on."""
    wish = [{"kind": "password", "password": PASSWORD}]
    body = {"enforce": True, "admin": "anna", "issue": wish}
    api.json("PUT", "/api/access/mode", json.dumps(body).encode())
    return AsAnna(api.live)


def row(who: str, action: str, pattern: str, effect: str = "allow") -> dict[str, Any]:
    return {"rows": [{"who": who, "action": action, "pattern": pattern, "effect": effect}]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/api/principals/anna", {"roles": []}),
        ("DELETE", "/api/principals/anna", None),
        ("PATCH", "/api/principals/anna", {"root": "tenants/anna"}),
        ("PUT", "/api/principals/anna/credentials", {"kind": "password"}),
        ("POST", "/api/access/rows", row("anna", "admin", "#", "deny")),
        ("POST", "/api/access/rows", row("role:admin", "*", "$access/#", "deny")),
        ("POST", "/api/access/rows", row("*", "admin", "?", "deny")),
        ("POST", "/api/access/apply", {"text": TABLE_FILE}),
    ],
)
def test_nobody_takes_its_own_right_to_administer_away(
    api: Api, anna: AsAnna, method: str, path: str, body: object
) -> None:
    before = api.json("GET", "/api/access")
    status, answer = anna(method, path, body)
    assert (status, answer["code"]) == (409, "locks_out")
    assert "another administrator" in answer["error"]
    assert api.json("GET", "/api/access") == before
    assert anna("GET", "/api/access")[0] == 200


def test_a_batch_with_a_refused_key_stores_no_value(api: Api, anna: AsAnna) -> None:
    anna("POST", "/api/access/rows", row("anna", "write-state", "secret/#", "deny"))
    values = [{"key": "a", "value": 1}, {"key": "secret/a", "value": 1}, {"key": "b", "value": 1}]
    status, answer = anna("POST", "/api/state/values", {"values": values})
    assert (status, answer["code"]) == (403, "refused")
    api.set("c", "1")  # a change that was left behind would be logged with the next one
    assert api("GET", "/api/state/tree") == (200, b'{"key":"c","value":1}\n')


def test_what_does_not_concern_its_own_right_may_be_changed(api: Api, anna: AsAnna) -> None:
    assert anna("POST", "/api/access/rows", row("role:walkers", "admin", "#", "deny"))[0] == 200
    assert anna("POST", "/api/access/rows", row("anna", "publish", "#", "deny"))[0] == 200
    assert anna("PATCH", "/api/principals/anna", {"roles": ["admin", "walkers2"]})[0] == 200
    assert anna("POST", "/api/access/rows", row("anna", "admin", "$access"))[0] == 200
    assert anna("PATCH", "/api/principals/anna", {"roles": []})[0] == 200  # she has a row of her own
    rows = row("anna", "admin", "$access")["rows"]
    assert anna("DELETE", "/api/access/rows", {"rows": rows})[1]["code"] == "locks_out"


def test_the_token_of_the_data_folder_may_remove_every_administrator(api: Api, anna: AsAnna) -> None:
    api.json("DELETE", "/api/principals/anna")
    assert anna("GET", "/api/access")[0] == 401
    assert "anna" not in [one["name"] for one in api.json("GET", "/api/principals")["principals"]]


def test_principals_are_listed_with_what_they_use(api: Api, anna: AsAnna) -> None:
    with api.open("GET", "/api/listen", {"pattern": "#"}).begin():
        principals = anna("GET", "/api/principals")[1]["principals"]
    assert {one["name"] for one in principals} == {"admin", "anna"}
    assert all(isinstance(one["used"], dict) for one in principals)
    one = anna("GET", "/api/principals/anna")[1]
    assert (one["quota_defaults"], one["quotas_counted"]) == ({}, False)


# -- the audit -------------------------------------------------------------------------------------------------------


def pages(api: Api, **query: Any) -> Iterator[list[dict[str, Any]]]:
    answer = api.json("GET", "/api/audit", newest=1, **query)
    yield answer["records"]
    while answer["before"] is not None:
        answer = api.json("GET", "/api/audit", before=answer["before"], **query)
        yield answer["records"]


@pytest.fixture
def changed(api: Api) -> Api:
    """A server whose audit has 25 changes of the table and a wrong proof."""
    api.json("PUT", "/api/access/mode", json.dumps({"enforce": True, "admin": "anna"}).encode())
    for number in range(24):
        body = row(f"p{number}", "publish", "#") if number % 2 else {"name": f"p{number}", "roles": ["r"]}
        path = "/api/access/rows" if number % 2 else "/api/principals"
        status, _ = api("POST", path, json.dumps(body).encode())
        assert status in (200, 201)
    return api


def test_the_audit_is_paged_backwards(changed: Api) -> None:
    found = list(pages(changed, count=10, kind="change"))
    assert [len(page) for page in found] == [10, 10, 5]
    records = [record for page in found for record in page]
    offsets = [record["offset"] for record in records]
    assert offsets == sorted(offsets, reverse=True)
    assert sorted(record["version"] for record in records) == list(range(1, 26))
    (one,) = changed.json("GET", "/api/audit", before=offsets[3] + 1, count=1)["records"]
    assert one == records[3]


def test_the_audit_is_filtered_by_text_and_time(changed: Api) -> None:
    changed.fails("GET", "/api/principals/nobody")
    status = AsAnna(changed.live)("GET", "/api/access")[0]
    assert status == 401
    logins = [record for page in pages(changed, search="WRONG") for record in page]
    assert [record["kind"] for record in logins] == ["login-refused"]
    assert [record for page in pages(changed, principal="nobody") for record in page] == []
    records = [record for page in pages(changed) for record in page]
    middle = records[len(records) // 2]["time_ms"]
    since = [record for page in pages(changed, since_ms=middle) for record in page]
    until = [record for page in pages(changed, until_ms=middle - 1) for record in page]
    assert since + until == records


def test_a_page_of_the_audit_looks_at_a_bounded_number_of_records(
    changed: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babelbus.web.audit.WINDOW", 4)
    monkeypatch.setattr("babelbus.web.audit.SCAN_MAX", 8)
    found = list(pages(changed, search='"P7"'))
    assert [record["after"][0]["who"] for page in found for record in page] == ["p7"]
    assert len(found) > 2


def test_an_audit_that_has_nothing_has_one_empty_page(api: Api) -> None:
    assert list(pages(api)) == [[]]


# -- locks and wills of others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["", "acme"])
def test_locks_and_wills_are_told_as_far_as_their_keys_are_granted(api: Api, root: str) -> None:
    def lock(key: str) -> None:
        api.live.call(lambda: api.live.server.broker.state.locks.lock(key, f"owner of {key}"))

    def leave(owner: str, key: str) -> None:
        will = Testament((KeyPattern(tuple(key.split("/")), rest=True),), ((f"{key}/x", msgspec.Raw(b"1")),))
        api.live.call(lambda: api.live.server.broker.state.set_testament(owner, will))

    for key in ("acme/plant", "acme/hidden", "globex/plant"):
        lock(key)
        leave(f"client of {key}", key)
    wish = [{"kind": "password", "password": PASSWORD}]
    body = {"name": "anna", "issue": wish} | ({"root": root} if root else {})
    assert api("POST", "/api/principals", json.dumps(body).encode())[0] == 201
    rows = [row("anna", action, "acme/plant/#")["rows"][0] for action in ("subscribe", "write-state")]
    api.json("POST", "/api/access/rows", json.dumps({"rows": rows}).encode())
    anna, key = AsAnna(api.live), "plant" if root else "acme/plant"
    assert [one["key"] for one in anna("GET", "/api/state/locks")[1]["locks"]] == [key]
    (will,) = anna("GET", "/api/state/wills")[1]["wills"]
    assert will["owner"] == "client of acme/plant"
    assert will["grave_goods"] == [f"{key}/#"]
    assert [one["key"] for one in will["last_will"]] == [f"{key}/x"]
    assert anna("GET", "/api/state/locks", key=key)[1]["total"] == 1
    assert len(api.json("GET", "/api/state/locks")["locks"]) == 3
    assert len(api.json("GET", "/api/state/wills")["wills"]) == 3
