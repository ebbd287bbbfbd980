"""Where urls lead: each rule of section 6.1, in its order."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.protocols.zbus.errors import MalformedMessageError, NotFoundError
from babelbus.protocols.zbus.messages import HEADERS_MAX, Message
from babelbus.protocols.zbus.routing import (
    ENTRIES_MAX,
    BindTable,
    Prefixes,
    UrlEntry,
    command_of_query,
    read_bindings,
    route,
)

QUEUES = {"MyRpc", "/svc", "/svc/deep", "Очередь", "example"}


def table() -> BindTable:
    bindings = BindTable()
    bindings.bind("Bound", [UrlEntry("/example/plus", "Bound"), UrlEntry("/svc/bound", "Bound")])
    bindings.bind("Deeper", [UrlEntry("/example/plus/more", "Deeper")])
    return bindings


def lead(url: str, bindings: BindTable | None = None) -> Message | None:
    return route(Message({"id": "1"}, url=url), bindings or table(), QUEUES.__contains__)


@pytest.mark.parametrize(
    ("url", "mq"),
    [
        ("/example/plus", "Bound"),
        ("/example/plusX", "Bound"),  # a plain prefix, kept for bind
        ("/example/plus/1/2?k=v", "Bound"),
        ("/example/plus/more/1", "Deeper"),
        ("/svc/bound/x", "Bound"),
        ("/example/minus", "example"),
        ("/svc", "/svc"),
        ("/svc?x=/deep", "/svc"),
        ("/svc/a/b", "/svc"),
        ("/svc/deep/x", "/svc/deep"),
        ("/svc/deeper", "/svc"),
        ("/svc/" + "x" * 1000, "/svc"),
        ("/MyRpc/example/plus", "MyRpc"),
        ("/MyRpc", "MyRpc"),
        ("/MyRpc?x=1", "MyRpc"),
        ("MyRpc/plus", "MyRpc"),
        ("/Очередь/a", "Очередь"),
    ],
)
def test_a_url_that_belongs_to_a_queue_is_published_there_unchanged(url: str, mq: str) -> None:
    message = Message({"id": "1", "cmd": "pub", "mq": mq, "ack": "false"}, url=url)
    assert lead(url) == message


@pytest.mark.parametrize("url", ["/svcX", "/myrpc/x", "/nothing", "/favicon.png", "//MyRpc", "/" * 5000, "MyRpcX", "x"])
def test_a_url_of_nobody_is_not_found(url: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        lead(url)
    assert (caught.value.status, caught.value.text) == (404, f"{url} Not Found")


@pytest.mark.parametrize("url", ["/", "", "/?", "/?x=1", "/?xcmd=pub", "?"])
def test_the_root_is_the_welcome_page(url: str) -> None:
    assert lead(url) is None


def test_a_service_bound_to_the_root_gets_every_url_but_the_browsers_form() -> None:
    bindings = BindTable()
    bindings.bind("All", [UrlEntry("/", "All")])
    for url in ("/", "/MyRpc/x", "/?x=1"):
        assert lead(url, bindings) == Message({"id": "1", "cmd": "pub", "mq": "All", "ack": "false"}, url=url)
    assert lead("/?cmd=query&mq=Q", bindings) == Message({"id": "1", "cmd": "query", "mq": "Q"}, url="/")


def test_without_a_url_the_command_is_missing() -> None:
    with pytest.raises(MalformedMessageError, match="cmd key required"):
        route(Message({}), table(), QUEUES.__contains__)


@pytest.mark.parametrize(
    ("target", "headers", "body"),
    [
        (
            "/?cmd=create&mq=Q&mqType=disk&channel=C",
            {"cmd": "create", "mq": "Q", "mqType": "disk", "channel": "C"},
            None,
        ),
        ("/?cmd=pub&mq=Q&body=hi&tag=a", {"cmd": "pub", "mq": "Q", "tag": "a"}, b"hi"),
        (
            "/?cmd=take&mq=Q&channel=C&window=5",
            {"cmd": "take", "mq": "Q", "channel": "C", "window": "5"},
            None,
        ),
        ("/?cmd=query&mq=Q", {"cmd": "query", "mq": "Q"}, None),
        ("?cmd=remove&mq=Q", {"cmd": "remove", "mq": "Q"}, None),
        ("/?CMD=pub&MQTYPE=disk&body=", {"cmd": "pub", "mqType": "disk"}, b""),
        ("/?cmd=pub&body=a%26b%3Dc+d%2B&mq=%D0%9E", {"cmd": "pub", "mq": "О"}, b"a&b=c d+"),
    ],
)
def test_the_browsers_form_makes_each_parameter_a_header(
    target: str, headers: dict[str, str], body: bytes | None
) -> None:
    message = Message({"id": "1"}, url="/decoded", method="GET")
    wanted = Message({"id": "1", **headers}, "/", "GET", None, body, "json" if body is None else "text")
    assert route(message, table(), QUEUES.__contains__, target) == wanted


def test_the_browsers_form_keeps_the_body_of_the_request_when_it_names_none() -> None:
    message = Message({"content-type": "text/plain"}, "/", "POST", body=b"x", body_kind="text")
    command = command_of_query(message, "/?cmd=pub&mq=Q")
    assert command is not None
    assert (command.body, command.headers["content-type"]) == (b"x", "text/plain")


def test_a_query_has_a_limited_number_of_parameters() -> None:
    with pytest.raises(MalformedMessageError):
        command_of_query(Message({}), "/?cmd=pub" + "&a=b" * HEADERS_MAX)
    with pytest.raises(MalformedMessageError):
        command_of_query(Message({"x": "y"}), "/?cmd=pub&" + "&".join(f"a{n}=b" for n in range(HEADERS_MAX - 1)))


@given(st.text(max_size=30))
def test_every_url_leads_somewhere_or_is_not_found(url: str) -> None:
    with contextlib.suppress(NotFoundError):
        lead(url)
    assert lead("/?cmd=" + url) is not None


def test_a_bind_forgets_earlier_urls_of_its_queue_unless_it_says_not_to() -> None:
    bindings = BindTable()
    bindings.bind("A", [UrlEntry("/a", "A")])
    bindings.bind("B", [UrlEntry("/b", "B")])
    bindings.bind("A", [UrlEntry("/c", "A")], clear=False)
    assert [bindings.find(url) for url in ("/a", "/b", "/c")] == ["A", "B", "A"]
    bindings.bind("A", [UrlEntry("/d", "A")])
    assert [bindings.find(url) for url in ("/a", "/b", "/c", "/d")] == [None, "B", None, "A"]
    bindings.bind("A", [])
    assert len(bindings) == 1


def test_the_last_binding_of_a_url_wins() -> None:
    bindings = BindTable()
    bindings.bind("A", [UrlEntry("/a", "A")])
    assert bindings.find("/a") == "A"
    bindings.bind("B", [UrlEntry("/a", "B")])
    assert bindings.find("/a") == "B"
    bindings.bind("A", [])
    assert bindings.find("/a") == "B"


def test_the_table_is_bounded_and_refuses_as_a_whole() -> None:
    bindings = BindTable(entries_max=2)
    bindings.bind("A", [UrlEntry("/a", "A"), UrlEntry("/b", "A")])
    with pytest.raises(MalformedMessageError):
        bindings.bind("B", [UrlEntry("/c", "B")])
    assert [bindings.find(url) for url in ("/a", "/b", "/c")] == ["A", "A", None]
    bindings.bind("A", [UrlEntry("/c", "A"), UrlEntry("/d", "A")])
    assert len(bindings) == 2


def test_the_bytes_of_the_table_are_bounded_for_all_and_for_each_principal() -> None:
    bindings = BindTable(bytes_max=12)
    bindings.bind("A", [UrlEntry("/äö", "A")], principal="alice")
    with pytest.raises(MalformedMessageError, match="urls of 7 bytes bound by 'bob', limit 6"):
        bindings.bind("B", [UrlEntry("/b", "B"), UrlEntry("/€", "B"), UrlEntry("/", "B")], principal="bob")
    bindings.bind("B", [UrlEntry("/bbbbbb", "B")])
    with pytest.raises(MalformedMessageError, match="urls of 13 bytes bound, limit 12"):
        bindings.bind("C", [UrlEntry("/", "C")])
    assert [bindings.find(url) for url in ("/äö", "/bbbbbb", "/c")] == ["A", "B", None]
    bindings.bind("B", [UrlEntry("/bbb", "B")])
    bindings.bind("C", [UrlEntry("/", "C")])


@pytest.mark.parametrize("kind", ["json", "text"])
def test_a_bind_brings_a_list_as_json_or_as_its_text(kind: Any) -> None:
    message = Message({"mq": "MyRpc"}, body=b'[{"url":"/example/plus","mq":"MyRpc"}]', body_kind=kind)
    assert read_bindings(message, "MyRpc") == [UrlEntry("/example/plus", "MyRpc")]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (None, "bind command, missing url entry list data in body"),
        (b'[{"url":"/a","mq":"Other"}]', "UrlEntry's mq should be same"),
        (b'{"url":"/a"}', "bind command, body is no list of url and mq"),
        (b"[1]", "bind command, body is no list of url and mq"),
        (b"[" * 100_000, "bind command, body is no list of url and mq"),
        (b"\xff", "bind command, body is no list of url and mq"),
    ],
)
def test_a_bind_that_is_wrong_is_refused_with_its_text(body: bytes | None, text: str) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        read_bindings(Message({"mq": "MyRpc"}, body=body, body_kind="bytes"), "MyRpc")
    assert (caught.value.status, caught.value.text) == (400, text)


def test_a_principal_has_half_of_the_table_and_gives_back_what_it_clears() -> None:
    bindings = BindTable(entries_max=4)
    bindings.bind("A", [UrlEntry("/a", "A"), UrlEntry("/b", "A")], principal="alice")
    with pytest.raises(MalformedMessageError, match="'alice', limit 2"):
        bindings.bind("B", [UrlEntry("/c", "B")], principal="alice")
    bindings.bind("C", [UrlEntry("/c", "C")], principal="bob")
    bindings.bind("A", [UrlEntry("/d", "A")], principal="alice")
    bindings.bind("B", [UrlEntry("/e", "B")], principal="alice")
    assert [bindings.find(url) for url in ("/a", "/c", "/d", "/e")] == [None, "C", "A", "B"]


def test_a_bind_names_no_more_urls_than_the_table_has() -> None:
    def message(count: int) -> Message:
        entries = [{"url": f"/{number}", "mq": "Q"} for number in range(count)]
        return Message({"id": "1"}, body=json.dumps(entries).encode(), body_kind="json")

    assert len(read_bindings(message(ENTRIES_MAX), "Q")) == ENTRIES_MAX
    with pytest.raises(MalformedMessageError, match="limit"):
        read_bindings(message(ENTRIES_MAX + 1), "Q")


URLS = st.text("/ab", max_size=5)


@given(st.lists(URLS, max_size=8), URLS)
def test_prefixes_are_found_as_by_looking_at_each(urls: list[str], text: str) -> None:
    prefixes = Prefixes(urls)
    assert prefixes.begin(text) == any(text.startswith(url) for url in urls)
    assert prefixes.has_below(text) == any(url.startswith(text) for url in urls)
