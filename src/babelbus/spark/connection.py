"""Connecting to a server that may be away for a while; and the connection that a process keeps for the sink.

Spark keeps its Python processes for many tasks and batches.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from babelbus.client import (
    BlockingClient,
    ClientClosedError,
    ConnectionLostError,
    Identity,
    NotAuthorisedError,
    UntrustedServerError,
)
from babelbus.clock import Clock, SystemClock
from babelbus.spark.options import Place

log = logging.getLogger(__name__)

PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 5.0
REFUSALS_MAX = 2
"""A server that stops closes connections as it does those of strangers, but takes no new ones: so the second such
answer is believed."""

_open: dict[tuple[Place, int], BlockingClient] = {}


class Patience:
    """The time that a server may be away: pauses between attempts, longer and longer, until `requestTimeoutMs` is over.

    It counts from the first failure on, and says once that it waits and once that the server is back.
    """

    def __init__(self, place: Place, clock: Clock | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        self._place = place
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._begun: float | None = None
        self._pause = PAUSE_SECONDS_MIN
        self._refusals = 0
        self._is_away = False

    def wait(self, error: ConnectionLostError | NotAuthorisedError) -> None:
        """Wait for the next attempt after one that failed.

        Raises:
            NotAuthorisedError: the server does not know us.
            ConnectionLostError: the time is over.
        """
        self._refusals = self._refusals + 1 if isinstance(error, NotAuthorisedError) else 0
        if self._refusals == REFUSALS_MAX:
            raise error
        now = self._clock.monotonic()
        if self._begun is None:
            self._begun = now
        seconds = self._place.timeout_seconds
        left = self._begun + seconds - now
        if left <= 0:
            raise ConnectionLostError(
                f"no connection to {self._place.address} for {seconds:g} s (option requestTimeoutMs): {error}"
            ) from error
        if not self._is_away:
            self._is_away = True
            log.warning("no connection to %s, trying again for %.1f s: %s", self._place.address, left, error)
        self._sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)

    def connected(self) -> None:
        """Record that there is a connection."""
        if self._is_away:
            assert self._begun is not None
            log.warning("%s is back after %.1f s", self._place.address, self._clock.monotonic() - self._begun)
        self._is_away = False
        self._refusals = 0


def connect(place: Place, patience: Patience, *, fingerprint: str = "", reconnect: bool = True) -> BlockingClient:
    """Connect; a server that is not there is tried again as long as `patience` lasts.

    Args:
        fingerprint: of the server, where the options do not say it but an earlier connection did.
        reconnect: whether the client connects again after a lost connection.

    Raises:
        ConnectionLostError: the server was away for too long.
        NotAuthorisedError, UntrustedServerError: the server does not know our key, or is another server.
        IdentityError: the file is no key file.
    """
    identity = Identity.load(find_file(place.identity))
    while True:
        client = BlockingClient(
            place.address,
            identity=identity,
            server_fingerprint=place.fingerprint or fingerprint or None,
            request_timeout_seconds=place.timeout_seconds,
            reconnect=reconnect,
        )
        try:
            client.__enter__()
        except (ConnectionLostError, NotAuthorisedError) as error:
            patience.wait(error)
            continue
        patience.connected()
        return client


@contextmanager
def connection(place: Place) -> Iterator[BlockingClient]:
    """Return a client that has been connected; it stays open for the next one, and one that lost its server tries on.

    The first connection is tried again, after longer and longer pauses, for `requestTimeoutMs`.

    Raises:
        ClientError: the server was not to be reached, is another one, or does not know us.
        IdentityError: the file is no key file.
    """
    at = place, os.getpid()  # never across a fork
    client = _open.get(at)
    if client is None:
        client = _open[at] = connect(place, Patience(place))
    try:
        yield client
    except (ClientClosedError, UntrustedServerError):  # it will not connect any more, a new one may
        del _open[at]
        client.close()
        raise


def find_file(name: str) -> str:
    """Return the path of a file that `SparkContext.addFile` may have shipped: as it is named, or there."""
    if not os.path.exists(name):
        from pyspark import SparkFiles

        shipped: str = SparkFiles.get(os.path.basename(name))
        if os.path.exists(shipped):
            return shipped
    return name
