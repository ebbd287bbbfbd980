"""The process that searches, as the server sees it: started when somebody searches, stopped when nobody does."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import babelbus
from babelbus.errors import BabelbusError
from babelbus.web.search.tasks import LENGTH, TASK_SECONDS, Outcome, Task, decode_outcome, encode, frame

IDLE_SECONDS = 60.0
"""A task ends itself much earlier; a process that does not is stopped."""
ENDED = "the process that searches has ended; search again, from where this search has stopped"


class SearchEndedError(BabelbusError):
    """The process was stopped, or has crashed; the next search starts another one."""


class Searcher:
    """The process of one server. Tasks of several searches take turns: each is short."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._exchanges: set[asyncio.Task[Outcome]] = set()
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The number of the process, `None` before it is started and after it is stopped."""
        return None if self._process is None else self._process.pid

    async def run(self, task: Task, file: int | None = None) -> Outcome:
        """Return the outcome of a task about `data`, or about a file.

        Raises:
            SearchEndedError: the process ended before its answer, or did not answer.
        """
        # Somebody who gives up must not leave an answer behind that the next one would read.
        shared = None if file is None else os.dup(file)
        exchange = asyncio.get_running_loop().create_task(self._exchange(task, shared))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._settled)
        return await asyncio.shield(exchange)

    def _settled(self, exchange: "asyncio.Task[Outcome]") -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # whoever asked may be gone

    def close(self) -> None:
        """Stop the process."""
        self._closed = True
        self._stop()

    async def _exchange(self, task: Task, file: int | None) -> Outcome:
        try:
            async with self._turn:
                if self._idle is not None:
                    self._idle.cancel()
                try:
                    async with asyncio.timeout(TASK_SECONDS):
                        return await self._ask(task, file)
                except (OSError, TimeoutError, EOFError) as error:
                    self._stop()
                    raise SearchEndedError(ENDED) from error
                finally:
                    self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._stop)
        finally:
            if file is not None:
                os.close(file)

    async def _ask(self, task: Task, file: int | None) -> Outcome:
        if self._connection is None:
            await self._start()
        loop, connection = asyncio.get_running_loop(), self._connection
        if connection is None:
            raise EOFError
        content = encode(task)
        if file is not None:
            # The buffer is empty: the process has answered whatever came before.
            socket.send_fds(connection, [LENGTH.pack(len(content))], [file])
            await loop.sock_sendall(connection, content)
        else:
            await loop.sock_sendall(connection, frame(content))
        (size,) = LENGTH.unpack(await _receive(connection, LENGTH.size))
        return decode_outcome(await _receive(connection, size))

    async def _start(self) -> None:
        self._check_open()
        ours, theirs = socket.socketpair()
        with theirs:
            folder = str(Path(babelbus.__file__).parent.parent)
            path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
            process = await asyncio.to_thread(
                subprocess.Popen,
                [sys.executable, "-m", "babelbus.web.search.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C ends the server, which ends the process in order
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": path},
            )
        ours.setblocking(False)
        self._process, self._connection = process, ours
        self._check_open()

    def _check_open(self) -> None:
        """Check that the server goes on. Raises: EOFError: it stops."""
        if self._closed:
            raise EOFError

    def _stop(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if self._idle is not None:
            self._idle.cancel()
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            # A process that waits for the disk ends when the disk has answered.
            threading.Thread(target=process.wait, name="search-end", daemon=True).start()


async def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(content))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
