"""A client with a front has the answers of one without, whatever it sends and whenever the core answers."""

import struct
import zlib
from collections import deque
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.errors import RemoteProtocolError
from babelbus.protocols.jebp.batch_codec import PASSED, ClientBatch, decode_batch, encode_batch
from babelbus.protocols.jebp.box import Opener, Sealer
from babelbus.protocols.jebp.codec import RECORD_FIELDS, encode_request
from babelbus.protocols.jebp.decoder import ServerDecoder
from babelbus.protocols.jebp.frames import read_head
from babelbus.protocols.jebp.front import BATCH_BYTES_MAX, RECORD_BYTES_MAX, TOGETHER_MAX, JebpFronts
from babelbus.protocols.jebp.handshake import ClientHandshake
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import CallItems, CreateRecord, Request
from babelbus.protocols.jebp.proved import (
    OPENED_BYTES_MAX,
    JebpPlan,
    ProvedHandshake,
    ProvedOpener,
    ProvedSealer,
    encode_opened,
)
from tests.support.jebp import ADMIN, SERVER, create

PLAN = JebpPlan(SERVER.seed, 2**20, False)
CALLED = encode_request(CallItems([(1, 1, b"\xc0")]))
NUMBER = struct.Struct(">H")


def plan() -> bytes:
    return msgspec.json.encode(PLAN)


class Way:
    """The way of one client to a core that a test plays."""

    def __init__(self, number: int, fronts: JebpFronts, sent: "deque[tuple[str, object]]") -> None:
        self.number = number
        self.fronts = fronts
        self.sent = sent
        """Bytes of the client and batches, in the order in which they come to the core."""
        self.written = bytearray()
        self.delivered = 0
        self.paused = self.ended = False
        self.later: bool | None = None
        self.batches = 0
        self.front = fronts.make(self)

    def forward(self, data: bytes) -> None:
        assert data
        if self.front.unsent:
            self.flush()
        self.sent.append(("data", data))

    def gather(self, *, later: bool = False) -> None:
        self.later = later

    def flush(self) -> None:
        self.fronts.flush(self._send)

    def _send(self, data: bytes) -> int:
        assert len(data) <= BATCH_BYTES_MAX + 1024
        self.batches += 1
        self.sent.append(("batch", (self.batches, data)))
        return self.batches

    def write(self, data: bytes | bytearray, delivered_bytes: int = 0) -> None:
        self.written += data
        self.delivered += delivered_bytes

    def pause_front(self) -> None:
        self.paused = True

    def resume_front(self) -> None:
        self.paused = False

    def end(self) -> None:
        self.ended = True

    def take(self) -> bytes:
        taken = bytes(self.written)
        self.written.clear()
        return taken


