"""The protocols that a server speaks: an entry here and a section of the configuration make a service."""

import sys
from collections.abc import Callable
from typing import Any

from babelbus.config import Config
from babelbus.listening.openings import Opening
from babelbus.protocols.eventmesh import service as eventmesh
from babelbus.protocols.jebp import service as jebp
from babelbus.protocols.service import MakeService
from babelbus.protocols.worterbuch import service as worterbuch
from babelbus.protocols.worterbuch.names import SYS
from babelbus.protocols.worterbuch.values import parse_value
from babelbus.protocols.zbus import service as zbus

SERVICES: dict[str, MakeService] = {"jebp": jebp.JebpService}
if sys.platform == "linux":  # SOCK_SEQPACKET with credentials
    from babelbus.protocols.sbus.service import SbusService

    SERVICES["sbus"] = SbusService
SERVICES |= {
    "worterbuch": worterbuch.WorterbuchService,
    "zbus": zbus.ZbusService,
    "eventmesh": eventmesh.EventmeshService,
}

_OPENINGS: dict[str, Callable[[Any], list[Opening]]] = {
    "jebp": jebp.openings,
    "worterbuch": worterbuch.openings,
    "zbus": zbus.openings,
    "eventmesh": eventmesh.openings,
}


def openings(config: Config) -> list[Opening]:
    """Return the TCP listeners of all services that are enabled.

    Raises:
        ConfigError: a setting of a section is wrong.
    """
    sections = {name: getattr(config, name) for name in _OPENINGS}
    return [one for name, section in sections.items() if section.enabled for one in _OPENINGS[name](section)]


LATE_MODULES = (worterbuch.WEB, zbus.WEB, *(f"{eventmesh.PACKAGE}.{name}" for name in ("http", "admin", "rpc")))
"""The modules that services load when their first clients come."""
TRANSIENT_KEYS = SYS
"""First element of the keys of the state that services set and that no log keeps."""
read_value = parse_value
"""Return a text as a value of the state that the clients of all services can read, or raise `ValueError`."""
