"""The link of a member to the owner: which one it goes to, and when."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nats", reason="clusters are not tested: the package nats-py is not installed")

from babelbus.clock import SystemClock
from babelbus.link import edge
from babelbus.server.owner_link import OwnerLink
from babelbus.storage.jetstream.lease import Held
from tests.support.bus import SAFETY_NET_SECONDS, turns


def test_a_member_whose_dead_owner_answers_nobody_goes_to_the_next_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edge, "WELCOME_SECONDS", 3600.0)

    async def test() -> None:
        dead, alive, lost = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def linked() -> None:
            raise AssertionError("neither of them answers")

        def silent(called: asyncio.Event) -> Callable[[], asyncio.Protocol]:
            class Silent(asyncio.Protocol):
                def data_received(self, data: bytes) -> None:
                    called.set()

                def connection_lost(self, error: Exception | None) -> None:
                    lost.set()

            return Silent

        def lease(epoch: int, server: asyncio.Server) -> Held:
            host, port = server.sockets[0].getsockname()
            return Held("owner", "place", "host", 10.0, address=f"{host}:{port}", epoch=epoch)

        loop = asyncio.get_running_loop()
        async with (
            await loop.create_server(silent(dead), "127.0.0.1") as first,
            await loop.create_server(silent(alive), "127.0.0.1") as second,
        ):
            seen: Any = SimpleNamespace(seen=lease(1, first), seen_count=0)
            link = OwnerLink(seen, None, SystemClock(), linked)
            linking = asyncio.ensure_future(link.keep(edge.Edge("m", SystemClock())))
            await dead.wait()
            link.look()  # it was alive when it renewed its lease, and may be yet
            await turns(20)
            assert not lost.is_set()
            seen.seen = lease(2, second)
            link.look()
            async with asyncio.timeout(SAFETY_NET_SECONDS):
                await alive.wait()
            linking.cancel()
            await asyncio.wait([linking])

    asyncio.run(test())


def test_a_member_names_the_error_of_an_owner_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "WELCOME_SECONDS", 0.0)

    async def test() -> None:
        async def linked() -> None:
            raise AssertionError("the owner does not answer")

        tried = asyncio.Event()
        async with await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1") as server:
            host, port = server.sockets[0].getsockname()
            held = Held("id", "place", "host", 10.0, name="owner", address=f"{host}:{port}", epoch=1)
            seen: Any = SimpleNamespace(seen=held, seen_count=0)
            link = OwnerLink(seen, None, SystemClock(), linked)
            monkeypatch.setattr(link._log, "write", lambda *_: tried.set())
            linking = asyncio.ensure_future(link.keep(edge.Edge("m", SystemClock())))
            await asyncio.wait_for(tried.wait(), SAFETY_NET_SECONDS)
            assert link.trouble == f"member owner at {host}:{port}: TimeoutError"
            linking.cancel()
            await asyncio.wait([linking])

    asyncio.run(test())
