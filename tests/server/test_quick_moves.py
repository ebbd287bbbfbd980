"""A planned move of the data waits for nothing that cannot come: members read nothing of their clients meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from babelbus.config import Config, ServerSettings
from tests.protocols.eventmesh.test_rpc import PUBLISH, listen
from tests.support.eventmesh import MeshClient
from tests.support.http2 import DATA, END_HEADERS, GOAWAY, HEADERS, RawClient, block, frame
from tests.support.members import Party
from tests.support.nats import NatsServer

DRAIN_SECONDS = 3600.0
"""How long a stop would wait for answers: a move that waits for them fails."""
FOREVER_MS = "86400000"


class Patient(Party):
    """Members with all the time that answers could take."""

    def config(self, name: str, url: str | None = None) -> Config:
        return msgspec.structs.replace(super().config(name, url), server=ServerSettings(drain_seconds=DRAIN_SECONDS))


@pytest.fixture
def party(nats: NatsServer, tmp_path: Path) -> Iterator[Patient]:
    party = Patient(nats, tmp_path, lease_seconds=3600.0)
    for name in ("a", "b"):
        party.start(name)
        party.until_ready(name)
    party.until_all_present("a", "a", "b")
    yield party
    party.close()


def address(party: Party, name: str, listener: str) -> str:
    return party.children[name].addresses[listener]


def mesh(party: Party, name: str, **agent: object) -> MeshClient:
    return MeshClient(address(party, name, "eventmesh-tcp")).hello(**agent)  # type: ignore[arg-type]


def rpc(party: Party, name: str) -> RawClient:
    return RawClient(address(party, name, "eventmesh-grpc"))


def test_clients_over_grpc_hear_that_the_owner_goes_whether_they_answer_or_not(party: Patient) -> None:
    with rpc(party, "a") as near, rpc(party, "b") as far:
        for client in (near, far):
            client.send(listen("news"))
            client.until(DATA, 1)
            client.send(frame(HEADERS, END_HEADERS, 3, block(path=PUBLISH)))  # its message never comes
        party.move("b", "b")
        for client in (near, far):
            assert client.status(1)["grpc-status"] in ("0", "14")
            assert client.status(3)["grpc-status"] == "14"
            goodbyes = [one.payload[:4] for one in client.until_closed() if one.kind == GOAWAY]
            assert goodbyes == [(2**31 - 1).to_bytes(4, "big"), (3).to_bytes(4, "big")]
