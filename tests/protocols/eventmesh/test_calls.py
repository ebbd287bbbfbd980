"""Outgoing calls of EventMesh: the end of a server that has calls on their way."""

import asyncio
import ssl
from pathlib import Path

import pytest

from babelbus.clock import SystemClock
from babelbus.core.receipt import settled
from babelbus.protocols.eventmesh.calls import CONNECTIONS_MAX, CallError, Calls, read_networks
from tests.support.bus import in_loop
from tests.support.certificates import Authority


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


@in_loop
async def test_the_first_call_over_tls_loads_the_authorities_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ssl.SSLContext] = []
    make = ssl.create_default_context

    def note() -> ssl.SSLContext:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        made.append(make())
        return made[0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    authority = Authority(tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(*authority.issue("hook"))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    monkeypatch.setattr(ssl, "create_default_context", note)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=served)
    calls = Calls(SystemClock(), read_networks("127.0.0.0/8"))
    assert made == []
    port = server.sockets[0].getsockname()[1]
    begun = [calls.call("POST", f"https://127.0.0.1:{port}/", ()) for _ in range(3)]
    assert await settled(begun) is None
    assert {call.response.status for call in begun if call.response} == {204}
    assert len(made) == 1
    calls.close()
    server.close()
