"""Reading as a member of a consumer group: one object for as long as a program consumes, through any reconnect.

async with client.consume("orders", group="billing") as messages:
    async for message in messages:
        handle(message)
        message.ack()
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint
from typing import Literal, Self

import msgspec

from babelbus.clients.jebp.calls import Calls
from babelbus.clients.jebp.errors import TEMPORARY_ERRORS, ClientError, ConnectionLostError, is_loss
from babelbus.clients.jebp.messages import SOON, Delivery, Holder, Membership, Message
from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp.call_messages import Consume

log = logging.getLogger(__name__)

Start = Literal["end", "beginning"] | int
"""Where a group that is made begins: at the end, at the first record, or at an offset."""


class Consumer:
    """A member of a consumer group. Made by `Client.consume`; ends with `leave`, or when nobody refers to it any more.

    After a lost connection it joins again by itself. Messages that it held and had not answered are delivered again, to
    this member or another; answers to messages from before do nothing.

    Attributes:
        rejoined: how often it has joined again.
    """

    def __init__(self, calls: Calls, request: Consume) -> None:
        self.rejoined = 0
        self._calls = calls
        self._request = request
        self._membership: Membership | None = None
        self._messages: Iterator[Message] = iter(())
        self._rest: Iterator[Message] = iter(())
        self._left = False
        self._joining = asyncio.Lock()
        self._loading = asyncio.Lock()
        self.holder_of: Callable[[Membership], Holder] = lambda membership: membership
        """Returns what takes the answers to messages; another one for messages that are answered in other threads."""

    @property
    def topic(self) -> str:
        """The topic."""
        return self._request.topic

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._request.group

    @property
    def order(self) -> str:
        """The order of the group, `key` or `none`; empty before it has joined."""
        membership = self._membership
        return membership.joined.order if membership is not None and membership.joined is not None else ""

    @property
    def ack_seconds(self) -> float:
        """How long a record may go unanswered; infinite in a group without acks, or before it has joined."""
        joined = None if self._membership is None else self._membership.joined
        return joined.ack_seconds if joined is not None and joined.ack == "explicit" else float("inf")

    async def join(self) -> None:
        """Connect to the group now, instead of with the first message.

        Raises:
            UnknownTopicError: there is no such topic.
            UnknownGroupError: there is no such group, and `create` is false.
            NoRightsError: the client may not consume the topic.
            LockedError: another member has the group for itself.
            BadArgumentError: a setting or a name is wrong.
            UnsupportedByServerError: the server is older than jebp/1.2.
            RequestTimeoutError: there was no answer in time.
            ClientError: there is no connection.
        """
        if self._membership is None:
            await self._join(patient=False)

    async def _join(self, *, patient: bool) -> Membership:
        """Return the membership; of the tasks that wait for it, one joins."""
        async with self._joining:
            return self._membership or await self._join_now(patient=patient)

    async def _join_now(self, *, patient: bool) -> Membership:
        while True:
            link = await self._calls.link("consume", None if patient else self._calls.timeout_seconds)
            membership = Membership(link, self._request)
            membership.expect_answer(self._calls.timeout_seconds)
            try:
                while membership.joined is None and not membership.ended_now:
                    await membership.changed()
            except BaseException:
                membership.close()
                raise
            if membership.joined is not None:
                self._membership = membership
                return membership
            error = membership.error or ConnectionLostError("consume: the server ended the stream at once")
            if not (patient and is_loss(error)):
                raise error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Wait for the next message.

        Raises:
            GoneError: the group or the topic was removed.
            NoRightsError: the client may not consume the topic any more.
            CorruptRecordError: a record is not the one that was written.
            ClientError: the connection is lost for good.
        """
        while True:
            message = next(self._messages, None)
            if message is not None:
                return message
            async with self._loading:  # of the tasks that read together, one loads
                message = next(self._messages, None)
                if message is not None:
                    return message
                await self._load()

    async def _load(self) -> None:
        """Wait for messages, some at a time: between them the loop sends the answers and receives more."""
        membership = self._membership
        if membership is not None and membership.error is None and length_hint(self._rest):
            await asyncio.sleep(0)
            if membership.error is None:
                self._messages = islice(self._rest, SOON)
                return
        while True:
            if self._left:
                await self.leave()  # it may have been left while it joined
                raise StopAsyncIteration
            membership = self._membership
            if membership is None:
                await self._join(patient=bool(self.rejoined))
                continue
            if membership.error is not None:
                self._lose(membership.error)
                continue
            if membership.items:
                delivery = Delivery(self.holder_of(membership), membership.next_item())
                self._rest = membership.begin(delivery)
                self._messages = islice(self._rest, SOON)
                await asyncio.sleep(0)
                return
            membership.drop()
            if membership.result is not None:
                raise StopAsyncIteration
            await membership.changed()

    def _lose(self, error: ClientError) -> None:
        """Handle a lost connection: the next message joins again.

        Raises:
            ClientError: it was not that.
        """
        if self._membership is not None:
            self._membership.drop()
        self._membership = None
        self._messages = self._rest = iter(())
        if not (is_loss(error) and self._calls.resends):
            self._left = not isinstance(error, TEMPORARY_ERRORS)  # else the next message joins again
            raise error
        self.rejoined += 1
        log.info("group %r of topic %r: %s; joining again", self.group, self.topic, error)

    async def take(self) -> list[Message]:
        """Wait for messages, and return those that are there, some hundred at the most; none when it has left.

        Raises: as `__anext__`.
        """
        try:
            message = await anext(self)
        except StopAsyncIteration:
            return []
        return [message, *self._messages]

    async def next(self, timeout: float | None = None) -> Message | None:  # noqa: ASYNC109  # as queues have it
        """Return the next message, `None` if no message comes within `timeout` seconds or the consumer has left."""
        try:
            async with asyncio.timeout(timeout):
                return await anext(self)
        except (TimeoutError, StopAsyncIteration):
            return None

    def set_window(self, window: int) -> None:
        """Set the most messages that the member holds unanswered from now on; 0 pauses the member.

        Messages on the way are delivered.
        """
        if window < 0:
            raise LocalProtocolError(f"a window of {window} messages")
        self._request = msgspec.structs.replace(self._request, window=window)
        if self._membership is not None:
            self._membership.set_window(window)

    async def leave(self) -> None:
        """End the membership: answers reach the server, other messages go to other members as if not delivered."""
        self._left = True
        self._messages = self._rest = iter(())
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.drop()
            membership.flush_acks()
            await membership.finish(self._calls.timeout_seconds)

    async def __aenter__(self) -> Self:
        await self.join()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.leave()

    def __del__(self) -> None:
        """End the membership, when a loop over the messages was left without `leave`."""
        if self._membership is not None:
            self._membership.close_soon()
