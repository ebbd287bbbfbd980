"""Babelbus: one event bus that speaks five protocols over one durable core."""

TYPE_CHECKING = False  # that of `typing`, whose import would be most of the time of this one
if TYPE_CHECKING:
    from typing import Any

    from babelbus.client import BlockingClient as BlockingClient
    from babelbus.client import Client as Client
    from babelbus.client import Identity as Identity
    from babelbus.client import Message as Message

__version__ = "0.1.0"
__all__ = ["BlockingClient", "Client", "Identity", "Message"]


def __getattr__(name: str) -> "Any":
    """Import the client when its names are asked for: commands and the server need none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'babelbus' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("babelbus.client"), name)
