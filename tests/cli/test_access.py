"""The gate through the real command line and a real server: rows, principals, the mode, the audit."""

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from babelbus.cli import program
from babelbus.cli.audit import line_of
from babelbus.cli.command import CommandError
from babelbus.cli.target import Target
from tests.cli.shell import Served
from tests.cli.test_groups import Near
from tests.support.bus import SAFETY_NET_SECONDS

HEX = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture(scope="module")
def near(served: Served) -> Near:
    return Near(served)


def rows(near: Near, who: str) -> list[dict[str, Any]]:
    return near.rows("access", "list", who, "--json")


def test_rows_are_granted_denied_listed_and_revoked(near: Near) -> None:
    near.run("principals", "add", "rita", "--role", "readers", "--fingerprint", "12" * 32)
    near.run("access", "grant", "role:readers", "read", "news/#")
    near.run("access", "deny", "rita", "*", "news/secret/#")
    assert rows(near, "rita") == [
        {"who": "rita", "action": "*", "pattern": "news/secret/#", "effect": "deny", "origin": "table"}
    ]
    may = near.rows("access", "explain", "rita", "read", "news/today", "--json")[0]
    assert may["allowed"]
    assert may["row"]["who"] == "role:readers"
    assert "because of the row: deny rita * news/secret/#" in near.run(
        "access", "explain", "rita", "read", "news/secret/x"
    )
    assert "rita may not publish x" in near.run("access", "explain", "rita", "publish", "x")
    assert "readers" in near.run("access", "roles")
    assert "every row can match" in near.run("access", "check")
    near.run("access", "revoke", "--deny", "rita", "*", "news/secret/#")
    assert rows(near, "rita") == []
    assert "keeps no row" in near.run("access", "revoke", "rita", "read", "x", code=1)


def test_a_right_that_another_row_still_gives_is_told_when_it_is_revoked(near: Near) -> None:
    near.run("principals", "add", "ruth", "--role", "editors", "--fingerprint", "56" * 32)
    near.run("access", "grant", "role:editors", "*", "wide/#")
    near.run("access", "grant", "ruth", "read", "wide/today")
    told = near.run("access", "revoke", "ruth", "read", "wide/today")
    assert "ruth still may, because of the row: allow role:editors * wide/# (table)" in told
    assert told.endswith("babelbus access deny ruth read wide/today\n")
    told = near.run("access", "revoke", "ruth", "read", "wide/today", code=1)
    assert "the row allow role:editors * wide/# (table) allows it: remove that row, or add one that denies" in told
    near.run("access", "deny", "ruth", "read", "wide/today")
    assert "allows it" not in near.run("access", "revoke", "ruth", "read", "wide/today", code=1)
    assert "still" not in near.run("access", "revoke", "role:editors", "*", "wide/#")


def test_two_who_change_at_once_get_a_conflict(near: Near) -> None:
    version = near.rows("access", "grant", "rita", "read", "a", "--json")[0]["version"]
    near.run("access", "grant", "rita", "read", "b", "--version", str(version))
    answer = near.run("access", "grant", "rita", "read", "c", "--version", str(version), code=1)
    assert "somebody else has changed it" in answer


def test_bad_rows_and_names_are_refused_with_the_reason(near: Near) -> None:
    assert "# stands only at the end" in near.run("access", "grant", "rita", "read", "a/#/b", code=1)
    assert "is no name" in near.run("principals", "add", "a/b", code=1)
    assert "already" in near.run("principals", "add", "rita", code=1)
    assert "there is no principal" in near.run("principals", "show", "nobody", code=1)
    assert "is no fingerprint" in near.run("principals", "add", "x", "--fingerprint", "12", code=2)


