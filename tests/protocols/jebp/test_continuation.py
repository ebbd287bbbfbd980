"""Sessions that go on at another server: one client, whose box and subscription another session takes over."""

import pytest

from babelbus.config import JebpSettings
from babelbus.core.access import SERVER as BUS
from babelbus.protocols.jebp.call_messages import Watch
from babelbus.protocols.jebp.codec import encode_request
from babelbus.protocols.jebp.continuation import KeptSession, decode_session
from babelbus.protocols.jebp.handshake import UntrustedPeerError
from babelbus.protocols.jebp.items import OPEN
from babelbus.protocols.jebp.messages import FROM_OFFSET, CallItems, FetchPartition
from babelbus.protocols.jebp.session import Authorise, Session
from tests.support.bus import Bus, in_loop
from tests.support.jebp import (
    SERVER,
    Conversation,
    create,
    encode,
    everyone,
    fetch,
    fetched,
    said,
    subscribe,
)


def kept(conversation: Conversation) -> KeptSession:
    continuation = conversation.session.continuation()
    assert continuation is not None
    conversation.session.leave()
    return decode_session(continuation.content)


def go_on(conversation: Conversation, bus: Bus, session: KeptSession, authorise: Authorise = everyone) -> None:
    """Continue a session in the place of the one that a client has."""
    conversation.session = Session(
        bus.broker,
        conversation.outbox,
        conversation._close,
        identity=SERVER,
        authorise=authorise,
        settings=JebpSettings(),
        metrics=bus.metrics,
        kept=session,
    )
    assert conversation.answers() == []


@in_loop
async def test_the_box_and_the_subscription_of_a_client_go_on() -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus).connect()
    await conversation.say(subscribe("news"), create("news", b"1"))
    for number in range(2, 4):
        go_on(conversation, bus, kept(conversation))
        assert await conversation.say(create("news", b"%d" % number)) == ["a130"]
    [answer] = await conversation.ask(fetch(0))
    assert fetched(answer)["news", 0] == [b"1", b"2", b"3"]


@in_loop
async def test_a_topic_that_is_gone_is_not_read_any_more() -> None:
    bus = Bus()
    bus.topic("news")
    bus.topic("more")
    conversation = Conversation(bus).connect()
    await conversation.say(subscribe("news", "more"))
    session = kept(conversation)
    await bus.broker.remove_topic("news", BUS)
    go_on(conversation, bus, session)
    assert conversation.session.subscriptions == [("more", False)]


@in_loop
async def test_a_client_that_nobody_knows_any_more_does_not_go_on() -> None:
    bus = Bus()
    conversation = Conversation(bus).connect()
    session = kept(conversation)
    with pytest.raises(UntrustedPeerError):
        go_on(conversation, bus, session, authorise=lambda fingerprint: None)


@in_loop
async def test_a_client_without_a_proof_or_with_an_open_call_does_not_go_on() -> None:
    bus = Bus()
    bus.open_state()
    bus.topic("news")
    stranger = Conversation(bus)
    assert not stranger.session.is_portable
    assert stranger.session.continuation() is None
    caller = Conversation(bus).connect()
    caller.send(encode_request(CallItems([(1, OPEN, encode(["subscribe", Watch(["news/#"])]))])))
    assert not caller.session.is_portable
    assert caller.session.continuation() is None
    caller.session.close()


@in_loop
async def test_a_fetch_that_was_put_off_is_answered_before_its_session_goes_on() -> None:
    bus = Bus()
    bus.topic("news")
    conversation = Conversation(bus).connect()
    waiting = encode_request(FetchPartition("news", 0, FROM_OFFSET, 0, -1, 1000, wait_ms=60_000))
    conversation.outbox.resting = True  # its quota is used up
    conversation.send(waiting)
    conversation.session.stay()
    conversation.outbox.resting = False
    conversation.session.resume()
    assert [said(answer)[:4] for answer in conversation.answers()] == ["a030"]
    go_on(conversation, bus, kept(conversation))
    conversation.send(waiting)
    assert conversation.answers() == []
    conversation.send(create("news", b"1"))
    assert [said(answer)[:4] for answer in await conversation.hear(2)] == ["a030", "a130"]
