"""The administration API without HTTP gives the answers of the endpoint, under the rights of its caller."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from babelbus.core.access import ADMIN_RIGHTS, CLIENT_RIGHTS, NOBODY, Identity
from babelbus.core.access.model import Granted
from babelbus.web.api import AdminApi
from tests.web.test_admin import Caller, FakeServer, serve

ADMIN = Identity("jebp:ops", "ops", None)


class Written:
    """The lines of an answer."""

    def __init__(self) -> None:
        self.address = "10.0.0.1:4000"
        self.data = b""
        self.something = asyncio.Event()

    async def write(self, data: bytes) -> None:
        self.data += data
        self.something.set()


def both(test: Callable[[Caller, AdminApi], Coroutine[Any, Any, None]]) -> None:
    async def run(call: Caller, bus: FakeServer) -> None:
        await test(call, call.api)

    serve(run)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/topics", None),
        ("GET", "/api/topics/nobody", None),
        ("GET", "/api/topics/a%2Fb", None),
        ("POST", "/api/topics", {"name": "a/b"}),
        ("POST", "/api/topics", {"nome": "a/b"}),
        ("POST", "/api/topics", 7),
        ("PUT", "/api/topics", None),
        ("GET", "/api/nothing", None),
        ("GET", "/api/topics/", None),
        ("GET", "/api/topics/a/b/c", None),
        ("GET", "/api/groups?topic=a&topic=b", None),
        ("GET", "/api/state/value", None),
        ("GET", "/api/state/value?key=a%2Fb%20c", None),
        ("GET", "/api/listen", None),
    ],
)
def test_answers_are_those_of_http(method: str, path: str, body: object) -> None:
    async def test(call: Caller, api: AdminApi) -> None:
        status, answer = await call("POST", "/api/topics", {"name": "a/b"})
        assert status == 201, answer
        content = b"" if body is None else msgspec.json.encode(body)
        status, data = await api.direct.answer(ADMIN, method, path, content, Written())
        assert (status, msgspec.json.decode(data)) == await call(method, path, body)

    both(test)


@pytest.mark.parametrize("rights", [NOBODY.rights, CLIENT_RIGHTS])
def test_a_caller_without_a_right_is_refused(rights: Granted | None) -> None:
    async def test(call: Caller, api: AdminApi) -> None:
        caller = Identity("jebp:guest", "guest", rights)
        for method, path in (("POST", "/api/reload"), ("GET", "/api/access"), ("GET", "/api/clients")):
            status, data = await api.direct.answer(caller, method, path, b"", Written())
            assert (status, msgspec.json.decode(data)["code"]) == (403, "refused"), path

    both(test)


def test_a_live_answer_is_written_line_by_line_and_ends_with_its_task() -> None:
    async def test(call: Caller, api: AdminApi) -> None:
        written = Written()
        asked = api.direct.answer(
            Identity("jebp:ops", "ops", ADMIN_RIGHTS), "GET", "/api/listen?pattern=%23", b"", written
        )
        task = asyncio.ensure_future(asked)
        await written.something.wait()
        written.something.clear()
        assert (await call("POST", "/api/send", {"subject": "a", "payload": "x"}))[0] == 200
        await written.something.wait()
        assert msgspec.json.decode(written.data)["payload"] == "x"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await call("POST", "/api/send", {"subject": "a", "payload": "x"}))[1]["receivers"] == 0

    both(test)


def test_a_live_answer_ends_when_the_server_stops() -> None:
    async def test(call: Caller, api: AdminApi) -> None:
        written = Written()
        task = asyncio.ensure_future(api.direct.answer(ADMIN, "GET", "/api/listen?pattern=%23", b"", written))
        await written.something.wait()
        api.close()
        assert await task == (200, b"")

    both(test)