def test_principals_are_shown_changed_rotated_and_removed(near: Near) -> None:
    near.run("principals", "add", "paul", "--fingerprint", HEX)
    near.run("principals", "change", "paul", "--role", "readers")
    near.run("principals", "rotate", "paul", "--fingerprint", OTHER)
    (shown,) = near.rows("principals", "show", "paul", "--json")
    assert shown["roles"] == ["readers"]
    assert [(one["kind"], one["id"]) for one in shown["credentials"]] == [("jebp", OTHER)]
    assert [row["who"] for row in shown["rows"]] == ["role:readers"]
    assert "paul" in near.run("principals", "show", "paul")
    near.run("principals", "remove", "paul", "--yes")
    assert "paul" not in near.run("principals", "list")


def test_quotas_of_a_principal_are_set_shown_and_taken_away(near: Near) -> None:
    near.run("principals", "add", "quinn", "--quota", "publish_bytes_per_second=1MiB", "--quota", "connections=2")
    near.run("principals", "change", "quinn", "--quota", "read-bytes-per-second=1.5KiB", "--quota", "connections=none")
    (shown,) = near.rows("principals", "show", "quinn", "--json")
    assert shown["quotas"] == {"publish_bytes_per_second": 2**20, "read_bytes_per_second": 1536}
    text = near.run("principals", "show", "quinn")
    assert "1 MiB/s" in text
    assert "1536 B/s" in text
    near.run("principals", "change", "quinn", "--role", "readers")
    assert near.rows("principals", "show", "quinn", "--json")[0]["quotas"] == shown["quotas"]
    for wrong, reason in (
        ("disks=3", "one of publish_bytes_per_second"),
        ("connections=many", "no whole number"),
        ("connections=0", "at least 1"),
        ("read_bytes_per_second=fast", "is no size"),
    ):
        assert reason in near.run("principals", "change", "quinn", "--quota", wrong, code=2)
    near.run("principals", "remove", "quinn", "--yes")


def test_clients_of_the_lists_are_principals_that_are_changed_there(near: Near) -> None:
    assert "client lists" in near.run("principals", "list")
    assert "babelbus clients" in near.run("principals", "remove", "admin", "--yes", code=1)


