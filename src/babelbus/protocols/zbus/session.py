"""What the messages of one zbus connection mean (specs/zbus.md, sections 3 to 7).

Messages are handled in order. What a chunk publishes is appended together, once for each MQ; a command that has to see
it waits until it is stored. The answers of a chunk go out in the order of its messages, with one write, and in front of
every delivery that they caused.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from babelbus.core.group_settings import GroupOwnedError, InvalidGroupNameError, check_group_name
from babelbus.core.record import Event, Receipt
from babelbus.core.settings import InvalidSettingError
from babelbus.core.subject import InvalidTopicNameError
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus import pages, routing
from babelbus.protocols.zbus.calls import Call
from babelbus.protocols.zbus.codec import taken
from babelbus.protocols.zbus.errors import (
    MalformedMessageError,
    NotFoundError,
    RequestError,
    UnsendableMessageError,
)
from babelbus.protocols.zbus.filters import compile_filter
from babelbus.protocols.zbus.given_up import without
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import Message, flag, integer, json_reply, text_reply
from babelbus.protocols.zbus.records import ORIGIN_PREFIX, to_record
from babelbus.protocols.zbus.routing import read_bindings
from babelbus.protocols.zbus.runs import PUBLISH, Run
from babelbus.protocols.zbus.stored import Mould, Recorder, encode_id
from babelbus.protocols.zbus.subscription import Receiver, Subscription

log = logging.getLogger(__name__)

Asked = TypeVar("Asked")
"""What an answer must know of its request."""
AskedOf = TypeVar("AskedOf", contravariant=True)
PING = "ping"
REPLIES_BYTES = 2**18
"""So much of answers is collected before they go to the outbox, which knows what it may hold."""
OUR_MISTAKE = "the server failed; its log says more"
TAKE_TRIES = 8
"""So often a `take` looks on if the channel's filter wanted nothing of what it saw."""
NOT_ROUTED = frozenset({"cmd", "target", "source", "remote-addr"}) | m.SECRETS
STATUS_OF = (
    (InvalidTopicNameError, m.BAD_REQUEST),
    (InvalidGroupNameError, m.BAD_REQUEST),
    (InvalidSettingError, m.BAD_REQUEST),
    (GroupOwnedError, m.FORBIDDEN),
)
_encode_json = msgspec.json.Encoder().encode


class Framing(Protocol[AskedOf]):
    """How the connection says what it answers."""

    def reply(self, message: Message, asked: AskedOf) -> bytes:
        """Give the answer that says a message.

        Raises:
            UnsendableMessageError: it cannot be said here.
        """

    def published(self, mq: str, ids: Sequence[bytes], asked: AskedOf) -> bytes:
        """Give the answers to `pub`, which is most of what is asked, one behind the other; `ids` are UTF-8."""


class _Publication:
    """What one chunk publishes to one MQ."""

    __slots__ = ("bodies", "events", "receipts", "size_bytes", "timestamp", "topic")

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.timestamp = topic.stamp()
        self.bodies: list[bytes] = []
        self.events: list[Event] = []
        """Where keys choose among several partitions."""
        self.receipts: list[Receipt] = []
        self.size_bytes = 0

    @property
    def error(self) -> BabelbusError | None:
        return next((receipt.error for receipt in self.receipts if receipt.error is not None), None)


_Reply = tuple[_Publication | None, bytes, Sequence[bytes], Asked]
"""The bytes of answers; with a publication they are true once it is stored, and the ids are those of its messages."""


