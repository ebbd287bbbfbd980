"""A promise of the event loop, and the receipt of what was published: callbacks first, `wait` for coroutines."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from babelbus.errors import BabelbusError

log = logging.getLogger(__name__)


class Promise:
    """Something that will be done, or that an `error` says will not; kept by whoever resolves it.

    Callbacks instead of a future: one object serves a whole batch and costs no turn of the event loop.
    """

    __slots__ = ("_callbacks", "done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: BabelbusError | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    @classmethod
    def refused(cls, error: BabelbusError) -> Self:
        """Return a promise that has failed already."""
        promise = cls()
        promise.resolve(error)
        return promise

    def when_done(self, callback: Callable[[Self], None], *, first: bool = False) -> None:
        """Call back once the promise is done, at once if it is; with `first`, before the callbacks that are there."""
        if self.done:
            callback(self)
        elif first:
            self._callbacks.insert(0, callback)
        else:
            self._callbacks.append(callback)

    def resolve(self, error: BabelbusError | None = None) -> None:
        """Record the outcome and call back; a later outcome is ignored."""
        if self.done:
            return
        self.done = True
        self.error = error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # one publisher's bug must not cost the others of the same flush their answers
                log.exception("answering a publisher failed")

    async def wait(self) -> Self:
        """Wait until the promise is done, and return it.

        Raises:
            BabelbusError: its error.
        """
        await settled((self,))
        if self.error is not None:
            raise self.error
        return self


class Receipt(Promise):
    """The outcome of one batch that was published; one object for the whole batch.

    It is done when the topic's ack level is reached. `partition` and `base_offset` are -1 if nothing was stored, until
    a batch that was gathered is appended, and for several partitions, each of which has a receipt in `parts`.
    """

    __slots__ = ("base_offset", "count", "partition")

    def __init__(self, partition: int = -1, base_offset: int = -1, count: int = 0) -> None:
        super().__init__()
        self.partition = partition
        self.base_offset = base_offset
        self.count = count

    @property
    def parts(self) -> Sequence["Receipt"]:
        """The receipts of the partitions that records went to."""
        return (self,)

    def follow(self, receipt: "Receipt") -> None:
        """Set the place and the outcome from another receipt."""
        self.partition, self.base_offset, self.count = receipt.partition, receipt.base_offset, receipt.count
        receipt.when_done(lambda done: self.resolve(done.error))


class _Receipts(Receipt):
    """The outcome of what went to several partitions, or to none."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence["Receipt"]) -> None:
        super().__init__(count=sum(part.count for part in parts))
        self._parts = parts
        all_of(parts).when_done(lambda done: self.resolve(done.error))

    @property
    def parts(self) -> Sequence["Receipt"]:
        """The receipts of the partitions that records went to."""
        return self._parts


def join(receipts: Sequence["Receipt"]) -> Receipt:
    """Return one receipt for all of these; without any, one that is done: nothing had to be stored."""
    return receipts[0] if len(receipts) == 1 else _Receipts(receipts)


DONE = Promise()
DONE.resolve()


def all_of(promises: Iterable[Promise]) -> Promise:
    """Return a promise that is done when all of these are, with the first error."""
    pending = list(promises)
    if len(pending) == 1:
        return pending[0]
    if not pending:
        return DONE
    whole = Promise()
    left = len(pending)
    failed: list[BabelbusError] = []

    def arrive(promise: Promise) -> None:
        nonlocal left
        left -= 1
        if promise.error is not None:
            failed.append(promise.error)
        if not left:
            whole.resolve(failed[0] if failed else None)

    for promise in pending:
        promise.when_done(arrive)
    return whole


async def settled(promises: Iterable[Promise]) -> BabelbusError | None:
    """Wait until all promises are done; return the first error instead of raising it."""
    whole = all_of(promises)
    if not whole.done:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        whole.when_done(lambda _: None if future.done() else future.set_result(None))
        await future
    return whole.error
