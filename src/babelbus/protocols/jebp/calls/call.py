"""The calls of one connection (jebp/1.2): items in, items out, and what belongs to each open call.

    METHODS = {"add": Method(Add, lambda call, add: add.left + add.right)}

A method is a function of the call and its typed parameters. It returns the result, or a coroutine that returns the
result (it runs at once up to its first wait, see `core.work`), or a `Stream`, which lives until one side ends it. A
`BabelbusError` that it raises is the error of the call. Everything runs in the event loop and may not block.

Items of one turn leave in one frame. Streams ask `Call.full` before they send much, and go on in `resume`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from types import CoroutineType
from typing import Any, Final, TypeVar, cast

import msgspec

from babelbus.core.access import Identity
from babelbus.core.broker import Broker
from babelbus.core.work import Work
from babelbus.errors import UNREADABLE, BabelbusError, LocalProtocolError, RemoteProtocolError
from babelbus.metrics import Metrics
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.box import Sealer
from babelbus.protocols.jebp.calls.errors import FAILED, CallRefusedError, encode_error
from babelbus.protocols.jebp.items import (
    CALLS_MAX,
    CANCEL,
    END,
    ERROR,
    GATHERED_BYTES_MAX,
    ITEM,
    ITEM_HEAD,
    MORE,
    OPEN,
    SERVER_HEAD,
)
from babelbus.protocols.jebp.messages import CallItems, Data

log = logging.getLogger(__name__)

_OPENING: Final = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_NOTHING: Final = msgspec.msgpack.encode(None)
_encode: Final = msgspec.msgpack.Encoder().encode
F = TypeVar("F", bound="Family")


class Stream:
    """An open call with more than one answer, or one that the client may end. Override what the method needs."""

    def receive(self, body: Data) -> None:
        """Handle a message of the client; the body is valid during the call alone.

        Raises:
            BabelbusError, msgspec.MsgspecError: the call ends with this error.
        """
        raise CallRefusedError("bad_argument", "this call takes no further messages")

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The patterns that the call reads live, and of each whether only a part of it is granted."""
        return []

    def resume(self) -> None:
        """Resume sending: the connection has room again."""

    def access_changed(self) -> None:
        """Check the rights of the client again; `Call.principal` is the client with the rights of now."""

    def close(self, *, lost: bool) -> None:
        """Release everything, once, however the call ends; `lost` says that the connection broke."""


class Family:
    """The shared part of the methods of one family on a connection. Override what the family needs."""

    def end_of_frame(self) -> None:
        """Handle the end of a frame of items: what they brought can be done together."""

    def close(self) -> None:
        """Release everything: the connection has ended, and so have its calls."""


