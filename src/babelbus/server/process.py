"""The process of a server or of a member of a cluster: signals, its supervisor, and the end."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

from babelbus.config import Config
from babelbus.core.access import SERVER, Identity
from babelbus.descriptors import raise_limit
from babelbus.errors import BabelbusError
from babelbus.protocols.registry import SERVICES
from babelbus.server.allocator import keep_freed_memory
from babelbus.server.app import Server
from babelbus.server.notify import READY, Supervisor

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.001
"""How long the interpreter lets one thread run while another waits: the flusher must not wait the usual 5 ms."""


class Running(Protocol):
    """A server, or a member of a cluster, that serves clients."""

    folder: str
    addresses: dict[str, str]
    admin_tls: bool
    """Whether the administration endpoint speaks TLS."""
    fingerprint: str
    """Fingerprint of the server's certificate; empty at a member that has never owned the data."""

    @property
    def enforcing(self) -> bool:
        """Whether the gate asks for rights; a member that is not the owner leaves it to the owner."""

    async def reload(self, by: Identity) -> None:
        """Read the lists of clients and topics and the certificates again; `by` asked for it."""


Ready = Callable[[Running], None]


class _Process:
    """The signals of the process, and what its supervisor hears."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set when the end is asked for."""
        self.supervisor = Supervisor(os.environ)
        self._loop = asyncio.get_running_loop()
        self._reloads: set[asyncio.Task[None]] = set()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.asked.set)

    def watch(self, running: Running) -> None:
        """Call `reload` at each SIGHUP."""
        self._loop.add_signal_handler(signal.SIGHUP, self._begin_reload, running)

    def _begin_reload(self, running: Running) -> None:
        task = self._loop.create_task(self._reload(running))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, running: Running) -> None:
        self.supervisor.send_reloading()
        try:
            await running.reload(SERVER)
        except (BabelbusError, OSError) as error:
            log.error("reload: %s", error)
        finally:
            self.supervisor.send(READY)

    def begin(self) -> None:
        """Send to the supervisor that clients are served."""
        self.supervisor.send(READY)
        self.supervisor.watch()

    def end(self) -> None:
        """Send to the supervisor that the process stops."""
        log.info("stopping")
        self.supervisor.stop()


async def _serve(config: Config, ready: Ready) -> None:
    process, server = _Process(), Server(config)
    process.watch(server)
    loop = asyncio.get_running_loop()
    starting, stopping = loop.create_task(server.start()), loop.create_task(process.asked.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # it may wait for a store that is away
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        log.info("stopped before it had started")
        return
    stopping.cancel()
    await starting
    ready(server)
    process.begin()
    await process.asked.wait()
    process.end()
    await server.stop()
    log.info("stopped")


async def _be_member(config: Config, ready: Ready) -> None:
    from babelbus.server.member import Member  # which loads what a server without a cluster does not need

    process, member = _Process(), Member(config)
    process.watch(member)

    def begin() -> None:
        ready(member)
        process.begin()

    member.on_ready = begin
    member.on_stopping = process.end
    member.on_ended = _begin_again
    await member.run(process.asked)
    log.info("stopped")


def _begin_again() -> None:
    """Replace this process, with all that is in its memory, by a new one with the same arguments.

    It has the same number, so a supervisor sees no end. Comes from any thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


def run(config: Config, ready: Ready = lambda running: None) -> None:
    """Run the server until SIGTERM or SIGINT; SIGHUP reloads the lists of clients. `ready` is called once it listens.

    Raises:
        BabelbusError, OSError: it could not start.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    keep_freed_memory()
    sections = [*(getattr(config, name) for name in SERVICES), config.admin]
    raise_limit(sum(section.connections_max for section in sections if section.enabled))
    factory = None
    if config.server.uvloop:
        try:
            import uvloop
        except ImportError:
            log.info("uvloop is not installed; asyncio's own loop is slower")
        else:
            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run((_be_member if config.cluster.enabled else _serve)(config, ready))
