"""What the tests of groups share: a bus with a registry of groups, and members that note what they get."""

from collections.abc import Callable, Sequence
from itertools import chain

from babelbus.core.access import SERVER
from babelbus.core.groups.group import Group
from babelbus.core.groups.in_flight import Delivery
from babelbus.core.groups.member import Member
from babelbus.core.groups.registry import Groups
from babelbus.core.groups.settings import BEGINNING, GroupSettings, Place
from babelbus.core.record import Event
from babelbus.core.settings import TopicSettings
from babelbus.errors import BabelbusError
from babelbus.storage.files import FileSystem
from tests.support.bus import Bus, publish, turns
from tests.support.clock import ManualClock

EXPLICIT = GroupSettings(ack="explicit", ack_seconds=30, retry_seconds=1, attempts_max=3)


class Crew:
    """A bus with groups; the topic `work` is there."""

    def __init__(
        self,
        files: FileSystem | None = None,
        *,
        clock: ManualClock | None = None,
        partitions: int = 1,
        reads_wait: bool = False,
        tail_cache_bytes: int = 2**20,
    ) -> None:
        self.bus = Bus(
            files,
            clock=clock,
            defaults=TopicSettings(ack="written", segment_bytes=4096),
            reads_wait=reads_wait,
            tail_cache_bytes=tail_cache_bytes,
        )
        self.files = self.bus.files
        self.clock = self.bus.clock
        self.broker = self.bus.broker
        self.groups = self.registry()
        if not self.broker.has_topic("work"):
            self.bus.topic("work", partitions)
        self.groups.open()
        self.broker._on_changed.append(self.groups.topics_changed)

    def registry(self) -> Groups:
        groups = Groups(self.broker, self.files, "data", clock=self.clock, loop=self.broker._loop, commit_seconds=3600)
        groups.register_filter("odd", lambda text: lambda record: int(record.payload or b"0") % 2 == 1)
        return groups

    def group(self, settings: GroupSettings = EXPLICIT, *, start: Place = BEGINNING, name: str = "g") -> Group:
        return self.groups.ensure("work", name, settings, start=start, principal=SERVER)

    def publish(self, *payloads: bytes | int, key: bytes | None = None, tag: bytes | None = None) -> None:
        headers = () if tag is None else ((b"tag", tag),)
        made = [one if isinstance(one, bytes) else b"%d" % one for one in payloads]
        publish(self.broker, [Event("work", payload, key, headers) for payload in made])

    async def pass_time(self, group: Group, seconds: float) -> None:
        self.clock.advance(seconds)
        group.tick()
        await turns()

    async def restart(self) -> "Crew":
        """Stop in order and start again."""
        await self.groups.close()
        await self.broker.close()
        return Crew(self.files, clock=self.clock)

    async def crash(self) -> "Crew":
        """Start again with the cursors that were on disk when the server died."""
        kept = {name: bytes(self.files.read_file(f"data/{name}")) for name in self.saved()}
        await self.close()
        for name, content in kept.items():
            self.files.replace_file(f"data/{name}", content)
        for name in set(self.saved()) - set(kept):
            self.files.unlink(f"data/{name}")
        return Crew(self.files, clock=self.clock)

    def saved(self) -> list[str]:
        return [name for name in ("groups.0", "groups.1") if self.files.exists(f"data/{name}")]

    async def close(self) -> None:
        await self.groups.close()
        await self.broker.close()


def take(group: Group, count: int, member: Member | None = None) -> list[Delivery]:
    return [*chain.from_iterable(group.take(count, member, principal=SERVER))]


class Taker:
    """A member that notes what it gets, and why it ended."""

    def __init__(
        self,
        group: Group,
        *,
        credit: int | None = None,
        window: int | None = None,
        then: Callable[["Taker", Sequence[Delivery]], None] | None = None,
        **how: object,
    ) -> None:
        self.got: list[Delivery] = []
        self.batches: list[int] = []
        self.errors: list[BabelbusError] = []
        self._then = then
        self.member: Member = group.join(
            self._take,
            credit=credit,
            window=window,
            on_closed=self.errors.append,
            **{"principal": SERVER, **how},  # type: ignore[arg-type]
        )

    def _take(self, deliveries: Sequence[Delivery]) -> None:
        self.got += deliveries
        self.batches.append(len(deliveries))
        if self._then is not None:
            self._then(self, deliveries)

    @property
    def numbers(self) -> list[int]:
        return [int(one.payload or b"-1") for one in self.got]

    def clear(self) -> list[int]:
        numbers = self.numbers
        self.got = []
        return numbers

    def ack_all(self) -> int:
        done = self.member.ack(self.got)
        self.got = []
        return done