class Call:
    """One open call. Spent once it has ended: what is said afterwards goes nowhere."""

    __slots__ = ("_calls", "_task", "number", "stream")

    def __init__(self, calls: "Calls", number: int) -> None:
        self.number = number
        self.stream: Stream | None = None
        self._calls = calls
        self._task: asyncio.Task[None] | None = None

    @property
    def principal(self) -> Identity:
        """The client, with the rights of the moment."""
        return self._calls.principal

    @property
    def address(self) -> str:
        """The address of the client."""
        return self._calls.address

    @property
    def broker(self) -> Broker:
        """The broker."""
        return self._calls.broker

    @property
    def metrics(self) -> Metrics:
        """The metrics of the server."""
        return self._calls.metrics

    @property
    def methods(self) -> list[str]:
        """The names of the methods that there are, sorted."""
        return sorted(self._calls.methods)

    @property
    def body_bytes_max(self) -> int:
        """The longest body of an item."""
        return self._calls.body_bytes_max

    @property
    def full(self) -> bool:
        """Whether the client does not take what was sent: send no more until `Stream.resume`."""
        return self._calls.full

    def family(self, key: object, make: Callable[["Calls"], F]) -> F:
        """Return what the family with this key shares on this connection, made when it is first needed."""
        return self._calls.family(key, make)

    @property
    def open(self) -> bool:
        """Whether the call has not ended."""
        return self._calls.is_open(self)

    def send(self, *parts: Data) -> None:
        """Send an item, whose body is these parts behind each other; they must not change any more.

        Raises:
            LocalProtocolError: the body is over the frame limit.
        """
        if self.open:
            self._calls.put(self.number, ITEM, parts)

    def end(self, result: object = None) -> None:
        """End the call with a result that msgpack can carry."""
        self.end_encoded(_NOTHING if result is None else _encode(result))

    def end_encoded(self, body: Data) -> None:
        """End the call with a result that is encoded already."""
        if not self._calls.finish(self, lost=False):
            return
        try:
            self._calls.put(self.number, END, (body,))
        except LocalProtocolError as error:
            self._put_error(CallRefusedError("too_large", str(error)))

    def fail(self, error: BabelbusError) -> None:
        """End the call with an error."""
        if self._calls.finish(self, lost=False):
            self._put_error(error)

    def _put_error(self, error: BabelbusError) -> None:
        text = self.principal.relative_text(str(error))
        self._calls.put(self.number, ERROR, (encode_error(error, text),))

    def run(self, work: Coroutine[Any, Any, None]) -> Stream:
        """Run the task of this call, for methods that need more than `Work` can wait for; cancelled when the call ends.

        The task ends the call. Returns a stream without messages, for methods that need no other.
        """
        assert self._task is None, "a call has one task"
        self._task = asyncio.get_running_loop().create_task(self._watch(work))
        return Stream()

    async def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.fail_by(error)

    def fail_by(self, error: Exception) -> None:
        """End the call with an exception that is being handled."""
        if not isinstance(error, BabelbusError):
            log.exception("jebp: a call failed")
            error = CallRefusedError(FAILED, "the server failed; its log says more")
        self.fail(error)

    def released(self, *, lost: bool) -> None:
        """Release what belongs to the call; `Calls` calls this once."""
        task, self._task = self._task, None
        if task is not None and task is not _current_task():
            task.cancel()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close(lost=lost)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # the loop is closed
        return None


Answerer = Callable[[Call, Any], Any]


class Method:
    """A method of the table: its parameters (a Struct with `array_like=True`), and the function that answers."""

    __slots__ = ("answer", "decode")

    def __init__(self, parameters: Any, answer: Answerer) -> None:
        self.decode = msgspec.msgpack.Decoder(parameters).decode
        self.answer = answer


