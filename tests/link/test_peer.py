"""One end of a link: how it closes."""

import asyncio
import socket
import struct

import pytest
import uvloop

from babelbus.link.frames import Frame
from babelbus.link.peer import Peer
from tests.support.bus import SAFETY_NET_SECONDS

RESETS = struct.pack("ii", 1, 0)
"""Time to linger: none, so that a close is a reset."""


class End(Peer):
    """An end that records how its link ended."""

    def __init__(self) -> None:
        super().__init__(silence_seconds=0)
        self.reasons: list[str] = []

    def handle(self, frames: list[Frame]) -> None:
        raise AssertionError("the other end sends nothing")

    def ended(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_link_that_the_other_end_has_reset_closes(factory: type[asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.connect(server.getsockname())
            ours, _ = server.accept()
            _, end = await asyncio.get_running_loop().connect_accepted_socket(End, ours)
            end.hold()  # so that this end does not read that it was reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
            client.close()
            await end.close("the core stops")
            await end.done
            assert end.reasons == ["the core stops"]

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(test(), SAFETY_NET_SECONDS))
