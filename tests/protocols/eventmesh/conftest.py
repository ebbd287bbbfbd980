"""A server of EventMesh for the tests of a file, and a client of its HTTP port."""

from collections.abc import Iterator

import pytest

from tests.support.eventmesh import SETTINGS
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path_factory.mktemp("mesh"), eventmesh=SETTINGS)) as server:
        yield server


@pytest.fixture
def web(live: LiveServer) -> Iterator[HttpClient]:
    with HttpClient(live.server.addresses["eventmesh-http"]) as client:
        yield client
