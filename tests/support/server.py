"""A whole server in this process, in a thread with an event loop of its own, that blocking clients speak to."""

import asyncio
import contextlib
import faulthandler
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from babelbus.clock import Clock
from babelbus.config import (
    AdminSettings,
    Config,
    DataSettings,
    DbSettings,
    EventmeshSettings,
    JebpSettings,
    ServerSettings,
    StorageSettings,
    TlsSettings,
    TopicDefaults,
    WorterbuchSettings,
    ZbusSettings,
)
from babelbus.core.access import CLIENT
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.protocols.connection import Connection
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.service import StreamService
from babelbus.server.app import Server
from babelbus.storage.files import FileSystem
from babelbus.testing.ports import free_ports
from tests.support.bus import LOOK_SECONDS, SAFETY_NET_SECONDS
from tests.support.jebp import Caller

T = TypeVar("T")


def configure(
    folder: Path,
    *,
    jebp: JebpSettings | None = None,
    server: ServerSettings | None = None,
    topics: TopicDefaults | None = None,
    worterbuch: WorterbuchSettings | None = None,
    zbus: ZbusSettings | None = None,
    eventmesh: EventmeshSettings | None = None,
    db: DbSettings | None = None,
    storage: StorageSettings | None = None,
    admin: bool = False,
    tls: TlsSettings | None = None,
) -> Config:
    """A configuration whose ports the system chooses."""
    return Config(
        data=DataSettings(str(folder)),
        jebp=jebp or JebpSettings(port=0),
        worterbuch=worterbuch or WorterbuchSettings(port=0, tcp_port=0),
        zbus=zbus or ZbusSettings(port=0),
        eventmesh=eventmesh or EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0),
        admin=AdminSettings(enabled=admin, port=0),
        server=server or ServerSettings(),
        topics=topics or TopicDefaults(),
        db=db or DbSettings(),
        storage=storage or StorageSettings(),
        tls=tls or TlsSettings(),
    )


def configure_to_return(folder: Path, **more: Any) -> Config:
    """A configuration for a server that is started more than once: jebp has the same port each time."""
    return configure(folder, jebp=JebpSettings(port=free_ports(1)[0]), **more)


def connections_of(server: Server) -> list[Connection]:
    """The stream connections of all services."""
    services = [one for one in server.services.values() if isinstance(one, StreamService)]
    return [connection for service in services for connection in service.listeners.connections]


@contextlib.asynccontextmanager
async def running(config: Config, clock: Clock | None = None) -> AsyncIterator[Server]:
    """A server in the event loop of the test."""
    server = Server(config, clock)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def _print_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack()


class LiveServer:
    """Runs from `with` to its end; `call` does something in its event loop."""

    def __init__(
        self, config: Config, *, use_uvloop: bool = True, files: FileSystem | None = None, clock: Clock | None = None
    ) -> None:
        self.config = config
        self._clock = clock
        self._files = files
        self._use_uvloop = use_uvloop
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop
        self._asked: asyncio.Event
        self.server: Server

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if self._use_uvloop else None) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:  # the test sees it
                self._failure = error
            finally:
                self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._asked = asyncio.get_running_loop(), asyncio.Event()
        self.server = Server(self.config, self._clock, files=self._files)
        await self.server.start()
        self._ready.set()
        await self._asked.wait()
        await self.server.stop()

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        assert self._ready.wait(SAFETY_NET_SECONDS)
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def ask_to_stop(self) -> None:
        """Begin a graceful stop and return at once."""
        self._loop.call_soon_threadsafe(self._asked.set)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._thread.is_alive():
            self.ask_to_stop()
        self._thread.join(SAFETY_NET_SECONDS)
        if self._thread.is_alive():
            faulthandler.dump_traceback()
            asyncio.run_coroutine_threadsafe(_print_tasks(), self._loop).result(SAFETY_NET_SECONDS)
            raise AssertionError("the server does not stop: where it waits is printed above") from error
        if self._failure is not None and error is None:
            raise self._failure

    def call(self, what: Callable[[], T]) -> T:
        """Do something in the server's event loop and give what it gave; what takes time has ended then."""

        async def do() -> T:
            given = what()
            if isinstance(given, Awaitable):
                await given
            return given

        return asyncio.run_coroutine_threadsafe(do(), self._loop).result(SAFETY_NET_SECONDS)

    def run(self, what: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the server's event loop and give what it gave."""
        return asyncio.run_coroutine_threadsafe(what(), self._loop).result(SAFETY_NET_SECONDS)

    def skip(self, seconds: float) -> None:
        """Let the time of the event loop jump, which uvloop cannot: what is due by then happens."""

        def jump() -> None:
            before = self._loop.time
            self._loop.time = lambda: before() + seconds  # type: ignore[method-assign]

        self.call(jump)

    def publish(self, events: list[Event]) -> None:
        """Publish events to whatever covers their subjects; readers see them then."""

        async def stored() -> None:
            await self.server.broker.publish(Publication(CLIENT, "test", events)).wait()

        self.run(stored)

    def until(self, condition: Callable[[], bool]) -> None:
        """Return when the condition holds in the event loop; it is asked time and again."""

        async def look() -> None:
            while not condition():  # noqa: ASYNC110  # what it asks for has no event of its own
                await asyncio.sleep(LOOK_SECONDS)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(look(), SAFETY_NET_SECONDS), self._loop).result()

    @property
    def address(self) -> str:
        return self.server.addresses["jebp"]

    @property
    def connections(self) -> list[Connection]:
        """The stream connections, of which some may come or go just now: the event loop looks."""
        if threading.current_thread() is self._thread:
            return connections_of(self.server)
        return self.call(lambda: connections_of(self.server))

    @property
    def conf(self) -> Path:
        return Path(self.config.data.folder) / "conf"

    @property
    def admin(self) -> Identity:
        return Identity.load(self.conf / "admin_key")

    def dial(self, *, receive_bytes: int | None = None) -> Caller:
        """A client that has not said anything yet."""
        return Caller(self.address, self.admin, receive_bytes=receive_bytes)

    def caller(self, *, receive_bytes: int | None = None) -> Caller:
        """The administrator's client, connected."""
        return self.dial(receive_bytes=receive_bytes).connect()
