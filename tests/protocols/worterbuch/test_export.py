"""The tree as a file: the format both ways, what is no such file, and export and import over HTTP (section 12.4)."""

import base64
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.config import WorterbuchSettings
from babelbus.core.state.key_index import KeyPattern
from babelbus.protocols.worterbuch.archive import ArchiveError, pack, unpack
from babelbus.protocols.worterbuch.rest import POINTER_BYTES_MAX, find_part
from babelbus.protocols.worterbuch.routes import RequestRefusedError
from tests.support.server import LiveServer, configure
from tests.support.web import Events, Web

MIB = 2**20
EXAMPLE = b'{"data":{"t":{"hello":{"t":{"world":{"v":"test"}}}}}}'
TREE = [("a", b"1", 0), ("a/b/c", b'{"x":[null]}', 0), ("a/b/d", b'"v"', 7), ("a//", b"null", 0), ("z", b"[]", 0)]
DOCUMENT = {
    "data": {
        "t": {
            "a": {
                "v": 1,
                "t": {
                    "": {"t": {"": {"v": None}}},
                    "b": {"t": {"c": {"v": {"x": [None]}}, "d": {"v": {"Cas": ["v", 7]}}}},
                },
            },
            "z": {"v": []},
        }
    }
}

elements = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), max_size=5).filter(
    lambda element: element not in ("?", "#")
)
keys = st.lists(elements, min_size=1, max_size=4).map("/".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(st.characters(exclude_categories=["Cs"])), st.lists
)


@given(st.dictionaries(keys, st.tuples(json_values, st.integers(0, 3))))
def test_what_was_packed_is_unpacked(tree: dict[str, tuple[object, int]]) -> None:
    entries = [(key, json.dumps(value).encode(), version) for key, (value, version) in tree.items()]
    data = pack(entries, bytes_max=MIB)
    json.loads(gzip.decompress(data))
    assert sorted(unpack(data, bytes_max=MIB)) == sorted(entries)


def test_the_format_is_that_of_the_specification() -> None:
    assert gzip.decompress(pack([("hello/world", b'"test"', 0)], bytes_max=MIB)) == EXAMPLE
    assert unpack(gzip.compress(EXAMPLE), bytes_max=MIB) == [("hello/world", b'"test"', 0)]
    assert json.loads(gzip.decompress(pack(TREE, bytes_max=MIB))) == DOCUMENT
    found = unpack(gzip.compress(json.dumps(DOCUMENT, indent=1).encode()), bytes_max=MIB)
    assert sorted((key, json.loads(value), version) for key, value, version in found) == sorted(
        (key, json.loads(value), version) for key, value, version in TREE
    )


def test_an_empty_tree_is_a_file_too() -> None:
    assert unpack(pack([], bytes_max=MIB), bytes_max=MIB) == []
    assert unpack(gzip.compress(b'{"data":{}}'), bytes_max=MIB) == []


@pytest.mark.parametrize(
    "value",
    ['{"Cas":[1]}', '{"Cas":[1,2],"x":3}', '{"Cas":[1,0]}', '{"Cas":[1,-1]}', '{"Cas":1}', '"Cas"', '{"Cas":[1,1.5]}'],
)
def test_what_only_looks_like_a_version_is_a_plain_value(value: str) -> None:
    document = b'{"data":{"t":{"k":{"v":%b}}}}' % value.encode()
    assert unpack(gzip.compress(document), bytes_max=MIB) == [("k", value.encode(), 0)]


GOOD = gzip.compress(EXAMPLE)
NO_FILES = {
    "nothing": b"",
    "no gzip": b"x" * 100,
    "cut": GOOD[:-5],
    "damaged": GOOD[:-6] + b"\0" + GOOD[-5:],
    "more behind it": GOOD + b"x",
    "no JSON": gzip.compress(b"{"),
    "no object": gzip.compress(b"[]"),
    "no data": gzip.compress(b"{}"),
    "not UTF-8": gzip.compress(b'{"data":{"t":{"\xff":{"v":1}}}}'),
    "a surrogate": gzip.compress(b'{"data":{"t":{"k":{"v":"\\ud800"}}}}'),
    "a value of the root": gzip.compress(b'{"data":{"v":1}}'),
    "a wildcard": gzip.compress(b'{"data":{"t":{"a":{"t":{"#":{"v":1}}}}}}'),
    "a slash": gzip.compress(b'{"data":{"t":{"a/b":{"v":1}}}}'),
    "a number beyond all floats": gzip.compress(b'{"data":{"t":{"a":{"v":1e999}}}}'),
    "a deep value": gzip.compress(b'{"data":{"t":{"a":{"v":' + b"[" * 200 + b"]" * 200 + b"}}}}"),
    "a very deep value": gzip.compress(b'{"data":{"t":{"a":{"v":' + b"[" * 20_000 + b"]" * 20_000 + b"}}}}"),
    "a very deep key": gzip.compress(b'{"data":' + b'{"t":{"a":' * 20_000 + b"{}" + b"}}" * 20_000 + b"}"),
    "a bomb": zlib.compress(b" " * 2 * MIB, wbits=31),
}


