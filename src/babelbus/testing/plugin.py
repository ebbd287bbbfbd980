"""Fixtures for pytest. They are there when babelbus is installed: it is a plugin of pytest.

def test_orders_are_billed(babelbus_server):
    with babelbus_server.blocking_client() as client:
        ...
"""

from collections.abc import Iterator

import pytest

TYPE_CHECKING = False  # as in `babelbus`: every run of pytest imports this module, most of them for nothing
if TYPE_CHECKING:
    from babelbus.testing import Server


@pytest.fixture(scope="session")
def babelbus_server() -> "Iterator[Server]":
    """Yield a server that all tests of the session share; tests choose topics of their own."""
    from babelbus.testing import Server

    with Server() as server:
        yield server


@pytest.fixture
def babelbus_fresh_server() -> "Iterator[Server]":
    """Yield a server of this test alone, which the test may stop, kill and start again."""
    from babelbus.testing import Server

    with Server() as server:
        yield server
