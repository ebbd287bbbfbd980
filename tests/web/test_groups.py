"""What groups do now, over the administration endpoint of a whole server: members, records in flight, why they wait."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from babelbus.client import BlockingClient
from babelbus.core.access import SERVER
from babelbus.protocols.jebp.identity import Identity
from babelbus.web import groups
from babelbus.wire.websocket import encode_texts
from tests.access.drivers import Admin
from tests.access.house import House
from tests.support.eventmesh import MeshClient
from tests.support.zbus import SocketClient
from tests.web.groups import GROUP, make_group, publish
from tests.web.test_admin import Caller, FakeServer, serve
from tests.web.test_state import Api

pytestmark = pytest.mark.usefixtures("work")


def shown(api: Api) -> Any:
    return api.json("GET", GROUP)


def until(api: Api, holds: Callable[[Any], bool]) -> Any:
    """The group as it is shown once it is so: the server is asked again and again."""
    while True:
        group = shown(api)
        if holds(group):
            return group


def seek(api: Api, **place: Any) -> Any:
    return api.json("POST", f"{GROUP}/seek", json.dumps(place).encode(), preview=1)


def test_members_of_all_protocols_are_shown_with_their_addresses(api: Api) -> None:
    make_group(api, ack="on_delivery")
    addresses = api.live.server.addresses
    with contextlib.ExitStack() as stack:
        identity = Identity.load(os.path.join(api.live.config.data.folder, "conf", "server_key"))
        key = Identity.generate()
        fingerprint = json.dumps({"name": "alice", "fingerprint": key.fingerprint}).encode()
        assert api("POST", "/api/clients", fingerprint)[0] == 201
        jebp = BlockingClient(addresses["jebp"], identity=key, server_fingerprint=identity.fingerprint)
        client = stack.enter_context(jebp)
        assert stack.enter_context(client.consume("work", "g", create=False)).next(0.01) is None  # joins
        zbus = SocketClient(addresses["zbus"])
        stack.callback(zbus.socket.close)
        zbus.send(encode_texts([b'{"headers":{"cmd":"sub","id":"1","mq":"work","channel":"g"}}'], mask=True))
        mesh = stack.enter_context(MeshClient(addresses["eventmesh-tcp"])).hello(group="g").listen("work")
        web = stack.enter_context(api.open("GET", f"{GROUP}/consume", {"window": 7}))
        assert web.line()["consumer"]
        group = until(api, lambda group: len(group["joined"]) == 4)
        members = {member["protocol"]: member for member in group["joined"]}
        assert set(members) == {"jebp", "zbus", "eventmesh", "admin"}
        assert members["jebp"]["principal"] == "alice"
        host, _, port = members["jebp"]["address"].rpartition(":")
        assert (host, port.isdigit()) == ("127.0.0.1", True)
        for protocol, other in (("zbus", zbus.socket), ("eventmesh", mesh.socket)):
            assert members[protocol]["address"] == "{}:{}".format(*other.getsockname())
        assert members["admin"]["address"] == "127.0.0.1"
        assert members["admin"]["capacity"] == 7
        assert group["members"] == 4
        assert group["may_manage"]


def test_a_group_says_why_its_records_wait(api: Api) -> None:
    make_group(api, retry_seconds=100, retry_seconds_max=100)
    publish(api, b"1", b"2", key=b"k")
    (obstacle,) = shown(api)["obstacles"]
    assert obstacle == {"kind": "no_members", "text": "The group has no members."}
    answer = api.open("GET", f"{GROUP}/consume", {"window": 1})
    with answer:
        name = answer.line()["consumer"]
        (delivery,) = answer.line()["deliveries"]
        group = shown(api)
        assert [one["kind"] for one in group["obstacles"]] == ["members_full"]
        (record,) = group["oldest"]
        assert (record["partition"], record["offset"], record["where"], record["attempts"]) == (0, 0, "delivered", 1)
        assert record["again_ms"] - record["since_ms"] == 60_000
        nack = json.dumps({"numbers": [delivery["number"]]}).encode()
        assert api.json("POST", f"/api/consumers/{name}/nack", nack)["done"] == 1
        group = until(api, lambda group: group["in_flight"] == 2)
        reasons = {one["kind"]: one for one in group["obstacles"]}
        assert reasons["redelivery"]["text"].startswith("Record 0 of partition 0 waits for delivery 2 of 16, in ")
        assert reasons["redelivery"]["at_ms"] == group["next_redelivery_ms"]
        assert reasons["key_order"]["text"].startswith("1 record is held back behind record 0 of partition 0")
        assert group["attempts"] == 1
        assert api.json("POST", f"{GROUP}/pause")["paused"]
        assert shown(api)["obstacles"][0]["kind"] == "paused"


def test_a_page_of_groups_is_searched_and_sorted_on_the_server(api: Api) -> None:
    for name in ("beta", "alpha", "gamma"):
        make_group(api, name)
    publish(api, b"1")
    api.json("POST", "/api/topics/work/groups/alpha/seek", b'{"at": "end"}')

    def page(**query: Any) -> tuple[list[str], int]:
        found = api.json("GET", "/api/groups", **query)
        return [group["name"] for group in found["groups"]], found["total"]

    assert page(count=2) == (["alpha", "beta"], 3)
    assert page(count=2, offset=2) == (["gamma"], 3)
    assert page(count=9, search="AM") == (["gamma"], 1)
    assert page(count=1, sort="lag") == (["alpha"], 3)
    assert page(count=1, sort="name", descending=1) == (["gamma"], 3)
    found = api.json("GET", "/api/groups", count=9)["groups"]
    assert [len(group["obstacles"]) for group in found] == [0, 1, 1]
    assert "total" not in api.json("GET", "/api/groups")
    assert api.fails("GET", "/api/groups", count=9, sort="colour") == (400, "bad_request")


def test_a_seek_is_told_before_it_is_done(api: Api) -> None:
    make_group(api)
    publish(api, b"1", b"2", b"3")
    effect = seek(api, at="end")
    (partition,) = effect.pop("partitions")
    assert effect == {"topic": "work", "name": "g", "again": 0, "skipped": 3, "in_flight": 0}
    assert (partition["committed"], partition["target"], partition["end"]) == (0, 3, 3)
    assert shown(api)["lag"] == 3
    api.json("POST", f"{GROUP}/seek", b'{"at": "end"}')
    assert seek(api, at="offset", value=1)["again"] == 2
    assert seek(api, at="time", value=0)["again"] == 3
    place = json.dumps({"at": "end", "partition": 7}).encode()
    assert api.fails("POST", f"{GROUP}/seek", place, preview=1) == (404, "unknown_partition")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("groups")) as house:
        yield house


class Told(Admin):
    def tell(self, path: str) -> Any:
        response = self.open("GET", path)
        assert response.status == 200
        return json.loads(response.read())


def test_only_managers_are_told_who_the_members_are(house: House) -> None:
    house.grant("alice manage walk/#", "alice consume walk/#", "bob read walk/#", "alice read walk/#")
    with Told(house, house.alice) as alice, Told(house, house.bob) as bob:
        body = {"topic": "walk/a", "name": "told", "settings": {"ack": "explicit"}, "start": {"at": "beginning"}}
        assert alice.ask("POST", "/api/groups", body) == 201
        path = "/api/topics/walk%2Fa/groups/told"
        response = alice.open("GET", f"{path}/consume", window="1")
        response.readline()
        response.readline()
        (member,) = alice.tell(path)["joined"]
        assert (member["principal"], member["address"]) == ("alice", "127.0.0.1")
        group = bob.tell(path)
        assert (group["may_manage"], group["joined"][0]["principal"], group["joined"][0]["address"]) == (
            False,
            None,
            None,
        )
        assert "alice" not in json.dumps(group)
        assert bob.ask("POST", f"{path}/seek", {"at": "end"}, preview="1") == 403
        # The right goes while the member is there.
        house.grant("alice read walk/#", "alice manage walk/#")
        house.until(lambda: not house.broker.groups.get("walk/a", "told").members)
        obstacle = alice.tell(path)["obstacles"][0]
        assert obstacle["kind"] == "no_right"
        assert "member alice (admin 127.0.0.1) has no right to consume since" in obstacle["text"]


def test_a_page_of_many_groups_lets_others_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUPS_AT_ONCE", 2)

    async def test(call: Caller, bus: FakeServer) -> None:
        await call("POST", "/api/topics", {"name": "work"})
        for name in "abcdef":
            await call("POST", "/api/groups", {"topic": "work", "name": name})
        turns, lines = 0, SimpleNamespace(address="")

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        status, body = await call.api.direct.answer(
            SERVER, "GET", "/api/groups?count=2&sort=lag", b"", cast(Any, lines)
        )
        counting.cancel()
        assert (status, json.loads(body)["total"]) == (200, 6)
        assert turns == 3

    serve(test)
