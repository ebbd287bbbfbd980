"""The server's side of the codec: golden texts both ways, any cut, limits at and one past, each way to be malformed."""

import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.clients.worterbuch.codec import encode_message
from babelbus.errors import LocalProtocolError, RemoteProtocolError
from babelbus.protocols.worterbuch import codec
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.codec import RUN_MIN, LineDecoder, decode_chunk, decode_messages
from babelbus.protocols.worterbuch.errors import MalformedMessageError

ID_MAX = 2**64 - 1

GOLDEN: list[tuple[str, m.ClientMessage]] = [
    ('{"protocolSwitchRequest":{"version":1}}', m.ProtocolSwitch(1)),
    ('{"authorizationRequest":{"authToken":"a.b.c"}}', m.Authorization("a.b.c")),
    ('{"authenticationRequest":{"authToken":"0f"}}', m.Authentication("0f")),
    (
        '{"handshakeRequest":{"supportedProtocolVersions":[{"major":0,"minor":3}],'
        '"lastWill":[{"key":"set/this","value":"x"}],"graveGoods":["delete/this/#"]}}',
        m.Handshake(((0, 3),), (("set/this", b'"x"'),), ("delete/this/#",)),
    ),
    ('{"get":{"transactionId":3,"key":"home/door"}}', m.Get(3, "home/door")),
    ('{"cGet":{"transactionId":3,"key":"x"}}', m.CGet(3, "x")),
    ('{"pGet":{"transactionId":3,"requestPattern":"a/#"}}', m.PGet(3, "a/#")),
    (
        '{"set":{"transactionId":1,"key":"a/b","value":{"x":[1,null,true]}}}',
        m.Set(1, "a/b", b'{"x":[1,null,true]}'),
    ),
    ('{"set":{"transactionId":2,"key":"home/lamp","value":true}}', m.Set(2, "home/lamp", b"true")),
    ('{"set":{"transactionId":2,"key":"","value":null}}', m.Set(2, "", b"null")),
    ('{"cSet":{"transactionId":4,"key":"x","value":"v","version":0}}', m.CSet(4, "x", b'"v"', 0)),
    ('{"sPubInit":{"transactionId":5,"key":"x"}}', m.SPubInit(5, "x")),
    ('{"sPub":{"transactionId":5,"value":1.5}}', m.SPub(5, b"1.5")),
    ('{"publish":{"transactionId":6,"key":"x","value":[]}}', m.Publish(6, "x", b"[]")),
    (
        '{"subscribe":{"transactionId":10,"key":"s","unique":false,"liveOnly":false}}',
        m.Subscribe(10, "s", False, False),
    ),
    (
        '{"pSubscribe":{"transactionId":1,"requestPattern":"hello/#","unique":true,"aggregateEvents":10,'
        '"liveOnly":true}}',
        m.PSubscribe(1, "hello/#", True, 10, True),
    ),
    (
        '{"pSubscribe":{"transactionId":1,"requestPattern":"home/#","unique":false,"liveOnly":false}}',
        m.PSubscribe(1, "home/#", False, None, False),
    ),
    ('{"unsubscribe":{"transactionId":1}}', m.Unsubscribe(1)),
    ('{"delete":{"transactionId":4,"key":"home/lamp"}}', m.Delete(4, "home/lamp")),
    ('{"pDelete":{"transactionId":15,"requestPattern":"x/#","quiet":false}}', m.PDelete(15, "x/#", False)),
    ('{"ls":{"transactionId":7}}', m.Ls(7, None)),
    ('{"ls":{"transactionId":8,"parent":"x"}}', m.Ls(8, "x")),
    ('{"pLs":{"transactionId":8}}', m.PLs(8, None)),
    ('{"pLs":{"transactionId":8,"parentPattern":"x/?"}}', m.PLs(8, "x/?")),
    ('{"subscribeLs":{"transactionId":8}}', m.SubscribeLs(8, None)),
    ('{"subscribeLs":{"transactionId":8,"parent":""}}', m.SubscribeLs(8, "")),
    ('{"unsubscribeLs":{"transactionId":8}}', m.UnsubscribeLs(8)),
    ('{"lock":{"transactionId":9,"key":"x"}}', m.Lock(9, "x")),
    ('{"acquireLock":{"transactionId":9,"key":"x"}}', m.AcquireLock(9, "x")),
    ('{"releaseLock":{"transactionId":9,"key":"x"}}', m.ReleaseLock(9, "x")),
    ('{"transform":{"transactionId":9,"key":"x","template":{"a":"b"}}}', m.Transform(9, "x", b'{"a":"b"}')),
    ('{"export":{"transactionId":1,"path":"/f.json"}}', m.Export(1, "/f.json")),
    ('{"import":{"transactionId":1,"path":"/f.json"}}', m.Import(1, "/f.json")),
    ('""', m.Keepalive()),
]


