"""The parts of the state that pages show, over the administration endpoint of a whole server."""

import json
from typing import Any

import pytest

from babelbus.clients.worterbuch.blocking import BlockingClient as TreeClient
from babelbus.web import state_views
from tests.web.test_state import Api

HOSTILE = "<img src=x onerror=alert(1)>"


def put(api: Api, **values: Any) -> None:
    body = {"values": [{"key": key, "value": value} for key, value in values.items()]}
    api.json("POST", "/api/state/values", json.dumps(body).encode())


def names(answer: Any) -> list[str]:
    return [node["name"] for node in answer["nodes"]]


def test_a_level_is_paged_in_order(api: Api) -> None:
    put(api, **{f"many/{number:05}": number for number in range(5_000)}, **{"many/00007/below": 1})
    first = api.json("GET", "/api/state/nodes", parent="many", count=3)
    assert (names(first), first["total"], first["after"]) == (["00000", "00001", "00002"], 5000, "00002")
    assert first["nodes"][1] == {"name": "00001", "key": "many/00001", "value": {"text": "1", "bytes": 1}}
    later = api.json("GET", "/api/state/nodes", parent="many", count=3, after="00005")
    assert [node.get("children", 0) for node in later["nodes"]] == [0, 1, 0]
    last = api.json("GET", "/api/state/nodes", parent="many", count=3, after="04997")
    assert (names(last), last["after"]) == (["04998", "04999"], None)
    some = api.json("GET", "/api/state/nodes", parent="many", search="0499")
    assert (len(some["nodes"]), some["total"]) == (11, 11)


def test_the_root_has_a_level_and_a_leaf_has_an_empty_one(api: Api) -> None:
    put(api, a=1, **{"b/c": 2, "": 3})
    root = api.json("GET", "/api/state/nodes")
    assert names(root) == ["", "$SYS", "a", "b"]
    assert "value" not in root["nodes"][3]
    assert api.json("GET", "/api/state/nodes", parent="a") == {"nodes": [], "total": 0, "after": None}
    assert api.json("GET", "/api/state/nodes", parent="nowhere")["nodes"] == []
    assert api.fails("GET", "/api/state/nodes", parent="a/#") == (400, "invalid_key")


def test_a_level_as_it_was(api: Api) -> None:
    put(api, **{"a/x": 1, "a/y/z": 2, "ab": 3})
    offset = api.json("GET", "/api/state/ends")["latest"]["offset"]
    api.json("DELETE", "/api/state/values", pattern="#")
    put(api, **{"a/x": 9})
    past = api.json("GET", "/api/state/nodes", parent="a", as_of_offset=offset)
    assert [(node["name"], node.get("children", 0), "value" in node) for node in past["nodes"]] == [
        ("x", 0, True),
        ("y", -1, False),
    ]
    assert past["nodes"][0]["value"]["text"] == "1"
    assert names(api.json("GET", "/api/state/nodes", as_of_offset=offset)) == ["a", "ab"]


def test_keys_are_found_in_the_whole_tree(api: Api) -> None:
    put(api, **{"plant/line1/Temp": 1, "plant/line2/temp": 2, "plant/line2/speed": 3, "temp": 4})
    assert names(api.json("GET", "/api/state/search", search="temp")) == [
        "plant/line1/Temp",
        "plant/line2/temp",
        "temp",
    ]
    assert names(api.json("GET", "/api/state/search", pattern="plant/?/temp")) == ["plant/line2/temp"]
    assert api.fails("GET", "/api/state/search", pattern="#/x") == (400, "invalid_pattern")


def test_a_long_value_comes_as_its_beginning_and_whole_if_asked_for(api: Api) -> None:
    text = json.dumps("ä" * 100_000 + HOSTILE, ensure_ascii=False)
    api.set("long", text)
    entry = api.json("GET", "/api/state/entry", key="long", bytes_max=100)
    assert entry["value"]["text"] == '"' + "ä" * 49  # the hundredth byte is half a letter
    assert (entry["value"]["clipped"], entry["value"]["bytes"]) == (True, len(text.encode()))
    assert api.json("GET", "/api/state/entry", key="long", bytes_max=2**20)["value"]["text"] == text
    (node,) = api.json("GET", "/api/state/nodes", search="long")["nodes"]
    assert len(node["value"]["text"].encode()) <= 200
    (revision,) = api.json("GET", "/api/state/revisions", key="long", bytes_max=3)["revisions"]
    assert (revision["text"], revision["bytes"]) == ('"ä', len(text.encode()))
    assert "value" not in revision


