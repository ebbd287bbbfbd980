"""Consumer groups whose members are URLs: subscriptions, and pushes with retries (specification, 4.7 and 5).

Subscriptions are kept in a note, so that a restart loses no subscription. A message is acknowledged when a webhook has
taken it; a message that no webhook of its group takes becomes a dead letter.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from babelbus.core.access import ANONYMOUS, Action, Granted, Identity, Root
from babelbus.core.groups import Delivery, Member, check_group_name
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.request import STOPS, Question, reads_too_slowly
from babelbus.core.router import Subscription as Live
from babelbus.core.subject import check_topic_name, exactly
from babelbus.core.work import Work, settled
from babelbus.errors import BabelbusError
from babelbus.identities.errors import InvalidProofError
from babelbus.protocols.eventmesh.callers import PROVE_NOTHING
from babelbus.protocols.eventmesh.calls import (
    CONNECTIONS_MAX,
    NOT_GRANTED,
    Call,
    Calls,
    Origin,
    TargetRefusedError,
)
from babelbus.protocols.eventmesh.hub import PROTOCOL, Hub, correlation
from babelbus.protocols.eventmesh.messages import SubscriptionItem
from babelbus.protocols.eventmesh.webhook_codec import (
    PUSH_ASYNC,
    PUSH_SYNC,
    encode_head,
    encode_push,
    read_answer,
)
from babelbus.records.record import Headers
from babelbus.storage.notes import Note
from babelbus.units import MIB

log = logging.getLogger(__name__)

Push = dict[str, tuple[dict[str, str], bytes]]
"""Header fields and form of a push, by the `protocoldesc` of its webhook."""
RETRIES_MAX = 3
PUSHES_MAX = 4 * CONNECTIONS_MAX
"""Messages of a group and topic that webhooks have at a time: a webhook that hangs keeps no more from other members."""
LIVE_BYTES_MAX = 4 * 2**20
"""Forms of events and questions that wait for webhooks of a group and topic; further ones are dropped."""
PUSH_BYTES = 1024
"""Memory of a push beside its form."""
EXPIRE_SECONDS = 90.0
"""A webhook whose client has sent heartbeats and stopped is forgotten after this."""
WEBHOOK_BYTES_MAX = 8192
"""Most bytes of UTF-8 of the URL, `idc` and `pid` of a webhook: pushes and the note repeat them."""
WEBHOOKS_BYTES_MAX = 4 * MIB
"""Most bytes of UTF-8 of all texts of the webhooks of one principal: each change writes the note of all of them."""


class Entry(msgspec.Struct, frozen=True):
    """One webhook of a consumer group for one topic, whose name is absolute, as the note keeps it."""

    group: str
    topic: str
    url: str
    mode: str = "CLUSTERING"
    type: str = "ASYNC"
    idc: str = ""
    pid: str = ""
    principal: str | UnsetType = UNSET
    """The name of who subscribed it; unset if the gate was off."""
    protocoldesc: str = ""
    """The name of the gRPC package by which it was subscribed, empty over HTTP: its pushes have data alone (5.1)."""

    @property
    def owner(self) -> str:
        """Name of the principal, empty for a webhook without a principal."""
        return "" if isinstance(self.principal, UnsetType) else self.principal

    @property
    def size_bytes(self) -> int:
        """Bytes of the texts that clients choose."""
        return sum(map(_size, (self.group, self.topic, self.url, self.idc, self.pid)))


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


class _Webhook:
    """The webhooks of a principal in a group for a topic."""

    def __init__(self, owner: "Webhooks", group: str, topic: str, principal: str) -> None:
        self.principal = principal
        self.group = group
        self.topic = topic
        self.entries: dict[str, Entry] = {}
        self.member: Member | None = None
        self.live: Live | None = None
        self.responder: Live | None = None
        self._rights: Granted | None = None
        self._root: Root | None = None
        self._urls: list[str] = []
        """The webhooks that share messages."""
        self._responders: list[str] = []
        """The webhooks that answer questions."""
        self._live_bytes = 0
        """Memory of events and questions whose push is not over."""
        self._owner = owner
        self._next = random.randrange(2**16)  # noqa: S311 - no secret: where the turns begin

    def update(self) -> None:
        """Begin and end what the entries ask for."""
        hub = self._owner.hub
        principal = hub.callers.of_name(self.principal)
        self._rights, self._root = principal.rights, principal.root
        entries = self.entries.values()
        modes = {entry.mode for entry in entries}
        self._urls = [entry.url for entry in entries if entry.mode == "CLUSTERING"] or list(self.entries)
        self._responders = [entry.url for entry in entries if entry.type == "SYNC"]
        if self.member is not None and self.member.closed:  # topic or group were removed
            self.member = None
        if "CLUSTERING" in modes and self.member is None:
            group = hub.group(principal.relative(self.topic), self.group, principal)
            # Each push ends with an ack or a reject, however long a webhook that hangs makes other pushes wait.
            self.member = group.join(
                self._deliver,
                window=min(hub.settings.window, PUSHES_MAX),
                owner=self,
                held=self._owner.rests,
                expires=False,
                principal=principal,
            )
        elif "CLUSTERING" not in modes and self.member is not None:
            self.member.leave()
            self.member = None
        if self.member is not None:
            self.member.address = ", ".join(sorted({urlsplit(url).netloc.rpartition("@")[2] for url in self._urls}))
        if "BROADCASTING" in modes and self.live is None:
            self.live = hub.broker.subscribe(exactly(self.topic), self._broadcast, principal)
        elif "BROADCASTING" not in modes and self.live is not None:
            hub.broker.unsubscribe(self.live)
            self.live = None
        if self._responders and self.responder is None:
            self.responder = hub.broker.responders.add(
                exactly(self.topic), self._ask, self.group, principal, counted=False
            )
        elif not self._responders and self.responder is not None:
            hub.broker.responders.remove(self.responder)
            self.responder = None

    def end(self) -> None:
        """End deliveries; what comes from now on waits for others, or for `update`."""
        hub = self._owner.hub
        member, self.member = self.member, None
        live, self.live = self.live, None
        responder, self.responder = self.responder, None
        if member is not None:
            member.leave()
        if live is not None:
            hub.broker.unsubscribe(live)
        if responder is not None:
            hub.broker.responders.remove(responder)

    def access_changed(self) -> bool:
        """End what the principal may not have any more; return whether it may have anything."""
        principal = self._owner.hub.callers.of_name(self.principal)
        if self._rights is not principal.rights or self._root != principal.root:
            self.end()
        elif self.member is not None and self.member.closed:
            self.member = None
        return self.may_push(is_live=False) or self.may_push(is_live=True)

    def may_push(self, *, is_live: bool) -> bool:
        """Return whether the principal may have a message now; without that it is not pushed, nor pushed again."""
        hub = self._owner.hub
        principal = hub.callers.of_name(self.principal)
        if is_live:
            return hub.broker.router.may_hear(principal, self.topic)
        return hub.broker.may_topic(principal, Action.CONSUME, self.topic)

    def _is_granted(self, *, is_live: bool) -> bool:
        return not self._owner.hub.callers.enforcing or self.may_push(is_live=is_live)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        member = self.member
        assert member is not None
        for delivery in self._owner.hub.fresh(member, deliveries):
            push = self._encode(delivery.payload, delivery.headers)
            self._push(push, partial(self._done, member, delivery.without_content()), lambda: self._urls)

    def _done(self, member: Member, delivery: Delivery, error: str) -> None:
        if member.closed:
            return
        if error:
            member.reject([delivery], reason=error)
        else:
            self._owner.acknowledge(member, delivery)

    def _broadcast(self, events: Sequence[Event]) -> None:
        for event in events:
            push = self._encode(event.payload, event.headers)
            for url, entry in self.entries.items():
                if entry.mode == "BROADCASTING" and self._has_room():
                    self._push_live(
                        push, partial(self._event_done, len(push[entry.protocoldesc][1])), partial(list, (url,))
                    )

    def _ask(self, question: Question) -> BabelbusError | None:
        if not self._has_room():
            return reads_too_slowly(question)
        hub = self._owner.hub
        name = hub.remember(question, hub.callers.of_name(self.principal))
        more = correlation(name)
        push = self._encode(question.payload, question.headers, more)
        self._push_live(push, partial(self._asked, name), lambda: self._responders)
        return None

    def _has_room(self) -> bool:
        """Return whether one more event or question may wait for the webhook; one that may not is counted."""
        if self._live_bytes > LIVE_BYTES_MAX:
            self._owner.hub.metrics.live_dropped_total.labels(PROTOCOL, "slow").inc()
            return False
        return True

    def _push_live(self, push: Push, done: Callable[[int, str], None], find_urls: Callable[[], list[str]]) -> None:
        """Send an event or a question."""
        size_bytes = sum(len(form) for _, form in push.values()) + PUSH_BYTES
        self._live_bytes += size_bytes
        self._push(push, partial(done, size_bytes), find_urls, is_live=True)

    def _event_done(self, form_bytes: int, size_bytes: int, error: str) -> None:
        self._live_done(size_bytes, error)
        if error:
            self._owner.hub.metrics.live_dropped_total.labels(PROTOCOL, "failed").inc()
        else:
            self._owner.hub.delivered.inc(1, form_bytes)

    def _live_done(self, size_bytes: int, error: str) -> None:
        self._live_bytes -= size_bytes
        if error:
            log.info("a webhook of group %r on topic %r: %s", self.group, self.topic, error)

    def _asked(self, name: str, size_bytes: int, error: str) -> None:
        self._live_done(size_bytes, error)
        if error:
            self._owner.hub.forget([name], "have failed")

    def _encode(self, payload: bytes | None, headers: Headers, more: dict[str, str] | None = None) -> Push:
        """Return header fields and form of a push, for each kind of webhook that there is."""
        hub = self._owner.hub
        topic, number = hub.callers.of_name(self.principal).relative(self.topic), str(hub.next_number())
        kinds = {entry.protocoldesc for entry in self.entries.values()}
        return {kind: encode_push(topic, payload, headers, more or {}, number, kind) for kind in kinds}

    def _push(
        self,
        push: Push,
        done: Callable[[str], None],
        find_urls: Callable[[], list[str]],
        attempt: int = 0,
        *,
        is_live: bool = False,
    ) -> None:
        """Call one webhook after the other until one takes the message; `done` gets the reason if none does."""
        urls = find_urls()
        if not self._is_granted(is_live=is_live):
            done(NOT_GRANTED)
            return
        self._next += 1
        chosen = urls[self._next % len(urls)] if urls else ""
        if chosen not in self.entries:
            done("no webhook is subscribed any more")
            return
        entry = self.entries[chosen]
        # A webhook of another kind may have come since: it gets what there is.
        fields, form = push.get(entry.protocoldesc) or next(iter(push.values()))
        code = PUSH_SYNC if entry.type == "SYNC" else PUSH_ASYNC

        def is_granted() -> bool:
            return chosen in self.entries and self._is_granted(is_live=is_live)

        head = encode_head(code, self._owner.cluster)
        call = self._owner.calls.call("POST", chosen, [*head, *fields.items()], form, is_granted)

        def answered(call: Promise) -> None:
            assert isinstance(call, Call)
            error, delay = read_answer(call.response, call.error)
            if not error or delay is None:
                done(error)
            elif attempt >= RETRIES_MAX:
                done(f"{chosen}: {error}, after {RETRIES_MAX} retries")
            else:
                self._owner.later(delay, lambda: self._push(push, done, find_urls, attempt + 1, is_live=is_live))

        call.when_done(answered)


class Webhooks:
    """All webhooks of a server. Changes are durable when their promise is done."""

    def __init__(self, hub: Hub, calls: Calls, note: Note[list[Entry]], cluster: dict[str, str]) -> None:
        self.hub = hub
        self.cluster = cluster
        """Headers that name the server (4.3, 5.1)."""
        self.calls = calls
        self._note = note
        self._webhooks: dict[tuple[str, str, str], _Webhook] = {}
        """By group, topic and principal."""
        self._counts: Counter[str] = Counter()
        """How many webhooks each principal has for topics."""
        self._bytes: Counter[str] = Counter()
        """Bytes of the texts of the webhooks of each principal."""
        self._principals = {""}
        """Principals that have, or had, webhooks."""
        self._heard: dict[tuple[str, str, str, str], float] = {}
        """When the client of a webhook sent its last heartbeat, if it ever sent one."""
        self._done: dict[Member, list[Delivery]] = {}
        self.rests = False
        """Whether messages of groups are not pushed any more, because the server is about to stop."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._loop = asyncio.get_running_loop()
        self._writer = hub.broker.writer("the webhooks of EventMesh", lambda: partial(note.write, self.entries()))

    def open(self) -> None:
        """Read the subscriptions of the last run, and push from now on.

        Raises:
            StorageError: the note is damaged, or the disk refused.
        """
        for entry in self._note.read() or ():
            self._update(self._add(entry))

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def subscribe(
        self,
        group: str,
        items: Sequence[SubscriptionItem],
        url: str,
        idc: str = "",
        pid: str = "",
        principal: Identity | None = None,
        protocoldesc: str = "",
    ) -> Work[None]:
        """Add a webhook to a group for topics; the work is done when the webhook agrees and the note is written.

        The `principal` subscribes, while the gate is on; `protocoldesc` is as in an `Entry`.

        Raises:
            TargetRefusedError, InvalidTopicNameError, InvalidGroupNameError: the subscription names what cannot be.
        """
        Origin(url)
        size_bytes = sum(map(_size, (url, idc, pid)))
        if size_bytes > WEBHOOK_BYTES_MAX:
            raise TargetRefusedError(f"URL, idc and pid have {size_bytes} bytes, {WEBHOOK_BYTES_MAX} is the limit")
        check_group_name(group)
        topics = [item.topic if principal is None else principal.absolute(item.topic) for item in items]
        for topic in topics:
            check_topic_name(topic)
        name: str | UnsetType = UNSET if principal is None else principal.name
        entries = [
            Entry(group, topic, url, item.mode, item.type, idc, pid, name, protocoldesc)
            for item, topic in zip(items, topics, strict=True)
        ]
        return Work(self._subscribe(entries, items, principal or self.hub.callers.of_name("")))

    async def _subscribe(
        self, entries: Sequence[Entry], items: Sequence[SubscriptionItem], principal: Identity
    ) -> None:
        self._check_entries(entries)
        for entry, item in zip(entries, items, strict=True):
            await self.hub.ensure_place(item, entry.group, principal)
        if self.hub.settings.webhook_consent and entries:
            origin = self.cluster["webhook-request-origin"]
            call = self.calls.call("OPTIONS", entries[0].url, [("webhook-request-origin", origin)])
            await settled(call)
            if isinstance(call.error, TargetRefusedError):
                raise call.error
            if self.hub.stopping:
                raise BabelbusError(STOPS)
            response = call.response  # a webhook that does not answer agrees
            allowed = "" if response is None else response.headers.get("webhook-allowed-origin", "").strip()
            if allowed not in ("", "*", origin):
                raise BabelbusError(f"the webhook allows {allowed[:100]!r} alone")
        if any(self.hub.callers.is_gone(entry.owner) for entry in entries):
            raise InvalidProofError(PROVE_NOTHING)
        self._check_entries(entries)  # another request may have taken the room meanwhile
        before = {entry: self._entry(entry) for entry in entries}
        try:
            for entry in entries:
                self._add(entry).update()
        except BabelbusError:
            for entry, old in before.items():
                if old is not None:
                    self._update(self._add(old))
                elif self._entry(entry) is not None:
                    self._remove(self._webhooks[entry.group, entry.topic, entry.owner], entry.url)
            raise
        await self._save().wait()

    def _entry(self, entry: Entry) -> Entry | None:
        """Return the webhook that an entry would replace."""
        webhook = self._webhooks.get((entry.group, entry.topic, entry.owner))
        return None if webhook is None else webhook.entries.get(entry.url)

    def _check_entries(self, entries: Sequence[Entry]) -> None:
        """Check that there is room for the entries of one webhook; those that replace others take none.

        Raises:
            BabelbusError: there is not.
        """
        by_topic = {entry.topic: (entry, self._entry(entry)) for entry in entries}
        count = sum(before is None for _, before in by_topic.values())
        more = sum(entry.size_bytes - (before.size_bytes if before else 0) for entry, before in by_topic.values())
        if entries:
            self.check_room(entries[0].owner, count, more)

    def check_room(self, owner: str, count: int, size_bytes: int = 0) -> None:
        """Check that a principal, by name as in an `Entry`, may have so many webhooks, and bytes of them, more.

        Raises:
            BabelbusError: it may not.
        """
        limit = self.hub.settings.subscriptions_max
        if count and self._counts[owner] + count > limit:
            raise BabelbusError(f"{limit} webhooks for topics are the limit of a principal: end some first")
        size_bytes += self._bytes[owner]
        if size_bytes > WEBHOOKS_BYTES_MAX and size_bytes > self._bytes[owner]:
            raise BabelbusError(
                f"{size_bytes} bytes of webhooks of a principal, {WEBHOOKS_BYTES_MAX} is the limit: end some first"
            )

    def unsubscribe(
        self, group: str, topics: Sequence[str], url: str, pid: str = "", principal: Identity | None = None
    ) -> Promise:
        """Remove a webhook of a group from topics; those of other clients stay, and those of other principals."""
        for topic in topics:
            absolute = topic if principal is None else principal.absolute(topic)
            for webhook in self._find(group, absolute, principal):
                entry = webhook.entries.get(url)
                if entry is not None and (not pid or not entry.pid or entry.pid == pid):
                    self._remove(webhook, url)
        return self._save()

    def beat(self, group: str, topic: str, url: str, principal: Identity | None = None) -> bool:
        """Record a heartbeat of the client of a webhook; return whether the webhook is known."""
        if principal is not None:
            topic = principal.absolute(topic)
        known = [webhook for webhook in self._find(group, topic, principal) if url in webhook.entries]
        for webhook in known:
            if webhook.member is not None and webhook.member.closed:
                self._update(webhook)
            self._heard[group, topic, webhook.principal, url] = self.hub.clock.monotonic()
        return bool(known)

    def _find(self, group: str, topic: str, principal: Identity | None) -> list[_Webhook]:
        """Return the webhooks of a principal in a group for a topic; `None`: of all principals, the gate is off."""
        if principal is None:
            names: Iterable[str] = self._principals
        else:
            names = ("", ANONYMOUS) if principal.name == ANONYMOUS else (principal.name,)
        return [self._webhooks[group, topic, name] for name in names if (group, topic, name) in self._webhooks]

    def entries(self, principal: Identity | None = None) -> list[Entry]:
        """Return all webhooks, or those of a principal."""
        names = None if principal is None else (principal.name, "" if principal.name == ANONYMOUS else principal.name)
        webhooks = [one for one in self._webhooks.values() if names is None or one.principal in names]
        return [entry for webhook in webhooks for entry in webhook.entries.values()]

    def urls_of(self, group: str, pid: str, principal: Identity | None = None) -> list[str]:
        """Return the webhooks of a client in a group: Go's SDK does not name them when it unsubscribes (7.6)."""
        entries = self.entries(principal)
        return sorted({entry.url for entry in entries if entry.group == group and pid in ("", entry.pid)})

    def access_changed(self) -> None:
        """Check again what principals may have; webhooks of principals that are gone are forgotten."""
        gone = [webhook for webhook in self._webhooks.values() if self.hub.callers.is_gone(webhook.principal)]
        for webhook in gone:
            log.info("webhooks of %r are forgotten: there is no such principal any more", webhook.principal)
            for url in list(webhook.entries):
                self._remove(webhook, url)
        if gone:
            self._save()
        for webhook in self._webhooks.values():
            if webhook.access_changed():
                self._update(webhook)
        self.calls.access_changed()

    def _update(self, webhook: _Webhook) -> None:
        try:
            webhook.update()
        except BabelbusError as error:
            log.warning("a webhook of group %r on topic %r gets nothing: %s", webhook.group, webhook.topic, error)

    def _add(self, entry: Entry) -> _Webhook:
        key = entry.group, entry.topic, entry.owner
        webhook = self._webhooks.get(key)
        if webhook is None:
            webhook = self._webhooks[key] = _Webhook(self, *key)
            self._principals.add(entry.owner)
        before = webhook.entries.get(entry.url)
        self._counts[entry.owner] += before is None
        self._bytes[entry.owner] += entry.size_bytes - (before.size_bytes if before else 0)
        webhook.entries[entry.url] = entry
        return webhook

    def _remove(self, webhook: _Webhook, url: str) -> None:
        entry = webhook.entries.pop(url)
        self._counts[entry.owner] -= 1
        self._bytes[entry.owner] -= entry.size_bytes
        self._heard.pop((webhook.group, webhook.topic, webhook.principal, url), None)
        if webhook.entries:
            self._update(webhook)
        else:
            webhook.end()
            del self._webhooks[webhook.group, webhook.topic, webhook.principal]

    def _save(self) -> Promise:
        """Write the note in a thread."""
        return self._writer.write()

    # -- pushes ------------------------------------------------------------------------------------------------------

    def acknowledge(self, member: Member, delivery: Delivery) -> None:
        """Acknowledge a delivery, together with what else this turn brings."""
        if not self._done:
            self._loop.call_soon(self._acknowledge)
        self._done.setdefault(member, []).append(delivery)

    def _acknowledge(self) -> None:
        done, self._done = self._done, {}
        for member, deliveries in done.items():
            if not member.closed:
                member.ack(deliveries)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Run something after a time, unless the server stops."""
        if self.hub.stopping:
            return

        def run() -> None:
            self._timers.discard(timer)
            do()

        timer = self._loop.call_later(seconds, run)
        self._timers.add(timer)

    def tick(self) -> None:
        """Remove webhooks whose clients have stopped to send heartbeats; called about once a second."""
        self.calls.tick()
        oldest = self.hub.clock.monotonic() - EXPIRE_SECONDS
        silent = [key for key, heard in self._heard.items() if heard < oldest]
        for group, topic, principal, url in silent:
            log.info("webhook %s of group %r on topic %r has sent no heartbeat, and is forgotten", url, group, topic)
            self._remove(self._webhooks[group, topic, principal], url)
        if silent:
            self._save()

    def rest(self) -> None:
        """Stop pushing messages of groups: the server is about to stop."""
        self.rests = True
        for member in self._members:
            member.hold()

    @property
    def owe_acks(self) -> bool:
        """Whether webhooks have messages of groups that they have not acknowledged."""
        return any(member.in_flight for member in self._members)

    @property
    def _members(self) -> list[Member]:
        return [webhook.member for webhook in self._webhooks.values() if webhook.member is not None]

    def stop(self) -> None:
        """Stop all pushes: what is not acknowledged comes again after the next start."""
        self._acknowledge()
        for timer in self._timers:
            timer.cancel()
        for member in self._members:
            member.leave()
        self.calls.close()
