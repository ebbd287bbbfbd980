"""A topic that is copied to another one by Spark while things are killed; what the tests of that have in common."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from babelbus.client import BlockingClient
from babelbus.records.record import Record
from tests.spark.sink_driver import Driver, Work
from tests.support.child import Child
from tests.support.server import configure_to_return

SECONDS_MAX = 300.0
SOURCE, TARGET = "source", "target"
POLL_SECONDS = 0.01


class Copy:
    """A server in a process of its own, a topic with records, and drivers that copy it."""

    def __init__(self, folder: Path, records: Sequence[Record]) -> None:
        self.folder = folder / "data"
        self._checkpoint = str(folder / "checkpoint")
        self.expected = [record.payload for record in records]
        self._config = configure_to_return(self.folder)
        self.port = self._config.jebp.port
        self.server = Child(self._config)
        self.client = BlockingClient(self.server.address, identity=self.server.admin, request_timeout_seconds=60)
        self.client.__enter__()
        for topic in (SOURCE, TARGET):
            self.client.create_topic(topic)
        self.client.publish_many(SOURCE, records)

    def work(self, **how: Any) -> Work:
        """What a driver is to do; `how` is what `Work` takes beyond the place."""
        return Work(
            url=f"jebp://{self.server.address}",
            identity=str(self.folder / "conf" / "admin_key"),
            source=SOURCE,
            target=TARGET,
            checkpoint=self._checkpoint,
            **how,
        )

    def driver(self, **how: Any) -> Driver:
        """Start one."""
        return Driver(self.work(**how))

    def restart_server(self) -> None:
        self.server.__exit__()
        self.server = Child(self._config)

    def copied(self) -> int:
        return self.client.end_offset(TARGET)

    def until(self, count: int, driver: Driver) -> None:
        """Return when so many records were copied, or the driver has ended."""
        deadline = time.monotonic() + SECONDS_MAX
        while driver.runs_for(POLL_SECONDS) and self.copied() < count:
            assert time.monotonic() < deadline

    def parts(self) -> set[Path]:
        """Give the files of what tasks have staged, and nobody has committed."""
        return set((self.folder / "staging").glob("*.part"))

    def found(self) -> list[bytes | None]:
        return [record.payload for record in self.client.follow(TARGET, until_end=True)]

    def __enter__(self) -> "Copy":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.__exit__()
