"""Stops Spark's tasks at certain rows: a test that kills something knows for certain what is under way just then."""

import os
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

SECONDS_MAX = 300.0
POLL_SECONDS = 0.05
ROW_BY_ROW = {
    "spark.sql.execution.python.udf.maxRecordsPerBatch": "1",
    "spark.sql.execution.python.udf.buffer.size": "8",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.sql.execution.pandas.udf.buffer.size": "8",
}
"""Settings with which the rows before one have gone through the whole task when that one comes to a gate."""


class Visit:
    """A task that has come to a gate, in the process `pid`; it waits there for `go`, or to be killed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._may_go = threading.Event()

    def go(self) -> None:
        """Let it pass: it alone, for others will be stopped again."""
        self._may_go.set()

    def wait(self) -> None:
        self._may_go.wait()


class Gate:
    """Where tasks stop that come to certain rows."""

    def __init__(self, rows: Collection[int]) -> None:
        self._arrived: dict[int, queue.SimpleQueue[Visit]] = {row: queue.SimpleQueue() for row in rows}
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._waiting: list[tuple[int, Visit]] = []
        gate = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                row, pid = map(int, self.rfile.readline().split())
                gate._arrive(row, pid).wait()
                with suppress(ConnectionError):  # it was killed meanwhile
                    self.wfile.write(b"\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_SECONDS,))

    @property
    def place(self) -> str:
        """What `stop_at` has to be told."""
        return f"{self._server.server_address[1]}:{','.join(map(str, sorted(self._arrived)))}"

    def _arrive(self, row: int, pid: int) -> Visit:
        visit = Visit(pid)
        with self._lock:
            self._waiting.append((row, visit))
            if row in self._open:
                visit.go()
        self._arrived[row].put(visit)
        return visit

    def wait(self, row: int, goes_on: Callable[[float], None]) -> Visit:
        """Give the next task that comes to this row; `goes_on` waits so many seconds, and raises if none can come."""
        deadline = time.monotonic() + SECONDS_MAX
        while self._arrived[row].empty():
            goes_on(POLL_SECONDS)
            assert time.monotonic() < deadline, f"no task has come to row {row}"
        return self._arrived[row].get()

    def open(self, row: int) -> None:
        """Let all pass that wait at this row, and all that come to it from now on."""
        with self._lock:
            self._open.add(row)
            for at, visit in self._waiting:
                if at == row:
                    visit.go()

    def __enter__(self) -> "Gate":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for row in self._arrived:
            self.open(row)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def stop_at(place: str) -> Callable[[Column], Column]:
    """Give the column function that passes values on, and stops at the rows of a gate.

    The number of a row is what its value begins with, up to a space.
    """
    port, _, listed = place.partition(":")
    rows = {row.encode() for row in listed.split(",")}

    def stop(value: bytes) -> bytes:
        row = bytes(value).partition(b" ")[0]
        if row in rows:
            with socket.create_connection(("127.0.0.1", int(port))) as line:
                line.sendall(b"%s %d\n" % (row, os.getpid()))
                line.recv(1)
        return value

    return F.udf(stop, "binary", useArrow=False)  # one that is nested is shipped with its code
