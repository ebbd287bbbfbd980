"""The members of a cluster: each sends now and then that it is there, and receives what the others send.

A presence is a message below the subject of the lease, of which its stream keeps the last one of each member. Its age
is counted by whoever hears it, with the monotonic clock; clocks of members are never compared.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from urllib.parse import quote

import msgspec
from nats.aio.msg import Msg

from babelbus.clock import Clock
from babelbus.storage.jetstream.client import ApiError, Nats
from babelbus.storage.jetstream.errors import NatsAwayError

log = logging.getLogger(__name__)

SECONDS = 1.0
"""How often a member says that it is there."""
AWAY_SECONDS = 5.0
"""A member that was not heard for so long is away."""
FORGET_SECONDS = 3600.0
"""A member that was not heard for so long is not shown any more."""
STOPPED = "stopped"


class Presence(msgspec.Struct, frozen=True):
    """The description that a member sends of itself."""

    name: str
    process: str
    """The name of its process in the streams."""
    host: str
    version: str
    link_version: int
    role: str
    """owner, member, starting or stopped."""
    since_ms: int
    """When it took the role, by its own clock: for people."""
    owner: str = ""
    """The member that its clients are passed on to."""
    nats: str = ""
    """The server of NATS that it is connected to."""
    connections: int = 0


class Heard(msgspec.Struct):
    """The last word of a member. `at` is when it was heard (monotonic), or since when it is missed."""

    presence: Presence
    at: float
    is_old: bool = False
    """Whether the word is from before this server listened."""


class Members:
    """The members of a cluster, as one of them hears them."""

    def __init__(self, nats: Nats, prefix: str, process: str, clock: Clock) -> None:
        self._nats = nats
        self._stream, self._subject = f"{prefix}-lease", f"{prefix}.lease.member"
        self._process, self._clock = process, clock
        self._heard: dict[str, Heard] = {}
        self._task: asyncio.Task[None] | None = None
        self._describe: Callable[[], Presence]
        self._twin: Heard | None = None
        """The last word of another process that has the name of this member."""

    # -- from any thread ---------------------------------------------------------------------------------------------

    @property
    def twin(self) -> Presence | None:
        """Return the other process that has the name of this member; `None` when it is away."""
        twin = self._twin
        return None if twin is None or self._is_away(twin) else twin.presence

    def _is_away(self, heard: Heard) -> bool:
        return heard.is_old or self._clock.monotonic() - heard.at > AWAY_SECONDS

    def all(self) -> list[tuple[Presence, float, bool]]:
        """Return the members by name: what each said, how many seconds ago it was heard, and whether it is away."""
        now = self._clock.monotonic()
        found = [(one.presence, now - one.at, self._is_away(one)) for one in self._copy()]
        return sorted((one for one in found if one[1] < FORGET_SECONDS), key=lambda one: one[0].name)

    def others(self) -> set[str]:
        """Return the names of the other members that pass their clients on and were not missed for long.

        A server that has just begun to listen has not heard those that are there.
        """
        now = self._clock.monotonic()
        heard = [one for one in self._copy() if one.presence.role == "member" and now - one.at <= AWAY_SECONDS]
        return {one.presence.name for one in heard if one.presence.process != self._process}

    def _copy(self) -> list[Heard]:
        return list(dict(self._heard).values())

    # -- in the thread of the connection -----------------------------------------------------------------------------

    async def start(self, describe: Callable[[], Presence]) -> None:
        """Receive what other members say, and send now and then what `describe` returns.

        Raises:
            NatsAwayError: NATS does not answer.
        """
        self._describe = describe
        await self._nats.hear(f"{self._subject}.*", self._hear)
        await self._load()
        self._task = self._nats.loop.create_task(self._run())

    async def _load(self) -> None:
        """Read who was there before."""
        try:
            info = await self._nats.api(f"STREAM.INFO.{self._stream}", {"subjects_filter": f"{self._subject}.*"})
            for subject in info["state"].get("subjects") or {}:
                message = await self._nats.get_from_leader(self._stream, last_by_subj=subject)
                presence = None if message is None else _read(message.data)
                if presence is not None and presence.role != STOPPED:
                    self._heard.setdefault(presence.name, Heard(presence, self._clock.monotonic(), is_old=True))
        except ApiError as error:
            raise NatsAwayError(f"stream {self._stream}: {error}") from error

    async def _run(self) -> None:
        while True:
            await self.say()
            await asyncio.sleep(SECONDS)

    async def say(self) -> None:
        """Send now what this member is."""
        presence = self._describe()
        subject = f"{self._subject}.{quote(presence.name, safe='').replace('.', '%2E')}"
        with contextlib.suppress(Exception):  # of the client: it is said again in a while
            await self._nats.client.publish(subject, msgspec.json.encode(presence))

    async def stop(self) -> None:
        """Send that this member stops."""
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        before = self._describe
        self._describe = lambda: msgspec.structs.replace(before(), role=STOPPED)
        await self.say()

    def _hear(self, message: Msg) -> None:
        presence = _read(message.data)
        if presence is None:
            return
        if presence.process != self._process and presence.name == self._describe().name:
            self._note_twin(presence)
            return
        if presence.role == STOPPED:
            self._heard.pop(presence.name, None)
        else:
            self._heard[presence.name] = Heard(presence, self._clock.monotonic())

    def _note_twin(self, presence: Presence) -> None:
        before = self.twin
        if presence.role == STOPPED:
            self._twin = None
            return
        self._twin = Heard(presence, self._clock.monotonic())
        if before is None or before.process != presence.process:
            log.error(
                "another member on %s has the name %r too: give each member its own cluster.name",
                presence.host, presence.name,
            )  # fmt: skip


def _read(data: bytes) -> Presence | None:
    try:
        return msgspec.json.decode(data, type=Presence)
    except msgspec.DecodeError:
        return None