def decode_message(text: bytes) -> m.ClientMessage:
    messages: list[m.ClientMessage] = []
    decode_messages((text,), messages)
    return messages[0]


@pytest.mark.parametrize(("text", "message"), GOLDEN)
def test_a_client_message_is_read_and_written_as_specified(text: str, message: m.ClientMessage) -> None:
    assert decode_message(text.encode()) == message
    if not isinstance(message, m.Handshake):  # which our client never sends
        assert encode_message(message) == text.encode()


@pytest.mark.parametrize(("text", "message"), GOLDEN)
def test_blanks_between_tokens_change_nothing(text: str, message: m.ClientMessage) -> None:
    if isinstance(message, m.Set | m.Transform | m.Publish):
        text = text.replace('{"', '{ "', 1)
    else:
        for token in "{}[]:,":
            text = text.replace(token, f" {token}\t")
    assert decode_message(f"\r\n {text}\n".encode()) == message


def test_every_message_has_its_line() -> None:
    assert {type(message) for _, message in GOLDEN} == set(m.KINDS)


OPTIONAL = [
    ('{"subscribe":{"transactionId":1,"key":"s"}}', m.Subscribe(1, "s")),
    ('{"subscribe":{"transactionId":1,"key":"s","unique":null,"liveOnly":null}}', m.Subscribe(1, "s")),
    ('{"subscribe":{"transactionId":1,"key":"s","liveOnly":true}}', m.Subscribe(1, "s", live_only=True)),
    ('{"pSubscribe":{"transactionId":1,"requestPattern":"s","aggregateEvents":null}}', m.PSubscribe(1, "s")),
    ('{"pSubscribe":{"transactionId":1,"requestPattern":"s","aggregateEvents":0}}', m.PSubscribe(1, "s", None, 0)),
    ('{"pDelete":{"transactionId":1,"requestPattern":"s"}}', m.PDelete(1, "s")),
    ('{"pDelete":{"transactionId":1,"requestPattern":"s","quiet":null}}', m.PDelete(1, "s")),
    ('{"ls":{"transactionId":1,"parent":null}}', m.Ls(1)),
    ('{"pLs":{"transactionId":1,"parentPattern":null}}', m.PLs(1)),
    ('{"get":{"key":"a","more":[{"x":null}],"transactionId":1}}', m.Get(1, "a")),
    ('{"set":{"value":1,"key":"\\u00e9\\n","transactionId":1}}', m.Set(1, "é\n", b"1")),
    ('{"s\\u0065t":{"transactionId":1,"key":"é","value":"\\u00e9é"}}', m.Set(1, "é", '"\\u00e9é"'.encode())),
    ('{"handshakeRequest":{"supportedProtocolVersions":[]}}', m.Handshake(())),
    (f'{{"get":{{"transactionId":{ID_MAX},"key":"a"}}}}', m.Get(ID_MAX, "a")),
    ('{"get":{"transactionId":0,"key":"a"}}', m.Get(0, "a")),
]


@pytest.mark.parametrize(("text", "message"), OPTIONAL)
def test_members_may_be_absent_null_unknown_and_in_any_order(text: str, message: m.ClientMessage) -> None:
    assert decode_message(text.encode()) == message


