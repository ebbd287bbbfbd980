"""The front of a jebp client at an edge: handshake, box, and records for batches (docs/cluster.md, "Fronts").

A client that creates a few small records and waits is answered by a batch; all other requests go to its session, in
order. A client has one batch at a time, and none while the session owes it an answer. Answers of the session to
requests behind the batch wait for the answer to the batch. So the order of answers is that of requests.
"""

import zlib
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from babelbus.errors import RemoteProtocolError
from babelbus.listening.door import TLS_HELLO
from babelbus.listening.fronts import Way
from babelbus.protocols.jebp.batch_codec import (
    ANSWER_BYTES,
    CLIENT_BYTES,
    PASSED,
    RECORD_BYTES,
    ClientBatch,
    encode_batch,
)
from babelbus.protocols.jebp.box import TAG_BYTES, Opener, Sealer
from babelbus.protocols.jebp.codec import RECORD_FIELDS
from babelbus.protocols.jebp.frames import read_head
from babelbus.protocols.jebp.handshake import ServerHandshake
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import CALL, CALL_STATUS, CREATE_RECORD
from babelbus.protocols.jebp.proved import (
    OPENED_BYTES_MAX,
    JebpPlan,
    encode_broken,
    encode_failure,
    encode_opened,
    encode_proof,
)
from babelbus.units import KIB

TOGETHER_MAX: Final = 8
"""Most records of one client in a batch; a client that sends more at once has batches of its own."""
RECORD_BYTES_MAX: Final = 8 * KIB
"""Most bytes of the payloads of one client in a batch."""
ANSWER_BYTES_MAX: Final = 2**63
"""Frames of the session are as long as the session says."""
BATCH_BYTES_MAX: Final = 48 * KIB
"""A batch that would become larger is sent first, so that it fits a frame of the link."""


class _Batch:
    """Records for one topic."""

    def __init__(self, topic: bytes) -> None:
        self.topic = topic
        self.fronts: list[JebpFront] = []
        self.numbers: list[int] = []
        self.counts: list[int] = []
        self.timestamps: list[int] = []
        self.payloads: list[bytes] = []
        self.size_bytes = 0


class JebpFronts:
    """The fronts of the jebp listener of an edge.

    While a batch of a topic is on its way, further records for the topic wait for its answer, for a moment: the slower
    the core, the larger the batches.
    """

    def __init__(self, plan: bytes) -> None:
        self.plan = msgspec.json.decode(plan, type=JebpPlan)
        self.identity = Identity(self.plan.seed)
        self._gathered: dict[bytes, _Batch] = {}
        self._sent: dict[int, _Batch] = {}
        self._under_way: Counter[bytes] = Counter()
        """How many batches of each topic are not answered."""

    def make(self, way: Way) -> "JebpFront":
        """Return the front of a new client."""
        return JebpFront(self, way)

    def add(self, front: "JebpFront", topic: bytes, timestamps: list[int], payloads: list[bytes]) -> None:
        """Add the records of a client to the batch of their topic."""
        size_bytes = CLIENT_BYTES + len(payloads) * RECORD_BYTES + sum(map(len, payloads))
        batch = self._gathered.get(topic)
        if batch is not None and batch.size_bytes + size_bytes > BATCH_BYTES_MAX:
            front.way.flush()
            batch = None
        if batch is None:
            batch = self._gathered[topic] = _Batch(topic)
        batch.fronts.append(front)
        batch.numbers.append(front.way.number)
        batch.counts.append(len(payloads))
        batch.timestamps += timestamps
        batch.payloads += payloads
        batch.size_bytes += size_bytes
        front.unsent = True
        front.way.gather(later=topic in self._under_way)

    def flush(self, send: Callable[[bytes], int]) -> None:
        """Send the batches."""
        gathered, self._gathered = self._gathered, {}
        for topic, batch in gathered.items():
            for front in batch.fronts:
                front.unsent = False
            data = encode_batch(ClientBatch(topic, batch.numbers, batch.counts, batch.timestamps, batch.payloads))
            self._under_way[topic] += 1
            self._sent[send(data)] = batch

    def settle(self, number: int, answer: bytes) -> None:
        """Answer the clients of a batch.

        Raises:
            RemoteProtocolError: the answer does not fit the batch.
        """
        batch = self._sent.pop(number)
        self._under_way[batch.topic] -= 1
        if not self._under_way[batch.topic]:
            del self._under_way[batch.topic]
        gathered = self._gathered.get(batch.topic)
        if gathered is not None:
            gathered.fronts[0].way.gather()
        if len(answer) != ANSWER_BYTES * len(batch.payloads):
            raise RemoteProtocolError(f"{len(answer)} bytes answer a batch of {len(batch.payloads)} records")
        at = 0
        for front, count in zip(batch.fronts, batch.counts, strict=True):
            end = at + ANSWER_BYTES * count
            front.settle(answer[at:end])
            at = end


