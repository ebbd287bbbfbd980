"""A connection whose session puts its requests off until it is told to go on."""

import logging

from babelbus.config import QuotaSettings, ServerSettings
from babelbus.core.quotas import Quotas
from babelbus.limited_log import LimitedLog
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import Door
from babelbus.metrics import Metrics
from babelbus.protocols.budget import Budget
from babelbus.protocols.connection import Connection
from babelbus.protocols.contract import Continuation, Session
from tests.support.clock import ManualClock


class Hesitant(Session):
    """A session that puts everything off until it is told to go on."""

    def __init__(self) -> None:
        self._busy = False
        self.may_go_on = False

    def receive_data(self, data: bytes) -> None:
        self._busy = not self.may_go_on

    def resume(self) -> None:
        self._busy = not self.may_go_on

    @property
    def busy(self) -> bool:
        return self._busy

    @property
    def established(self) -> bool:
        return True

    @property
    def is_portable(self) -> bool:
        return True

    def close(self) -> None:
        return

    def continuation(self) -> Continuation:
        return Continuation("owner", b"")


def connect(session: Session) -> Connection:
    metrics, clock = Metrics(), ManualClock()
    settings = ServerSettings()
    door = Door(
        "acme",
        metrics,
        LimitedLog(logging.getLogger("test"), clock),
        Crowd(settings),
        connections_max=10,
        handshake_seconds=30,
    )
    quotas = Quotas(QuotaSettings(), clock, metrics)
    return Connection(door, lambda *_: session, metrics, set(), Budget(settings, metrics), quotas, bytes_max=2**20)
