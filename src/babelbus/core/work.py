"""A coroutine begun inside a synchronous call: it runs at once up to its first wait, so that nothing waits needlessly.

Sessions are synchronous and answer in order: what they ask for is a promise (`Outbox.answer_when`). A read that is
served from memory is done when `Work` returns, without a task and without a turn of the event loop.
"""

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from babelbus.core.receipt import DONE, Promise
from babelbus.errors import BabelbusError, StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Work(Promise, Generic[T]):
    """A coroutine under way. When it is `done`, it has a `value` or an `error`.

    It may wait for futures and for `settled` alone, and is not cancelled: whoever lost interest ignores the outcome.
    """

    __slots__ = ("_coroutine", "value")

    value: T

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self._coroutine = coroutine
        self._step()

    def _step(self, _waited: "Promise | asyncio.Future[Any] | None" = None) -> None:
        try:
            waited = self._coroutine.send(None)
        except StopIteration as end:
            self.value = end.value
            self.resolve()
        except BabelbusError as error:
            self.resolve(error)
        except Exception:  # a bug must not leave a client without an answer for ever
            log.exception("internal error")
            self.resolve(StorageError("the server failed; its log says more"))
        else:
            if isinstance(waited, Promise):
                waited.when_done(self._step)
            else:
                waited._asyncio_future_blocking = False  # as a task does before it waits
                waited.add_done_callback(self._step)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine of asyncio. Raises: the error."""
        yield from self.wait().__await__()
        return self.value

    def result(self) -> T:
        """Return the value of work that is done.

        Raises: its error.
        """
        if self.error is not None:
            raise self.error
        return self.value


@types.coroutine
def settled(promise: Promise) -> Generator[Promise, None, None]:
    """Wait inside of `Work` until a promise is done; the work goes on in the very call that resolves the promise."""
    if not promise.done:
        yield promise


class Writer:
    """Writes one small file, one time after the other; a write covers all that was asked for before it begins.

    `prepare` returns the write of what there is now; `run` carries it out, in a thread where the disk may wait. `what`
    names the content to the operator.
    """

    def __init__(
        self, what: str, prepare: Callable[[], Callable[[], None]], run: Callable[[Callable[[], None]], Awaitable[None]]
    ) -> None:
        self.what = what
        self._prepare = prepare
        self._run = run
        self._next: Promise | None = None
        self.last: Promise = DONE
        """The last write that was asked for."""
        self.failing: StorageError | None = None
        """Why the last write that has ended failed; `None` if it did not: the file has what there was then."""

    def write(self) -> Promise:
        """Return what is done when the file has what there is now; its error is a `StorageError`."""
        if self._next is None:
            before, self.last = self.last, Promise()
            self._next = self.last
            Work(self._write(before, self.last))
        return self.last

    async def _write(self, before: Promise, done: Promise) -> None:
        await settled(before)
        self._next = None
        error: StorageError | None = None
        try:
            await self._run(self._prepare())
        except (OSError, StorageError) as failure:
            error = failure if isinstance(failure, StorageError) else _refused(failure)
        self.failing = error
        done.resolve(error)


def _refused(failure: OSError) -> StorageError:
    error = StorageError(str(failure))
    error.__cause__ = failure  # whose number says what to do about a start that fails
    return error
