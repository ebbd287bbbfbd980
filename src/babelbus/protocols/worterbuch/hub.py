"""The shared part of all Wörterbuch clients of a server: subscriptions, `$SYS`, locks and testaments.

Changes of the state (`_hear_changes`) and events of other protocols (`_hear_events`) become runs of changes with the
same subscribers, encoded once for all subscribers of one shape
(docs/specifications/worterbuch.md, sections 7 and 9).
"""

import asyncio
import datetime
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, cast

import msgspec

from babelbus import __version__
from babelbus.clock import Clock
from babelbus.config import WorterbuchSettings
from babelbus.core.access import Action, Narrowing, has_lost, may
from babelbus.core.broker import Broker
from babelbus.core.fanout import Fan, Fanout
from babelbus.core.json_text import is_json, json_text
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.state import Change, Commit, Granted, KeyPattern, Kind, NoSuchKeyError, State, Unheard
from babelbus.core.subject import PathPattern, is_secret
from babelbus.metrics import Metrics, Traffic
from babelbus.protocols.contract import LOST_RIGHT
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.gatekeeper import PROTOCOL, Gatekeeper
from babelbus.protocols.worterbuch.names import SYS, is_below_sys, shows_keys
from babelbus.protocols.worterbuch.peer import Peer, Subscriber
from babelbus.protocols.worterbuch.values import parse_value

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
LICENCE = "Apache-2.0"
STORE_MODE = "Babelbus"
SOURCE_CODE = "https://github.com/babelbus/babelbus"
MAIN_VERSIONS = b"[[0,11],[1,1]]"
_ESCAPED = {"#": "%23", "?": "%3F"}
"""How the wildcards of a pattern stand in a key; the same characters inside an element are no wildcards."""
UNTOLD = frozenset((Kind.CHILDREN, Kind.RETAINED, Kind.TESTAMENT))

Subscribers = tuple[Subscriber, ...]


class Ticking(Protocol):
    """A connection for HTTP, as the hub sees it."""

    def tick(self) -> None:
        """Handle the end of a second."""


