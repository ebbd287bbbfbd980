"""What a client publishes while the disk takes nothing: it is read no more before that costs much memory."""

from collections.abc import Callable

from babelbus.config import SbusSettings
from babelbus.core.flow_policy import Flow
from babelbus.core.publish import Publication
from babelbus.core.receipt import Receipt
from babelbus.core.router import Router
from babelbus.metrics import Metrics
from babelbus.protocols.sbus.credentials import Credentials
from babelbus.protocols.sbus.hub import Hub
from babelbus.protocols.sbus.ports import Port
from babelbus.protocols.sbus.session import UNSTORED_BYTES_MAX, Session
from babelbus.wire.packets import Packets

UNKNOWN_CONTROL = b"CMSG nonsense"


class HeldPort:
    """A port that records whether its client is read."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.holds: list[bool] = []

    def hold(self, holds: bool) -> None:
        self.holds.append(holds)

    def send(self, packets: Packets, first: int, last: int, *, stoppable: bool) -> bool:
        return False

    def reply(self, packet: bytes) -> None: ...

    def keep(self, wanted: Callable[[bytes], bool]) -> None: ...

    def wait_for(self, other: Port) -> None: ...

    def flow_changed(self) -> None: ...


def test_publications_in_front_of_a_command_count_until_they_are_stored() -> None:
    receipts: list[Receipt] = []

    def publish(publication: Publication) -> Receipt:
        receipts.append(Receipt())
        return receipts[-1]

    port = HeldPort()
    hub = Hub(Router(), Metrics(), SbusSettings(), publish=publish, topic_of=lambda subject: "plant")
    session = Session(hub, port, Credentials(0, 0, 1))
    packets = Packets.of([b"MSG plant\0" + bytes(UNSTORED_BYTES_MAX // 2), UNKNOWN_CONTROL])
    session.receive(packets, 0, 2)
    session.receive(packets, 0, 2)
    assert port.holds == [False, True]
    for receipt in receipts:
        receipt.resolve()
    assert port.holds[2:] == [False, False]