class Core:
    """A core that answers each request with the number of its place, when the test lets it."""

    def __init__(self) -> None:
        self.fronts = JebpFronts(plan())
        self.sent: deque[tuple[str, object]] = deque()
        self.way = Way(7, self.fronts, self.sent)
        self.handshake = ProvedHandshake(2**20)
        self.requests: list[Request] = []
        """Requests in the order in which they were executed."""
        self.asked: deque[int] = deque()
        """Requests that the session has not answered."""
        self.batches: deque[tuple[int, bytes]] = deque()
        """Answers to batches."""
        self.passes = False
        self.opener: Opener
        self.decoder: ServerDecoder

    def connect(self, cut: Callable[[bytes], list[bytes]] = lambda data: [data]) -> "Core":
        """Do the handshake."""
        self.way.front.deliver(self.handshake.begin())
        shake = ClientHandshake(ADMIN, bool)
        while shake.established is None:
            for part in cut(shake.receive_data(self.way.take())):
                self.way.front.receive_data(part)
        ((_, data),) = self.sent
        self.sent.clear()
        assert isinstance(data, bytes)
        assert self.handshake.receive_data(data) == b""
        established = self.handshake.established
        assert established is not None
        assert established.fingerprint == ADMIN.fingerprint
        assert isinstance(established.opener, ProvedOpener)
        self.opener = established.opener
        self.decoder = ServerDecoder(established.opener, frame_bytes_max=2**20)
        self.sealer = shake.established.sealer
        self.client_opener = shake.established.opener
        return self

    def receive(self) -> None:
        """Execute what the edge has sent."""
        while self.sent:
            kind, what = self.sent.popleft()
            if kind == "data":
                assert isinstance(what, bytes)
                self.decoder.receive_data(what)
                self._execute()
                continue
            assert isinstance(what, tuple)
            number, data = what
            assert not self.asked, "a batch of a client to whom the session owes an answer"
            batch = decode_batch(data)
            assert list(batch.numbers) == [7]
            if self.passes:
                self.decoder.receive_data(encode_opened(forged(batch)))
                self._execute()
                self.batches.append((number, PASSED * len(batch.payloads)))
                continue
            self.opener.skip(len(batch.payloads))
            answers = []
            for payload, timestamp in zip(batch.payloads, batch.timestamps, strict=True):
                self.requests.append(CreateRecord(batch.topic.decode(), timestamp, payload))
                answers.append(NUMBER.pack(len(self.requests)))
            self.batches.append((number, b"".join(answers)))

    def receive_all(self) -> None:
        """Execute what the edge has sent; a client that has broken the protocol is an error."""
        self.receive()
        self.decoder.events()

    def _execute(self) -> None:
        for request in self.decoder.events():
            self.requests.append(request)
            if not isinstance(request, CallItems):
                self.asked.append(len(self.requests))

    def settle(self) -> None:
        """Answer the oldest batch."""
        if self.batches:
            self.fronts.settle(*self.batches.popleft())

    def answer(self, size: int = 0) -> None:
        """Answer the oldest request of the session."""
        if self.asked:
            data = ProvedSealer(bytes(32), bytes(24)).seal(NUMBER.pack(self.asked.popleft()) + bytes(size))
            middle = len(data) // 2
            self.way.front.deliver(data[:middle])
            self.way.front.deliver(data[middle:])

    def heard(self) -> list[int]:
        """Return the numbers that the client has heard."""
        data, numbers, at = self.way.take(), [], 0
        while at < len(data):
            head = read_head(data, at, 2**30)
            assert head is not None
            at = sum(head)
            numbers.append(NUMBER.unpack_from(self.client_opener.open(data[head[0] : at]))[0])
        return numbers


def forged(batch: ClientBatch) -> list[bytes]:
    head = b"\x12\x01%c%b" % (len(batch.topic), batch.topic)
    return [
        head + RECORD_FIELDS.pack(zlib.crc32(payload), timestamp) + payload
        for payload, timestamp in zip(batch.payloads, batch.timestamps, strict=True)
    ]


small = st.builds(create, st.sampled_from(["a", "b"]), st.binary(max_size=20), valid=st.just(True))
requests = st.one_of(
    small,
    small,
    small,
    st.builds(create, st.just("a"), st.just(b"x"), valid=st.just(False)),
    st.builds(lambda size: create("a", bytes(size)), st.integers(2_000, 12_000)),
    st.sampled_from([b"", b"\x21", b"\x12", b"\x99", CALLED]),
)
Step = tuple[str, list[bytes]]
steps: st.SearchStrategy[Step] = st.one_of(
    st.tuples(st.just("send"), st.lists(requests, min_size=1, max_size=10)),
    st.tuples(st.just("send"), st.lists(small, min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["flush", "settle", "receive", "pass"]), st.just([])),
    st.tuples(st.just("answer"), st.lists(st.just(b""), max_size=1)),
)