class Hub:
    """The shared part of all Wörterbuch connections of one server."""

    def __init__(
        self, broker: Broker, metrics: Metrics, clock: Clock, settings: WorterbuchSettings, keeper: Gatekeeper
    ) -> None:
        self.broker = broker
        self.state: State = broker.state
        self.settings = settings
        self.keeper = keeper
        self.clock = clock
        self.clients: dict[str, Peer] = {}
        self.ticking: dict[Ticking, None] = {}
        """Connections for HTTP."""
        self.received: Traffic = metrics.live_received(PROTOCOL)
        self.delivered: Traffic = metrics.live_delivered(PROTOCOL)
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._receiver = self._hear_events  # one object: the router compares by identity
        self._fanout: Fanout[str, Subscriber, Fan[Subscriber]] = Fanout(self._make_fan)
        self._ls: dict[str | None, dict[Subscriber, None]] = {}
        self._touched: dict[Peer, None] = {}
        self._counted = 0
        self._started = clock.monotonic()
        broker.state_receiver = self._receiver
        self.state.shows_keys = shows_keys
        self.state.listeners.append(self._hear_changes)
        self.state.locks.receivers.append(self._grant)
        self._show_server()

    # -- $SYS --------------------------------------------------------------------------------------------------------

    def show(self, path: str, value: object) -> None:
        """Set a key below `$SYS`."""
        self.state.put(f"{SYS}/{path}", msgspec.json.encode(value))

    def hide(self, path: str) -> None:
        """Delete a key below `$SYS`, if it is there."""
        key = f"{SYS}/{path}"
        if self.state.find(key) is not None:
            self.state.delete(key)

    def _show_server(self) -> None:
        self.show("version", __version__)
        self.show("license", LICENCE)
        self.show("source-code", SOURCE_CODE)
        self.state.put(f"{SYS}/protocolVersion", MAIN_VERSIONS)
        if self.settings.instance_name is not None:
            self.show("name", self.settings.instance_name)
        self.show("store/mode", STORE_MODE)
        self.show("clients", 0)
        if self.settings.extended_monitoring:
            self.show("subscriptions", 0)
        self.tick()

    def tick(self) -> None:
        """Update the figures of `$SYS`, and send the keepalives of old clients; called every second."""
        self.show("uptime", int(self.clock.monotonic() - self._started))
        self.show("store/values/count", len(self.state))
        self.commit()
        now_seconds = self.keeper.now_seconds()
        for session in list(self.clients.values()):
            end = session.access.find_end(now_seconds)
            if end is not None:
                session.end(end)
            else:
                session.tick()
        for connection in list(self.ticking):
            connection.tick()

    def commit(self, source: str = PROTOCOL) -> None:
        """Write the changes that no client waits for to the log."""
        receipt = self.state.commit(source)
        receipt.when_done(_note_failure)

    # -- clients -----------------------------------------------------------------------------------------------------

    def join(self, session: Peer) -> None:
        """Show a client that connected."""
        self.clients[session.client_id] = session
        path = f"clients/{session.client_id}"
        self.show("clients", len(self.clients))
        self.show(f"{path}/protocol", session.transport_name)
        self.show(f"{path}/address", session.address)
        if self.settings.extended_monitoring:
            self.show(f"{path}/connectedSince", timestamp_text(self.clock.now_ms()))
        self.commit()

    def forget(self, session: Peer) -> None:
        """Remove a client whose session goes on at another server: nothing of it ends."""
        self.clients.pop(session.client_id, None)

    def leave(self, session: Peer) -> None:
        """Remove a client that is gone, in the order of section 9.3."""
        client_id = session.client_id
        if self.clients.pop(client_id, None) is None:
            return
        state = self.state
        state.locks.drop(client_id)
        self.show("clients", len(self.clients))
        for subscriber in session.subscribers.values():
            self._withdraw(subscriber)
        self._counted -= session.counted  # once for all of them: a client may have 100,000
        for subscriber in session.ls_subscribers.values():
            self.unsubscribe_ls(subscriber)
        session.subscribers.clear()
        session.ls_subscribers.clear()
        for key, _ in state.match(KeyPattern((SYS, "clients", client_id), rest=True)):
            state.delete(key)
        source = session.access.source

        def executed() -> None:
            if self.settings.extended_monitoring:
                self.show("subscriptions", self._counted)
            self.commit(source)
            self.flush()

        if client_id in state.away:  # the testament waits until all hear of it that go on: see `State.call_back`
            executed()
        else:
            state.execute_in_turns(client_id, source, executed)

    def _grant(self, granted: Granted) -> None:
        """Show the holder of a lock, and answer if it is a client of ours that waits for the lock."""
        if self.settings.extended_monitoring:
            if granted.owner is None:
                self.hide(f"locks/{granted.key}")
            else:
                self.show(f"locks/{granted.key}", granted.owner)
        client = self.clients.get(cast("str", granted.owner))
        if client is not None:
            client.send_granted(granted.waits)

    def flush(self) -> None:
        """Send what was pushed to the clients."""
        touched, self._touched = self._touched, {}
        for session in touched:
            session.flush()

    def drop(self, reason: str, count: int = 1) -> None:
        """Count events that do not reach a client."""
        self._metrics.live_dropped_total.labels(PROTOCOL, reason).inc(count)

    # -- subscriptions -----------------------------------------------------------------------------------------------

    def subscribe(self, subscriber: Subscriber, pattern: PathPattern) -> None:
        """Register a subscriber; it gets the events behind its `since`. Call `show_subscription` when it has begun.

        Raises:
            AccessRefusedError: nothing of the pattern is granted.
            QuotaExceededError: the principal of the client has as many subscriptions as it may.
        """
        identity = subscriber.session.access.identity
        subscriber.since = sys.maxsize
        subscriber.subscription = self.broker.subscribe(
            pattern, self._receiver, identity, shared=True, owner=subscriber
        )

    def show_subscription(self, subscriber: Subscriber) -> None:
        """Show a subscription, and whether it is narrowed."""
        self._monitor(subscriber, 1)
        if subscriber.session.access.identity.rights is not None:
            self._show_narrowing(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """End a subscription."""
        if self._withdraw(subscriber):
            self._monitor(subscriber, -1)
        if subscriber.narrowed:
            self._show_narrowing(subscriber)

    def _withdraw(self, subscriber: Subscriber) -> bool:
        """End the subscription of a subscriber; return whether it had one."""
        subscriber.stop()
        subscription, subscriber.subscription = subscriber.subscription, None
        if subscription is None:
            return False
        self.broker.router.remove(subscription)
        return True

    def _monitor(self, subscriber: Subscriber, step: int) -> None:
        """Show how many subscriptions there are, without those whose events this would be (section 9.1)."""
        subject = subscriber.subject
        if not self.settings.extended_monitoring or subject is None or subject == "#" or is_below_sys(subject):
            return
        session = subscriber.session
        self._counted += step
        session.counted += step
        self.show("subscriptions", self._counted)
        path = f"clients/{session.client_id}/subscriptions"
        shown = _escaped(session.access.identity.relative(subject))
        if step > 0:
            self.show(f"{path}/{shown}", subscriber.transaction_id)
        else:
            self.hide(f"{path}/{shown}")
        if session.counted:
            self.show(path, session.counted)
        else:
            self.hide(path)

    def _show_narrowing(self, subscriber: Subscriber) -> None:
        """Show whether a subscription is granted in part, or not at all any more, where clients can look it up."""
        subscription, subject = subscriber.subscription, subscriber.subject
        narrowed = subscription is not None and subscription.narrowing is not Narrowing.WHOLE
        if narrowed is subscriber.narrowed or subject is None:
            return
        subscriber.narrowed = narrowed
        shown = _escaped(subscriber.session.access.identity.relative(subject))
        path = f"clients/{subscriber.session.client_id}/narrowed/{shown}"
        if narrowed:
            self.show(path, subscriber.transaction_id)
        else:
            self.hide(path)

    def subscribe_ls(self, subscriber: Subscriber) -> None:
        """Register a subscriber for changes of the names below its subject."""
        self._ls.setdefault(subscriber.subject, {})[subscriber] = None
        self.state.watches_children = True

    def unsubscribe_ls(self, subscriber: Subscriber) -> None:
        """End an ls subscription."""
        subscribers = self._ls.get(subscriber.subject, {})
        subscribers.pop(subscriber, None)
        if not subscribers:
            self._ls.pop(subscriber.subject, None)
        self.state.watches_children = bool(self._ls)

    # -- rights ------------------------------------------------------------------------------------------------------

    def access_changed(self) -> None:
        """Read the rights of each client again: subscriptions shrink or grow, and clients without a principal go."""
        for client in list(self.clients.values()):
            access, before = client.access, client.access.identity
            if not access.refresh():
                client.end("its principal is gone")
            elif has_lost(before, access.identity) and client.is_stuck:
                client.end(LOST_RIGHT)
            elif not all(
                may(access.identity, Action.WRITE_STATE, key) for key in self.state.locks.keys(client.client_id)
            ):
                client.end("it may not hold a lock any more")  # no message of the protocol says so
            for subscriber in client.subscribers.values():
                if subscriber.subscription is not None:
                    subscriber.subscription.principal = access.identity
                    subscriber.forget_refused(partial(self._may_hear, access))
                    self._show_narrowing(subscriber)
            for subscriber in client.ls_subscribers.values():
                self._tell_names(subscriber)
        self.commit()
        self.flush()

    def _may_hear(self, access: Access, key: str | None) -> bool:
        """Return whether a client may have the change of a key, which may be a dead letter of another subject."""
        return key is not None and access.may_hear(key) and self.broker.router.may_hear(access.identity, key)

    # -- events ------------------------------------------------------------------------------------------------------

    def _make_fan(self, key: str) -> Fan[Subscriber]:
        """Return who subscribed to a key."""
        route = self.broker.router.route_of(key)
        receiver = self._receiver
        owners = tuple(cast("Subscriber", one.owner) for one in route.subscriptions if one.receiver is receiver)
        if shows_keys(key):  # the router knows the rows alone
            owners = tuple(one for one in owners if one.session.access.may_hear(key))
        return Fan(route, owners)

    def _hear_changes(self, changes: Sequence[Change], commit: Commit) -> None:
        if self.broker.router.empty and not self._ls:
            return
        told = [change for change in changes if change[0] not in UNTOLD]
        if len(told) < len(changes):
            for parent in dict.fromkeys(change[1] for change in changes if change[0] is Kind.CHILDREN):
                self._tell_children(parent)
        keys = [change[1] for change in told]  # only the root of CHILDREN is None
        for run, subscribers in self._fanout.runs(told, cast("list[str]", keys)):
            self._tell(run, subscribers, commit.number)
        self.flush()

    def tell_again(self, unheard: Sequence[Unheard], heard: Mapping[str, int]) -> None:
        """Send clients that go on the changes that the last server did not send; `heard` is an offset by client id.

        Nothing was committed to the log since the clients go on: later commits reach them as ever. The names of an ls
        subscription are those of now, once.
        """
        for client_id in heard:
            client = self.clients.get(client_id)
            for subscriber in () if client is None else client.ls_subscribers.values():
                self._tell_names(subscriber)
        told = [one for one in unheard if one[1][0] not in UNTOLD]
        keys = [one[1][1] for one in told]  # only the root of CHILDREN is None
        for run, subscribers in self._fanout.runs(told, cast("list[str]", keys)):
            groups: dict[int, list[Subscriber]] = {}
            for subscriber in subscribers:
                offset = heard.get(subscriber.session.client_id)
                if offset is not None:
                    groups.setdefault(offset, []).append(subscriber)
            for offset, group in groups.items():
                changes = [change for at, change in run if at >= offset]
                if changes:
                    self._tell(changes, tuple(group), None)
        self.flush()

    def _hear_events(self, events: Sequence[Event]) -> None:
        """Deliver events of other protocols like publishes of a client."""
        keys: list[str] = []
        told: list[Change] = []
        for event in events:
            key = event.subject
            if is_secret(key):
                self.drop("secret")
                continue
            if not key.isascii() and not key.isprintable() and any("\ud800" <= one <= "\udfff" for one in key):
                self.drop("inexpressible")
                continue
            keys.append(key)
            before = self.state.find(key) if event.payload is None and self.broker.retains(key) else None
            if before is not None:  # the state is about to forget it
                told.append((Kind.DELETED, key, before, None, 0))
            else:
                told.append((Kind.PUBLISHED, key, foreign_value(event), None, 0))
        for run, subscribers in self._fanout.runs(told, keys):
            self._tell(run, subscribers, None)
        self.flush()

    def _tell(self, run: list[Change], subscribers: Subscribers, number: int | None) -> None:
        """Send a run of changes to its subscribers, encoded once for each shape of them."""
        made: dict[object, bytes] = {}
        touched = self._touched
        count = 0
        for subscriber in subscribers:
            if number is not None and subscriber.since >= number:
                continue  # it has seen their result
            session = subscriber.session
            touched[session] = None
            count += 1
            if not subscriber.plain:
                subscriber.take(run, self._loop.call_later)
                continue
            shape = subscriber.shape or subscriber.take_shape()
            data = made.get(shape)
            if data is None:
                data = made[shape] = session.framing.encode(session.encode_run(subscriber, run))
            session.push_bytes(data)
        self.delivered.inc(count * len(run), sum(map(len, made.values())))

    def _tell_children(self, parent: str | None) -> None:
        subscribers = self._ls.get(parent)
        if not subscribers:
            return
        try:
            names = self.state.children(parent)
        except NoSuchKeyError:
            names = []
        for subscriber in subscribers:
            session = subscriber.session
            if session.access.identity.rights is not None:
                self._tell_names(subscriber)
                continue
            subscriber.names = names
            session.push([session.encode_names(subscriber, names)])
            self._touched[session] = None

    def _tell_names(self, subscriber: Subscriber) -> None:
        """Send an ls subscriber the names that it may see, if they are others than before."""
        session = subscriber.session
        names = session.access.children(subscriber.subject)
        if names != subscriber.names:
            subscriber.names = names
            session.push([session.encode_names(subscriber, names)])
            self._touched[session] = None

    def later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back after some seconds."""
        return self._loop.call_later(seconds, callback)


def _escaped(subject: str) -> str:
    """Return a pattern as a key."""
    return "/".join(_ESCAPED.get(element, element) for element in subject.split("/"))


def foreign_value(event: Event) -> bytes:
    """Return the payload of another protocol's event as a value: JSON that some client could not read is a text."""
    payload = event.payload
    if payload is None:
        return b"null"
    if payload and event.headers and is_json(event.headers):
        try:
            return parse_value(payload)
        except ValueError:
            pass
    return json_text(payload, ())


def timestamp_text(now_ms: int) -> str:
    """Return a time as ISO 8601 in UTC with nanoseconds, as section 9.1 shows it."""
    at = datetime.datetime.fromtimestamp(now_ms / 1000, datetime.UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{now_ms % 1000:03d}000000+00:00"


def _note_failure(receipt: Promise) -> None:
    if receipt.error is not None:
        log.warning("worterbuch: a change was not stored: %s", receipt.error)
