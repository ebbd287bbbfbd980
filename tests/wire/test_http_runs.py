"""Requests that are cut together are the requests that would have been read one by one."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.wire.http import HttpError, Request, RequestDecoder, RequestRun
from babelbus.wire.http.runs import PATTERNS_MAX


def post(
    value: str | None, body: bytes, *, name: str = "id", path: str = "/", extra: str = "", length: bool = True
) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: here", *([] if value is None else [f"{name}: {value}"]), f"X: {extra}"]
    lines += [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read(
    chunks: Sequence[bytes], *, together: bool, body_bytes_max: int = 100
) -> tuple[list[Request], int | None, int]:
    """Give the requests, the status of the error that ended them, and how many came in runs."""
    decoder = RequestDecoder(varying="id" if together else None, body_bytes_max=body_bytes_max)
    requests: list[Request] = []
    count = 0
    for chunk in chunks:
        decoder.receive_data(chunk)
        try:
            for one in decoder.runs() if together else decoder.requests():
                if isinstance(one, RequestRun):
                    count += len(one.bodies)
                    requests += one.requests("id")
                else:
                    requests.append(one)
        except HttpError as error:
            return requests, error.status, count
        if decoder.error is not None:
            return requests, decoder.error.status, count
    return requests, None, count


def same(chunks: Sequence[bytes], *, body_bytes_max: int = 100) -> int:
    """Assert that both ways give the same, and give how many requests came in runs."""
    apart = read(chunks, together=False, body_bytes_max=body_bytes_max)
    found = read(chunks, together=True, body_bytes_max=body_bytes_max)
    # The order of headers is nobody's business but the varying one's, which goes to the end.
    assert found[:2] == apart[:2]
    return found[2]


def test_all_but_the_first_two_of_many_alike_come_together() -> None:
    assert same([b"".join(post(str(number), b"hello") for number in range(100))]) == 98
    assert same([b"".join(post(None, b"hello") for _ in range(100))]) == 98
    assert same([b"".join(post(None, b"", length=False) for _ in range(100))]) == 98


def test_the_length_may_vary_too_and_each_run_says_its_own() -> None:
    assert same([b"".join(post(str(number), b"x" * (number % 5)) for number in range(100))]) == 98


def test_requests_of_another_kind_may_stand_between_them() -> None:
    one, other = post("1", b"a"), post("2", b"b", path="/other")
    assert same([one * 4 + other + one * 4 + other * 4 + one]) >= 5


values = st.sampled_from(
    ["1", "22", "", " 3", "a b", "\t", "a\t", "é", "x" * 255, "x" * 256, "x" * 257, ":"]
) | st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=5)
requests = st.one_of(
    st.builds(post, st.none() | values, st.binary(max_size=8)),
    st.builds(
        post, values, st.binary(max_size=3), name=st.sampled_from(["id", "ID", "iD"]), extra=st.sampled_from("ab")
    ),
    st.sampled_from(
        [
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"\r\nGET / HTTP/1.1\r\nHost: a\r\nid: 7\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nid: 7\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nid: 1\r\nid: 2\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nid: 1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
            b"GET / HTTP/1.1\r\nHost: a\r\nid: 1\r\nContent-Length: 01\r\n\r\nx",
            b"GET / HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\nid: 1\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nid: 1\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
        ]
    ),
)
endings = st.sampled_from(
    [
        b"",
        post("1", b"", length=False).replace(b"\r\nid", b"\nid"),
        b"POST / HTTP/1.1\r\nHost: here\r\nid: 1\r\nX: \r\nContent-Length: 99999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: here\r\nid: 1\x00\r\nX: \r\nContent-Length: 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: here\r\nid: 1\r\n X: \r\nContent-Length: 1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: here\r\nid: 1\r\nX: \r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: here\r\nid: 1\r\nX: \r\nContent-Length: 1\r\nConnection: close\r\n\r\nx",
        b"garbage",
    ]
)


@given(st.lists(st.tuples(requests, st.integers(1, 4)), max_size=8), endings, st.lists(st.integers(1, 200), max_size=4))
def test_any_requests_cut_anywhere_are_the_same_either_way(
    sent: list[tuple[bytes, int]], ending: bytes, sizes: list[int]
) -> None:
    data = b"".join(one * times for one, times in sent) + ending
    chunks, position = [], 0
    for number in range(len(data)):
        size = sizes[number % len(sizes)] if sizes else len(data)
        chunks.append(data[position : position + size])
        position += size
        if position >= len(data):
            break
    same(chunks)
    same(chunks, body_bytes_max=4)


@pytest.mark.parametrize("length", ["5", "05", "005"])
def test_a_length_is_delivered_as_it_was_written(length: str) -> None:
    one = f"POST / HTTP/1.1\r\nHost: a\r\nid: 1\r\nContent-Length: {length}\r\n\r\nhello".encode()
    assert same([one * 5]) == 3
    assert read([one * 5], together=True)[0][-1].headers["content-length"] == length


def test_a_client_that_changes_its_head_all_the_time_does_not_make_us_learn_for_ever() -> None:
    sent = [post("1", b"x", path=f"/{number}") * 3 for number in range(3 * PATTERNS_MAX)]
    assert same([b"".join(sent)]) == PATTERNS_MAX


def test_what_belongs_to_a_body_is_no_request_although_it_looks_like_one_before() -> None:
    known = post("1", b"hello")
    heads = (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(known),
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(known),
    )
    for head in heads:
        decoder = RequestDecoder(varying="id", body_bytes_max=1000)
        for _ in range(3):
            decoder.receive_data(known)
            decoder.runs()
        decoder.receive_data(head)
        assert decoder.runs() == []
        assert not decoder.unfinished_bytes
        decoder.receive_data(known[:-1])
        assert decoder.runs() == []