def test_a_key_without_a_value_says_so(api: Api) -> None:
    put(api, **{"a/b": 1})
    assert api.json("GET", "/api/state/entry", key="a") == {"key": "a", "value": None, "digest": "", "children": 1}
    assert api.json("GET", "/api/state/entry", key="x")["children"] == 0
    assert api.fails("GET", "/api/state/entry", key="x", as_of_time=1) == (404, "no_such_key")


@pytest.mark.parametrize("size", [1, 2 * 2**20])
def test_the_second_of_two_who_edit_one_plain_value_is_told(api: Api, size: int) -> None:
    api.set("a", json.dumps("x" * size))
    digest = api.json("GET", "/api/state/entry", key="a", bytes_max=1)["digest"]
    api.json("PUT", "/api/state/value", b'"mine"', key="a", digest=digest)
    assert api.fails("PUT", "/api/state/value", b'"yours"', key="a", digest=digest) == (409, "value_changed")
    assert api.fails("DELETE", "/api/state/value", key="a", digest=digest) == (409, "value_changed")
    entry = api.json("GET", "/api/state/entry", key="a")
    assert (entry["value"]["text"], entry["value"].get("version", 0)) == ('"mine"', 0)
    api.json("DELETE", "/api/state/value", key="a", digest=entry["digest"])
    assert api.fails("PUT", "/api/state/value", b"1", key="a", digest=digest) == (409, "value_changed")
    api.json("PUT", "/api/state/value", b"1", key="a", digest="")
    assert api.fails("PUT", "/api/state/value", b"2", key="a", digest="") == (409, "value_changed")


def test_equal_values_of_other_versions_differ(api: Api) -> None:
    api.json("PUT", "/api/state/value", b"1", key="a", version=0)
    digest = api.json("GET", "/api/state/entry", key="a")["digest"]
    api.json("PUT", "/api/state/value", b"1", key="a", version=1)
    assert api.json("GET", "/api/state/entry", key="a")["digest"] != digest
    assert api.fails("DELETE", "/api/state/value", key="a", digest=digest) == (409, "value_changed")


def test_differences_between_two_moments_are_counted_and_paged(api: Api) -> None:
    put(api, **{"a/one": 1, "a/two": 2, "b": 1})
    start = api.json("GET", "/api/state/ends")["latest"]
    api.set("a/one", "10")
    api.json("DELETE", "/api/state/value", key="a/two")
    api.set("a/three", json.dumps(HOSTILE * 1000))
    first = api.json("GET", "/api/state/differences", pattern="a/#", from_offset=start["offset"], count=2, bytes_max=9)
    assert first["counts"] == {"added": 1, "changed": 1, "removed": 1}
    assert [(row["key"], row["difference"]) for row in first["rows"]] == [("a/one", "changed"), ("a/three", "added")]
    assert (first["rows"][0]["before"]["value"]["text"], first["rows"][0]["after"]["value"]["text"]) == ("1", "10")
    assert first["rows"][1]["before"] is None
    assert first["rows"][1]["after"]["value"] == {
        "text": '"<img src',
        "bytes": len(HOSTILE) * 1000 + 2,
        "clipped": True,
    }
    rest = api.json(
        "GET",
        "/api/state/differences",
        pattern="a/#",
        from_offset=first["from_offset"],
        to_offset=first["to_offset"],
        after=first["after"],
    )
    assert [(row["key"], row["difference"], row["after"]) for row in rest["rows"]] == [("a/two", "removed", None)]
    assert rest["after"] is None


def test_differences_need_moments_in_order(api: Api) -> None:
    put(api, a=1, b=2)
    path = "/api/state/differences"
    assert api.fails("GET", path) == (400, "bad_request")
    assert api.fails("GET", path, from_offset=1, to_offset=0) == (400, "invalid_moments")
    assert api.fails("GET", path, from_offset=99) == (416, "offset_out_of_range")
    assert api.fails("GET", path, from_offset=1, from_time=1) == (400, "bad_request")


