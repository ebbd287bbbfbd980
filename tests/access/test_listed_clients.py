"""The list of jebp clients is a way into the table: its clients are principals."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from babelbus.client import BlockingClient as JebpClient
from babelbus.clients.jebp.errors import NoRightsError
from babelbus.core.access import SERVER
from babelbus.protocols.jebp.identity import Identity
from tests.access.drivers import Admin
from tests.access.house import House


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("listed")) as house:
        yield house


def test_who_administers_the_server_alone_adds_no_client_that_may_do_everything(house: House, tmp_path: Path) -> None:
    house.grant("alice admin $server")
    identity = Identity.generate()
    client = {"name": "back-door", "fingerprint": identity.fingerprint, "admin": True}
    with Admin(house, house.alice) as alice:
        assert alice.ask("POST", "/api/clients", client) == 403
        house.grant("alice admin $access")
        assert alice.ask("POST", "/api/clients", client) == 201
        path = f"/api/clients/{identity.fingerprint}"
        with closing(JebpClient(house.server.addresses["jebp"], identity=identity, reconnect=False)) as made:
            made.__enter__()
            made.create_topic("by-a-listed-client")
        house.grant("alice admin $server")
        for method, body in (("PATCH", {"admin": False}), ("DELETE", None), ("GET", None)):
            assert alice.ask(method, path if method != "GET" else "/api/clients", body) == 403
        house.grant("alice admin $access")
        assert alice.ask("PATCH", path, {"admin": False}) == 200
        assert alice.ask("DELETE", path) == 200


def test_changes_of_the_list_are_in_the_audit(house: House) -> None:
    house.grant("alice admin $access")
    fingerprint = "a" * 64
    with Admin(house, house.alice) as alice:
        before = len(house.audit())
        assert alice.ask("POST", "/api/clients", {"name": "desk", "fingerprint": fingerprint}) == 201
        assert alice.ask("PATCH", f"/api/clients/{fingerprint}", {"admin": True}) == 200
        assert alice.ask("DELETE", f"/api/clients/{fingerprint}") == 200
        made = {"name": "desk", "fingerprint": fingerprint, "admin": False}
        changed = made | {"admin": True}
        records = [one for one in house.audit()[before:] if one["kind"] == "change"]
        assert [(one["principal"], one.get("before"), one.get("after")) for one in records] == [
            ("alice", [None], [made]),
            ("alice", [made], [changed]),
            ("alice", [changed], [None]),
        ]


def test_changes_of_the_files_are_in_the_audit_when_they_are_read_again(house: House) -> None:
    house.grant("alice admin $server")
    path = house.conf / "client_fingerprints"
    kept, fingerprint = path.read_text(), "b" * 64
    client = {"fingerprint": fingerprint, "name": "by-hand", "admin": False}
    with Admin(house, house.alice) as alice:
        before = len(house.audit())
        path.write_text(f"{kept}{fingerprint} by-hand\n")
        assert alice.ask("POST", "/api/reload") == 200
        path.write_text(kept)
        house.run(partial(house.server.reload, SERVER))  # as on SIGHUP
        records = [one for one in house.audit()[before:] if one["kind"] == "change"]
        assert [(one["principal"], one.get("before"), one.get("after")) for one in records] == [
            ("alice", [None], [client]),
            ("server", [client], [None]),
        ]


def test_a_change_of_one_client_does_not_hide_what_was_edited_by_hand(house: House) -> None:
    house.grant("alice admin $access")
    path = house.conf / "client_fingerprints"
    kept, fingerprint = path.read_text(), "c" * 64
    by_hand = {"fingerprint": "d" * 64, "name": "by-hand", "admin": False}
    asked = {"fingerprint": fingerprint, "name": "asked", "admin": False}
    with Admin(house, house.alice) as alice:
        before = len(house.audit())
        path.write_text(f"{kept}{'d' * 64} by-hand\n")
        assert alice.ask("POST", "/api/clients", {"name": "asked", "fingerprint": fingerprint}) == 201
        path.write_text(kept + f"{fingerprint} asked\n")
        assert alice.ask("DELETE", f"/api/clients/{fingerprint}") == 200
        records = [one for one in house.audit()[before:] if one["kind"] == "change"]
        assert [(one["principal"], one.get("before"), one.get("after")) for one in records] == [
            ("server", [None], [by_hand]),
            ("alice", [None], [asked]),
            ("server", [by_hand], [None]),
            ("alice", [asked], [None]),
        ]


def test_a_client_of_the_files_that_is_called_like_a_role_does_not_administer(house: House) -> None:
    path = house.conf / "client_fingerprints"
    kept, identity = path.read_text(), Identity.generate()
    path.write_text(f"{kept}{identity.fingerprint} role:admin\n")
    house.run(partial(house.server.reload, SERVER))
    with closing(JebpClient(house.server.addresses["jebp"], identity=identity, reconnect=False)) as client:
        client.__enter__()
        with pytest.raises(NoRightsError):
            client.create_topic("by-a-role")
    path.write_text(kept)
    house.run(partial(house.server.reload, SERVER))
