"""The session of one jebp connection (docs/protocols/jebp.md): requests in, broker calls out."""

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from babelbus.config import JebpSettings
from babelbus.core.access import NOBODY, AccessRefusedError, Action, Narrowing, has_lost, overlaps
from babelbus.core.access import Identity as Client
from babelbus.core.broker import Broker
from babelbus.core.catalog import TopicExistsError, UnknownTopicError
from babelbus.core.partition import Partition
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.receipt import DONE, Promise
from babelbus.core.record import Headers
from babelbus.core.settings import InvalidSettingError
from babelbus.core.subject import EVERYTHING
from babelbus.core.work import Work, settled
from babelbus.errors import BabelbusError, InvalidTopicNameError, RemoteProtocolError, StorageError
from babelbus.metrics import Metrics
from babelbus.protocols import contract
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.calls.call import Calls, Method
from babelbus.protocols.jebp.calls.methods import METHODS
from babelbus.protocols.jebp.continuation import KeptSession, encode_session, restore
from babelbus.protocols.jebp.decoder import ServerDecoder
from babelbus.protocols.jebp.handshake import Established, ServerHandshake, UntrustedPeerError
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import (
    CREATE_TOPIC,
    PROTOCOL,
    REMOVE_TOPIC,
    AbortBatch,
    AskTransaction,
    CallItems,
    CommitBatch,
    CreateRecord,
    CreateRecords,
    CreateTopic,
    Fetch,
    FetchPartition,
    Malformed,
    MoveGroup,
    PartitionRequest,
    RemoveTopic,
    Request,
    StageRecords,
    StagingRequest,
    Subscribe,
    TellPositions,
)
from babelbus.protocols.jebp.proved import ProvedHandshake, ProvedOpener
from babelbus.protocols.jebp.publisher import Publisher
from babelbus.protocols.jebp.reading import Said, Subscription, awaited, fetch_partition, move_group, tell_positions
from babelbus.protocols.jebp.rooted import absolute
from babelbus.protocols.jebp.staging_session import carry_out
from babelbus.protocols.jebp.status import Outcome, answers

log = logging.getLogger(__name__)

RESPONSE_OVERHEAD_BYTES = 18
"""Tag and the two status bytes, which the frame limit counts too."""


Authorise = Callable[[str], Client | None]
"""Fingerprint -> who that is and what he may do; `None`: nobody we know."""
NoteLogin = Callable[[str, str], None]
"""Takes the name of a client that has proved who it is, or the fingerprint of a stranger and why it is refused."""


