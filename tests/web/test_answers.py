"""How a handler's failure is answered, over a real socket."""

import asyncio
import logging
from contextlib import closing

import pytest
from aiohttp import web

from babelbus.core.access import CLIENT
from babelbus.web.answers import answer_errors, write_lines
from babelbus.web.calls import HttpCall
from tests.support.bus import in_loop

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@in_loop
async def test_a_connection_that_breaks_while_lines_are_written_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def write_to_a_broken_connection(request: web.Request) -> web.StreamResponse:
        response = await HttpCall(request, CLIENT).begin_lines()
        assert request.transport is not None
        request.transport.abort()
        await write_lines(response, [b"{}"])
        assert isinstance(response, web.StreamResponse)
        return response

    application = web.Application(middlewares=[answer_errors])
    application.router.add_get("/", write_to_a_broken_connection)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    with caplog.at_level(logging.DEBUG, "babelbus"):
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        with closing(writer):
            writer.write(REQUEST)
            await reader.read()
        await runner.cleanup()
    ours = [record for record in caplog.records if record.name != "asyncio"]
    assert [(record.levelname, record.exc_info) for record in ours] == [("DEBUG", None)]
