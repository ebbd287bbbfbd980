"""An edge process of a server: `python -m babelbus.server.edge DESCRIPTOR NAME LEVEL FORMAT UVLOOP`, started by it.

The first argument is the socket of the link. The core sends the listeners; the process ends when the link ends.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial

import msgspec

from babelbus.clock import SystemClock
from babelbus.config import TlsSettings
from babelbus.descriptors import raise_limit
from babelbus.errors import BabelbusError, ConfigError
from babelbus.link.client import EdgeListener
from babelbus.link.edge import Edge
from babelbus.link.frames import ListenerInfo
from babelbus.listening.certificates import Certificates, Tls
from babelbus.listening.fronts import Fronts
from babelbus.protocols.jebp.front import JebpFronts
from babelbus.server import logs

log = logging.getLogger(__name__)

GC_FIRST_THRESHOLD = 50_000
"""Objects between two looks of the cycle collector, as in the core."""
FRONTS: dict[str, Callable[[bytes], Fronts]] = {"jebp": JebpFronts}
"""Makes fronts of the content of a `FrontPlan`, by listener."""
LAST_SECONDS = 2.0
"""How long clients may take what was written to them when the core has closed the link."""


class EdgeTls(msgspec.Struct, frozen=True):
    """The TLS of a listener, as an edge makes it again from the files."""

    settings: TlsSettings
    section: str
    cert_file: str | None
    key_file: str | None
    alpn: list[str]


def main(arguments: list[str]) -> None:
    """Run the process."""
    descriptor, name, level, log_format, has_uvloop = arguments
    logs.configure(level, log_format)
    # The core decides when an edge ends: a signal to the group of processes must not cut a drain short.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise_limit(0)
    gc.set_threshold(GC_FIRST_THRESHOLD)
    factory = None
    if int(has_uvloop):
        try:
            import uvloop
        except ImportError:  # the core has said so
            pass
        else:
            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_run(socket.socket(fileno=int(descriptor)), name))


async def _run(connection: socket.socket, name: str) -> None:
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def lose(reason: str) -> None:
        if not lost.done():
            lost.set_result(reason)

    edge = Edge(name, SystemClock(), on_lost=lose, make_fronts=FRONTS)
    welcome = await edge.connect_socket(connection)
    stores: list[Certificates] = []
    await edge.open([_listener(info, stores) for info in welcome.listeners])
    edge.load_again = partial(_reload, stores)
    for store in stores:
        store.watch()
    edge.send_ready()
    gc.collect()
    gc.freeze()
    log.debug("edge %s listens", name)
    reason = await lost
    log.debug("edge %s ends: %s", name, reason)
    await edge.stop()
    await edge.wait_closed(LAST_SECONDS)


def _listener(info: ListenerInfo, stores: list[Certificates]) -> EdgeListener:
    sockets = [socket.socket(fileno=descriptor) for descriptor in info.descriptors]
    return EdgeListener(info.name, sockets, _tls(info, stores), info.handshake_seconds)


def _tls(info: ListenerInfo, stores: list[Certificates]) -> Tls | None:
    if info.tls is None:
        return None
    given = msgspec.json.decode(info.tls, type=EdgeTls)
    store = Certificates(given.settings)
    stores.append(store)
    return store.make_tls(given.section, True, cert_file=given.cert_file, key_file=given.key_file, alpn=given.alpn)


def _reload(stores: list[Certificates]) -> None:
    """Load the certificates again; wrong files leave those before in use."""
    for store in stores:
        try:
            store.reload()
        except ConfigError as error:
            log.error("reload: %s", error)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (BabelbusError, OSError) as error:
        sys.exit(f"edge: {error}")