class Session(contract.Session):
    """One connection of a jebp client, from its handshake on."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        identity: Identity,
        authorise: Authorise,
        settings: JebpSettings,
        metrics: Metrics,
        handshake: ServerHandshake | ProvedHandshake | None = None,
        kept: KeptSession | None = None,
        note_login: NoteLogin = lambda name, refused: None,
        methods: Mapping[str, Method] = METHODS,
    ) -> None:
        self._note_login = note_login
        self._broker = broker
        self._outbox = outbox
        self._close_connection = close
        self._authorise = authorise
        self._settings = settings
        self._metrics = metrics
        self._content_bytes_max = settings.frame_bytes_max - RESPONSE_OVERHEAD_BYTES
        self._answers = answers(settings.status)
        # One is given by tests that know every byte; else its keys are made here, for this connection alone.
        self._handshake: ServerHandshake | ProvedHandshake = handshake or ServerHandshake(
            identity, bare_certificates=settings.bare_certificates, frame_bytes_max=settings.frame_bytes_max
        )
        self._decoder: ServerDecoder | None = None
        self._client: Client | None = None
        self._fingerprint = ""
        self._methods = methods
        self._calls: Calls | None = None
        """There from the first call on."""
        self._subscription = Subscription(broker, metrics)
        self._backlog: deque[Request] = deque()
        self._change: Promise = DONE
        """The last change of the topics that this client asked for."""
        self._waits: set[Promise] = set()
        self._may_wait = True
        """Whether fetches wait for records."""
        if kept is not None:
            self._continue(kept)
            return
        hello = self._handshake.begin()
        outbox.answer(lambda: hello)

    # -- connection --------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Receive the bytes of one read and handle all requests in them.

        Raises:
            RemoteProtocolError: the peer broke the protocol or is nobody we know; close the connection.
        """
        decoder = self._decoder
        if decoder is None:
            decoder = self._shake(data)
            if decoder is None:
                return
        else:
            decoder.receive_data(data)
        requests = decoder.events()
        root = None if self._client is None else self._client.root
        if root is not None:
            requests = [absolute(request, root) for request in requests]
        if self._backlog:
            self._backlog.extend(requests)
        else:
            self._handle(requests)
        self._check(decoder)

    def _check(self, decoder: ServerDecoder) -> None:
        """Raise the error of a client that broke the protocol, once the requests in front of that are handled."""
        if decoder.error is not None and not self._backlog:
            raise decoder.error

    def _shake(self, data: bytes) -> ServerDecoder | None:
        """Continue the handshake; return the decoder of the requests once it is done."""
        reply = self._handshake.receive_data(data)
        if reply:
            self._outbox.answer(lambda: reply)
        established = self._handshake.established
        if established is None:
            return None
        client = self._authorise(established.fingerprint)
        if client is None:
            self._metrics.connections_refused_total.labels(PROTOCOL, "identity").inc()
            self._note_login(established.fingerprint, "nobody has this certificate")
            raise UntrustedPeerError(established.fingerprint)
        self._note_login(client.name, "")
        log.info("jebp: %s (%s) connected", client.name, established.fingerprint[:16])
        return self._establish(established, client)

    def _establish(self, established: Established, client: Client) -> ServerDecoder:
        self._client, self._fingerprint = client, established.fingerprint
        self._sealer, self._opener = established.sealer, established.opener
        self._publisher = Publisher(
            self._broker,
            self._outbox,
            established.sealer,
            opened_by=client,
            answers=self._answers,
            metrics=self._metrics,
        )
        bare = self._has_topic if self._settings.bare_records else None
        self._decoder = ServerDecoder(
            established.opener, frame_bytes_max=self._settings.frame_bytes_max, topic_exists=bare
        )
        self._decoder.receive_data(established.surplus)
        return self._decoder

    # -- from one server to the next ---------------------------------------------------------------------------------

    @property
    def is_portable(self) -> bool:
        """Whether another server can continue the session: its client has proved who it is, and has no calls."""
        return self._client is not None and (self._calls is None or self._calls.is_idle)

    def stay(self) -> None:
        """Answer the fetches that wait for records with what there is: the server stops."""
        self.end_fetches()

    def continuation(self) -> contract.Continuation | None:
        """Return what another server needs to continue the session."""
        if not self.is_portable or self._waits or not self._change.done:
            return None
        is_fronted = isinstance(self._opener, ProvedOpener)
        kept = KeptSession(
            self._fingerprint, self._sealer.place, self._opener.place, self._subscription.topics, is_fronted
        )
        return contract.Continuation(str(uuid.uuid4()), encode_session(kept))

    def _continue(self, kept: KeptSession) -> None:
        """Continue a session that another server has begun.

        Raises:
            UntrustedPeerError: nobody has the certificate of the client any more.
        """
        client = self._authorise(kept.fingerprint)
        if client is None:
            raise UntrustedPeerError(kept.fingerprint)
        self._establish(restore(kept, self._settings.frame_bytes_max), client)
        self._subscription.restore(kept.topics, client)

    # -- records that come in batches of fronts ------------------------------------------------------------------------

    @property
    def client(self) -> Client | None:
        """The client, once it has proved who it is, while it may be served."""
        return self._client

    @property
    def source(self) -> Headers:
        """The headers of the client in events for live subscribers."""
        return self._publisher.source

    def skip(self, count: int) -> None:
        """Count requests of the client that came in a batch."""
        self._opener.skip(count)

    def _has_topic(self, name: str) -> bool:
        """Return whether there is a topic of a name of the client, to which the client may publish something."""
        client, broker = self._client or NOBODY, self._broker
        topic = client.absolute(name)
        return broker.has_topic(topic) and broker.may_some(client, Action.PUBLISH, topic)

    @property
    def established(self) -> bool:
        """Whether the client has proved who it is."""
        return self._client is not None

    @property
    def principal(self) -> str | None:
        """Name of the client in the list of clients."""
        return None if self._client is None else self._client.name

    @property
    def is_encrypted(self) -> bool:
        """Whether the handshake is done: everything behind it is encrypted."""
        return self.established

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The topics and patterns that the client reads live."""
        calls = [] if self._calls is None else self._calls.subscriptions
        return [*((name, False) for name in self._subscription.topics), *calls]

    @property
    def busy(self) -> bool:
        """Whether requests are put off."""
        return bool(self._backlog)

    @property
    def unfinished_bytes(self) -> int:
        """Memory of a frame that has not come whole; those of the handshake are small."""
        return 0 if self._decoder is None else self._decoder.unfinished_bytes

    def refuse_unfinished(self, text: str, *, later: bool) -> None:
        """Drop the frame that has not come whole; jebp has no answer for it.

        Raises:
            RemoteProtocolError: always.
        """
        error = RemoteProtocolError(text)
        if self._decoder is not None:
            self._decoder.fail(error)
        raise error

    def access_changed(self) -> bool:
        """Find the client again after the lists of clients changed; close if it is not in them any more.

        Returns whether the client may hear or read less than before.
        """
        before = self._client
        if before is not None:
            self._client = self._authorise(self._fingerprint)
            if self._client is None:
                log.info("jebp: client %s is not in the list any more, closing", self._fingerprint[:16])
                self._close_connection()
            elif self._client.root != before.root:
                log.info("jebp: client %s has another root, closing", self._fingerprint[:16])
                self._client = None
                self._close_connection()
            self._subscription.client = self._client or NOBODY
            if self._calls is not None:
                self._calls.access_changed(self._client or NOBODY)
        return before is not None and has_lost(before, self._client or NOBODY)

    def resume(self) -> None:
        """Continue with the requests that were put off while the outbox was full."""
        requests = list(self._backlog)
        self._backlog.clear()
        self._handle(requests)
        if self._decoder is not None:
            self._check(self._decoder)

    def release(self) -> None:
        """Resume the streams: the outbox may have room again."""
        if self._calls is not None and not self._outbox.full:
            self._calls.resume()

    def close(self) -> None:
        """End the session: records of requests that came whole are still stored (specification, section 6)."""
        self.end_fetches()
        for request in self._backlog:
            if isinstance(request, CallItems):
                with contextlib.suppress(RemoteProtocolError):
                    self._call(request)
        if self._calls is not None:
            self._calls.close(lost=True)
        self._change.when_done(self._finish)

    def _finish(self, _change: Promise) -> None:
        """Handle what was put off, up to the next change of the topics; then again behind it."""
        requests = [request for request in self._backlog if not isinstance(request, Fetch | FetchPartition | CallItems)]
        self._backlog.clear()
        try:
            self._handle(requests)
        finally:
            if self._backlog:
                self._change.when_done(self._finish)
            else:
                self._subscription.end()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, requests: Sequence[Request]) -> None:
        """Handle requests in order: records that follow each other together, until the outbox is full."""
        count, outbox = len(requests), self._outbox
        at = 0
        while at < count:
            if outbox.full or not self._change.done:
                self._backlog.extend(requests[at:])
                return
            request = requests[at]
            kind = type(request)
            if kind is CreateRecord or kind is CreateRecords:
                after = at + 1
                while after < count and type(requests[after]) is kind:
                    after += 1
                publish = self._publisher.create_each if kind is CreateRecord else self._publisher.create_batches
                publish(requests[at:after], self._client or NOBODY)  # type: ignore[arg-type]  # the loop looked at each
                at = after
                continue
            at += 1
            match request:
                case Fetch():
                    self._fetch(request)
                case Subscribe():
                    self._say(*self._subscription.subscribe(request, self._client or NOBODY))
                case CreateTopic():
                    self._change_topics(Work(self._create_topic(request)))
                case RemoveTopic():
                    self._change_topics(Work(self._remove_topic(request)))
                case StageRecords() | CommitBatch() | AbortBatch() | AskTransaction():
                    self._carry_out_staging(request)
                case TellPositions() | FetchPartition() | MoveGroup():
                    self._read_partitions(request)
                case CallItems():
                    rest = self._call(request)
                    if rest is not None:
                        self._backlog.extend((rest, *requests[at:]))
                        return
                case Malformed():
                    self._say(self._refuse(request))

    def _call(self, request: CallItems) -> CallItems | None:
        """Handle items of calls (40); return those that are left for later.

        Raises:
            RemoteProtocolError: a call is opened under a number that is in use.
        """
        if self._calls is None:
            self._calls = Calls(
                self._broker,
                self._outbox,
                self._sealer,
                methods=self._methods,
                principal=self._client or NOBODY,
                metrics=self._metrics,
            )
        return self._calls.receive(request)

    @property
    def _may_manage_nothing(self) -> bool:
        """Whether the client may make or remove no topic at all."""
        return overlaps(self._client or NOBODY, Action.MANAGE, EVERYTHING) is Narrowing.NONE

    def _content(self, outcome: Outcome) -> bytes:
        return self._answers[outcome]

    def _say(self, outcome: Outcome, content: bytes = b"") -> None:
        answer = self._content(outcome) + content
        self._outbox.answer(lambda: self._sealer.seal_many([answer]))

    def _refuse(self, request: Malformed) -> Outcome:
        """Return what is wrong; who may not do it at all is told that first (section 4.2)."""
        if request.command == CREATE_TOPIC and self._may_manage_nothing:
            return Outcome.CREATE_TOPIC_NO_RIGHTS
        if request.command == REMOVE_TOPIC and self._may_manage_nothing:
            return Outcome.REMOVE_TOPIC_NO_RIGHTS
        return request.outcome

    # -- 14, 15, 16 and 23: staged batches ---------------------------------------------------------------------------

    def _carry_out_staging(self, request: StagingRequest) -> None:
        if self._client is None:  # it has lost its rights while the connection closes
            self._say(Outcome.UNKNOWN_COMMAND)
            return
        receipts, tell = carry_out(request, self._broker, self._client, self._metrics)

        def answer() -> bytes | bytearray:
            outcome, content = tell()
            return self._sealer.seal_many([self._content(outcome) + content])

        self._outbox.answer_when(receipts, answer, len(request.records) if isinstance(request, StageRecords) else 0)

    # -- 22: reading -------------------------------------------------------------------------------------------------

    def _fetch(self, request: Fetch) -> None:
        bytes_max = self._content_bytes_max
        read = Work(self._subscription.fetch(request, bytes_max))
        self._answer_read(read, min(request.bytes_max, bytes_max), Outcome.FETCH_DISK)

    def _answer_read(self, read: Work[Said], weight: int, failed: Outcome = Outcome.PARTITION_DISK) -> None:
        """Answer with what a read brings, at once if it is there; `weight` is the most that it may bring."""

        def encode() -> bytes | bytearray:
            outcome, parts = (failed, []) if read.error is not None else read.value
            return self._sealer.seal_parts([self._content(outcome), *parts])

        if read.done and read.error is None:
            weight = sum(map(len, read.value[1]))
        self._outbox.answer_when([read], encode, weight)

    # -- 24 to 26: partitions by number -----------------------------------------------------------------------------

    def _read_partitions(self, request: PartitionRequest) -> None:
        client, broker = self._client or NOBODY, self._broker
        bytes_max = self._content_bytes_max
        if isinstance(request, MoveGroup):
            self._answer_read(Work(move_group(request, broker, client)), 0)
        elif isinstance(request, TellPositions):
            self._answer_read(Work(tell_positions(request, broker, client, bytes_max)), bytes_max)
        else:
            weight = min(request.bytes_max, bytes_max)
            if request.wait_ms:
                # One that waits must not fill the outbox: while nothing is read, a client that goes is not noticed.
                weight = min(weight, self._outbox.bytes_max // 2)
            self._answer_read(Work(self._fetch_partition(request, client)), weight)

    async def _fetch_partition(self, request: FetchPartition, client: Client) -> Said:
        broker = self._broker
        waiting = await awaited(request, broker, client)
        if waiting is not None:
            await settled(self._wait(*waiting, request.wait_ms / 1000))
        return await fetch_partition(request, broker, self._client or NOBODY, self._metrics, self._content_bytes_max)

    def _wait(self, partition: Partition, offset: int, seconds: float) -> Promise:
        """Return what is done when a record can be read, its topic goes away, the time is over or the client is
        gone.
        """
        receipt = Promise()
        if not self._may_wait:  # it was put off until now
            receipt.resolve()
            return receipt
        self._waits.add(receipt)
        cancel = partition.watch(offset, receipt.resolve)
        timer = asyncio.get_running_loop().call_later(seconds, receipt.resolve)

        def forget(_: Promise) -> None:
            cancel()
            timer.cancel()
            self._waits.discard(receipt)

        receipt.when_done(forget)
        return receipt

    def end_waits(self) -> None:
        """Answer the fetches that wait for records with what there is, and end the calls: the server stops."""
        self.end_fetches()
        if self._calls is not None:
            self._calls.flush()
            self._calls.close(lost=False)

    def end_fetches(self) -> None:
        """Answer the fetches that wait for records, or would wait, with what there is: the client may be gone."""
        self._may_wait = False
        for receipt in list(self._waits):
            receipt.resolve()

    # -- 11 and 31: topics -------------------------------------------------------------------------------------------

    def _change_topics(self, change: Work[Outcome]) -> None:
        """Answer a change of the topics; later requests are put off until then, for they may ask for its outcome."""
        self._change = change
        weight = 0 if change.done else self._outbox.bytes_max
        self._outbox.answer_when([change], lambda: self._sealer.seal_many([self._content(change.result())]), weight)

    async def _create_topic(self, request: CreateTopic) -> Outcome:
        try:
            await self._broker.create_topic(request.topic, principal=self._client or NOBODY)
        except AccessRefusedError:
            return Outcome.CREATE_TOPIC_NO_RIGHTS
        except BabelbusError as error:
            return _refused(error, _NOT_CREATED)
        return Outcome.TOPIC_CREATED

    async def _remove_topic(self, request: RemoveTopic) -> Outcome:
        try:
            await self._broker.remove_topic(request.topic, principal=self._client or NOBODY)
        except AccessRefusedError:
            return Outcome.REMOVE_TOPIC_NO_RIGHTS
        except BabelbusError as error:
            return _refused(error, _NOT_REMOVED)
        return Outcome.TOPIC_REMOVED


_NOT_CREATED: dict[type[BabelbusError], Outcome] = {
    TopicExistsError: Outcome.CREATE_TOPIC_EXISTS,
    InvalidTopicNameError: Outcome.CREATE_TOPIC_BAD_NAME,
    InvalidSettingError: Outcome.CREATE_TOPIC_BAD_NAME,
    QuotaExceededError: Outcome.CREATE_TOPIC_NO_RIGHTS,
    StorageError: Outcome.CREATE_TOPIC_DISK,
}
_NOT_REMOVED: dict[type[BabelbusError], Outcome] = {
    UnknownTopicError: Outcome.REMOVE_TOPIC_MISSING,
    InvalidTopicNameError: Outcome.REMOVE_TOPIC_REFUSED,
    StorageError: Outcome.REMOVE_TOPIC_DISK,
}


def _refused(error: BabelbusError, outcomes: dict[type[BabelbusError], Outcome]) -> Outcome:
    kind = next((kind for kind in outcomes if isinstance(error, kind)), None)
    if kind is None:
        raise error
    log.log(logging.ERROR if kind is StorageError else logging.INFO, "jebp: a topic is not made or removed: %s", error)
    return outcomes[kind]
