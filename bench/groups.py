"""Consumer groups in the core: a backlog handed to two members in turn. One process, 100-byte payloads, topic on disk.

The clock runs from when the members join until the last record was handed out (and acked, in explicit mode).
"""

import asyncio
import functools
import time
from collections.abc import Iterator, Sequence

from babelbus.clock import SystemClock
from babelbus.core.access import SERVER
from babelbus.core.broker import Broker
from babelbus.core.groups.in_flight import Delivery
from babelbus.core.groups.member import Member
from babelbus.core.groups.registry import Groups
from babelbus.core.groups.settings import BEGINNING, GroupSettings
from babelbus.core.settings import TopicSettings
from babelbus.metrics import Metrics
from babelbus.storage.disk.store import FolderStore
from babelbus.storage.files import LocalFiles
from bench.frame import Reading, figure
from bench.workload import PAYLOAD, scratch_folder
from tests.support.bus import publish_payloads

RECORDS = 500_000
BATCH_RECORDS = 1_000
MEMBERS = 2


def _measure(settings: GroupSettings) -> Iterator[Reading]:
    while True:
        with scratch_folder() as folder:
            yield Reading(RECORDS / asyncio.run(_seconds(folder, settings)))


async def _seconds(folder: str, settings: GroupSettings) -> float:
    """Fill a topic, and give how long a group takes to get through it."""
    loop, clock, files = asyncio.get_running_loop(), SystemClock(), LocalFiles()
    store = FolderStore(files, folder, clock)
    defaults = TopicSettings(ack="written")
    broker = Broker(
        {"disk": store}, defaults=defaults, checkpoint_bytes=2**26, clock=clock, metrics=Metrics(), loop=loop
    )
    groups = Groups(broker, files, folder, clock=clock, loop=loop)
    topic = broker.create_topic("work", 1, principal=SERVER).result()
    for _ in range(RECORDS // BATCH_RECORDS):
        publish_payloads(topic, [PAYLOAD] * BATCH_RECORDS, [0] * BATCH_RECORDS)
    group = groups.create("work", "workers", settings, start=BEGINNING, principal=SERVER)
    done, left = loop.create_future(), RECORDS
    members: list[Member] = []

    def take(member: int, deliveries: Sequence[Delivery]) -> None:
        nonlocal left
        if settings.ack == "explicit":
            members[member].ack(deliveries)
        left -= len(deliveries)
        if not left:
            done.set_result(None)

    begun = time.perf_counter()
    members += [group.join(functools.partial(take, number), principal=SERVER) for number in range(MEMBERS)]
    await done
    seconds = time.perf_counter() - begun
    assert group.info().lag == 0
    await groups.close()
    await broker.close()
    return seconds


@figure("groups.on_delivery", unit="records/s", target=500_000)
def on_delivery() -> Iterator[Reading]:
    """A record is done when it is handed out."""
    return _measure(GroupSettings())


@figure("groups.explicit", unit="records/s", target=250_000)
def explicit() -> Iterator[Reading]:
    """Each member acks what it was handed, sequence by sequence."""
    return _measure(GroupSettings(ack="explicit", in_flight_max=100_000))
