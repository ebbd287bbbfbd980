"""Access: the cost of asking the gate for each publication, of a decision, and of a revocation, with 10,000 rows.

In-process, by CPU time: the broker publishes what a session of the protocol hands it, by turns for a principal with
rights and for a client that nobody asks.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from babelbus.clock import SystemClock
from babelbus.core.access import CLIENT, Action, Identity, Principal, Row, Table
from babelbus.core.access.table import edits_for
from babelbus.core.broker import Broker
from babelbus.core.publish import Bodies, Content, Publication
from babelbus.core.record import Event
from babelbus.core.router import Router
from babelbus.core.settings import TopicSettings
from babelbus.core.subject import below
from babelbus.metrics import Metrics
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from babelbus.storage.disk import FolderStore
from babelbus.storage.files import LocalFiles
from babelbus.storage.memory import MemoryFiles
from bench.frame import Reading, figure

ROWS = 10_000
SAMPLE = 5_000
SUBSCRIPTIONS = 1_000
TURNS = 40
CALLS = 100
BATCH = 100


def _table() -> Table:
    table = Table()
    rows = [Row("alice", "publish", f"plant/area{number % 100}/device{number}/#") for number in range(ROWS // 2)]
    rows += [Row("role:sensors", "publish", f"other/?/device{number}") for number in range(ROWS // 2)]
    rows += [Row("alice", "publish", "events/#"), Row("alice", "write-state", "events/#")]
    rows += [Row("alice", "subscribe", "#")]
    table.apply(edits_for([Principal("alice", ("sensors",)), *rows]))
    return table


@figure("access.decision_us", unit="us", target=20, lower_is_better=True)
def decision() -> Iterator[Reading]:
    """Decide about a subject that was not asked for before, with 10,000 rows."""
    rights = _table().rights("alice")
    first = 0
    while True:
        subjects = [f"plant/area{one % 100}/device{one % ROWS}/v{first}" for one in range(SAMPLE)]
        begun = time.process_time()
        for subject in subjects:
            rights.may(Action.PUBLISH, subject)
        yield Reading((time.process_time() - begun) / SAMPLE * 1e6)
        first += 1


@figure("access.revoke_ms", unit="ms", target=50, lower_is_better=True)
def revoke() -> Iterator[Reading]:
    """Take away the rights of a principal with 1,000 subscriptions, until its next event reaches nobody."""
    while True:
        table = _table()
        principal = Identity("bench:alice", "alice", table.rights("alice"))
        router, heard = Router(), 0

        def receive(events: Sequence[Event]) -> None:
            nonlocal heard
            heard += len(events)

        for number in range(SUBSCRIPTIONS):
            router.add(below(f"plant/area{number}"), receive, principal=principal)
        events = [Event(f"plant/area{number}/x", b"") for number in range(SUBSCRIPTIONS)]
        router.route(events)
        assert heard == SUBSCRIPTIONS
        begun = time.process_time()
        table.apply(edits_for((), [Row("alice", "subscribe", "#")]))
        router.forget_all()
        router.route(events)
        yield Reading((time.process_time() - begun) * 1e3)
        assert heard == SUBSCRIPTIONS


@figure("access.publish_cost", unit="%", target=3, lower_is_better=True)
def publish_cost() -> Iterator[Reading]:
    """Publish batches of jebp, bodies of zbus and sets of Wörterbuch, asked and not asked by turns: the dearest."""
    with tempfile.TemporaryDirectory() as folder:
        runner = asyncio.Runner()
        try:
            while True:
                yield Reading(runner.run(_cost(folder)))
        finally:
            runner.close()


async def _cost(folder: str) -> float:
    clock = SystemClock()
    broker = Broker(
        {
            "disk": FolderStore(LocalFiles(), folder, clock),
            "memory": FolderStore(MemoryFiles(), "memory", clock),
        },
        defaults=TopicSettings(),
        checkpoint_bytes=2**26,
        clock=clock,
        metrics=Metrics(),
        loop=asyncio.get_running_loop(),
    )
    settings = {"engine": "memory", "ack": "accepted", "retention_bytes": 2**20, "segment_bytes": 2**20}
    await broker.create_topic("events", 1, settings)
    memory = MemoryFiles()
    kept = TopicSettings(engine="memory", ack="accepted", cleanup="compact")
    broker.open_state(memory, "state", settings=kept, checkpoint_bytes=2**26, transient="$SYS")
    asked = Identity("bench:alice", "alice", _table().rights("alice"))
    batch = encode_batch([Record(b"x" * 100, timestamp=clock.now_ms()) for _ in range(BATCH)])
    body = bytes(encode_batch([Record(b"x" * 100, timestamp=clock.now_ms())]).data)[16:]
    bodies = Bodies([body] * BATCH, [clock.now_ms()] * BATCH, 100 * BATCH)
    keys = [f"events/{number}" for number in range(BATCH)]

    def publish(content: Content) -> Callable[[Identity], None]:
        def call(principal: Identity) -> None:
            broker.publish(Publication(principal, "bench", content, "events"))

        return call

    states = {CLIENT: broker.state_for(CLIENT), asked: broker.state_for(asked)}
    values = [b"1"] * BATCH

    def set_all(principal: Identity) -> None:
        states[principal].set_all(keys, values)
        broker.state.commit("bench")

    dearest = 0.0
    for call in (publish(batch), publish(bodies), set_all):
        spent = {CLIENT: 0.0, asked: 0.0}
        for turn in range(TURNS):
            for principal in (CLIENT, asked) if turn % 2 else (asked, CLIENT):
                begun = time.process_time()
                for _ in range(CALLS):
                    call(principal)
                spent[principal] += time.process_time() - begun
            await asyncio.sleep(0)
        dearest = max(dearest, (spent[asked] / spent[CLIENT] - 1) * 100)
    await broker.close()
    return dearest