@pytest.mark.parametrize("data", NO_FILES.values(), ids=NO_FILES.keys())
def test_what_is_no_such_file_is_refused(data: bytes) -> None:
    with pytest.raises(ArchiveError):
        unpack(data, bytes_max=MIB)


def test_a_tree_that_could_not_be_read_back_is_not_packed() -> None:
    entries = [(f"k/{number}", b'"%b"' % (b"x" * 100), 0) for number in range(10_000)]
    size = len(gzip.decompress(pack(entries, bytes_max=10 * MIB)))
    assert len(unpack(pack(entries, bytes_max=size), bytes_max=size)) == 10_000
    with pytest.raises(ArchiveError, match=str(size - 1)):
        pack(entries, bytes_max=size - 1)


# -- over HTTP -------------------------------------------------------------------------------------------------------


def serve(folder: Path, **settings: Any) -> LiveServer:
    return LiveServer(configure(folder, worterbuch=WorterbuchSettings(port=0, tcp_port=0, **settings)))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(tmp_path_factory.mktemp("export"), export_name="backup") as server:
        yield server


@pytest.fixture
def web(live: LiveServer) -> Iterator[Web]:
    with Web(live) as client:
        yield client
        client.ask("DELETE", "/api/v1/pdelete/%23")


def tree_of(live: LiveServer) -> list[tuple[str, bytes, int]]:
    found = live.call(lambda: live.server.broker.state.entries(KeyPattern((), rest=True)))
    return sorted(entry for entry in found if not entry[0].startswith("$SYS/"))


def test_an_export_is_the_tree_without_the_servers_own_keys(live: LiveServer, web: Web) -> None:
    assert web.post("/api/v1/import", pack(TREE, bytes_max=MIB), "application/gzip").status == 200
    answer = web.get("/api/v1/export")
    assert answer.headers["content-disposition"] == "attachment; filename=backup.json.gz"
    assert answer.headers["content-type"] == "application/gzip"
    assert json.loads(gzip.decompress(answer.body)) == DOCUMENT
    assert tree_of(live) == sorted(TREE)


def test_an_export_as_text_is_base64(web: Web) -> None:
    web.post("/api/v1/set/hello/world", b'"test"')
    answer = web.get("/api/v1/export", accept="text/html;q=0.5, text/plain;q=0.9")
    assert answer.headers["content-type"] == "text/plain"
    assert gzip.decompress(base64.b64decode(answer.body, validate=True)) == EXAMPLE
    web.ask("DELETE", "/api/v1/pdelete/%23")
    lines = b"\r\n".join([answer.body[:10], answer.body[10:], b""])
    assert web.post("/api/v1/import", lines, "text/plain; charset=utf-8").status == 200
    assert web.get("/api/v1/get/hello/world").json == "test"


def test_an_import_overwrites_its_keys_and_leaves_the_others(live: LiveServer, web: Web) -> None:
    web.post("/api/v1/set/other", b"1")
    web.post("/api/v1/set/plain", b"1")
    live.call(lambda: live.server.broker.state.compare_and_set("cas", b"1", 0))
    answer = web.post("/api/v1/import", pack([("plain", b"2", 5), ("cas", b"2", 0)], bytes_max=MIB), "")
    assert (answer.status, answer.body) == (200, b"")
    assert tree_of(live) == [("cas", b"2", 0), ("other", b"1", 0), ("plain", b"2", 5)]


def test_subscribers_hear_of_an_import(live: LiveServer, web: Web) -> None:
    with Events(live, "/api/v1/psubscribe/i/%23?liveOnly") as events, Events(live, "/api/v1/subscribels/i") as names:
        assert names.next() == []
        web.post("/api/v1/import", pack([("i/1", b"1", 0), ("i/2", b"2", 3)], bytes_max=MIB), "")
        heard = [events.next()["keyValuePairs"][0] for _ in range(2)]
        assert sorted((pair["key"], pair["value"]) for pair in heard) == [("i/1", 1), ("i/2", 2)]
        assert sorted(names.next()) == ["1", "2"]


