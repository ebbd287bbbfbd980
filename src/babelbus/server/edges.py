"""The edge processes of a server (`server.processes`): started, watched, and started again when they end."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial

import msgspec

from babelbus.config import Config
from babelbus.errors import BabelbusError, ConfigError
from babelbus.link.core import CoreEnd, CoreLink
from babelbus.link.frames import ListenerInfo
from babelbus.listening.certificates import Tls
from babelbus.listening.entrances import Entrances
from babelbus.listening.sockets import share
from babelbus.metrics import Metrics
from babelbus.server.edge import EdgeTls

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""How long an edge may take to open its listeners."""
WAIT_SECONDS_MIN = 0.1
WAIT_SECONDS_MAX = 10.0
STEADY_SECONDS = 30.0
"""An edge that has run for so long is started again at once."""
END_SECONDS = 5.0
"""How long an edge may take to end."""
KILL_SECONDS = 5.0
"""How long the system may take to end a process that was killed."""
BACKLOG = 1024
MODULE = "babelbus.server.edge"
"""The program of an edge process."""


class Edges:
    """The edge processes of a server. Each accepts the clients of all listeners on sockets of its own."""

    def __init__(self, config: Config, core: CoreEnd, entrances: Entrances, metrics: Metrics) -> None:
        self._config = config
        self._core = core
        self._entrances = entrances
        self._metrics = metrics
        self._tasks: list[asyncio.Task[None]] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """The running processes by the name of the edge."""
        self._starting = threading.Lock()
        self._is_killed = False

    async def start(self) -> None:
        """Start the processes, and wait until all of them listen.

        Raises:
            ConfigError: this system is not Linux.
            BabelbusError: a process has ended instead.
            OSError: a process cannot be started.
        """
        if not hasattr(os, "pidfd_open"):
            raise ConfigError("server.processes above 1 needs Linux")
        names = [str(number) for number in range(1, self._config.server.processes + 1)]
        links = await asyncio.gather(*map(self._start, names))
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._keep(name, process, link))
            for name, (process, link) in zip(names, links, strict=True)
        ]

    async def _start(self, name: str) -> tuple[subprocess.Popen[bytes], CoreLink]:
        """Return a new process and its link when its listeners are open."""
        config = self._config
        ours, theirs = socket.socketpair()
        sockets: list[socket.socket] = []
        listeners: list[ListenerInfo] = []
        try:
            for entrance in self._entrances.by_name.values():
                opened = [share(address, family=family, backlog=BACKLOG) for family, address in entrance.addresses]
                if opened:
                    sockets += opened
                    listeners.append(
                        ListenerInfo(
                            entrance.name,
                            [one.fileno() for one in opened],
                            None if entrance.tls is None else _encode_tls(entrance.tls),
                            entrance.door.handshake_seconds,
                        )
                    )
            arguments = [
                str(theirs.fileno()),
                name,
                config.log.level,
                config.log.format,
                str(int(config.server.uvloop)),
            ]
            begin = partial(self._begin, name, arguments, [theirs.fileno(), *(one.fileno() for one in sockets)])
            process = await asyncio.get_running_loop().run_in_executor(None, begin)
        except BaseException:
            ours.close()
            raise
        finally:
            for one in (theirs, *sockets):
                one.close()
        self._metrics.edge_starts_total.labels(name).inc()
        try:
            link = await self._core.adopt(ours, name, listeners)
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(link.ready)
        except BaseException as error:
            await self._end(process)
            if isinstance(error, TimeoutError):
                raise BabelbusError(f"edge {name} does not listen after {START_SECONDS:g} s") from error
            raise
        return process, link

    def _begin(self, name: str, arguments: list[str], descriptors: list[int]) -> subprocess.Popen[bytes]:
        """Start an edge process, which imports what this process imports."""
        with self._starting:
            if self._is_killed:
                raise BabelbusError("the core ends")
            process = self.processes[name] = subprocess.Popen(  # noqa: S603 - this interpreter, with numbers and settings
                [sys.executable, "-m", MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return process

    async def _keep(self, name: str, process: subprocess.Popen[bytes], link: CoreLink) -> None:
        """Start an edge again whenever it ends."""
        loop = asyncio.get_running_loop()
        seconds = WAIT_SECONDS_MIN
        while True:
            began = loop.time()
            await asyncio.shield(link.done)  # the end of this task must not cancel it
            code = await self._end(process)
            log.warning("edge %s has ended (%s): it is started again", name, _describe(code))
            seconds = WAIT_SECONDS_MIN if loop.time() - began > STEADY_SECONDS else seconds
            while True:
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, WAIT_SECONDS_MAX)
                try:
                    process, link = await self._start(name)
                    break
                except (BabelbusError, OSError) as error:
                    log.error("edge %s cannot be started: %s; the next attempt is in %g s", name, error, seconds)

    async def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Return the exit code of a process whose link is gone; it is killed if it does not end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:  # `kill` has waited for it
            return process.wait()
        loop.add_reader(descriptor, partial(_resolve, ended))
        try:
            await asyncio.wait([ended], timeout=END_SECONDS)
            if not ended.done():
                log.warning("edge process %d does not end: it is killed", process.pid)
                process.kill()
                await ended
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return process.wait()

    async def leave(self) -> None:
        """Start no process again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Wait until all processes have ended; the core has closed their links."""
        await self.leave()
        running = [process for process in self.processes.values() if process.returncode is None]
        await asyncio.gather(*map(self._end, running))

    def kill(self) -> None:
        """Stop all processes with SIGKILL, and start none again: the core is replaced now.

        The addresses that the processes listened on are free when this returns. Any thread may call this; it blocks.
        """
        with self._starting:
            self._is_killed = True
            processes = list(self.processes.values())
        for process in processes:
            process.kill()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)


def _encode_tls(tls: Tls) -> bytes:
    own = tls.names != ("tls.cert_file", "tls.key_file")
    section = tls.names[0].partition(".")[0]
    cert_file, key_file = (tls.cert_file, tls.key_file) if own else (None, None)
    return msgspec.json.encode(EdgeTls(tls.settings, section, cert_file, key_file, tls.alpn))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