class Session(Generic[Asked]):
    """One connection. `pushes` says whether deliveries can be sent on it, and answers that nobody waits for."""

    def __init__(
        self,
        hub: Hub,
        outbox: Outbox,
        framing: Framing[Asked],
        *,
        receiver: Receiver | None,
        address: str | None,
        monitor: bool = False,
        session_id: str | None = None,
    ) -> None:
        self.id = session_id or hub.new_id()
        self.address = f"/{address or 'local'}"
        self._hub = hub
        self._outbox = outbox
        self._framing = framing
        self._receiver = receiver
        self._monitor = monitor
        self._stamp = {"source": self.id, "remote-addr": self.address}
        self._recorder = Recorder(self._stamp)
        self._publications: dict[str, _Publication] = {}
        self._replies_bytes = 0
        self._replies: list[_Reply[Asked]] = []
        self._known: Message | None = None
        self._mq = ""
        self._acked = True
        self._mould: Mould
        self._receipts: list[Receipt] = []
        self._calls: dict[str, list[Call]] = {}
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self._commands: dict[str, Callable[[Message], Message | None]] = {
            "create": self._create,
            "sub": self._sub,
            "take": self._take,
            "route": self._route,
            "remove": self._remove,
            "query": self._query,
            "bind": self._bind,
            PING: self._ping,
        }

    # -- messages ----------------------------------------------------------------------------------------------------

    def handle(self, message: Message, asked: Asked, *, target: str | None = None) -> bool:
        """Do what a message says, which proved who sent it; `False`: not before the outbox has room again.

        `target` is what stood in the request line of HTTP.
        """
        headers = message.headers
        request_id = headers.get("id")
        if request_id is None:
            request_id = headers["id"] = self._hub.new_id()
        try:
            if "cmd" not in headers:
                message = self._route_url(message, target)
                if message.status is not None:
                    self._reply(message, request_id, asked)
                    return True
            command = message.headers["cmd"].lower()
            if command == PUBLISH:
                self._publish(message, request_id, asked)
                return True
            act = self._commands.get(command)
            if act is None:
                raise NotFoundError(m.command_not_found(command))
            if not self._store():
                return False
            reply = act(message)
            if reply is not None:
                self._reply(reply, request_id, asked)
        except RequestError as error:
            self._reply(text_reply(request_id, error.status, error.text), request_id, asked)
        except BabelbusError as error:
            status = next((status for kind, status in STATUS_OF if isinstance(error, kind)), m.FAILED)
            self._reply(text_reply(request_id, status, str(error)), request_id, asked)
        except Exception:  # section 3, item 8: our own mistake costs one message, not the connection
            log.exception("%s: a message failed", self.address)
            self._reply(text_reply(request_id, m.FAILED, OUR_MISTAKE), request_id, asked)
        return True

    def refuse(self, error: RequestError, asked: Asked, request_id: str | None = None) -> None:
        """Answer what is no message, or does not prove who sent it."""
        self._reply(text_reply(request_id, error.status, error.text), request_id or "", asked)

    def answer(self, reply: Message, asked: Asked) -> None:
        """Answer without more ado."""
        self._reply(reply, reply.headers.get("id", ""), asked)

    def _reply(self, reply: Message, request_id: str, asked: Asked) -> None:
        try:
            encoded = self._framing.reply(reply, asked)
        except UnsendableMessageError as error:
            encoded = self._framing.reply(text_reply(None, error.status, error.text), asked)
        self._replies.append((None, encoded, (), asked))
        self._replies_bytes += len(encoded)

    def settle(self) -> None:
        """Append what was published, and answer everything: behind each chunk, and before the outbox is asked."""
        if not self._replies and not self._receipts:
            return
        self._publish_all()
        receipts, self._receipts = self._receipts, []
        replies, self._replies, self._replies_bytes = self._replies, [], 0
        if replies:
            weight = sum([len(one[1]) for one in replies])
            self._outbox.answer_when(receipts, lambda: self._encode(replies), weight)

    def _encode(self, replies: list["_Reply[Asked]"]) -> bytes:
        encoded = []
        for publication, reply, ids, asked in replies:
            error = None if publication is None else publication.error
            if error is None:
                encoded.append(reply)
            else:
                texts = (text_reply(one.decode(), m.FAILED, str(error)) for one in ids)
                encoded += [self._framing.reply(text, asked) for text in texts]
        return b"".join(encoded)

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, run: Run, asked: Asked) -> None:
        """Do what a run of publications says: what `handle` does with each of them."""
        if run.message is not self._known:
            self._learn(run.message)
        topic = self._hub.find_topic(self._mq)
        if topic is None or len(topic.partitions) != 1 or not (self._acked or self._receiver is not None):
            for message in run.messages():
                self.handle(message, asked)
            return
        ids = self._hub.fill_ids(run.ids)
        publication = self._publication(topic)
        publication.bodies += self._mould.bodies(ids, run.bodies, publication.timestamp)
        publication.size_bytes += sum(map(len, run.bodies))
        self._promise(publication, ids, self._acked, asked)

    @property
    def mould(self) -> tuple[str, Mould] | None:
        """The MQ and the mould of the run that was published last, if such ones are acknowledged."""
        return (self._mq, self._mould) if self._known is not None and self._acked else None

    def _learn(self, message: Message) -> None:
        """Remember what the publications of a run have in common: the next ones will be like them."""
        self._known = message
        self._mq = message.headers.get("mq", "")
        self._acked = flag(message, "ack", default=True)
        self._mould = self._recorder.mould(message, has_body=True)

    def _publish(self, message: Message, request_id: str, asked: Asked) -> None:
        headers = message.headers
        mq = headers.get("mq")
        if mq is None:
            raise MalformedMessageError(m.missing_mq("pub"))
        acked = "ack" not in headers or flag(message, "ack", default=True)
        if not acked and self._receiver is None:
            self._call(message, mq, request_id, asked)
            return
        publication = self._publication(self._hub.topic(mq))
        if len(publication.topic.partitions) == 1:
            publication.bodies.append(self._recorder.encode(message, publication.timestamp))
        else:
            publication.events.append(self._event(mq, message))
        if message.body is not None:
            publication.size_bytes += len(message.body)
        self._promise(publication, [encode_id(request_id)], acked, asked)

    def _publication(self, topic: Topic) -> _Publication:
        publication = self._publications.get(topic.name)
        if publication is None:
            publication = self._publications[topic.name] = _Publication(topic)
        return publication

    def _promise(self, publication: _Publication, ids: Sequence[bytes], acked: bool, asked: Asked) -> None:
        """Answer publications when they are stored; without an ack nothing is said unless it fails (section 4)."""
        reply = self._framing.published(publication.topic.name, ids, asked) if acked else b""
        self._replies.append((publication, reply, ids, asked))
        self._replies_bytes += len(reply)

    def _event(self, mq: str, message: Message) -> Event:
        """Give the event of a message, stamped with who sent it (section 3)."""
        stamped = msgspec.structs.replace(message, headers={**message.headers, **self._stamp})
        payload, key, headers = to_record(stamped, ORIGIN_PREFIX)
        return Event(mq, payload, key, headers)

    def _publish_all(self) -> None:
        if not self._publications:
            return
        publications, self._publications = self._publications, {}
        for publication in publications.values():
            topic, events, bodies = publication.topic, publication.events, publication.bodies
            if bodies:
                size_bytes, timestamp = publication.size_bytes, publication.timestamp
                publication.receipts.append(self._hub.gatherer.append(topic, bodies, timestamp, size_bytes))
            if events:
                publication.receipts += topic.publish(events)
                self._hub.published(topic, len(events), publication.size_bytes)
            self._receipts += publication.receipts
            publication.bodies = []
            publication.events = []

    def _store(self) -> bool:
        """Append what was published before a command; `False`: it is not stored yet, or the outbox is full anyway."""
        if self._replies_bytes > REPLIES_BYTES:
            self.settle()
        if self._outbox.full:
            return False
        self._publish_all()
        self._hub.gatherer.commit()
        receipts = [receipt for receipt in self._receipts if not receipt.done]
        if not receipts:
            return True
        self.settle()
        self._outbox.answer_when(receipts, bytes, self._outbox.bytes_max)
        return False

    # -- calls over plain HTTP (section 6.3) -------------------------------------------------------------------------

    def _call(self, message: Message, mq: str, request_id: str, asked: Asked) -> None:
        """Publish a request, and answer it when a service does: behind the answers to those before it."""
        topic = self._hub.topic(mq)
        event = self._event(mq, message)
        self.settle()
        call = self._hub.calls.begin(mq, self.id, request_id)
        self._calls.setdefault(request_id, []).append(call)

        def encode() -> bytes:
            assert call.reply is not None
            waiting = self._calls.get(request_id, [])
            if call in waiting:
                waiting.remove(call)
                if not waiting:
                    del self._calls[request_id]
            try:
                return self._framing.reply(call.reply, asked)
            except UnsendableMessageError as error:
                return self._framing.reply(text_reply(request_id, error.status, error.text), asked)

        self._outbox.answer_when([call.done], encode)

        def stored(receipt: Receipt) -> None:
            if receipt.error is not None:
                call.answer(text_reply(request_id, m.FAILED, str(receipt.error)))

        self._hub.gatherer.commit()  # what was published before it comes first
        for receipt in topic.publish([event]):
            receipt.when_done(stored)
        self._hub.published(topic, 1, len(event.payload or b""))

    def take_reply(self, message: Message) -> bool:
        """Send what a service answers; give whether somebody waits for it."""
        if self._receiver is not None:
            return self._receiver.push(message)
        call = next((call for call in self._calls.get(message.headers.get("id", ""), ()) if call.reply is None), None)
        if call is None:
            return False
        call.answer(message)
        return True

    # -- urls (section 6) --------------------------------------------------------------------------------------------

    def _route_url(self, message: Message, target: str | None) -> Message:
        """Give the command that a message without one means, or the answer to it, which has a status."""
        hub = self._hub
        request_id = message.headers["id"]
        if message.status is not None:  # it would be an answer, and there is no question
            message = msgspec.structs.replace(message, status=None)
        found = routing.route(message, hub.bindings, hub.exists, target)
        if isinstance(found, routing.Command | routing.Publish):
            if self._monitor and isinstance(found, routing.Publish):
                raise NotFoundError(m.url_not_found(message.url or ""))
            return found.message
        if isinstance(found, routing.Nowhere):
            raise RequestError(found.status, found.text)
        if not self._monitor:
            return pages.welcome(request_id, hub.options.version)
        if "text/html" in message.headers.get("accept", ""):
            return pages.monitor(request_id, hub.describe_all())
        return json_reply(request_id, m.OK, _encode_json(hub.describe_all()))

    # -- commands (section 4) ----------------------------------------------------------------------------------------

    def _ping(self, message: Message) -> Message | None:
        """Say nothing, but over plain HTTP, where every request has an answer. In small letters it never gets here."""
        if self._receiver is not None:
            return None
        return Message({"content-type": m.TEXT_TYPE, "id": message.headers["id"]}, status=m.OK)

    def _create(self, message: Message) -> Message:
        headers = message.headers
        mq, channel = _mq_of(message, "create"), headers.get("channel")
        mq_mask, mask, offset = (integer(message, name) for name in ("mqMask", "channelMask", "offset"))
        wanted = headers.get("filter")
        if wanted:
            compile_filter(wanted)
        if channel is not None:
            check_group_name(channel)  # before there is an MQ
        topic = self._hub.ensure_mq(mq, headers.get("mqType"), mq_mask, self.address)
        if channel is not None:
            self._hub.ensure_channel(
                topic, channel, mask=mask, wanted=wanted, offset=offset, checksum=headers.get("checksum")
            )
        return text_reply(headers["id"], m.OK, m.created(mq, channel))

    def _remove(self, message: Message) -> Message:
        mq, channel = _mq_of(message, "remove"), message.headers.get("channel")
        if channel is None:
            self._hub.remove_mq(mq)
        else:
            self._hub.remove_channel(mq, channel)
        return text_reply(message.headers["id"], m.OK, m.removed(mq, channel))

    def _query(self, message: Message) -> Message:
        headers, hub = message.headers, self._hub
        mq, channel = headers.get("mq"), headers.get("channel")
        told: object
        if mq is None:
            told = hub.describe_all()
        elif channel is None:
            told = hub.describe(hub.topic(mq))
        else:
            told = hub.describe_channel(hub.channel(mq, channel))
        return json_reply(headers["id"], m.OK, _encode_json(told))

    def _bind(self, message: Message) -> Message:
        mq = _mq_of(message, "bind")
        self._hub.bindings.bind(mq, read_bindings(message), clear=flag(message, "clearBind", default=True))
        return text_reply(message.headers["id"], m.OK, m.bound(mq))

    def _route(self, message: Message) -> Message | None:
        headers = message.headers
        target = headers.get("target")
        if target is None:
            raise MalformedMessageError(m.ROUTE_NEEDS_TARGET)
        peer = self._hub.peers.get(target)
        kept = {name: value for name, value in headers.items() if name not in NOT_ROUTED}
        found = peer is not None and peer.take_reply(msgspec.structs.replace(message, headers=kept))
        if not flag(message, "ack", default=False):
            # Over plain HTTP every request has an answer.
            return None if self._receiver is not None else text_reply(headers["id"], m.OK, m.ROUTED)
        if not found:
            raise NotFoundError(m.target_not_found(target))
        return text_reply(headers["id"], m.OK, m.ROUTED)

    def _take(self, message: Message) -> Message:
        headers, hub = message.headers, self._hub
        mq, channel = _mq_and_channel(message)
        count = max(integer(message, "window") or 1, 1)
        group = hub.channel(mq, channel)
        given_up = hub.calls.given_up(mq)
        heads: list[bytes] = []
        explicit = group.settings.ack == "explicit"
        member = group.join(lambda _: None, credit=0) if explicit else None
        try:
            for _ in range(TAKE_TRIES):
                looked = False
                for some in group.take_runs(count - len(heads), member):
                    looked = True
                    if member is not None:
                        member.ack(some)  # made by another protocol; here a message is done when it is handed out
                    heads += hub.heads(mq).of(without(some, given_up) if given_up else some)
                if len(heads) >= count or (not looked and group.settings.filter is None):
                    break
        finally:
            if member is not None:
                member.leave()
        if not heads:
            return json_reply(headers["id"], m.NO_DATA, b"[]", mq=mq, channel=channel)
        return json_reply(headers["id"], m.OK, taken(heads), mq=mq, channel=channel)

    def _sub(self, message: Message) -> Message | None:
        headers, hub = message.headers, self._hub
        mq, channel = _mq_and_channel(message)
        window, wanted = integer(message, "window"), headers.get("filter")
        if self._receiver is None:
            raise MalformedMessageError("nothing can be pushed over plain HTTP: use WebSocket, or take")
        matches = compile_filter(wanted) if wanted else None
        key = mq, channel
        subscription = self._subscriptions.get(key)
        group = hub.channel(mq, channel)
        if subscription is None or subscription.member is None:
            made = subscription or Subscription(
                hub, self._receiver, mq, channel, session_id=self.id, address=self.address
            )
            made.set(window, wanted, matches)
            made.join(group)
            if subscription is None:
                self._subscriptions[key] = made
                hub.subscribed(made)
        else:
            subscription.set(window, wanted, matches)
        hub.touched(mq, channel)
        if not flag(message, "ack", default=True):
            return None
        return text_reply(headers["id"], m.OK, m.subscribed(mq, channel))

    # -- the connection ----------------------------------------------------------------------------------------------

    def hold(self, held: bool) -> None:
        """Take no deliveries, or take them again."""
        for subscription in self._subscriptions.values():
            member = subscription.member
            if member is not None:
                if held:
                    member.hold()
                else:
                    member.resume()

    def close(self) -> None:
        """The connection is gone: its subscriptions end (5.5), and nobody waits for its calls."""
        for subscription in self._subscriptions.values():
            try:
                subscription.leave()
            except BabelbusError as error:  # the disk refused to remove what was to go with it
                log.warning("an MQ was to be removed with its last subscriber: %s", error)
        self._subscriptions.clear()
        for calls in self._calls.values():
            for call in calls:
                if call.reply is None:
                    self._hub.calls.give_up(call)
                    call.answer(text_reply(call.id, m.GATEWAY_TIMEOUT, "the caller is gone"))
        self._calls.clear()


def _mq_of(message: Message, command: str) -> str:
    mq = message.headers.get("mq")
    if mq is None:
        raise MalformedMessageError(m.missing_mq(command))
    return mq


def _mq_and_channel(message: Message) -> tuple[str, str]:
    headers = message.headers
    mq, channel = headers.get("mq"), headers.get("channel")
    if mq is None:
        raise MalformedMessageError(m.SUB_NEEDS_MQ)
    if channel is None:
        raise MalformedMessageError(m.SUB_NEEDS_CHANNEL)
    return mq, channel