def test_an_import_cannot_write_the_servers_own_keys(web: Web) -> None:
    before = web.get("/api/v1/get/$SYS/version").json
    data = pack([("$SYS/version", b'"mine"', 0), ("$SYS", b"1", 0), ("x", b"1", 0)], bytes_max=MIB)
    assert web.post("/api/v1/import", data, "").status == 200
    assert web.get("/api/v1/get/$SYS/version").json == before
    assert web.get("/api/v1/get/x").json == 1
    assert web.get("/api/v1/get/$SYS").status == 404


@pytest.mark.parametrize("data", NO_FILES.values(), ids=NO_FILES.keys())
def test_a_file_that_is_none_changes_nothing(live: LiveServer, web: Web, data: bytes) -> None:
    if data == NO_FILES["a bomb"]:
        data = zlib.compress(b" " * 65 * MIB, wbits=31)
    answer = web.post("/api/v1/import", data, "")
    assert (answer.status, answer.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert web.post("/api/v1/import", b"no base64!", "text/plain").status == 400
    assert tree_of(live) == []


def test_an_import_of_a_key_that_is_too_long_changes_nothing(web: Web) -> None:
    fits, over = ("fits/" + "x" * 4091, b"1", 0), ("x" * 4097, b"1", 0)
    assert web.post("/api/v1/import", pack([fits, over], bytes_max=MIB), "").status == 400
    assert web.get("/api/v1/get/" + fits[0]).status == 404
    assert web.post("/api/v1/import", pack([fits], bytes_max=MIB), "").status == 200
    assert web.get("/api/v1/get/" + fits[0]).json == 1


def test_many_keys_go_out_and_in_and_survive(tmp_path: Path) -> None:
    entries = [(f"many/{number % 100}/{number}", b"%d" % number, 0) for number in range(20_000)]
    with serve(tmp_path) as live, Web(live) as web:
        assert web.post("/api/v1/import", pack(entries, bytes_max=MIB), "").status == 200
        exported = web.get("/api/v1/export").body
        assert sorted(unpack(exported, bytes_max=MIB)) == sorted(entries)
    with serve(tmp_path) as live, Web(live) as web:
        assert tree_of(live) == sorted(entries)


def test_what_would_not_fit_into_a_message_is_not_exported(tmp_path: Path) -> None:
    with serve(tmp_path, message_bytes_max=2048) as live, Web(live) as web:
        for number in range(3):
            web.post(f"/api/v1/set/{number}", b'"%b"' % (b"x" * 1000))
        answer = web.get("/api/v1/export")
        assert (answer.status, b"2048" in answer.body) == (500, True)
        assert web.get("/info").status == 200


# -- parts of values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pointer", "part"),
    [  # the document and most lines are those of RFC 6901, section 5
        ("/foo", b'["bar", "baz"]'),
        ("/foo/0", b'"bar"'),
        ("/", b"0"),
        ("/a~1b", b"1"),
        ("/c%d", b"2"),
        ("/e^f", b"3"),
        ("/k\\l", b"6"),
        ('/m"n', b"7"),
        ("/ ", b"7.0"),
        ("/m~0n", b"8"),
        ("/foo/2", None),
        ("/foo/-", None),
        ("/foo/00", None),
        ("/foo/bar", None),
        ("/foo/0/x", None),
        ("/nix", None),
    ],
)
def test_a_pointer_names_a_part(pointer: str, part: bytes | None) -> None:
    value = rb'{"foo": ["bar", "baz"], "": 0, "a/b": 1, "c%d": 2, "e^f": 3, "k\\l": 6, "m\"n": 7, " ": 7.0, "m~n": 8}'
    assert find_part(value, pointer) == part


@pytest.mark.parametrize(("value", "pointer", "inner_bytes"), [(b"[%b1]", "/0", 0), (b'{"a":[%b1]}', "/a/0", 3)])
def test_a_pointer_looks_at_a_bounded_number_of_bytes(value: bytes, pointer: str, inner_bytes: int) -> None:
    room = (POINTER_BYTES_MAX - len(value % b"") - inner_bytes) // pointer.count("/")
    assert find_part(value % (b" " * room), pointer) == b"1"
    with pytest.raises(RequestRefusedError):
        find_part(value % (b" " * (room + 1)), pointer)
