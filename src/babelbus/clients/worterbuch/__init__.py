"""The client of Wörterbuch: keys, subscriptions and locks over TCP, unix sockets and WebSocket."""

__all__ = []
