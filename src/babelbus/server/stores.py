"""The stores of all engines. An engine is a store that is made here, and a folder of `storage` with its code."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from babelbus.clock import Clock
from babelbus.config import Config
from babelbus.errors import ConfigError
from babelbus.storage.contract import Fit, Store
from babelbus.storage.disk import FolderStore
from babelbus.storage.files import FileSystem
from babelbus.storage.memory import MemoryFiles

if TYPE_CHECKING:
    from babelbus.storage.jetstream import JetstreamStore, Ownership

DATABASE_NAME = "db.sqlite"


class Stores(dict[str, Store]):
    """The store of each engine; those that need a database or NATS are opened when a topic first needs them."""

    def __init__(
        self, config: Config, files: FileSystem, folder: str, clock: Clock, ownership: "Ownership | None"
    ) -> None:
        super().__init__(
            disk=FolderStore(files, folder, clock),
            memory=FolderStore(MemoryFiles(), "memory", clock, Fit(reads_wait=False, volatile=True)),
        )
        url = config.db.url or f"sqlite:///{os.path.join(folder, DATABASE_NAME)}"
        self._makers: dict[str, Callable[[], Store]] = {
            "db": lambda: _open_database(url, files, clock),
            "jetstream": lambda: _open_jetstream(config, files, folder, clock, ownership),
        }
        self._lock = threading.Lock()

    def __missing__(self, engine: str) -> Store:
        """Open the store of an engine, in the thread of the topic that first needs it."""
        with self._lock:
            if engine not in self:
                self[engine] = self._makers[engine]()
            return self[engine]


def _open_database(url: str, files: FileSystem, clock: Clock) -> Store:
    """Open the database, and finish the removals that a crash cut short; loading SQLAlchemy takes half a second."""
    from babelbus.storage.sql import DatabaseStore

    store = DatabaseStore(url, files, clock)
    for token in store.removed():
        store.erase(token)
    return store


def import_jetstream() -> ModuleType:
    """Load the engine.

    Raises:
        ConfigError: a package that it needs is not installed.
    """
    try:
        from babelbus.storage import jetstream
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine jetstream needs the package {error.name}, which is not installed:"
            " pip install 'babelbus[jetstream]'"
        ) from error
    return jetstream


def _open_jetstream(
    config: Config, files: FileSystem, folder: str, clock: Clock, ownership: "Ownership | None"
) -> Store:
    """Open the streams, of NATS or of an `ownership`, and finish the removals that a crash cut short."""
    store: JetstreamStore = import_jetstream().JetstreamStore(config.jetstream, files, folder, clock, ownership)
    for token in store.removed():
        store.erase(token)
    return store


async def in_daemon(work: Callable[[], object]) -> None:
    """Wait for work in a thread that may hang and does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except BaseException as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(end, error)

    threading.Thread(target=run, name="opening", daemon=True).start()
    await done
