"""The meaning of the messages of one zbus connection (docs/specifications/zbus.md, sections 3 to 7).

Messages are handled in order: a command that has to see what was published before it waits until that is stored, and
one that needs a message from the disk until it is read. A command that waits is a `Promise`, and is put off: it is done
again from its beginning.
"""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, Generic

import msgspec

from babelbus import __version__
from babelbus.core.access import Action, Identity, Root, check_may, has_lost
from babelbus.core.access.gate import ACCESS_TOPIC
from babelbus.core.groups import check_group_name
from babelbus.core.receipt import Promise
from babelbus.core.request import Reply, Request
from babelbus.core.work import Work
from babelbus.errors import BabelbusError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus import messages as m
from babelbus.protocols.zbus import pages, routing
from babelbus.protocols.zbus.calls import taker_of
from babelbus.protocols.zbus.codec import taken
from babelbus.protocols.zbus.continuation import KeptSession, KeptSubscription
from babelbus.protocols.zbus.errors import MalformedMessageError, NotFoundError, RequestError
from babelbus.protocols.zbus.filters import compile_filter, without
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import PUBLISH, Message, Run, flag, integer, json_reply, text_reply
from babelbus.protocols.zbus.publisher import Asked, Framing, Publisher
from babelbus.protocols.zbus.query import describe, describe_all, describe_channel
from babelbus.protocols.zbus.rooted import Bindings, absolute, relative_answer
from babelbus.protocols.zbus.routing import read_bindings
from babelbus.protocols.zbus.services import NOT_ROUTED, answer_of, refusal_of
from babelbus.protocols.zbus.subscription import Receiver, Subscription

log = logging.getLogger(__name__)

PING = "ping"
OUR_MISTAKE = "the server failed; its log says more"
Change = Callable[[Message], Coroutine[Any, Any, Message]]
TAKE_TRIES = 8
"""So often a `take` looks on if the channel's filter wanted nothing of what it saw."""
CALLED_MAX = 1024
"""So many MQs that a connection calls, or takes from, are remembered."""
_encode_json = msgspec.json.Encoder().encode


