"""Pages and files of the administration endpoint, as a browser without a token gets them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from yarl import URL

from babelbus.config import AdminSettings
from babelbus.listening.sockets import open_sockets
from babelbus.metrics import Metrics
from babelbus.web.admin import AdminServer
from babelbus.web.api import AdminApi
from tests.web.test_admin import TOKEN, FakeServer

Get = Callable[..., Coroutine[Any, Any, tuple[int, aiohttp.ClientResponse, bytes]]]


def browse(test: Callable[[Get], Coroutine[Any, Any, None]], settings: AdminSettings | None = None) -> None:
    async def run() -> None:
        bus = FakeServer()
        api = AdminApi(bus, Metrics(), read_value=bytes)
        server = AdminServer(bus, api, token=TOKEN, settings=settings or AdminSettings(port=0))
        sockets = await open_sockets("127.0.0.1", 0)
        host, port = sockets[0].getsockname()
        await server.start(sockets)
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as session:

                async def get(
                    path: str, method: str = "GET", **headers: str
                ) -> tuple[int, aiohttp.ClientResponse, bytes]:
                    url = URL(f"http://{host}:{port}{path}", encoded=True)
                    sent = {"Accept-Encoding": "identity"} | headers
                    async with session.request(method, url, headers=sent, allow_redirects=False) as reply:
                        return reply.status, reply, await reply.read()

                await test(get)
        finally:
            await server.stop()
            await bus.broker.close()

    asyncio.run(run())