def test_the_ends_of_the_past_are_told(api: Api) -> None:
    empty = api.json("GET", "/api/state/ends")
    assert empty["latest"] == {"offset": -1, "time_ms": None}
    put(api, a=1, b=2)
    ends = api.json("GET", "/api/state/ends")
    assert ends["latest"]["offset"] == 1
    assert ends["earliest"]["time_ms"] <= ends["latest"]["time_ms"] <= ends["now_ms"]


def test_locks_tell_who_holds_and_who_waits(api: Api) -> None:
    address = api.live.server.addresses["worterbuch-tcp"]
    with TreeClient(f"tcp://{address}") as holder, TreeClient(f"tcp://{address}") as other:
        holder.lock("plant/line1")
        holder.lock("plant/line2")
        other.lock("shop")
        locks = api.json("GET", "/api/state/locks", count=2)
        assert [lock["key"] for lock in locks["locks"]] == ["plant/line1", "plant/line2"]
        assert (locks["total"], locks["after"]) == (3, "plant/line2")
        (shop,) = api.json("GET", "/api/state/locks", key="shop")["locks"]
        assert shop["waiting"] == []
        assert shop["holder"] not in ("", locks["locks"][0]["holder"])


def test_wills_tell_whose_they_are_and_are_found_by_key(api: Api) -> None:
    address = api.live.server.addresses["worterbuch-tcp"]
    with TreeClient(f"tcp://{address}") as client:
        client.set_grave_goods(["alive/#"])
        client.set_last_will({"status/me": HOSTILE, "status/you": 1})
        (will,) = api.json("GET", "/api/state/wills")["wills"]
        assert will["grave_goods"] == ["alive/#"]
        assert [one["key"] for one in will["last_will"]] == ["status/me", "status/you"]
        assert will["owner"] == client.client_id
        (will,) = api.json("GET", "/api/state/wills", key="alive/x")["wills"]
        assert (will["grave_goods"], will["last_will"]) == (["alive/#"], [])
        (will,) = api.json("GET", "/api/state/wills", key="status/me")["wills"]
        assert [one["key"] for one in will["last_will"]] == ["status/me"]
        assert api.json("GET", "/api/state/wills", key="nothing")["wills"] == []


def test_a_watch_may_bring_only_the_last_of_many_changes(api: Api) -> None:
    api.set("k", "0")
    query = {"pattern": "k", "new_only": "", "every_ms": 200, "bytes_max": 3}
    with api.open("GET", "/api/state/watch", query).begin() as answer:
        with api.open("GET", "/api/state/watch", {"pattern": "k", "bytes_max": 1}).begin() as present:
            assert present.line() == {"key": "k", "version": 0, "text": "0", "bytes": 1}
        body = {"values": [{"key": "k", "value": number} for number in range(100_000, 100_100)]}
        api.json("POST", "/api/state/values", json.dumps(body).encode())
        line = answer.line()
        assert (line["key"], line["text"], line["bytes"]) == ("k", "100", 6)
        api.json("DELETE", "/api/state/value", key="k")
        assert answer.line()["deleted"] is True


def test_a_list_of_long_values_has_the_beginning_of_each(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    put(api, **{f"wide/{number}": "x" * 1000 for number in range(4)})
    queries: dict[str, dict[str, Any]] = {"nodes": {"parent": "wide"}, "search": {"pattern": "wide/#"}}
    for path, query in queries.items():
        monkeypatch.setattr(state_views, "LIST_BYTES_MAX", 2**20)
        found = api.json("GET", f"/api/state/{path}", bytes_max=2**20, count=4, **query)["nodes"]
        assert [len(node["value"]["text"]) for node in found] == [1002] * 4
        monkeypatch.setattr(state_views, "LIST_BYTES_MAX", 400)
        found = api.json("GET", f"/api/state/{path}", bytes_max=2**20, count=4, **query)["nodes"]
        assert [len(node["value"]["text"]) for node in found] == [100] * 4
        assert all(node["value"]["clipped"] and node["value"]["bytes"] == 1002 for node in found)
