"""What holds for all tests."""

import faulthandler
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from babelbus.clients.jebp import connection
from babelbus.web import server as web_server
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.nats import NatsMissingError, NatsServer, nats_server
from tests.support.passwords import make_hashes_cheap
from tests.support.postgres import PostgresMissingError, PostgresServer, postgres_server

EXIT_SECONDS = 300
"""How long pytest may take to be gone after its last test."""

# A run that was started in the background ignores Ctrl+C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Containers often set it: then each process that a test starts would compile every module of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No test depends on the speed of the machine: the first draw of a strategy may take seconds where others run beside it.
# A run gives the same verdict as the run before it: examples are the same each time. `make torture` draws others, and
# twenty times as many.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=50
)
settings.register_profile(
    "torture", settings.get_profile("steady"), derandomize=False, max_examples=1_000, print_blob=True
)
settings.load_profile("steady")

# Before the first test module is imported: some build their credentials then.
make_hashes_cheap()


def pytest_unconfigure() -> None:
    """Let no thread that a failed test left behind keep the run for ever: it is shown, and the run ends as failed."""
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)


@pytest.fixture(scope="session", autouse=True)
def busy_machine() -> None:
    """Let a flush, and the first word of a server, take the time that others on the machine leave them."""
    web_server.SLOW_FLUSH_SECONDS = SAFETY_NET_SECONDS
    connection.GREETING_SECONDS = SAFETY_NET_SECONDS


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    try:
        with nats_server() as server:
            yield server
    except NatsMissingError as missing:
        pytest.skip(f"engine jetstream is not tested: {missing}")


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    try:
        with postgres_server() as server:
            yield server
    except PostgresMissingError as missing:
        pytest.skip(f"engine db is not tested on PostgreSQL: {missing}")
