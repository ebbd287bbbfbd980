"""A client's subscriptions to keys, patterns and names below a key (docs/specifications/worterbuch.md, 7).

Everything up to a subscription is answered and told before it begins, so that what follows has been seen by its
snapshot, or has not.
"""

from babelbus.core.receipt import Promise
from babelbus.core.state import children_pattern, subscription_pattern
from babelbus.core.subject import exactly
from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.access import Access
from babelbus.protocols.worterbuch.answers import Answers
from babelbus.protocols.worterbuch.codec import encode_ack, encode_ls, encode_pstate, encode_state
from babelbus.protocols.worterbuch.errors import ErrorCode, RefusedError
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.peer import Peer, Subscriber
from babelbus.protocols.worterbuch.translator import Translator


class SubscriptionRequests:
    """The requests of one client that begin and end subscriptions: each method does one, and gives what is to answer.

    Raises:
        RefusedError: it cannot be done, or may not.
    """

    def __init__(self, client: Peer, hub: Hub, translator: Translator, access: Access, answers: Answers) -> None:
        self._client = client
        self._hub = hub
        self._state = hub.state
        self._translator = translator
        self._access = access
        self._answers = answers

    def subscribe(self, message: m.Subscribe) -> bytes:
        """Subscribe to a key; the `ack` is sent at once."""
        key = message.key
        self._translator.check_key(key)
        self._access.need("read", key)
        receipt, subscriber = self._begin(message, key, is_pattern=False, unique=bool(message.unique))

        def encode() -> bytes:
            value = self._state.find(key)
            if value is None:
                return b""
            return encode_state(message.transaction_id, value, self._translator.write_pair_key(key))

        if not message.live_only:
            self._answers.send_snapshot(receipt, encode)
        self._hub.subscribe(subscriber, exactly(key))
        return b""

    def psubscribe(self, message: m.PSubscribe) -> bytes:
        """Subscribe to all keys that match; the `ack` is sent at once."""
        translator, text = self._translator, message.pattern
        pattern = translator.read_pattern(text)
        self._access.need("read", text)
        receipt, subscriber = self._begin(
            message, text, is_pattern=True, unique=bool(message.unique), aggregate_ms=message.aggregate_ms
        )

        def encode() -> bytes:
            pairs = translator.write_pairs(self._state.match(pattern))
            return encode_pstate(message.transaction_id, translator.write_pattern(text), pairs)

        if not message.live_only:
            self._answers.send_snapshot(receipt, encode)
        self._hub.subscribe(subscriber, subscription_pattern(text))
        return b""

    def _begin(
        self,
        message: m.Subscribe | m.PSubscribe,
        subject: str,
        *,
        is_pattern: bool,
        unique: bool,
        aggregate_ms: int | None = None,
    ) -> tuple[Promise, Subscriber]:
        """Answer all requests up to a subscription; return when their changes are stored, and the subscriber."""
        transaction_id = message.transaction_id
        self._check_room(self._client.subscribers, transaction_id)
        self._answers.add(message, encode_ack(transaction_id))
        receipt = self._answers.finish()
        subscriber = self._client.subscribers[transaction_id] = Subscriber(
            self._client,
            transaction_id,
            subject,
            pattern=self._translator.write_pattern(subject) if is_pattern else None,
            unique=unique,
            since=self._state.commit_number,
            aggregate_ms=aggregate_ms,
        )
        return receipt, subscriber

    def _check_room(self, subscribers: dict[int, Subscriber], transaction_id: int) -> None:
        """Check that the client may have a further subscription under this number.

        Raises:
            RefusedError: the number is in use, or the client has as many subscriptions as it may have.
        """
        if transaction_id in subscribers:
            raise RefusedError(ErrorCode.OTHER, f"there is a subscription {transaction_id}; end it first")
        count = len(self._client.subscribers) + len(self._client.ls_subscribers)
        if count >= self._hub.settings.subscriptions_max:
            text = f"a client has at most {count:,} subscriptions (worterbuch.subscriptions_max); end some first"
            raise RefusedError(ErrorCode.OTHER, text)

    def unsubscribe(self, message: m.Unsubscribe) -> bytes:
        """End a subscription of any kind; earlier changes are still delivered."""
        self._answers.finish()
        subscriber = self._client.subscribers.pop(message.transaction_id, None)
        if subscriber is None:
            return self.unsubscribe_ls(m.UnsubscribeLs(message.transaction_id))
        self._hub.unsubscribe(subscriber)
        return encode_ack(message.transaction_id)

    def subscribe_ls(self, message: m.SubscribeLs) -> bytes:
        """Subscribe to the names below a key; the `ack` is sent at once."""
        parent = message.parent
        self._translator.check_size(parent)
        self._access.need("read", children_pattern(parent))
        transaction_id = message.transaction_id
        self._check_room(self._client.ls_subscribers, transaction_id)
        self._answers.add(message, encode_ack(transaction_id))
        receipt = self._answers.finish()
        subscriber = self._client.ls_subscribers[transaction_id] = Subscriber(
            self._client, transaction_id, parent, unique=False, since=self._state.commit_number
        )
        self._answers.send_snapshot(receipt, lambda: encode_ls(transaction_id, self._hub.children(parent)))
        self._hub.subscribe_ls(subscriber)
        return b""

    def unsubscribe_ls(self, message: m.UnsubscribeLs) -> bytes:
        """End an ls subscription; earlier changes are still delivered."""
        self._answers.finish()
        subscriber = self._client.ls_subscribers.pop(message.transaction_id, None)
        if subscriber is None:
            raise RefusedError(ErrorCode.NOT_SUBSCRIBED, f"no subscription {message.transaction_id}")
        self._hub.unsubscribe_ls(subscriber)
        return encode_ack(message.transaction_id)
