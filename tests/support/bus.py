"""A real broker in a real event loop, on files that can be held, fail or lose their process; time stands still."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, ParamSpec, TypeVar

from babelbus.config import QuotaSettings
from babelbus.core.access import CLIENT, SERVER
from babelbus.core.access.gate import Gate as AccessGate
from babelbus.core.broker import Broker
from babelbus.core.partition import Partition
from babelbus.core.publish import Payloads, Publication
from babelbus.core.quotas import Quotas
from babelbus.core.receipt import Promise, Receipt, settled
from babelbus.core.record import Event
from babelbus.core.settings import TopicSettings
from babelbus.core.state import KEY_BYTES_MAX, State
from babelbus.core.topic import Topic
from babelbus.metrics import Metrics
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_batch
from babelbus.records.record import Headers, Record, RecordBatch
from babelbus.storage.contract import Fit, Store
from babelbus.storage.disk.log import Log
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.files import FileSystem
from babelbus.storage.memory import MemoryFiles
from tests.storage.faults import FaultyFiles
from tests.support.clock import ManualClock

NOW = 1_700_000_000_000
SAFETY_NET_SECONDS = 200.0
"""What hangs fails after so long, and what is slow does not: a starved machine starts two programs in half a minute."""
LOOK_SECONDS = 0.001
"""How soon a test looks again at what has no event of its own; at once takes a processor from what it waits for."""

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in an event loop of its own; what hangs fails, and no broker that it made keeps its threads."""

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            asyncio.run(asyncio.wait_for(test(*arguments, **named), SAFETY_NET_SECONDS))
        finally:
            while _brokers:
                _end_threads(_brokers.pop())

    return run


_brokers: list[Broker] = []
"""Those of the test that runs: a test that is done with its broker leaves it as it is."""


def _end_threads(broker: Broker) -> None:
    """Let the threads of a broker end; a flush that a test holds is not waited for."""
    for backend in broker.backends.values():
        backend.flusher._requests.put(None)
        backend.changes.shutdown(wait=False)
        backend._readers.shutdown(wait=False)


class Gate:
    """Holds the flusher's `flush` calls until they are let through, and counts those to the logs."""

    def __init__(self, files: FaultyFiles) -> None:
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()
        self.flushes = 0
        files.before_call = self._pass

    def _pass(self, operation: str, path: str) -> None:
        if operation == "flush" and path.endswith(".log") and threading.current_thread().name == "flusher-disk":
            self.flushes += 1
            self._reached.set()
            assert self._open.wait(SAFETY_NET_SECONDS)

    def shut(self) -> None:
        """Let no further flush begin."""
        self._open.clear()
        self._reached.clear()

    def open(self) -> None:
        """Let what waits go on."""
        self._open.set()

    async def reached(self) -> None:
        """Return when a flush stands at the gate."""
        assert await asyncio.get_running_loop().run_in_executor(None, self._reached.wait, SAFETY_NET_SECONDS)