@given(st.lists(steps, max_size=40), st.data())
def test_requests_are_executed_and_answered_in_order(script: list[Step], data: st.DataObject) -> None:
    core = Core().connect()
    asked: list[bytes] = []
    rest = b""
    for step, contents in [*script, ("end", [])]:
        if step == "send":
            asked += contents
            rest += bytes(core.sealer.seal_many(contents))
            cut = data.draw(st.integers(0, len(rest)))
            core.way.front.receive_data(rest[:cut]) if cut else None
            rest = rest[cut:]
        elif step == "flush":
            core.way.flush()
        elif step == "receive":
            core.receive()
        elif step == "pass":
            core.passes = not core.passes
        elif step == "settle":
            core.settle()
        elif step == "answer":
            core.answer(100_000 if contents else 0)
    if rest:
        core.way.front.receive_data(rest)
    core.way.flush()
    core.receive()
    while core.asked or core.batches:
        core.answer()
        core.settle()
    numbers = [number for number, content in enumerate(asked, 1) if content[:1] != b"\x40"]
    assert core.heard() == numbers
    records = [one.payload for one in core.requests if isinstance(one, CreateRecord)]
    assert records == [content[16:] for content in asked if content[:1] == b"\x12" and len(content) > 15]
    assert not core.way.ended


def test_a_lone_record_goes_in_a_batch_and_everything_else_to_the_session() -> None:
    core = Core().connect()

    def kinds(*contents: bytes) -> list[str]:
        core.way.front.receive_data(bytes(core.sealer.seal_many(contents)))
        core.way.flush()
        sent = [kind for kind, _ in core.sent]
        core.receive()
        while core.asked or core.batches:
            core.answer()
            core.settle()
        return sent

    assert kinds(create("a", b"x")) == ["batch"]
    assert kinds(*[create("a", b"x")] * TOGETHER_MAX) == ["batch"]
    assert kinds(*[create("a", b"x")] * (TOGETHER_MAX + 1)) == ["data"]
    assert kinds(create("a", bytes(RECORD_BYTES_MAX))) == ["batch"]
    assert kinds(create("a", bytes(RECORD_BYTES_MAX + 1))) == ["data"]
    assert kinds(create("a", b"x"), create("b", b"x")) == ["data"]
    assert kinds(b"\x12\x01\0" + create("a", b"x")[4:], create("a", b"x")) == ["data"]  # one for no topic
    assert kinds(create("a", b"x", valid=False)) == ["data"]
    assert kinds(create("a", bytes(OPENED_BYTES_MAX))) == ["data"]
    assert kinds(create("a", b"x")) == ["batch"]
    assert kinds(CALLED) == ["data"]
    assert kinds(create("a", b"x")) == ["data"]


def test_a_handshake_does_not_depend_on_how_its_bytes_are_cut() -> None:
    core = Core().connect(lambda data: [data[at : at + 1] for at in range(len(data))])
    core.way.front.receive_data(bytes(core.sealer.seal_many([create("a", b"x")])))
    core.way.flush()
    core.receive()
    core.settle()
    assert core.heard() == [1]


def test_bytes_in_front_of_the_sign_of_the_core_wait() -> None:
    core = Core()
    core.way.front.receive_data(b"\x01\x01\x20" + bytes(16))
    assert (core.way.paused, bytes(core.way.written)) == (True, b"")
    core.way.front.deliver(core.handshake.begin())
    assert not core.way.paused
    assert core.way.take() == core.handshake.begin()
    assert core.way.delivered == len(core.handshake.begin())


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"\x16\x03\x01", "frame starts with 16, not 01"),
        (b"\x02", "frame starts with 02, not 01"),
        (b"\x01\x01\x05hello", "public key of 5 bytes, not 32"),
    ],
)
def test_a_wrong_handshake_is_the_error_of_the_session(sent: bytes, text: str) -> None:
    core = Core()
    core.way.front.deliver(core.handshake.begin())
    core.way.front.receive_data(sent)
    core.way.front.receive_data(b"more")
    ((_, data),) = core.sent
    assert isinstance(data, bytes)
    with pytest.raises(RemoteProtocolError, match=text):
        core.handshake.receive_data(data)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (b"\x05", "frame starts with 05, not 01"),
        (b"\x01\x01\x20" + bytes(32), "message 4 does not decrypt"),
        (b"\x01\x04\x7f\xff\xff\xff", "frame of 2147483647 bytes, limit 1048576"),
        (b"\x01\x02\x30\x00" + bytes(0x3000), "message 4 does not decrypt"),
    ],
)
def test_a_client_that_breaks_the_protocol_has_its_requests_before_that_answered(broken: bytes, text: str) -> None:
    core = Core().connect()
    good = bytes(core.sealer.seal_many([create("a", b"1"), create("b", b"2")]))
    core.way.front.receive_data(good + broken)
    core.way.front.receive_data(b"more")
    core.way.flush()
    with pytest.raises(RemoteProtocolError, match=text):
        core.receive_all()
    assert [one.payload for one in core.requests if isinstance(one, CreateRecord)] == [b"1", b"2"]


