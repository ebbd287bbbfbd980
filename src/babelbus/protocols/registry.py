"""The protocols that a server speaks: an entry here and a section of the configuration make a service."""

import sys

from babelbus.protocols.eventmesh.service import EventmeshService
from babelbus.protocols.jebp.service import JebpService
from babelbus.protocols.service import MakeService
from babelbus.protocols.worterbuch.names import SYS
from babelbus.protocols.worterbuch.service import WorterbuchService
from babelbus.protocols.worterbuch.values import parse_value
from babelbus.protocols.zbus.service import ZbusService

SERVICES: dict[str, MakeService] = {"jebp": JebpService}
if sys.platform == "linux":  # SOCK_SEQPACKET with credentials
    from babelbus.protocols.sbus.service import SbusService

    SERVICES["sbus"] = SbusService
SERVICES |= {"worterbuch": WorterbuchService, "zbus": ZbusService, "eventmesh": EventmeshService}

TRANSIENT_KEYS = SYS
"""First element of the keys of the state that services set and that no log keeps."""
read_value = parse_value
"""Return a text as a value of the state that the clients of all services can read, or raise `ValueError`."""
