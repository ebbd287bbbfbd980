"""A coroutine begun inside a synchronous call: it runs at once up to its first wait, so that nothing waits needlessly.

Sessions are synchronous and answer in order: what they ask for is a promise (`Outbox.answer_when`). A read that is
served from memory is done when `Work` returns, without a task and without a turn of the event loop.
"""

import asyncio
import logging
import types
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

from babelbus.core.receipt import Promise
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
        except Exception as error:  # a bug must not leave a client without an answer for ever
            log.exception("a read failed")
            self.resolve(StorageError(f"internal error in a read: {error}"))
        else:
            if isinstance(waited, Promise):
                waited.when_done(self._step)
            else:
                waited._asyncio_future_blocking = False  # as a task does before it waits
                waited.add_done_callback(self._step)

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