class Calls:
    """The open calls of one connection. All calls come from the event loop."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        sealer: Sealer,
        *,
        methods: Mapping[str, Method],
        principal: Identity,
        metrics: Metrics,
    ) -> None:
        self.broker = broker
        self.metrics = metrics
        self.principal = principal
        """The client, with the rights of the moment; the session keeps it up to date."""
        self.body_bytes_max = sealer.content_bytes_max - len(SERVER_HEAD) - ITEM_HEAD.size
        self._gathered_bytes_max = min(GATHERED_BYTES_MAX, sealer.content_bytes_max - len(SERVER_HEAD))
        self._outbox = outbox
        self._sealer = sealer
        self.methods = methods
        self._open: dict[int, Call] = {}
        self._families: dict[object, Family] = {}
        self._parts: list[Data] = [SERVER_HEAD]
        self._size = 0
        self._holding = False
        self._scheduled = False
        self._closed = False
        self._stalled = False
        """Whether a stream was told to wait."""

    @property
    def full(self) -> bool:
        """Whether streams should wait for `resume`."""
        full = self._outbox.full
        self._stalled |= full
        return full

    @property
    def address(self) -> str:
        """The address of the client."""
        return self._outbox.peer

    def family(self, key: object, make: Callable[["Calls"], F]) -> F:
        """Return what a family shares on this connection; see `Call.family`."""
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = make(self)
        return cast("F", family)

    @property
    def is_idle(self) -> bool:
        """Whether no call is open, and no family has anything of the client."""
        return not (self._open or self._families or self._scheduled)

    def is_open(self, call: Call) -> bool:
        """Return whether a call has not ended."""
        return self._open.get(call.number) is call

    # -- items of the client -----------------------------------------------------------------------------------------

    def receive(self, message: CallItems) -> CallItems | None:
        """Handle the items of one frame; what they bring at once leaves in one frame.

        Return the items that are left for later: a frame may ask for more than the client takes in time.

        Raises:
            RemoteProtocolError: a call is opened under a number that is in use.
        """
        self._holding = True
        calls, items = self._open, message.items
        try:
            for at, (number, kind, body) in enumerate(items):
                if at and self._outbox.full:
                    return CallItems(items[at:])
                call = calls.get(number)
                if kind == OPEN:
                    if call is not None:
                        raise RemoteProtocolError(f"call {number} is open already")
                    self._begin(number, body)
                elif call is None:
                    continue  # it has ended, and the client did not know
                elif kind == MORE:
                    self._pass_on(call, body)
                elif kind == CANCEL and call.stream is not None:  # a call with one answer is answered all the same
                    call.end()
        finally:
            for family in self._families.values():
                family.end_of_frame()
            self._holding = False
            self.flush()
        return None

    def _begin(self, number: int, body: Data) -> None:
        call = self._open[number] = Call(self, number)
        if len(self._open) > CALLS_MAX:
            call.fail(CallRefusedError("quota", f"{CALLS_MAX} calls are open on this connection, which is the limit"))
            return
        try:
            name, raw = _OPENING.decode(body)
            method = self.methods.get(name)
            if method is None:
                call.fail(CallRefusedError("unsupported", f"this server has no method {name!r}: upgrade the server"))
                return
            answer = method.answer(call, method.decode(raw))
        except UNREADABLE as error:
            call.fail(CallRefusedError("bad_argument", _reason(error)))
        except Exception as error:
            call.fail_by(error)
        else:
            if isinstance(answer, Stream):
                if self._open.get(number) is call:
                    call.stream = answer
                else:  # it has ended itself while it began
                    answer.close(lost=False)
            elif type(answer) is CoroutineType:
                Work(_answered(call, answer))
            else:
                call.end(answer)

    def _pass_on(self, call: Call, body: Data) -> None:
        stream = call.stream
        if stream is None:
            return  # of a call with one answer, which is on its way
        try:
            stream.receive(body)
        except UNREADABLE as error:
            call.fail(CallRefusedError("bad_argument", _reason(error)))
        except Exception as error:
            call.fail_by(error)

    # -- items of the server -----------------------------------------------------------------------------------------

    def put(self, number: int, kind: int, body: tuple[Data, ...]) -> None:
        """Add an item to the frame of this turn."""
        size = sum(map(len, body))
        if size > self.body_bytes_max:
            raise LocalProtocolError(f"an item of {size} bytes is over the frame limit, {self.body_bytes_max}")
        if self._closed:
            return
        total = self._size + ITEM_HEAD.size + size
        if self._size and total > self._gathered_bytes_max:
            self.flush()
            total = ITEM_HEAD.size + size
        self._size = total
        self._parts.append(ITEM_HEAD.pack(number, kind, size))
        self._parts += body
        if not self._holding and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Send the items that were put."""
        if self._size and not self._closed:
            parts, self._parts, self._size = self._parts, [SERVER_HEAD], 0
            self._outbox.send(self._sealer.seal_parts(parts))

    def finish(self, call: Call, *, lost: bool) -> bool:
        """Release a call; `False` if it has ended before."""
        if self._open.get(call.number) is not call:
            return False
        del self._open[call.number]
        call.released(lost=lost)
        return True

    # -- the connection ----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume the streams that stopped because the outbox was full."""
        if not self._stalled:
            return
        self._stalled = False
        for call in list(self._open.values()):
            if call.stream is not None:
                call.stream.resume()

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The patterns of all streams."""
        streams = [call.stream for call in self._open.values() if call.stream is not None]
        return [one for stream in streams for one in stream.subscriptions]

    def access_changed(self, principal: Identity) -> None:
        """Call streams, which check the rights of the client again."""
        self.principal = principal
        for call in list(self._open.values()):
            if call.stream is not None:
                call.stream.access_changed()

    def close(self, *, lost: bool) -> None:
        """End all calls without a word: the connection is gone (`lost`), or the server closes it next."""
        self._closed = True
        for call in list(self._open.values()):
            self.finish(call, lost=lost)
        families, self._families = self._families, {}
        for family in families.values():
            family.close()


def _reason(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


async def _answered(call: Call, work: Coroutine[Any, Any, object]) -> None:
    """Answer a call with the result of a coroutine."""
    try:
        result = await work
    except Exception as error:
        call.fail_by(error)
    else:
        call.end(result)
