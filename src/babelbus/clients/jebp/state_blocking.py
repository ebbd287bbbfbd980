"""The state without `await`: the calls of `state` for programs without an event loop, from any thread."""

from datetime import datetime

from babelbus.clients.jebp.locks import Lock
from babelbus.clients.jebp.state import Past, State
from babelbus.clients.portal import Twin, blocking, streaming


class BlockingPast(Twin[Past]):
    """`Past`; the calls and errors are the same, without `await`."""

    get = blocking(Past.get)
    find = blocking(Past.find)
    match = blocking(Past.match)


class BlockingLock(Twin[Lock]):
    """`Lock`; hold it with `with`. Nobody can interrupt a thread: look at `held` before what must not happen twice."""

    @property
    def key(self) -> str:
        """The name of the lock."""
        return self._twin.key

    @property
    def held(self) -> bool:
        """Whether it is ours at this moment."""
        return self._twin.held

    def __enter__(self) -> "BlockingLock":
        """Wait for the lock; see `Lock.acquire`."""
        self._portal.call(self._twin.acquire())
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Release the lock.

        Raises:
            LockLostError: it was lost inside the block.
        """
        if self._portal.is_open:
            self._portal.call(self._twin.finish(error is None))


class BlockingState(Twin[State]):
    """`State`; the calls and errors are the same, without `await`."""

    get = blocking(State.get)
    find = blocking(State.find)
    get_many = blocking(State.get_many)
    match = blocking(State.match)
    list = blocking(State.list)
    history = blocking(State.history)
    set = blocking(State.set)
    set_many = blocking(State.set_many)
    compare_and_set = blocking(State.compare_and_set)
    delete = blocking(State.delete)
    delete_match = blocking(State.delete_match)
    watch = streaming(State.watch)
    watch_batches = streaming(State.watch_batches)
    will = blocking(State.will)

    def as_of(self, *, time: datetime | int | None = None, offset: int | None = None) -> BlockingPast:
        """Return the state as it was; see `State.as_of`."""
        return BlockingPast(self._portal, self._twin.as_of(time=time, offset=offset))

    def lock(self, key: str, *, timeout: float | None = None) -> BlockingLock:
        """Return a lock to hold with `with`; see `State.lock`."""
        return BlockingLock(self._portal, self._twin.lock(key, timeout=timeout))
