"""What a client is answered, in the order of its requests, and not before what they changed is stored."""

from collections.abc import Callable

from babelbus.core.receipt import Promise
from babelbus.protocols.contract import Sender
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.errors import ErrorCode
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.peer import Framing, Peer
from babelbus.protocols.worterbuch.translator import Translator

HEAVY_BYTES = 16_384
"""Larger answers are counted against what one connection may make the server hold."""
CHANGING = (m.Set, m.CSet, m.Delete, m.PDelete, m.Publish, m.SPub)
READING = (m.Get, m.CGet, m.PGet, m.Ls, m.PLs)


class Answers:
    """The answers of one client. Those of a chunk are collected, and go out together with `finish`.

    Args:
        client: whose they are; its `source` stands beside what it changed, and it hears that something was `sent`.
        again: answers a request that only reads once more, when what it was answered first is not stored.
    """

    def __init__(
        self,
        client: Peer,
        hub: Hub,
        outbox: Sender,
        framing: Framing,
        translator: Translator,
        again: Callable[[m.ClientMessage], bytes],
    ) -> None:
        self._client = client
        self._state = hub.state
        self._received = hub.received
        self._outbox = outbox
        self._framing = framing
        self._translator = translator
        self._again = again
        self.replies: list[bytes] = []
        self.requests: list[m.ClientMessage] = []
        """The requests that `replies` answer, one each."""
        self.heavy_bytes = 0
        """How much the requests of this chunk made the server hold, as far as it is worth counting."""

    def add(self, request: m.ClientMessage, reply: bytes) -> None:
        """Answer a request with the next `finish`."""
        self.requests.append(request)
        self.replies.append(reply)
        if len(reply) > HEAVY_BYTES:
            self.heavy_bytes += len(reply)

    def finish(self) -> Promise:
        """Log what was changed, and answer everything that was asked up to here; return when it is stored."""
        requests, replies = self.requests, self.replies
        self.requests, self.replies = [], []
        return self._finish(lambda: requests, replies)

    def finish_run(self, run: m.SetRun) -> Promise:
        """Log what sets changed, and answer each with an `ack`."""
        return self._finish(run.messages, [b'{"ack":{"transactionId":%d}}' % number for number in run.transaction_ids])

    def _finish(self, requests: Callable[[], list[m.ClientMessage]], replies: list[bytes]) -> Promise:
        receipt = self._state.commit(self._client.source)
        if not replies:
            return receipt
        self._received.inc(len(replies), 0)
        self._client.sent = True
        if receipt.done and receipt.error is None:
            data = self._framing.encode(replies)
            self._outbox.answer(lambda: data, len(data))
        else:
            self._outbox.answer_when(
                [receipt],
                lambda: self._framing.encode(self._settle(requests(), replies, receipt)),
                sum(map(len, replies)),
            )
        return receipt

    def _settle(self, requests: list[m.ClientMessage], replies: list[bytes], receipt: Promise) -> list[bytes]:
        """Return the answers once it is known whether the changes are stored; if not, none of them was."""
        if receipt.error is None:
            return replies
        text = str(receipt.error)
        settled = []
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(request, CHANGING):
                settled.append(self._translator.encode_error(request.transaction_id, ErrorCode.IO_ERROR, text))
            elif isinstance(request, READING):
                settled.append(self._again(request))
            else:
                settled.append(reply)
        return settled

    def send(self, text: bytes) -> None:
        """Send a message behind the answers that are finished."""
        data = self._framing.encode((text,))
        self._client.sent = True
        if len(data) > HEAVY_BYTES:
            self.heavy_bytes += len(data)
        self._outbox.answer(lambda: data, len(data))

    def send_snapshot(self, receipt: Promise, encode: Callable[[], bytes]) -> None:
        """Send what a subscription begins with; when changes that it shows are not stored after all, what is."""
        text = encode()
        if receipt.done:
            if text:
                self.send(text)
            return

        def settle() -> bytes:
            settled = text if receipt.error is None else encode()
            return self._framing.encode((settled,)) if settled else b""

        self.heavy_bytes += len(text)
        self._outbox.answer_when([receipt], settle, len(text))
