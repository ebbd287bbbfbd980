"""A client's subscriptions to keys, patterns and names below a key (docs/specifications/worterbuch.md, 7).

Everything up to a subscription is answered and told before it begins, so that what follows has been seen by its
snapshot, or has not.
"""

from collections.abc import Callable

from babelbus.core.state import children_pattern, subscription_pattern
from babelbus.core.subject import PathPattern, exactly
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
        events = exactly(key)
        subscriber = Subscriber(self._client, message.transaction_id, key, unique=bool(message.unique))

        def encode() -> bytes:
            value = self._access.find_visible(key)
            if value is None:
                return b""
            return encode_state(message.transaction_id, value, self._translator.write_pair_key(key))

        self._begin(message, subscriber, events, None if message.live_only else encode)
        return b""

    def psubscribe(self, message: m.PSubscribe) -> bytes:
        """Subscribe to all keys that match; the `ack` is sent at once."""
        translator, text = self._translator, message.pattern
        pattern = translator.read_pattern(text)
        self._access.need("read", text)
        events = subscription_pattern(text)
        subscriber = Subscriber(
            self._client,
            message.transaction_id,
            text,
            pattern=translator.write_pattern(text),
            unique=bool(message.unique),
            aggregate_ms=message.aggregate_ms,
        )

        def encode() -> bytes:
            pairs = translator.write_pairs(self._access.match_visible(pattern))
            return encode_pstate(message.transaction_id, translator.write_pattern(text), pairs)

        self._begin(message, subscriber, events, None if message.live_only else encode)
        return b""

    def subscribels(self, message: m.SubscribeLs) -> bytes:
        """Subscribe to the names below a key; the `ack` is sent at once."""
        parent = message.parent
        self._translator.check_size(parent)
        self._access.need("read", children_pattern(parent))
        subscriber = Subscriber(self._client, message.transaction_id, parent)

        def encode() -> bytes:
            subscriber.names = self._access.children(parent)
            return encode_ls(message.transaction_id, subscriber.names)

        self._begin(message, subscriber, None, encode)
        self._hub.subscribe_ls(subscriber)
        return b""

    def _begin(
        self, message: m.Request, subscriber: Subscriber, events: PathPattern | None, encode: Callable[[], bytes] | None
    ) -> None:
        """Register a subscription to events, or to names without a pattern of events; answer all requests up to it,
        and send its first event if it has a first event.

        Raises:
            RefusedError: the transaction id is in use, or the client has as many subscriptions as it may have.
            AccessRefusedError, QuotaExceededError: see `Hub.subscribe`.
        """
        subscribers = self._client.ls_subscribers if events is None else self._client.subscribers
        number = message.transaction_id
        if number in subscribers:
            raise RefusedError(ErrorCode.OTHER, f"there is a subscription {number}; end it first")
        count = len(self._client.subscribers) + len(self._client.ls_subscribers)
        if count >= self._hub.settings.subscriptions_max:
            text = f"a client has at most {count:,} subscriptions (worterbuch.subscriptions_max); end some first"
            raise RefusedError(ErrorCode.OTHER, text)
        if events is not None:
            self._hub.subscribe(subscriber, events)
        self._answers.add(message, encode_ack(number))
        receipt = self._answers.finish()
        subscriber.since = self._state.commit_number
        subscribers[number] = subscriber
        if encode is not None:
            self._answers.send_snapshot(receipt, encode)
        if events is not None:
            self._hub.show_subscription(subscriber)

    def unsubscribe(self, message: m.Unsubscribe) -> bytes:
        """End a subscription of any kind; earlier changes are still delivered."""
        self._answers.finish()
        subscriber = self._client.subscribers.pop(message.transaction_id, None)
        if subscriber is None:
            return self.unsubscribels(m.UnsubscribeLs(message.transaction_id))
        self._hub.unsubscribe(subscriber)
        return encode_ack(message.transaction_id)

    def unsubscribels(self, message: m.UnsubscribeLs) -> bytes:
        """End an ls subscription; earlier changes are still delivered."""
        self._answers.finish()
        subscriber = self._client.ls_subscribers.pop(message.transaction_id, None)
        if subscriber is None:
            raise RefusedError(ErrorCode.NOT_SUBSCRIBED, f"no subscription {message.transaction_id}")
        self._hub.unsubscribe_ls(subscriber)
        return encode_ack(message.transaction_id)
