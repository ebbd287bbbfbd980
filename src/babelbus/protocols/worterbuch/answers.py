"""The answers of a client, in the order of its requests, and not before their changes are stored."""

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
        client: its `source` is the author of the changes; `sent` is set when it is answered.
        again: answers a reading request once more if the changes that its first answer shows are not stored.
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
        """The size of the large answers to this chunk."""

    def add(self, request: m.ClientMessage, reply: bytes) -> None:
        """Answer a request with the next `finish`."""
        self.requests.append(request)
        self.replies.append(reply)
        if len(reply) > HEAVY_BYTES:
            self.heavy_bytes += len(reply)

    def finish(self) -> Promise:
        """Answer all requests up to here when their changes are stored; return the promise of that."""
        requests, replies = self.requests, self.replies
        self.requests, self.replies = [], []
        return self._finish(lambda: requests, replies)

    def finish_run(self, run: m.SetRun) -> Promise:
        """Answer each set of a run with an `ack` when the changes are stored."""
        return self._finish(run.messages, [b'{"ack":{"transactionId":%d}}' % number for number in run.transaction_ids])

    def _finish(self, requests: Callable[[], list[m.ClientMessage]], replies: list[bytes]) -> Promise:
        receipt = self._state.commit(self._client.access.source)
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
        """Return the answers when the outcome of the commit is known: all changes are stored, or none."""
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
        """Send the first event of a subscription; encode it again if the changes that it shows are not stored."""
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
