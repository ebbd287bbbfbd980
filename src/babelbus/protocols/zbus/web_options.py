"""The options of one HTTP port of zbus."""

from typing import Final

import msgspec

from babelbus.protocols.zbus.open_urls import OpenUrls
from babelbus.protocols.zbus.static import StaticFiles
from babelbus.wire.browsers import BrowserGuard
from babelbus.wire.cors import Cors

NO_PAGES: Final = BrowserGuard()
"""Lets no page of another origin in."""


class WebOptions(msgspec.Struct, frozen=True):
    """By default there is nothing but the protocol."""

    monitor: bool = False
    """Whether it is the port of the list of queues, where no url is a service's."""
    cors: Cors | None = None
    files: StaticFiles | None = None
    """The files that GET returns where no url belongs to a service."""
    open_urls: OpenUrls = OpenUrls()
    """The urls that need no signature."""
    guard: BrowserGuard = NO_PAGES


NOTHING_ELSE = WebOptions()