def test_the_end_of_the_session_waits_for_the_answer_to_the_batch() -> None:
    core = Core().connect()
    core.way.front.receive_data(bytes(core.sealer.seal_many([create("a", b"x")])))
    core.way.flush()
    core.way.front.close()
    assert not core.way.ended
    core.receive()
    core.settle()
    assert core.heard() == [1]
    assert core.way.ended


def test_records_wait_a_moment_for_the_answer_to_the_batch_before() -> None:
    first, second = Core().connect(), Core()
    second.fronts, second.sent = first.fronts, first.sent
    second.way = Way(8, first.fronts, first.sent)
    second.connect()
    for core, later in ((first, False), (second, True)):
        core.way.front.receive_data(bytes(core.sealer.seal_many([create("a", b"x")])))
        assert core.way.later is later
        if not later:
            core.way.flush()
    first.receive()
    first.settle()
    assert second.way.later is False
    second.way.flush()
    assert not second.way.front.unsent


def test_records_of_many_clients_are_one_batch_up_to_the_size_of_a_frame() -> None:
    fronts = JebpFronts(plan())
    cores = [Core() for _ in range(20)]
    sent: deque[tuple[str, object]] = deque()
    for number, core in enumerate(cores):
        core.fronts, core.sent = fronts, sent
        core.way = Way(number, fronts, sent)
        core.connect()
    for core in cores:
        core.way.front.receive_data(bytes(core.sealer.seal_many([create("a", bytes(5_000))])))
    cores[0].way.flush()
    batches = [decode_batch(what[1]) for _, what in sent]  # type: ignore[index]
    assert [list(batch.numbers) for batch in batches] == [list(range(9)), list(range(9, 18)), [18, 19]]


@given(
    st.binary(min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.lists(st.binary(max_size=9), min_size=1, max_size=3)), max_size=5),
)
def test_a_batch_is_read_as_it_was_written(topic: bytes, clients: list[tuple[int, list[bytes]]]) -> None:
    payloads = [payload for _, some in clients for payload in some]
    times = [index * 2**40 for index in range(len(payloads))]
    batch = ClientBatch(topic, [number for number, _ in clients], [len(some) for _, some in clients], times, payloads)
    read = decode_batch(encode_batch(batch))
    assert (read.topic, list(read.numbers), list(read.counts)) == (topic, batch.numbers, batch.counts)
    assert (read.timestamps, read.payloads) == (times, payloads)


@given(st.binary(max_size=60))
def test_other_bytes_are_no_batch(data: bytes) -> None:
    try:
        batch = decode_batch(data)
    except RemoteProtocolError:
        return
    assert encode_batch(batch) == data


def test_an_answer_that_does_not_fit_its_batch_is_refused() -> None:
    core = Core().connect()
    core.way.front.receive_data(bytes(core.sealer.seal_many([create("a", b"x")])))
    core.way.flush()
    with pytest.raises(RemoteProtocolError, match="4 bytes answer a batch of 1 records"):
        core.fronts.settle(1, b"abcd")


def test_the_plan_carries_the_key_of_the_server() -> None:
    assert JebpFronts(plan()).identity.certificate == SERVER.certificate
    assert isinstance(JebpFronts(plan()).identity, Identity)
    assert Sealer(bytes(32), bytes(24)).content_bytes_max == ProvedSealer(bytes(32), bytes(24)).content_bytes_max
