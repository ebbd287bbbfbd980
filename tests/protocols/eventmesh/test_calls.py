"""Outgoing calls of EventMesh: the end of a server that has calls on their way."""

import asyncio

from babelbus.clock import SystemClock
from babelbus.core.receipt import settled
from babelbus.protocols.eventmesh.calls import CONNECTIONS_MAX, CallError, Calls, read_networks
from tests.support.bus import in_loop


@in_loop
async def test_calls_fail_when_the_server_stops_also_those_that_wait_for_a_connection() -> None:
    asked = asyncio.Semaphore(0)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.release()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    calls = Calls(SystemClock(), read_networks("127.0.0.0/8"))
    begun = [calls.call("POST", url, ()) for _ in range(CONNECTIONS_MAX + 3)]
    for _ in range(CONNECTIONS_MAX):
        await asked.acquire()
    calls.close()
    late = calls.call("POST", url, ())
    assert isinstance(await settled([*begun, late]), CallError)
    assert {str(call.error) for call in (*begun, late)} == {"the server stops"}
    server.close()


@in_loop
async def test_a_call_that_waits_for_its_first_connection_fails_when_the_server_stops() -> None:
    calls = Calls(SystemClock(), read_networks("127.0.0.0/8"))
    call = calls.call("POST", "http://127.0.0.1:1/", ())
    calls.close()
    assert isinstance(await settled([call]), CallError)
