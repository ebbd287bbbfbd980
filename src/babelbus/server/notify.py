"""Messages for systemd, which started the process (sd_notify(3)): ready, reloading, stopping, alive.

Without the variable `NOTIFY_SOCKET` nothing is sent: the process runs in a shell or in a container.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


class Supervisor:
    """The socket of systemd, as the environment of this process names it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        of_this_process = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        interval = environment.get("WATCHDOG_USEC", "0") if of_this_process else "0"
        self._interval_seconds = int(interval) / 2e6 if interval.isdecimal() else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, *lines: str) -> None:
        """Send a message; systemd that cannot be reached is no reason to stop serving."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as peer:
                peer.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("systemd at %s was not told %s: %s", self._address, lines[0], error.strerror)

    def send_reloading(self) -> None:
        """Send that a reload begins; `READY` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def watch(self) -> None:
        """Send a sign of life twice in each interval of the watchdog; an event loop that hangs sends no more."""
        if self._interval_seconds > 0:
            self.send(ALIVE)
            self._timer = asyncio.get_running_loop().call_later(self._interval_seconds, self.watch)

    def stop(self) -> None:
        """Send that the process stops, and no further sign of life."""
        if self._timer is not None:
            self._timer.cancel()
        self.send(STOPPING)
