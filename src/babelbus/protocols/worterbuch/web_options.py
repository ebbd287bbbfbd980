"""The operator's choices for the HTTP port of Wörterbuch."""

from collections.abc import Mapping

import msgspec

from babelbus.protocols.worterbuch.profiles import Endpoint
from babelbus.wire.browsers import BrowserGuard
from babelbus.wire.cors import Cors
from babelbus.wire.http import Files

NO_PAGES = BrowserGuard()
"""Lets no page of another origin in."""


class WebOptions(msgspec.Struct, frozen=True):
    """The operator's choices for the HTTP port."""

    paths: Mapping[str, Endpoint]
    """Where clients may upgrade to WebSocket."""
    cors: Cors | None = None
    """Pages that may use REST."""
    files: Files | None = None
    """The files that GET serves beside the API."""
    guard: BrowserGuard = NO_PAGES
    is_tls: bool = False
    """Whether the port speaks TLS."""