MALFORMED: list[tuple[bytes, int | None]] = [
    (b"", None),
    (b" ", None),
    (b"{", None),
    (b"}", None),
    (b'{"', None),
    (b'{"get"}', None),
    (b'{"get":}', None),
    (b'{get:{"transactionId":1,"key":"a"}}', None),
    (b"null", None),
    (b"[]", None),
    (b"1", None),
    (b'"get"', None),
    (b'"" ""', None),
    (b"{}", None),
    (b'{"get":null}', None),
    (b'{"get":[1,"a"]}', None),
    (b'{"fetch":{"transactionId":7,"key":"a"}}', 7),
    (b'{"Get":{"transactionId":7,"key":"a"}}', 7),
    (b'{"get":{"transactionId":7,"key":"a"},"set":{"transactionId":8,"key":"a","value":1}}', 7),
    (b'{"get":{"transactionId":7,"key":"a"},"get":{"transactionId":7,"key":"a"}}', 7),
    (b'{"get":{"transactionId":7,"key":"a"},}', None),
    (b'{"get":{"transactionId":7,"key":"a"}}x', None),
    (b'{"get":{"transactionId":7,"key":"a"}}}', None),
    (b'{"get":{"transactionId":7,"key":"a"}} {"get":{"transactionId":7,"key":"a"}}', None),
    (b'\xef\xbb\xbf{"get":{"transactionId":7,"key":"a"}}', None),
    (b'{"a\\"b":{"transactionId":7}}', 7),
    (b'{"get":{"key":"a"}}', None),
    (b'{"get":{"transactionId":7}}', 7),
    (b'{"get":{"transactionId":7,"key":null}}', 7),
    (b'{"get":{"transactionId":7,"key":1}}', 7),
    (b'{"get":{"transactionId":"7","key":"a"}}', None),
    (b'{"get":{"transactionId":7.0,"key":"a"}}', None),
    (b'{"get":{"transactionId":7e0,"key":"a"}}', None),
    (b'{"get":{"transactionId":true,"key":"a"}}', None),
    (b'{"get":{"transactionId":-1,"key":"a"}}', None),
    (b'{"get":{"transactionId":18446744073709551616,"key":"a"}}', None),
    (b'{"set":{"transactionId":18446744073709551616,"key":"a","value":1}}', None),
    (b'{"set":{"transactionId":7,"key":"a"}}', 7),
    (b'{"set":{"transactionId":7,"value":1}}', 7),
    (b'{"set":{"transactionId":7,"key":"a","value":NaN}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":Infinity}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":-Infinity}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":1e400}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":[1,{"x":-1e400}]}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":1E400}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":%b}}' % (b"9" * 309), 7),
    (b'{"set":{"transactionId":7,"key":"a","value":{"x":[-%b.5]}}}' % (b"9" * 309), None),
    (b'{"set":{"transactionId":7,"key":"a","value":%b}}' % (b"9" * 5000), None),
    (b'{"set":{"transactionId":7,"key":"a","value":01}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":[1,]}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":"\n"}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":"\\x"}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":"\\ud800"}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":"\\udc00\\ud800"}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":"\xff"}}', None),
    (b'{"set":{"transactionId":7,"key":"a","value":"\xed\xa0\x80"}}', None),
    (b'{"get":{"transactionId":7,"key":"\\ud800"}}', None),
    (b'{"get":{"transactionId":7,"key":"\xff"}}', None),
    (b'{"get":{"transactionId":7,"key":"a","more":"\xff"}}', None),
    (b'{"cSet":{"transactionId":7,"key":"a","value":1}}', 7),
    (b'{"cSet":{"transactionId":7,"key":"a","value":1,"version":-1}}', 7),
    (b'{"cSet":{"transactionId":7,"key":"a","value":1,"version":1.0}}', 7),
    (b'{"cSet":{"transactionId":7,"key":"a","value":1,"version":18446744073709551616}}', 7),
    (b'{"subscribe":{"transactionId":7,"key":"a","unique":1}}', 7),
    (b'{"subscribe":{"transactionId":7,"key":"a","unique":"false"}}', 7),
    (b'{"pSubscribe":{"transactionId":7,"requestPattern":"a","aggregateEvents":-1}}', 7),
    (b'{"pSubscribe":{"transactionId":7,"requestPattern":"a","aggregateEvents":1.5}}', 7),
    (b'{"pSubscribe":{"transactionId":7,"key":"a","unique":true}}', 7),
    (b'{"pGet":{"transactionId":7,"key":"a"}}', 7),
    (b'{"ls":{"transactionId":7,"parent":1}}', 7),
    (b'{"unsubscribe":{}}', None),
    (b'{"protocolSwitchRequest":{"version":"1"}}', None),
    (b'{"protocolSwitchRequest":{"version":-1}}', None),
    (b'{"protocolSwitchRequest":{}}', None),
    (b'{"authorizationRequest":{"authToken":1}}', None),
    (b'{"authorizationRequest":{}}', None),
    (b'{"handshakeRequest":{}}', None),
    (b'{"handshakeRequest":{"supportedProtocolVersions":[[0,3]],"lastWill":[],"graveGoods":[]}}', None),
    (b'{"handshakeRequest":{"supportedProtocolVersions":[],"lastWill":[{"key":"a"}],"graveGoods":[]}}', None),
    (b'{"handshakeRequest":{"supportedProtocolVersions":[],"lastWill":[],"graveGoods":[1]}}', None),
    (b'{"handshakeRequest":{"supportedProtocolVersions":[{"major":-1,"minor":3}]}}', None),
    (b'{"transform":{"transactionId":7,"key":"a"}}', 7),
]


