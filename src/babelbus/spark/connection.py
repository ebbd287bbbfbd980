"""This process's connection to a server; Spark keeps its Python processes for many tasks and batches."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from babelbus.client import (
    BlockingClient,
    ClientClosedError,
    ConnectionLostError,
    Identity,
    NotAuthorisedError,
    UntrustedServerError,
)
from babelbus.clock import SystemClock
from babelbus.spark.options import Place
from babelbus.spark.server import find_file

log = logging.getLogger(__name__)

PAUSE_SECONDS_MIN = 0.1
PAUSE_SECONDS_MAX = 5.0
STOPPING_SECONDS_MAX = 5.0
"""A server that stops closes connections as it does those of strangers: so long such an answer is not believed."""

_open: dict[tuple[Place, int], BlockingClient] = {}


@contextmanager
def connection(place: Place) -> Iterator[BlockingClient]:
    """Give a client that has been connected; it stays open for the next one, and one that lost its server tries on.

    The first connection is tried again, after longer and longer pauses, for `requestTimeoutMs`.

    Raises:
        ClientError: the server was not to be reached, is another one, or does not know us.
        IdentityError: the key file is none.
    """
    at = place, os.getpid()  # never across a fork
    client = _open.get(at)
    if client is None:
        client = _open[at] = _connect(place)
    try:
        yield client
    except (ClientClosedError, UntrustedServerError):  # it will not connect any more, a new one may
        del _open[at]
        client.close()
        raise


def _connect(place: Place) -> BlockingClient:
    identity = Identity.load(find_file(place.identity))
    clock = SystemClock()
    begun, pause = clock.monotonic(), PAUSE_SECONDS_MIN
    while True:
        client = BlockingClient(
            place.address,
            identity=identity,
            server_fingerprint=place.fingerprint or None,
            request_timeout_seconds=place.timeout_seconds,
        )
        try:
            return client.__enter__()
        except (ConnectionLostError, NotAuthorisedError) as error:
            most = place.timeout_seconds
            if isinstance(error, NotAuthorisedError):
                most = min(most, STOPPING_SECONDS_MAX)
            if clock.monotonic() - begun + pause > most:
                raise
            log.warning("no connection to %s, trying again: %s", place.address, error)
        time.sleep(pause)
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