class Session(Generic[Asked]):
    """One connection. `receiver` sends deliveries on it, and answers that nobody waits for; plain HTTP has none."""

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
        self._receiver = receiver
        self._monitor = monitor
        stamp = {"source": self.id, "remote-addr": self.address}
        self._publisher = Publisher(hub, outbox, framing, stamp)
        self._subscriptions: dict[tuple[str, str], Subscription] = {}
        self.called: dict[str, None] = {}
        """The MQs to which this connection has sent what a service may answer."""
        self.taken: dict[str, None] = {}
        """The MQs from which this connection has taken messages."""
        self.binds = False
        """Whether this connection has bound urls."""
        self._proof: str | None = None
        self._root: Root | None = None
        """The root of the principal."""
        self._change: Work[Message] | None = None
        """The change of an MQ that waits, for the command that is put off."""

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The MQs that the client consumes; with the channel behind a comma, if it is not that of the MQ's name."""
        return [(mq if channel == mq else f"{mq},{channel}", False) for mq, channel in self._subscriptions]

    # -- messages ----------------------------------------------------------------------------------------------------

    def handle(self, message: Message, asked: Asked, *, target: str | None = None) -> bool:
        """Handle a message, whose sender is proved; return `False` to be called again when the outbox has room.

        `target` is what stood in the request line of HTTP.
        """
        headers = message.headers
        request_id = headers.get("id")
        if is_free(message):
            if "cmd" not in headers:
                self._publisher.reply(pages.icon(request_id), asked)
            elif self._receiver is None:  # over plain HTTP every request has an answer
                self._publisher.reply(Message({"content-type": m.TEXT_TYPE}, status=m.OK), asked)
            return True
        if request_id is None:
            request_id = headers["id"] = self._hub.new_id()
        try:
            self._check_monitor()
            if "cmd" not in headers:
                message = self._route_url(message, target)  # its MQ is absolute
                if message.status is not None:
                    self._publisher.reply(message, asked)
                    return True
                request_id = message.headers["id"]  # a query may have another one
                if self._receiver is not None and message.url != "/" and self._ask(message, request_id):
                    return True
            elif self._root is not None:
                message = absolute(message, self._root)
            command = message.headers["cmd"].lower()
            if command == PUBLISH:
                self._publish(message, (request_id,), (message.body or b"",), asked)
                return True
            act = self._COMMANDS.get(command)
            if act is None:
                raise NotFoundError(m.command_not_found(command))
            if not self._publisher.store():
                return False
            reply = act(self, message)
            if isinstance(reply, Promise):
                self._publisher.wait(reply)
                return False
            if reply is not None:
                self._publisher.reply(reply, asked)
        except RequestError as error:
            self._publisher.reply(text_reply(request_id, error.status, error.text), asked)
        except BabelbusError as error:
            self._publisher.reply(refusal_of(error, request_id), asked)
        except Exception:  # section 3, item 8: our own mistake costs one message, not the connection
            log.exception("%s: a message failed", self.address)
            self._publisher.reply(text_reply(request_id, m.FAILED, OUR_MISTAKE), asked)
        return True

    def _check_monitor(self) -> None:
        """Check that the principal may use the port of the monitor, if it does. Raises: AccessRefusedError."""
        if self._monitor:
            check_may(self.principal, Action.ADMIN, ACCESS_TOPIC)

    def refuse(self, error: RequestError, asked: Asked, request_id: str | None = None) -> None:
        """Answer what is no message, or does not prove who sent it."""
        self._publisher.reply(text_reply(request_id, error.status, error.text), asked)

    def publish(self, run: Run, asked: Asked) -> None:
        """Publish a run, as `handle` does with each message."""
        new_id = self._hub.new_id
        ids = [new_id() if request_id is None else request_id for request_id in run.ids]
        try:
            self._check_monitor()
            root = self._root
            common = run.message if root is None else absolute(run.message, root)
            self._publish(common, ids, run.bodies, asked)
        except BabelbusError:
            for message in run.messages():
                self.handle(message, asked)

    def settle(self) -> None:
        """Publish and answer the messages gathered: behind each chunk, and before the outbox is asked."""
        self._publisher.settle()

    def _publish(self, message: Message, ids: Sequence[str], payloads: Sequence[bytes], asked: Asked) -> None:
        headers = message.headers
        mq = headers.get("mq")
        if mq is None:
            raise MalformedMessageError(m.missing_mq("pub"))
        acked = "ack" not in headers or flag(message, "ack", default=True)
        if acked or self._receiver is not None:
            if not acked:
                _remember(self.called, mq)
            self._publisher.publish(message, mq, ids, payloads, asked, acked=acked)
        else:  # over plain HTTP a publication without an ack is a call (6.3); it never comes in a run
            self._publisher.call(message, mq, ids[0], asked)

    def _ask(self, message: Message, request_id: str) -> bool:
        """Call a url on WebSocket that responders of other protocols answer; return `False` if there are none."""
        hub, mq, receiver = self._hub, message.headers["mq"], self._receiver
        if receiver is None or not hub.services.are_elsewhere(mq):
            return False
        deadline = hub.clock.monotonic() + hub.settings.rpc_timeout_seconds

        root = self._root

        def replied(request: Request[Reply]) -> None:
            answer = answer_of(request, request_id)
            if request.reply is None and root is not None:
                answer = relative_answer(answer, root)
            receiver.push(answer)

        self._publisher.ask(message, mq, deadline).when_done(replied)
        return True

    def take_reply(self, message: Message) -> bool:
        """Send what a service answers; return whether somebody waits for it."""
        if self._receiver is not None:
            return self._receiver.push(message)
        return self._publisher.take_reply(message)

    # -- urls (section 6) --------------------------------------------------------------------------------------------

    def _route_url(self, message: Message, target: str | None) -> Message:
        """Return the command that a message without one means, or the answer to it, which has a status."""
        hub = self._hub
        request_id = message.headers["id"]
        if message.status is not None:  # it would be an answer, and there is no question
            message = msgspec.structs.replace(message, status=None)
        command = self.find_route(message, target)
        if command is not None:
            if self._monitor and routing.command_of_query(message, target or message.url or "") is None:
                raise NotFoundError(m.url_not_found(message.url or ""))
            return command
        if not self._monitor:
            return pages.welcome(request_id, __version__)
        if "text/html" in message.headers.get("accept", ""):
            return pages.monitor(request_id, describe_all(hub, self.principal))
        return json_reply(request_id, m.OK, _encode_json(describe_all(hub, self.principal)))

    def find_route(self, message: Message, target: str | None) -> Message | None:
        """Return the command that a message without one means, with an absolute MQ; see `routing.route`."""
        hub, root = self._hub, self._root
        if root is None:
            return routing.route(message, hub.bindings, hub.is_called, target)
        bindings = Bindings(hub.bindings, root)
        command = routing.route(message, bindings, lambda name: hub.is_called(root.absolute(name)), target)
        return None if command is None else absolute(command, root)

    # -- commands (section 4) ----------------------------------------------------------------------------------------

    def _ping(self, message: Message) -> Message | None:
        """Answer over plain HTTP alone, where every request has an answer. `ping` in small letters never gets here."""
        if self._receiver is not None:
            return None
        return Message({"content-type": m.TEXT_TYPE, "id": message.headers["id"]}, status=m.OK)

    def _carry_out(self, change: Change, message: Message) -> Message | Promise:
        """Begin a change, or go on with the change of the command that was put off."""
        work = self._change or Work(change(message))
        self._change = None if work.done else work
        return work.result() if work.done else work

    def _create(self, message: Message) -> Message | Promise:
        return self._carry_out(self._create_mq, message)

    def _remove(self, message: Message) -> Message | Promise:
        return self._carry_out(self._remove_mq, message)

    async def _create_mq(self, message: Message) -> Message:
        headers = message.headers
        mq, channel = _mq_of(message, "create"), headers.get("channel")
        mq_mask, mask, offset = (integer(message, name) for name in ("mqMask", "channelMask", "offset"))
        wanted = headers.get("filter")
        if wanted:
            compile_filter(wanted)
        if channel is not None:
            check_group_name(channel)  # before there is an MQ
        topic = await self._hub.ensure_mq(mq, headers.get("mqType"), mq_mask, self.address, self.principal)
        if channel is not None:
            checksum = headers.get("checksum")
            checked = offset is None or checksum is None or await self._hub.id_at(topic, offset) == checksum
            if not checked:
                raise MalformedMessageError(f"no message with the id of checksum at offset {offset}")
            await self._hub.ensure_channel(
                topic, channel, mask=mask, wanted=wanted, offset=offset, principal=self.principal
            ).wait()
        return text_reply(headers["id"], m.OK, m.created(mq, channel))

    async def _remove_mq(self, message: Message) -> Message:
        mq, channel = _mq_of(message, "remove"), message.headers.get("channel")
        if channel is None:
            await self._hub.remove_mq(mq, self.principal)
        else:
            await self._hub.remove_channel(mq, channel, self.principal).wait()
        return text_reply(message.headers["id"], m.OK, m.removed(mq, channel))

    def _query(self, message: Message) -> Message:
        headers, hub = message.headers, self._hub
        mq, channel = headers.get("mq"), headers.get("channel")
        told: object
        if mq is None:
            told = describe_all(hub, self.principal)
        else:
            topic = hub.find_seen(self.principal, mq)
            if channel is None:
                told = describe(hub, topic, self.principal)
            else:
                told = describe_channel(hub, hub.channel(mq, channel), self.principal)
        return json_reply(headers["id"], m.OK, _encode_json(told))

    def _bind(self, message: Message) -> Message:
        mq = _mq_of(message, "bind")
        clear = flag(message, "clearBind", default=True)
        entries = read_bindings(message, self.principal.relative(mq))
        self._hub.bind(mq, entries, self.principal, clear=clear)
        self.binds = True
        return text_reply(message.headers["id"], m.OK, m.bound(mq))

    def _route(self, message: Message) -> Message | None:
        headers = message.headers
        target = headers.get("target")
        if target is None:
            raise MalformedMessageError(m.ROUTE_NEEDS_TARGET)
        kept = {name: value for name, value in headers.items() if name not in NOT_ROUTED}
        answer = msgspec.structs.replace(message, headers=kept)
        consumed = {*self.taken, *(mq for mq, _ in self._subscriptions)}
        found = self._hub.route(target, answer, self.principal, taker=self._taker, consumed=consumed)
        if not flag(message, "ack", default=False):
            # Over plain HTTP every request has an answer.
            return None if self._receiver is not None else text_reply(headers["id"], m.OK, m.ROUTED)
        if not found:
            raise NotFoundError(m.target_not_found(target))
        return text_reply(headers["id"], m.OK, m.ROUTED)

    def _take(self, message: Message) -> Message | Promise:
        headers, hub = message.headers, self._hub
        mq, channel = _mq_and_channel(message)
        count = max(integer(message, "window") or 1, 1)
        hub.broker.check_topic(self.principal, Action.CONSUME, mq)  # first: names of channels are not for others
        group = hub.channel(mq, channel)
        given_up = hub.calls.abandoned(mq)
        heads: list[bytes] = []
        explicit = group.settings.ack == "explicit"
        member = group.join(lambda _: None, credit=0, principal=self.principal) if explicit else None
        try:
            for _ in range(TAKE_TRIES):
                looked = False
                for some in group.take(count - len(heads), member, self.principal):
                    looked = True
                    if hub.calls.are_waiting(mq):
                        hub.calls.handed_out(some, self._taker)
                    if member is not None:
                        member.ack(some)  # made by another protocol; here a message is done when it is handed out
                    heads += hub.heads(mq, self._root).of(without(some, given_up) if given_up else some)
                if len(heads) >= count or (not looked and group.settings.filter is None):
                    break
            if not heads and group.loading is not None:
                return group.loading
        finally:
            if member is not None:
                member.leave()
        _remember(self.taken, mq)
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
        hub.broker.check_topic(self.principal, Action.CONSUME, mq)
        group = hub.channel(mq, channel)
        if subscription is None or subscription.member is None:
            made = subscription or self._subscription(self._receiver, mq, channel, self.principal, self._proof)
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

    def _subscription(
        self, receiver: Receiver, mq: str, channel: str, principal: Identity, proof: str | None
    ) -> Subscription:
        return Subscription(
            self._hub,
            receiver,
            mq,
            channel,
            session_id=self.id,
            address=self.address,
            principal=principal,
            proof=proof,
        )

    @property
    def principal(self) -> Identity:
        """The client, as the broker asks for its rights."""
        return self._publisher.principal

    @property
    def _taker(self) -> str:
        return taker_of(self.principal, self.id, self.address, is_pushed=self._receiver is not None)

    def speak_for(self, principal: Identity, proof: str | None) -> None:
        """Handle the next messages for a principal, which `proof` (an apiKey) has proved, if not the connection."""
        self._publisher.principal = principal
        self._root = principal.root
        self._proof = proof

    def access_changed(self, identity: Callable[[str | None], Identity]) -> bool:
        """End what the principals may not do any more; `identity` returns who has proved an apiKey.

        Returns whether a principal of the connection may hear or read less than before.
        """
        before = self.principal
        self.speak_for(identity(self._proof), self._proof)
        is_lost = has_lost(before, self.principal)
        for key, subscription in list(self._subscriptions.items()):
            before = subscription.principal
            if not subscription.access_changed(identity(subscription.proof)):
                del self._subscriptions[key]
                _leave(subscription)
            is_lost |= has_lost(before, subscription.principal)
        return is_lost

    _COMMANDS: ClassVar[dict[str, Callable[["Session[Any]", Message], Message | Promise | None]]] = {
        "create": _create,
        "sub": _sub,
        "take": _take,
        "route": _route,
        "remove": _remove,
        "query": _query,
        "bind": _bind,
        PING: _ping,
    }

    # -- from one server to the next ---------------------------------------------------------------------------------

    @property
    def is_copyable(self) -> bool:
        """Whether nothing but a message of the client or for it changes what is kept, and no request is under way."""
        if self.binds or self._change is not None or not self._publisher.is_idle:
            return False
        return all(one.is_copyable for one in self._subscriptions.values())

    def keep(self) -> list[KeptSubscription]:
        """Return the subscriptions, for the next server."""
        return [
            KeptSubscription(one.mq, one.channel, one.window, one.filter, one.proof, one.member is not None)
            for one in self._subscriptions.values()
        ]

    def restore(self, kept: KeptSession, identity: Callable[[str | None], Identity]) -> None:
        """Continue with the work of the client at another server; `identity` returns who has proved an apiKey.

        Raises:
            BabelbusError: a channel is gone, or its principal may not consume the MQ any more.
        """
        hub, receiver = self._hub, self._receiver
        self.called, self.taken = dict.fromkeys(kept.called), dict.fromkeys(kept.taken)
        self.binds = kept.binds
        for one in kept.subscriptions:
            assert receiver is not None, "plain HTTP has no subscriptions"
            principal = identity(one.proof)
            hub.broker.check_topic(principal, Action.CONSUME, one.mq)
            subscription = self._subscription(receiver, one.mq, one.channel, principal, one.proof)
            subscription.set(one.window, one.filter, compile_filter(one.filter) if one.filter else None)
            if one.is_member:
                subscription.join(hub.channel(one.mq, one.channel))
            self._subscriptions[one.mq, one.channel] = subscription
            hub.subscribed(subscription)

    # -- the connection ----------------------------------------------------------------------------------------------

    def hold(self, held: bool) -> None:
        """Stop deliveries, or resume them."""
        for subscription in self._subscriptions.values():
            member = subscription.member
            if member is not None:
                if held:
                    member.hold()
                else:
                    member.resume()

    def close(self) -> None:
        """Close the subscriptions (5.5) and the calls: the connection is gone."""
        for subscription in self._subscriptions.values():
            _leave(subscription)
        self._subscriptions.clear()
        self._publisher.close()
        self._receiver = None  # else session and receiver hold each other, and the bytes of an unfinished message


def is_free(message: Message) -> bool:
    """Return whether a message is answered at once, whoever sent it: a `ping` in small letters, or the icon."""
    command = message.headers.get("cmd")
    return command == PING or (command is None and message.body is None and message.url == pages.FAVICON_URL)


def _leave(subscription: Subscription) -> None:
    try:
        subscription.leave()
    except BabelbusError as error:  # the disk refused to remove what was to go with it
        log.warning("an MQ was to be removed with its last subscriber: %s", error)


def _remember(names: dict[str, None], mq: str) -> None:
    if mq not in names:
        if len(names) >= CALLED_MAX:
            del names[next(iter(names))]
        names[mq] = None


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
