"""The HTTP half of a connection, for every protocol over HTTP: order, back-pressure, refusals and the end (RFC 9112).

A protocol derives from `HttpSession` and says what a request means in `answer_request`. The session that reads behind
an upgrade is the `successor`.
"""

from abc import ABC, abstractmethod
from collections import deque

from babelbus.errors import PeerLeavesError, RemoteProtocolError, without_frames
from babelbus.wire.browsers import BrowserGuard, Refusal
from babelbus.wire.contract import Continuation, Outbox, Session
from babelbus.wire.http.decoder import RequestDecoder
from babelbus.wire.http.fields import HttpError
from babelbus.wire.http.request import Request, RequestRun
from babelbus.wire.http.response import CONTINUE, encode_error

IDLE_SECONDS = 180.0
"""How long a connection without a setting of its own stays open while no request comes and no answer goes."""


class HttpSession(Session, ABC):
    """Requests of one connection, carried out and answered in their order, each when the outbox has room.

    With `varying`, the name of a header, requests that differ in this header and the body alone come as a run.
    """

    def __init__(self, outbox: Outbox, guard: BrowserGuard, *, body_bytes_max: int, varying: str | None = None) -> None:
        self._outbox = outbox
        self._guard = guard
        self._varying = varying
        self._decoder = RequestDecoder(body_bytes_max=body_bytes_max, varying=varying)
        self._waiting: deque[Request | RequestRun] = deque()
        self._admitted: Request | None = None
        """The common part of the last run whose head the guard let in."""
        self._last_word: RemoteProtocolError | PeerLeavesError | None = None
        self._successor: Session | None = None
        self._heard = False
        self.is_over = False
        """Whether no further request can come."""
        self.active = True
        """Whether bytes came since the protocol cleared this."""

    # -- for the protocol --------------------------------------------------------------------------------------------

    @abstractmethod
    def answer_request(self, request: Request, refusal: Refusal | None) -> bool:
        """Handle a request and answer it; return `False` to be called again when the outbox has room.

        With a `refusal` the request comes from a page that may only read; refuse everything else.
        """

    def answer_run(self, run: RequestRun) -> bool:
        """Handle a run; return `False` to get its requests one by one."""
        return False

    def settle(self) -> None:
        """Send what was carried out and is not answered yet: other answers follow, or none."""
        return

    def keeps_alive(self, request: Request) -> bool:
        """Return whether the connection stays open behind the answer to a request."""
        return request.keep_alive

    def proves_sender(self, head: Request) -> bool:
        """Return whether a request shows in its head who sent it, as far as its client has to."""
        return True

    def refuse(self, refusal: Refusal) -> None:
        """Answer a request of a page that may not make it, and close the connection behind the answer."""
        self._guard.refused(refusal)
        self.end(HttpError(refusal.status, refusal.text), PeerLeavesError(refusal.text))

    def end(self, error: HttpError, last_word: PeerLeavesError | None = None) -> None:
        """Answer what is no request, behind all earlier answers; the connection closes when the answer is sent."""
        self.settle()
        self._last_word = last_word or error
        self.is_over = True
        self._outbox.answer(lambda: encode_error(error), self._outbox.bytes_max)

    def switch(self, response: bytes) -> None:
        """Send the answer to an upgrade; `follow` with the successor, which may send behind the answer."""
        self.settle()
        self._outbox.answer(lambda: response, len(response))

    def follow(self, successor: Session) -> None:
        """Start the successor: it reads from now on."""
        self._successor = successor
        self.is_over = True
        unread = self._decoder.unread()
        if unread:
            successor.receive_data(unread)

    def stream(self) -> None:
        """Begin an answer without an end: nothing that follows is read."""
        self.settle()
        self.is_over = True

    # -- bytes -------------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Handle a chunk: carry out each request that is complete.

        Raises:
            RemoteProtocolError: the client broke the protocol; earlier requests were carried out and answered.
            PeerLeavesError: the client wants the connection closed, and has all its answers.
        """
        self.active = True
        if self._successor is not None:
            self._successor.receive_data(data)
        elif not self.is_over:  # else nothing that follows can be answered
            self._decoder.receive_data(data)
            self.resume()

    def resume(self) -> None:
        """Continue with requests that were put off while the outbox was full, then with requests that came.

        Raises:
            RemoteProtocolError, PeerLeavesError: the connection ends, and everything is answered.
        """
        if self._successor is not None:
            self._successor.resume()
            return
        if not self.is_over:
            self._work()
        if self._last_word is not None and not self._outbox.waiting:
            raise self._last_word

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """Those of the successor: a request alone has none."""
        return [] if self._successor is None else self._successor.subscriptions

    @property
    def busy(self) -> bool:
        """Whether requests are put off, or the end waits for the last answer."""
        if self._successor is not None:
            return self._successor.busy
        return bool(self._waiting) or self._last_word is not None

    @property
    def established(self) -> bool:
        """Whether a whole request has come, and the successor is established if there is one."""
        return self._heard and (self._successor is None or self._successor.established)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that are kept of a request or message that is not complete."""
        return self._decoder.unfinished_bytes if self._successor is None else self._successor.unfinished_bytes

    @property
    def trusted(self) -> bool:
        """Whether the peer may send more than a small part of a body."""
        if self._successor is not None:
            return self._successor.trusted
        head = self._decoder.begun
        return head is None or self.proves_sender(head)

    def refuse_unfinished(self, text: str, *, later: bool) -> None:
        """Drop the request that is not complete, and refuse it behind all earlier answers.

        Raises:
            RemoteProtocolError, PeerLeavesError: the connection ends, and everything is answered.
        """
        if self._successor is not None:
            self._successor.refuse_unfinished(text, later=later)
            return
        self._decoder.fail(HttpError(503, text, [("retry-after", "1")]) if later else HttpError(413, text))
        self.resume()

    @property
    def is_portable(self) -> bool:
        """Whether the successor is: a connection for requests is made anew."""
        return self._successor is not None and self._successor.is_portable

    @property
    def is_copyable(self) -> bool:
        """Whether the successor is."""
        return self._successor is not None and self._successor.is_copyable

    def continuation(self) -> Continuation | None:
        """Return that of the successor."""
        return None if self._successor is None else self._successor.continuation()

    def close(self) -> None:
        """Handle the end of the connection."""
        if self._successor is not None:
            self._successor.close()

    def _work(self) -> None:
        decoder, waiting = self._decoder, self._waiting
        while waiting or decoder.has_more:
            if not waiting:
                try:
                    if decoder.error is not None:
                        raise decoder.error
                    waiting += decoder.runs()
                except HttpError as error:
                    self.end(without_frames(error))
                    return
                if not waiting:
                    break
            if self._outbox.full or not self._answer_waiting():
                return
            if self.is_over:
                waiting.clear()  # nothing behind the last request can be answered
                return
            decoder.go_on()  # behind a request that asked for a WebSocket where none is offered
        if decoder.take_continue():
            self._outbox.answer(lambda: CONTINUE, len(CONTINUE))

    def _answer_waiting(self) -> bool:
        """Answer what waits, as far as the outbox has room; return whether everything is answered."""
        waiting = self._waiting
        done = True
        while waiting and not self.is_over:
            request = waiting[0]
            if type(request) is RequestRun:
                self._heard = True
                waiting.popleft()
                if not self._admits(request.request) or not self.answer_run(request):
                    assert self._varying is not None
                    waiting.extendleft(reversed(request.requests(self._varying)))
                continue
            assert type(request) is Request
            if not self._answer(request):
                done = False
                break
            waiting.popleft()
            if not self.is_over and not self.keeps_alive(request):
                self.settle()
                self._last_word = PeerLeavesError("the client wants the connection closed")
                self.is_over = True
                # The outbox counts as full until the last answer is written: then `resume` ends the connection.
                self._outbox.answer(bytes, self._outbox.bytes_max)
        self.settle()
        return done

    def _admits(self, common: Request) -> bool:
        """Return whether requests with this common part may do everything; a part that is known costs a comparison."""
        if common is not self._admitted and self._guard.check(common.headers) is None:
            self._admitted = common
        return common is self._admitted

    def _answer(self, request: Request) -> bool:
        self._heard = True
        refusal = self._guard.check(request.headers)
        if refusal is not None and not refusal.allows_reading:
            self.refuse(refusal)
            return True
        return self.answer_request(request, refusal)