class JebpFront:
    """The front of one client."""

    __slots__ = (
        "_answers",
        "_answers_need",
        "_calls",
        "_early",
        "_ends",
        "_fronts",
        "_handshake",
        "_held",
        "_is_first",
        "_left",
        "_opener",
        "_pending",
        "_rest",
        "_sealer",
        "_spent",
        "_waiting",
        "unsent",
        "way",
    )

    def __init__(self, fronts: JebpFronts, way: Way) -> None:
        self.way = way
        self.unsent = False
        """Whether records of the client are in a batch that was not sent."""
        self._fronts = fronts
        self._handshake: ServerHandshake | None = None
        """There once the core has let the client in."""
        self._early: list[bytes] = []
        """Bytes that came before."""
        self._is_first = True
        self._opener: Opener | None = None
        self._sealer: Sealer
        self._spent = False
        """Whether the client has broken the protocol."""
        self._rest = b""
        """The beginning of a request."""
        self._left = 0
        """Bytes to come of a request that goes to the session sealed."""
        self._pending = 0
        """Requests that the session has not answered."""
        self._waiting = 0
        """Records in the batch."""
        self._calls = False
        """Whether the client has made a call: answers of calls are not counted, so it has no batches any more."""
        self._held: list[bytes] = []
        """Bytes of the session behind the answer to the batch."""
        self._answers = bytearray()
        """The beginning of a frame of the session."""
        self._answers_need = 0
        """Size of that frame, as far as it is known."""
        self._ends = False
        """Whether the session has ended."""

    # -- the client --------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Receive bytes of the client."""
        if self._spent:
            return
        if self._opener is not None:
            self._receive(self._opener, data)
        elif self._handshake is not None:
            self._shake(self._handshake, data)
        else:
            self._early.append(data)
            self.way.pause_front()

    def _shake(self, handshake: ServerHandshake, data: bytes) -> None:
        is_first, self._is_first = self._is_first, False
        try:
            reply = handshake.receive_data(data)
        except RemoteProtocolError as error:
            self._spent = True
            # Who speaks TLS is told apart at the core, by these bytes.
            self.way.forward(TLS_HELLO if is_first and data.startswith(TLS_HELLO) else encode_failure(error))
            return
        if reply:
            self.way.write(reply)
        established = handshake.established
        if established is None:
            return
        self._handshake = None
        self._opener, self._sealer = established.opener, established.sealer
        self.way.forward(encode_proof(established.fingerprint, established.opener))
        if established.surplus:
            self._receive(established.opener, established.surplus)

    def _receive(self, opener: Opener, data: bytes) -> None:
        """Handle bytes after the handshake: small requests are opened here, large ones are sent on as they come."""
        if self._left:
            part = data[: self._left]
            self._left -= len(part)
            self.way.forward(part)
            data = data[len(part) :]
        elif self._rest:
            data = self._rest + data
        small: list[bytes] = []
        at, size, bytes_max = 0, len(data), self._fronts.plan.frame_bytes_max
        broken: RemoteProtocolError | None = None
        try:
            while at < size:
                if data.startswith(b"\x01\x01", at) and at + 2 < size:
                    start, length = at + 3, data[at + 2]  # the common form, without a call
                else:
                    head = read_head(data, at, bytes_max)
                    if head is None:
                        break
                    start, length = head
                end = start + length
                if length > OPENED_BYTES_MAX:
                    before, small = small, []
                    self._open(opener, before)
                    opener.skip(1)
                    self._pending += 1
                    self._left = max(0, end - size)
                    end = min(end, size)
                    self.way.forward(data[at:end])
                elif end <= size:
                    small.append(data[start:end])
                else:
                    break
                at = end
        except RemoteProtocolError as error:
            broken = error
        self._rest = data[at:]
        try:
            self._open(opener, small)
        except RemoteProtocolError as error:
            broken = error
        if broken is not None:
            self._spent, self._rest = True, b""
            self.way.forward(encode_broken(broken))

    def _open(self, opener: Opener, sealed: list[bytes]) -> None:
        """Open and handle requests.

        Raises:
            RemoteProtocolError: one does not decrypt; those in front of it are handled.
        """
        contents: list[bytes] = []
        try:
            for one in sealed:
                contents.append(opener.open_alone(one))  # noqa: PERF401 - those in front of a bad one count
        finally:
            if contents:
                self._handle(contents)

    def _handle(self, contents: list[bytes]) -> None:
        """Add requests to a batch, or send them to the session."""
        if not (self._pending or self._waiting or self._calls) and self._gather(contents):
            return
        for content in contents:
            if content and content[0] == CALL:
                self._calls = True
            else:
                self._pending += 1
        self.way.forward(encode_opened(contents))

    def _gather(self, contents: list[bytes]) -> bool:
        """Return whether requests are a few good records for one topic, which are in a batch then."""
        if len(contents) > TOGETHER_MAX:
            return False
        topic = None
        timestamps: list[int] = []
        payloads: list[bytes] = []
        room = RECORD_BYTES_MAX
        for content in contents:
            if len(content) < 3 or content[0] != CREATE_RECORD or content[1] != 1:
                return False
            end = 3 + content[2]
            name, start = content[3:end], end + RECORD_FIELDS.size
            room -= len(content) - start
            if start > len(content) or not name or name != (topic or name) or room < 0:
                return False
            checksum, timestamp = RECORD_FIELDS.unpack_from(content, end)
            payload = content[start:]
            if timestamp < 0 or zlib.crc32(payload) != checksum:
                return False
            topic = name
            timestamps.append(timestamp)
            payloads.append(payload)
        if not topic:
            return False
        self._waiting = len(payloads)
        self._fronts.add(self, topic, timestamps, payloads)
        return True

    # -- the core ----------------------------------------------------------------------------------------------------

    def deliver(self, data: bytes) -> None:
        """Receive bytes of the session: first the sign that the client may come in, then frames."""
        if self._opener is None:
            self._begin(len(data))
        elif self._waiting:
            self._held.append(data)
        else:
            self._send(data)

    def _begin(self, size_bytes: int) -> None:
        plan = self._fronts.plan
        self._handshake = ServerHandshake(
            self._fronts.identity, bare_certificates=plan.bare_certificates, frame_bytes_max=plan.frame_bytes_max
        )
        self.way.write(self._handshake.begin(), size_bytes)
        if self._early:
            early, self._early = self._early, []
            self.way.resume_front()
            for data in early:
                self.receive_data(data)

    def _send(self, data: bytes) -> None:
        """Write the frames of the session to the client, sealed."""
        if self._answers:
            self._answers += data
            if len(self._answers) < self._answers_need:
                return
            data = bytes(self._answers)
            self._answers.clear()
        contents: list[bytes] = []
        at, size = 0, len(data)
        self._answers_need = 0
        while at < size:
            head = read_head(data, at, ANSWER_BYTES_MAX)
            if head is None:
                break
            start, length = head
            end = start + length
            if end > size:
                self._answers_need = end - at
                break
            content = data[start + TAG_BYTES : end]
            if content[0] != CALL_STATUS:
                self._pending -= 1
            contents.append(content)
            at = end
        if at < size:
            self._answers += data[at:]
        if contents:
            self.way.write(self._sealer.seal_many(contents), at)

    def settle(self, answers: bytes) -> None:
        """Answer the records in the batch."""
        count, self._waiting = self._waiting, 0
        if answers.startswith(PASSED):
            self._pending += count
        elif count == 1:
            self.way.write(self._sealer.seal(answers))
        else:
            contents = [answers[at : at + ANSWER_BYTES] for at in range(0, len(answers), ANSWER_BYTES)]
            self.way.write(self._sealer.seal_many(contents))
        held, self._held = self._held, []
        for data in held:
            self._send(data)
        if self._ends:
            self.way.end()

    def close(self) -> None:
        """Close the client behind the answer to its batch."""
        self._ends = True
        if not self._waiting:
            self.way.end()
