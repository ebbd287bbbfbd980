"""The list of jebp clients over the administration API."""

from tests.web.test_admin import Caller, FakeServer, serve

KEY, OTHER = "a" * 64, "b" * 64


def test_clients_are_added_listed_changed_and_removed() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        added = {"name": "desk", "fingerprint": KEY.upper(), "admin": False}
        status, made = await call("POST", "/api/clients", added)
        assert (status, made) == (201, added | {"fingerprint": KEY, "server_fingerprint": bus.fingerprint})
        status, changed = await call("PATCH", f"/api/clients/{KEY}", {"admin": True})
        assert (status, changed["admin"], changed["name"]) == (200, True, "desk")
        client = {"name": "desk", "fingerprint": KEY, "admin": True}
        assert (await call("GET", "/api/clients"))[1] == {"clients": [client], "server_fingerprint": bus.fingerprint}
        assert await call("DELETE", f"/api/clients/{KEY}") == (200, {"removed": KEY, "name": "desk"})
        assert (await call("GET", "/api/clients"))[1]["clients"] == []

    serve(test)


def test_names_and_certificates_are_unique() -> None:
    async def test(call: Caller, bus: FakeServer) -> None:
        await call("POST", "/api/clients", {"name": "desk", "fingerprint": KEY})
        for wrong in ({"name": "desk", "fingerprint": OTHER}, {"name": "other", "fingerprint": KEY}):
            status, answer = await call("POST", "/api/clients", wrong)
            assert (status, answer["code"]) == (409, "client_exists")
        await call("POST", "/api/clients", {"name": "other", "fingerprint": OTHER})
        status, answer = await call("PATCH", f"/api/clients/{OTHER}", {"name": "desk"})
        assert (status, answer["code"]) == (409, "client_exists")
        for method in ("PATCH", "DELETE"):
            status, answer = await call(method, f"/api/clients/{'c' * 64}", {"admin": True})
            assert (status, answer["code"]) == (404, "unknown_client")

    serve(test)