def test_a_table_file_is_applied_and_its_errors_have_line_and_column(near: Near, tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text('[[rows]]\nwho = "rita"\naction = "consume"\npattern = "file/#"\n', encoding="utf-8")
    near.run("access", "apply", str(file))
    assert "file/#" in [row["pattern"] for row in rows(near, "rita")]
    file.write_text('[[rows]]\nwho = "rita"\naction = "eat"\npattern = "file/#"\n', encoding="utf-8")
    assert "line 3, column 1" in near.run("access", "apply", str(file), code=1)
    assert "file/#" in [row["pattern"] for row in rows(near, "rita")]
    file.write_text("", encoding="utf-8")
    near.run("access", "apply", str(file))
    assert "file/#" not in [row["pattern"] for row in rows(near, "rita")]


def test_quotas_of_a_principal_come_from_the_file_and_stay_when_the_rest_changes(near: Near, tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text('[[principals]]\nname = "quentin"\nquotas = {topics = 3}\n', encoding="utf-8")
    near.run("access", "apply", str(file))
    near.run("principals", "change", "quentin", "--role", "readers")
    near.run("principals", "rotate", "quentin", "--fingerprint", "34" * 32)
    (shown,) = near.rows("principals", "show", "quentin", "--json")
    assert (shown["quotas"], shown["roles"]) == ({"topics": 3}, ["readers"])
    file.write_text("", encoding="utf-8")
    near.run("access", "apply", str(file))
    assert "quentin" not in near.run("principals", "list")


def test_a_principal_has_a_root_that_can_be_changed_and_taken_away(near: Near, tmp_path: Path) -> None:
    near.run("principals", "add", "acme", "--root", "tenants/acme")
    near.run("access", "grant", "acme", "publish", "tenants/#")
    assert "acme may publish tenants/acme/orders" in near.run("access", "explain", "acme", "publish", "orders")
    assert "its subjects are relative to tenants/acme" in near.run("principals", "show", "acme")
    assert "tenants/acme" in near.run("principals", "list")
    near.run("principals", "change", "acme", "--role", "readers")
    assert near.rows("principals", "show", "acme", "--json")[0]["root"] == "tenants/acme"
    near.run("principals", "change", "acme", "--root", "tenants/other")
    assert near.rows("principals", "show", "acme", "--json")[0]["root"] == "tenants/other"
    near.run("principals", "change", "acme", "--no-root")
    assert "root" not in near.rows("principals", "show", "acme", "--json")[0]
    changes = [one for one in near.rows("audit", "--json") if one["kind"] == "change"]
    assert any(entry and entry.get("root") == "tenants/other" for one in changes for entry in one.get("before", []))
    assert "it has none of" in near.run("principals", "change", "acme", "--root", "a/#", code=1)
    assert "give --root or --no-root" in near.run("principals", "change", "acme", "--root", "a", "--no-root", code=2)
    file = tmp_path / "table.toml"
    file.write_text('[[principals]]\nname = "filed"\nroot = "tenants/filed"\n', encoding="utf-8")
    near.run("access", "apply", str(file))
    assert near.rows("principals", "show", "filed", "--json")[0]["root"] == "tenants/filed"
    file.write_text('[[principals]]\nname = "filed"\nroot = "tenants//filed"\n', encoding="utf-8")
    assert "line 3, column 1" in near.run("access", "apply", str(file), code=1)
    file.write_text("", encoding="utf-8")
    near.run("access", "apply", str(file))


def test_the_gate_is_turned_on_refuses_and_says_so_in_the_audit(near: Near) -> None:
    near.run("topics", "create", "open")
    near.run("topics", "create", "shut")
    (made,) = near.rows("clients", "add", "sensor", "--json")
    identity = ("--identity", str(Path(near.folder) / made["key_file"]))
    near.run("publish", "shut", "before", *identity)
    assert "the gate is on" in near.run("access", "enable", "--yes")
    try:
        near.run("publish", "shut", "still", *identity)
        near.run("access", "deny", "sensor", "publish", "shut/#")
        near.run("publish", "open", "1", *identity)
        near.run("publish", "shut", "2", *identity, code=1)
        record = near.rows("audit", "--principal", "sensor", "--json")[-1]
        assert (record["kind"], record["action"], record["subject"]) == ("refusal", "publish", "shut")
        assert "refusal" in near.run("audit", "--id", record["id"])
        near.run("access", "revoke", "sensor", "publish", "shut/#", "--deny")
        told = near.run("audit")
        assert ": added deny sensor publish shut/#" in told
        assert ": removed deny sensor publish shut/#" in told
        assert "list of clients: added principal sensor" in told
    finally:
        assert "the gate is off" in near.run("access", "enable", "--off", "--yes")
    near.run("publish", "shut", "after", *identity)


def test_a_line_of_the_audit_that_is_followed_steers_no_terminal() -> None:
    record = {"time_ms": 0, "kind": "refusal", "principal": "p", "action": "publish", "subject": "a\x1b[2J\nb\u202e"}
    assert line_of(record) == "1970-01-01T00:00:00.000Z  refusal  p    publish a\\x1b[2J\\nb\\u202e  1  "


def test_credentials_of_every_kind_are_made_shown_once_rotated_and_removed(near: Near, tmp_path: Path) -> None:
    (made,) = near.rows(
        "principals", "add", "olga", "--role", "admin", "--token", "--api-key", "--expires", "90d", "--json"
    )
    secrets = {one["kind"]: one["secret"] for one in made["secrets"]}
    assert set(secrets) == {"token", "api-key"}
    for wrong in ("0s", "36501d"):
        said = near.run("principals", "add", "otto", "--token", "--expires", wrong, code=2)
        assert f"'{wrong}' is not between 1ms and 36500d; without --expires it is valid for ever" in " ".join(
            said.split()
        )
    near.run("principals", "change", "olga", "--password", input="correct horse battery\n")
    near.run("principals", "change", "olga", "--tls-name", "dns", "olga.example", "--uid", "4711", "--gid", "4712")
    (shown,) = near.rows("principals", "show", "olga", "--json")
    assert sorted(one["kind"] for one in shown["credentials"]) == [
        "api-key",
        "password",
        "peer",
        "peer",
        "tls",
        "token",
    ]
    assert not any(secret in near.run("principals", "show", "olga", "--json") for secret in secrets.values())
    near.run("access", "list", "--user", "olga", input="correct horse battery\n")
    assert "wrong" in near.run("access", "list", "--user", "olga", input="no such horse\n", code=1)
    file = tmp_path / "token"
    file.write_text(secrets["token"], encoding="utf-8")
    file.chmod(0o644)
    assert "chmod 600" in near.run("access", "list", "--token-file", str(file), code=1)
    file.chmod(0o600)
    near.run("access", "list", "--token-file", str(file))
    for other in (
        "-----BEGIN PRIVATE KEY-----\nMIGHAgEA\n-----END PRIVATE KEY-----\n",
        f"token {secrets['token']}",
        "é",
        "",
    ):
        key = tmp_path / "other"
        key.touch(mode=0o600)
        key.write_text(other, encoding="utf-8")
        said = near.run("access", "list", "--token-file", str(key), code=1)
        assert said == f"babelbus: {key} holds no token, which is one word, such as bb_...; name the right file\n"
    rotated = near.run("principals", "rotate", "olga", "--token")
    assert "bb_" in rotated
    assert "the token of no principal" in near.run("access", "list", "--token-file", str(file), code=1)
    peer = next(one["id"] for one in shown["credentials"] if one["kind"] == "peer")
    near.run("principals", "change", "olga", "--remove-credential", peer)
    assert "one kind" in near.run("principals", "rotate", "olga", "--token", "--new-password", code=2)
    assert "8 to" in near.run("principals", "change", "olga", "--password", input="short\n", code=1)
    assert "already" in near.run("principals", "add", "oleg", "--tls-name", "dns", "OLGA.example", code=1)
    near.run("principals", "remove", "olga", "--yes")


def test_the_gate_is_turned_on_with_a_first_administrator(near: Near) -> None:
    try:
        told = near.run("access", "enable", "--administrator", "anna", "--new-password", "--yes")
        password = next(line for line in told.splitlines() if line.startswith("password")).rpartition(" ")[2]
        assert "the gate is on" in near.run("access", "explain", "anna", "admin", "$access", "--user", "anna",
                                            input=password + "\n") + told  # fmt: skip
    finally:
        near.run("access", "enable", "--off", "--yes")
    change = near.rows("audit", "--kind", "change", "--json")[-1]
    assert change["principal"] == "admin"


def test_a_server_that_is_killed_in_the_middle_of_changes_keeps_each_whole_or_not_at_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    served = Served(tmp_path)
    try:
        begun, rows_of_one = threading.Event(), 200

        def change() -> None:
            try:
                for number in itertools.count():
                    rows = [
                        {"who": f"w{number}", "action": "read", "pattern": f"p/{each}"} for each in range(rows_of_one)
                    ]
                    api.call("POST", "/api/access/rows", {"rows": rows})
                    if number == 3:
                        begun.set()
            except CommandError:
                begun.set()

        api = Target(data_folder=str(served.data)).api()
        changing = threading.Thread(target=change)
        changing.start()
        assert begun.wait(SAFETY_NET_SECONDS)
        served.process.kill()
        changing.join(SAFETY_NET_SECONDS)
    finally:
        served.process.kill()
        served.process.communicate()
    again = Served(tmp_path)
    try:
        found = Counter(
            row["who"] for row in Near(again).rows("access", "list", "--json") if row["who"].startswith("w")
        )
        assert len(found) >= 4
        assert set(found.values()) == {rows_of_one}
    finally:
        assert again.stop() == 0


def test_a_server_that_is_down_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(program, ["access", "list", "--data-folder", str(tmp_path)])
    assert done.exit_code == 1
    assert "the server makes it at its first start" in done.stderr
