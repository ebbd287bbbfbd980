"""SIGKILL of the driver and of the server while a stream is copied: what comes out is what went in, once.

Row 22 of the fault matrix in reliability.md. BABELBUS_TEST_SEED chooses other moments.
"""

import os
import random
import time
from pathlib import Path

import pytest

from babelbus.client import BlockingClient
from babelbus.config import JebpSettings
from tests.spark.sink_driver import Driver
from tests.spark.support import numbered
from tests.support.child import Child
from tests.support.server import configure

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))
SECONDS_MAX = 300.0
SOURCE, TARGET = "source", "target"
POLL_SECONDS = 0.01


class Copy:
    """A server in a process of its own, a topic with records, and drivers that copy it."""

    def __init__(self, folder: Path, records: int) -> None:
        self._folder = folder
        self.records = records
        self.server = Child(configure(folder / "data"))
        self._port = int(self.server.address.rpartition(":")[2])
        self.client = BlockingClient(self.server.address, identity=self.server.admin, request_timeout_seconds=60)
        self.client.__enter__()
        for topic in (SOURCE, TARGET):
            self.client.create_topic(topic)
        self.client.publish_many(SOURCE, numbered(records))

    def driver(self) -> Driver:
        identity = self._folder / "data" / "conf" / "admin_key"
        return Driver(f"jebp://{self.server.address}", str(identity), SOURCE, TARGET, str(self._folder / "checkpoint"))

    def restart_server(self) -> None:
        self.server.__exit__()
        self.server = Child(configure(self._folder / "data", jebp=JebpSettings(port=self._port)))

    def until(self, count: int, driver: Driver) -> None:
        """Return when so many records were copied, or the driver has ended."""
        deadline = time.monotonic() + SECONDS_MAX
        while driver.runs_for(POLL_SECONDS) and self.client.end_offset(TARGET) < count:
            assert time.monotonic() < deadline

    def found(self) -> list[bytes | None]:
        return [record.payload for record in self.client.follow(TARGET, until_end=True)]

    def __enter__(self) -> "Copy":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.__exit__()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "records", "kills"),
    [(SEED, 300, 2), *(pytest.param(seed, 20_000, 12, marks=pytest.mark.slow) for seed in range(SEED, SEED + 3))],
)
def test_what_is_copied_by_a_driver_that_is_killed_again_and_again_is_there_once(
    tmp_path: Path, seed: int, records: int, kills: int
) -> None:
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(records * 3 // 4), kills))
    with Copy(tmp_path, records) as copy:
        for moment in moments:
            with copy.driver() as driver:
                copy.until(moment, driver)
                driver.runs_for(chance.uniform(0, 0.3))  # into a batch; whatever it hits is right
                driver.kill()
        with copy.driver() as driver:
            copy.until(chance.randrange(records * 3 // 4, records), driver)
            copy.restart_server()  # this one the driver has to bear
            code, said = driver.wait()
        assert code == 0, said
        assert copy.found() == [b"%d" % number for number in range(records)]