class Bus:
    """A broker and what it stands on; must be made in a running event loop."""

    def __init__(
        self,
        files: FileSystem | None = None,
        *,
        clock: ManualClock | None = None,
        defaults: TopicSettings | None = None,
        default_partitions: int = 1,
        others: dict[str, Store] | None = None,
        reads_wait: bool = False,
        tail_cache_bytes: int = 2**20,
        quotas: QuotaSettings | None = None,
    ) -> None:
        self.files = files or FaultyFiles()
        self.clock = clock or ManualClock(NOW)
        self.metrics = Metrics()
        self.quotas = Quotas(quotas or QuotaSettings(), self.clock, self.metrics)
        self.disk = FolderStore(self.files, "data", self.clock, Fit(reads_wait=False))
        self.broker = Broker(
            {"disk": self.disk, "memory": memory_store(self.clock), **(others or {})},
            defaults=defaults or TopicSettings(),
            checkpoint_bytes=2**20,
            clock=self.clock,
            metrics=self.metrics,
            loop=asyncio.get_running_loop(),
            default_partitions=default_partitions,
            tail_cache_bytes=tail_cache_bytes,
            quotas=self.quotas,
        )
        _brokers.append(self.broker)
        self.finished_removals = self.broker.open()
        self.broker._backend("disk").fit = Fit(reads_wait=reads_wait)  # changes of topics are done at once all the same

    def topic(self, name: str = "news", partitions: int = 1, **settings: object) -> Topic:
        """Make a topic."""
        return self.broker.create_topic(name, partitions, dict(settings), principal=SERVER).result()

    def open_gate(
        self,
        mode: Literal["off", "enforce"] = "enforce",
        wildcards: Literal["narrow", "refuse"] = "narrow",
        accept_version: int | None = None,
    ) -> AccessGate:
        """Open the table of access, before the state."""
        return self.broker.open_gate(
            self.files,
            "data",
            settings=TopicSettings(cleanup="compact"),
            audit_settings=TopicSettings(),
            mode=mode,
            wildcards=wildcards,
            accept_version=accept_version,
        )

    def open_state(
        self,
        *,
        checkpoint_bytes: int = 2**20,
        key_bytes_max: int = KEY_BYTES_MAX,
        since: int | None = None,
        **settings: Any,
    ) -> State:
        """Open the state, whose transient keys are `$SYS`; its topic is compacted unless told otherwise."""
        kept = TopicSettings(**{"cleanup": "compact", **settings})
        return self.broker.open_state(
            self.files,
            "data/state",
            settings=kept,
            checkpoint_bytes=checkpoint_bytes,
            transient="$SYS",
            key_bytes_max=key_bytes_max,
            since=since,
        )

    async def die(self) -> None:
        """End as a killed process does: what was written stays, nothing else happens."""
        for backend in self.broker.backends.values():
            await asyncio.get_running_loop().run_in_executor(None, backend.flusher.stop)

    async def restart(self) -> "Bus":
        """Stop in order and start again on the same files."""
        await self.broker.close()
        return Bus(self.files, clock=self.clock)


Promised = TypeVar("Promised", bound=Promise)


def memory_store(clock: ManualClock) -> FolderStore:
    """The store of engine `memory`."""
    return FolderStore(MemoryFiles(), "memory", clock, Fit(reads_wait=False, volatile=True))


async def done(promises: Iterable[Promised]) -> list[Promised]:
    """Wait until all promises are done."""
    waited = list(promises)
    await settled(waited)
    return waited


async def turns(count: int = 3) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def publish(target: Broker | Topic, events: list[Event]) -> list[Receipt]:
    """Publish events, to whatever covers their subjects or to this topic; gives a receipt for each partition."""
    name = target.name if isinstance(target, Topic) else None
    return [*target.publish(Publication(CLIENT, "test", events, name)).parts]


def publish_payloads(topic: Topic, payloads: list[bytes], timestamps: list[int], source: Headers = ()) -> list[Receipt]:
    content = Payloads(payloads, timestamps)
    return [*topic.publish(Publication(CLIENT, "test", content, topic.name, source=source)).parts]


def publish_batch(topic: Topic, batch: RecordBatch, **more: Any) -> Receipt:
    """Publish a batch in the stored form; raises what refuses it at once."""
    receipt = topic.publish(Publication(CLIENT, "test", batch, topic.name, **more))
    topic.flush()
    if receipt.error is not None:
        raise receipt.error
    return receipt


def events(*payloads: bytes, subject: str = "news", key: bytes | None = None) -> list[Event]:
    return [Event(subject, payload, key) for payload in payloads]


def batch(*payloads: bytes, key: bytes | None = None) -> RecordBatch:
    """A batch in the stored form, as a client sends it."""
    made = encode_batch([Record(payload, key=key, timestamp=NOW) for payload in payloads])
    return RecordBatch(bytearray(made.data), made.positions, made.timestamps, 0)


def disk_log(partition: Partition) -> Log:
    """The log of a partition on disk, with what the disk alone can do."""
    assert isinstance(partition.log, Log)
    return partition.log


def read(partition: Partition, offset: int = 0) -> list[Record]:
    """Everything that a consumer can see."""
    found: list[Record] = []
    while offset < partition.high_watermark:
        chunk = partition.read_cached(offset, 2**20)
        assert chunk is not None
        found += iterate(decode_chunk(chunk.data))
        offset = chunk.next_offset
    return found


async def stored(partition: Partition, offset: int = 0) -> list[bytes | None]:
    """The payloads of everything that a consumer can see, read from the engine where they are not in memory."""
    found: list[bytes | None] = []
    while offset < partition.high_watermark:
        chunk = await partition.read(offset, 2**20)
        found += [record.payload for record in iterate(decode_chunk(chunk.data))]
        offset = chunk.next_offset
    return found


def payloads(partition: Partition, offset: int = 0) -> list[bytes | None]:
    return [record.payload for record in read(partition, offset)]
