"""Answers when the disk refuses, takes its time, or loses what it took."""

from tests.storage.faults import FaultyFiles
from tests.support.bus import Gate, in_loop, turns
from tests.support.worterbuch import (
    Talker,
    ack,
    cset,
    delete,
    get,
    ls,
    make_hub,
    pget,
    pstate,
    psubscribe,
    put,
    state,
    subscribe,
    until,
)


@in_loop
async def test_changes_that_the_log_refuses_are_answered_with_error_3_and_do_not_hold() -> None:
    files = FaultyFiles()
    bus, hub = make_hub(files)
    talker, watcher = Talker(hub), Talker(hub)
    talker.ask(put(1, "k", "old"), put(2, "gone", 1))
    watcher.ask(psubscribe(1, "?", liveOnly=True))
    for chunk in (
        [put(3, "k", "new"), put(4, "n", 1)],  # nothing but sets
        [put(3, "k", "new"), get(4, "k"), delete(5, "gone"), cset(6, "c", 1, 0), pget(7, "k")],
    ):
        files.fail("pwrite")
        heard = talker.ask(*chunk)
        for message, answer in zip(chunk, heard, strict=True):
            name = next(iter(message))
            if name == "get":
                assert answer == state(4, "old")
            elif name == "pGet":
                assert answer == pstate(7, "k", {"k": "old"})
            else:
                assert answer["err"]["errorCode"] == 3
                assert answer["err"]["transactionId"] == message[name]["transactionId"]
        assert hub.state.find("k") == b'"old"'
        assert hub.state.find("gone") == b"1"
        assert hub.state.find("c") is None
        assert hub.state.find("n") is None
    assert watcher.heard() == []
    assert talker.ask(put(9, "k", "new")) == [ack(9)]
    assert watcher.heard() == [pstate(1, "?", {"k": "new"})]
    await bus.die()


@in_loop
async def test_answers_wait_for_the_flush_and_keep_their_order() -> None:
    files = FaultyFiles()
    gate = Gate(files)
    bus, hub = make_hub(files, ack="flushed")
    talker, reader = Talker(hub), Talker(hub)
    gate.shut()
    talker.say(put(1, "k", 1))
    await gate.reached()
    talker.say(get(2, "k"), subscribe(3, "k"), put(4, "k", 2), ls(5, "none"))
    reader.say(get(1, "k"))
    await turns()
    assert talker.heard() == reader.heard() == []  # nobody sees what might not be there after a crash
    gate.open()
    await until(lambda: not talker.outbox.waiting)
    heard = talker.heard()
    replies = [one for one in heard if one != state(3, 2)]
    assert replies[:4] == [ack(1), state(2, 1), ack(3), state(3, 1)]
    assert replies[4] == ack(4)
    assert replies[5]["err"]["errorCode"] == 5
    assert heard.count(state(3, 2)) == 1
    assert heard.index(state(3, 2)) > heard.index(state(3, 1))
    assert len(reader.heard()) == 1
    await bus.broker.close()


@in_loop
async def test_a_failed_flush_is_error_3_and_a_subscription_begins_with_what_is_left() -> None:
    files = FaultyFiles()
    gate = Gate(files)
    bus, hub = make_hub(files, ack="flushed")
    talker = Talker(hub)
    talker.say(put(1, "k", "old"))
    await until(lambda: not talker.outbox.waiting)
    assert talker.heard() == [ack(1)]
    gate.shut()
    files.fail("flush", drop=True, suffix=".log")
    talker.say(put(2, "k", "lost"), subscribe(3, "k"), psubscribe(4, "k"), get(5, "k"))
    await gate.reached()
    gate.open()
    await until(lambda: not talker.outbox.waiting)
    heard = talker.heard()
    assert heard[0]["err"]["errorCode"] == 3
    assert heard[1:] == [ack(3), state(3, "old"), ack(4), pstate(4, "k", {"k": "old"}), state(5, "old")]
    talker.say(put(6, "k", "new"))
    await until(lambda: not talker.outbox.waiting)
    assert state(3, "new") in talker.heard()
    await bus.broker.close()
