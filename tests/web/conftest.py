"""A server, its administration endpoint, and a topic whose groups are asked about."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.core.access import SERVER
from tests.support.server import LiveServer, configure
from tests.web.test_state import Api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with LiveServer(configure(tmp_path, admin=True)) as live:
        yield Api(live)


@pytest.fixture
def work(api: Api) -> None:
    api.live.call(lambda: api.live.server.broker.create_topic("work", 1, {"ack": "written"}, SERVER))