@pytest.mark.parametrize(("text", "transaction_id"), MALFORMED)
def test_what_is_no_message_is_refused_with_its_transaction_id_if_that_can_be_read(
    text: bytes, transaction_id: int | None
) -> None:
    with pytest.raises(MalformedMessageError) as caught:
        decode_message(text)
    assert (caught.value.transaction_id, caught.value.code) == (transaction_id, 4)


def nested(levels: int, inner: bytes = b"") -> bytes:
    return (
        b"[" * (levels - levels // 2)
        + b'{"a":' * (levels // 2)
        + (inner or b"1")
        + b"}" * (levels // 2)
        + b"]" * (levels - levels // 2)
    )


@pytest.mark.parametrize("name", [b"set", b"publish"])
@pytest.mark.parametrize("lines", [1, 40])
def test_a_value_may_be_nested_120_levels_deep_and_no_more(name: bytes, lines: int) -> None:
    def sent(levels: int) -> bytes:
        return b'{"%b":{"transactionId":7,"key":"a","value":%b}}\n' % (name, nested(levels)) * lines

    decoder = LineDecoder(line_bytes_max=10**6)
    decoder.receive_data(sent(120))
    assert len(listed(decoder.messages())) == lines
    for levels in (121, 500, 10_000):
        decoder = LineDecoder(line_bytes_max=10**6)
        decoder.receive_data(sent(levels))
        with pytest.raises(MalformedMessageError):
            decoder.messages()


def test_brackets_inside_texts_are_no_levels() -> None:
    value = b'["%b\\"%b"]' % (b"[" * 500, b"{" * 500)
    text = b'{"set":{"transactionId":1,"key":"a","value":%b}}' % value
    assert decode_message(text) == m.Set(1, "a", value)


def test_a_value_of_several_lines_is_kept_in_one() -> None:
    text = b'{"set":{"transactionId":1,"key":"a","value":{\n "x" : [1.0,\r\n"\\n"]}}}'
    assert decode_message(text) == m.Set(1, "a", b'{"x":[1.0,"\\n"]}')


@pytest.mark.parametrize("count", [1, 100])
def test_a_value_keeps_no_carriage_return_between_its_tokens(count: int) -> None:
    line = b'{"set":{"transactionId":1,"key":"a","value":[1,\r2]}}\r\n'
    assert lines_of(line * count, []) == ([m.Set(1, "a", b"[1,2]")] * count, False)


def test_a_value_holds_on_to_nothing_but_its_own_bytes() -> None:
    message = decode_message(b'{"set":{"transactionId":1,"key":"a","value":"x"}}')
    assert isinstance(message, m.Set)
    assert type(message.value) is bytes


@settings(deadline=None)
@given(st.binary(max_size=60) | st.text('{}[]":,\\u0d8 \nsetgtransctionIdkeyvalue1.e-+é', max_size=80).map(str.encode))
def test_garbage_is_refused_with_our_error_only(text: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        decode_message(text)


@settings(deadline=None)
@given(st.sampled_from(GOLDEN), st.integers(0), st.binary(min_size=1, max_size=3))
def test_a_message_with_changed_bytes_is_a_message_or_refused(
    golden: tuple[str, m.ClientMessage], position: int, change: bytes
) -> None:
    text = golden[0].encode()
    at = position % len(text)
    with contextlib.suppress(MalformedMessageError):
        decode_message(text[:at] + change + text[at + len(change) :])


def listed(messages: list[m.ClientMessage] | m.SetRun) -> list[m.ClientMessage]:
    return messages.messages() if isinstance(messages, m.SetRun) else messages


def lines_of(data: bytes, sizes: list[int], line_bytes_max: int = 10**6) -> tuple[list[m.ClientMessage], bool]:
    """Read data that arrives in pieces of these sizes; give what was said, and whether it ended in an error."""
    decoder, received = LineDecoder(line_bytes_max=line_bytes_max), list[m.ClientMessage]()
    position = 0
    for size in itertools.chain(sizes, itertools.repeat(len(data) + 1)):
        decoder.receive_data(data[position : position + size])
        position += size
        try:
            received += listed(decoder.messages())
        except RemoteProtocolError:
            return received, True
        if position >= len(data):
            break
    try:
        decoder.messages()
    except RemoteProtocolError:
        return received, True
    return received, False


some_lines = st.lists(st.sampled_from([*GOLDEN, *OPTIONAL]), max_size=6)
cuts = st.lists(st.integers(1, 400), max_size=10)


@settings(deadline=None)
@given(some_lines, st.sampled_from([1, 2, 60]), st.sampled_from(["\n", "\r\n", "\n\n"]), cuts)
def test_messages_do_not_depend_on_how_the_bytes_were_cut(
    sent: list[tuple[str, m.ClientMessage]], count: int, end: str, sizes: list[int]
) -> None:
    expected = [message for _, message in sent for _ in range(count)]
    data = "".join((text + end) * count for text, _ in sent)
    assert lines_of(data.encode(), sizes) == (expected, False)


RUN = 100
"""Lines enough for the decoder to look at them together."""

spoilers = st.sampled_from(
    [
        *(text for text, _ in MALFORMED if b"\n" not in text and text),
        b'{"get":{"transactionId":1,"key":"a"}}{"get":{"transactionId":1,"key":"a"}}',
        b'{"get":{"transactionId":1,"key":"a"}} {"get":{"transactionId":1,"key":"a"}}',
        b'{"get":{"transactionId":1,"key":"a"},"get":{"transactionId":1,"key":"a"}}',
        b'{"get":{"transactionId":1,"key":"a"} ,"get":{"transactionId":1,"key":"a"}}',
        b'{"set":{"transactionId":1,"key":"a","value":{}},"set":{"transactionId":1,"key":"a","value":2}}',
        b'{"get":{"transactionId":1,\n"key":"a"}}',
        b'{"set":{"transactionId":1,"key":"a","value":{}\n}}',
    ]
)
runs = st.sampled_from(
    [
        b'{"get":{"transactionId":1,"key":"a"}}',
        b'{"set":{"transactionId":1,"key":"a","value":{"x":{}}}}',
        b'{"set":{"transactionId":1,"key":"a","value":"}},{"}}',
        b'{"publish":{"transactionId":1,"key":"a","value":12}}',
        '{"set":{"transactionId":1,"key":"a","value":"é"}}'.encode(),
    ]
)


@settings(deadline=None)
@given(runs, st.integers(0, RUN), spoilers, cuts)
def test_what_was_said_before_an_error_comes_first_and_nothing_after_it(
    line: bytes, before: int, spoiler: bytes, sizes: list[int]
) -> None:
    data = (line + b"\n") * before + spoiler + b"\n" + (line + b"\n") * (RUN - before)
    assert lines_of(data, sizes) == ([decode_message(line)] * before, True)


@settings(deadline=None)
@given(runs, st.integers(0, RUN), st.sampled_from([text for text, _ in GOLDEN]))
def test_a_line_reads_the_same_alone_and_among_others(line: bytes, before: int, other: str) -> None:
    data = (line + b"\n") * before + other.encode() + b"\n" + (line + b"\n") * (RUN - before)
    expected = [decode_message(line)] * RUN
    expected.insert(before, decode_message(other.encode()))
    assert lines_of(data, []) == (expected, False)


@settings(deadline=None)
@given(runs, st.integers(0, RUN), spoilers, st.integers(1, RUN))
def test_texts_of_one_chunk_read_the_same_together_and_alone(
    text: bytes, before: int, spoiler: bytes, after: int
) -> None:
    messages: list[m.ClientMessage] = []
    decode_messages([text] * before, messages)
    assert messages == [decode_message(text)] * before
    run = decode_chunk([text] * before)
    assert (run is not None) == (before >= RUN_MIN and text.startswith(b'{"set"'))
    assert run is None or run.messages() == messages
    texts = [text] * before + [spoiler] + [text] * after
    read: list[m.ClientMessage] = []
    try:
        good = decode_message(spoiler)
    except MalformedMessageError:
        with pytest.raises(MalformedMessageError):
            decode_messages(texts, read)
        assert read == messages
        assert decode_chunk(texts) is None
    else:  # over several lines, as a WebSocket text may be
        decode_messages(texts, read)
        assert read == [*messages, good, *[decode_message(text)] * after]


SET = b'{"set":{"transactionId":1,"key":"a","value":{"b":[{}]}}}'


@pytest.mark.parametrize(
    "texts",
    [
        [SET[:-1] + SET[len(b'{"set":') :]],  # two objects
        [SET[:-1] + b" " + SET[len(b'{"set":') :], b'{"set":{}}'],
        # One object in two texts would make up for two in another one.
        *(
            [SET[:-1] + SET[len(b'{"set":') :], SET[:at] + b"}}", b'{"set":{' + SET[at:]]
            for at in range(len(b'{"set":{'), len(SET) - 2)
        ),
        [SET[:-1] + SET[len(b'{"set":') :], SET[:-1], SET[-1:]],
        [SET[:-1] + SET[len(b'{"set":') :], SET[:-1] + b"\r"],
        [SET[:-2] + b',"set":1}}'[:-1] + b',"set":{}}}'],
    ],
)
def test_texts_that_are_no_messages_alone_are_none_together(texts: list[bytes]) -> None:
    assert decode_chunk([SET] * RUN_MIN) is not None
    for order in (texts, texts[::-1]):
        assert decode_chunk([*[SET] * RUN_MIN, *order]) is None
        assert decode_chunk([*order, *[SET] * RUN_MIN]) is None


@pytest.mark.parametrize("count", [1, 2, RUN])
def test_a_line_may_be_as_long_as_the_limit_and_no_longer(count: int) -> None:
    line = b'{"set":{"transactionId":1,"key":"a","value":"%b"}}' % (b"x" * 50)
    assert lines_of((line + b"\n") * count, [], len(line)) == ([decode_message(line)] * count, False)
    assert lines_of((line + b"\n") * count, [], len(line) - 1) == ([], True)


@pytest.mark.parametrize("sizes", [[], [1] * 200, [50, 51]])
def test_a_line_over_the_limit_is_refused_before_it_is_complete(sizes: list[int]) -> None:
    assert lines_of(b"x" * 100, sizes, 100) == ([], False)
    assert lines_of(b"x" * 101, sizes, 100) == ([], True)
    good = b'{"get":{"transactionId":1,"key":"a"}}'
    assert lines_of(good + b"\n" + b"x" * 101, sizes, 100) == ([m.Get(1, "a")], True)


def test_a_decoder_that_has_raised_raises_again_and_keeps_nothing() -> None:
    decoder = LineDecoder(line_bytes_max=100)
    decoder.receive_data(b'{"get":{"transactionId":1,"key":"a"}}\nnull\n')
    assert decoder.messages() == [m.Get(1, "a")]
    assert decoder.error is not None
    for _ in range(2):
        decoder.receive_data(b'{"get":{"transactionId":1,"key":"a"}}\n')
        assert not decoder._chunks
        assert not decoder._lines
        with pytest.raises(MalformedMessageError):
            decoder.messages()


def test_replies_look_as_the_specification_shows_them() -> None:
    assert codec.AUTHORIZED == b'{"authorized":{"transactionId":0}}'
    assert codec.AUTHENTICATED == b'{"authenticated":{"transactionId":0}}'
    assert codec.encode_ack(3) == b'{"ack":{"transactionId":3}}'
    assert codec.encode_error(3, 5, "nothing stored under 'home/door'") == (
        b'{"err":{"transactionId":3,"errorCode":5,"metadata":"\\"nothing stored under \'home/door\'\\""}}'
    )
    assert codec.encode_state(3, b"42") == b'{"state":{"transactionId":3,"value":42}}'
    assert codec.encode_state(3, b"42", deleted=True) == b'{"state":{"transactionId":3,"deleted":42}}'
    assert codec.encode_cstate(3, b"42", 7) == b'{"cState":{"transactionId":3,"value":42,"version":7}}'
    assert codec.encode_pstate(3, "a/#", [("a/b", b"1")]) == (
        b'{"pState":{"transactionId":3,"requestPattern":"a/#","keyValuePairs":[{"key":"a/b","value":1}]}}'
    )
    assert codec.encode_pstate(1, "home/#", []) == (
        b'{"pState":{"transactionId":1,"requestPattern":"home/#","keyValuePairs":[]}}'
    )
    assert codec.encode_pstate(3, "a/#", iter([("a/b", b"1")]), deleted=True) == (
        b'{"pState":{"transactionId":3,"requestPattern":"a/#","deleted":[{"key":"a/b","value":1}]}}'
    )
    assert codec.encode_pstate(1, "#", [("a", b"1"), ("b", b'"x"')]) == (
        b'{"pState":{"transactionId":1,"requestPattern":"#",'
        b'"keyValuePairs":[{"key":"a","value":1},{"key":"b","value":"x"}]}}'
    )
    assert codec.encode_ls(3, ["b", "c"]) == b'{"lsState":{"transactionId":3,"children":["b","c"]}}'
    assert codec.encode_ls(3, []) == b'{"lsState":{"transactionId":3,"children":[]}}'
    assert codec.encode_handshake((0, 3)) == (
        b'{"handshake":{"protocolVersion":{"major":0,"minor":3},"separator":"/","wildcard":"?","multiWildcard":"#"}}'
    )


def test_old_profiles_carry_the_key_in_a_state() -> None:
    assert codec.encode_state(1, b"2", "a") == b'{"state":{"transactionId":1,"keyValue":{"key":"a","value":2}}}'
    assert codec.encode_state(1, b"2", "a", deleted=True) == (
        b'{"state":{"transactionId":1,"deleted":{"key":"a","value":2}}}'
    )


@settings(deadline=None)
@given(st.integers(0, ID_MAX), st.text(), st.text(), st.sampled_from([b"1", b'"x"', b'{"a":[]}']))
def test_a_head_and_a_shared_tail_are_the_message(number: int, key: str, pattern: str, value: bytes) -> None:
    state, pstate = codec.state_head(number), codec.pstate_head(number, pattern)
    assert state + codec.state_tail(value) == codec.encode_state(number, value)
    assert state + codec.state_tail(value, key) == codec.encode_state(number, value, key)
    assert state + codec.state_tail(value, deleted=True) == codec.encode_state(number, value, deleted=True)
    assert state + codec.state_tail(value, key, deleted=True) == codec.encode_state(number, value, key, deleted=True)
    assert pstate + codec.pstate_tail([(key, value)]) == codec.encode_pstate(number, pattern, [(key, value)])
    assert pstate + codec.pstate_tail([(key, value)], deleted=True) == codec.encode_pstate(
        number, pattern, [(key, value)], deleted=True
    )


@settings(deadline=None)
@given(st.text(), st.text())
def test_keys_and_texts_leave_in_ascii_on_one_line(key: str, text: str) -> None:
    for reply in (
        codec.encode_error(1, 5, text),
        codec.encode_pstate(1, text, [(key, b"1")]),
        codec.encode_ls(1, [key, text]),
        codec.encode_state(1, b"1", key),
    ):
        assert reply.isascii()
        assert b"\n" not in reply


def test_a_key_that_json_cannot_say_is_not_said() -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode_pstate(1, "#", [("a\udcff", b"1")])
