import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.cli.shell import Served, Shell


def test_a_topic_is_made_shown_changed_and_removed(served: Served) -> None:
    settings = ("--partitions", "2", "--retention", "7d", "--retention-bytes", "10GiB", "--retention-records", "1000")
    (made,) = served.rows("topics", "create", "plant/line1", *settings, "--json")
    assert made["settings"]["retention_records"] == 1000
    assert (made["settings"]["retention_seconds"], made["settings"]["retention_bytes"]) == (604_800.0, 10 * 2**30)
    served.run("topics", "alter", "plant/line1", "--retention-bytes", "none", "--partitions", "3")
    (shown,) = served.rows("topics", "show", "plant/line1", "--json")
    assert (shown["settings"]["retention_bytes"], len(shown["partitions"])) == (None, 3)
    assert "plant/line1" in served.run("topics", "list")
    assert "7d" in served.run("topics", "show", "plant/line1")
    assert "--yes" in served.run("topics", "remove", "plant/line1", code=1)
    served.run("topics", "remove", "plant/line1", "--yes")
    assert "plant/line1" not in [topic["name"] for topic in served.rows("topics", "list", "--json")]


def test_a_topic_that_has_lost_its_partition_is_given_up(tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        served.run("topics", "create", "lost", "--partitions", "1")
        assert served.stop() == 0
        shutil.rmtree(tmp_path / "data/topics/lost/0")
        served = Served(tmp_path)
        assert "is closed" in served.run("topics", "remove", "lost", code=1)
        (made,) = served.rows("clients", "add", "plain", "--json")
        plain = ("--server", served.ready["addresses"]["jebp"], "--identity", made["key_file"])
        told = served.run("topics", "remove", "lost", "--yes", *plain, code=1)
        assert "no right to manage 'lost'" in told
        assert "if the topic is closed, its owner is not known" in told
        assert served.run("topics", "remove", "lost", "--yes") == "topic lost is removed\n"
        assert "there is no topic" in served.run("topics", "remove", "lost", "--yes", code=1)
        served.run("topics", "create", "lost")
    finally:
        served.kill_started()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("topics", "show", "nowhere"), "there is no topic 'nowhere'"),
        (("topics", "create", "a", "--ack", "maybe"), "ack"),
        (("topics", "create", "a", "--retention", "soon"), "retention_seconds"),
        (("topics", "create", "a", "--retention-records", "many"), "retention_records = 'many'"),
        (("topics", "create", "a,b"), "a,b"),
    ],
)
def test_what_the_server_refuses_is_one_line_and_code_1(served: Served, args: tuple[str, ...], told: str) -> None:
    text = served.run(*args, code=1)
    assert text.startswith("babelbus: ")
    assert told in text
    assert text.count("\n") == 1


def test_wrong_usage_ends_with_code_2(served: Served) -> None:
    assert "nothing to change" in served.run("topics", "alter", "a", code=2)
    assert "give only one of them" in served.run("fetch", "a", "--from-offset", "1", "--from-time", "-1h", code=2)
    assert "HOST:PORT" in served.run("topics", "list", "--admin", "here", code=2)


def test_a_client_is_let_in_and_locked_out_while_the_server_runs(served: Served) -> None:
    served.run("topics", "create", "doors")
    (made,) = served.rows("clients", "add", "console", "--json")
    assert made["effective"]
    assert made["server_fingerprint"] == served.ready["server_fingerprint"]
    assert stat.S_IMODE(os.stat(made["key_file"]).st_mode) == 0o600
    remote = (
        "--server", served.ready["addresses"]["jebp"], "--identity", made["key_file"],
        "--server-fingerprint", made["server_fingerprint"],
    )  # fmt: skip
    assert served.run("publish", "doors", "hello", *remote) == "0:0\n"
    wrong = (*remote[:-1], "0" * 64)
    assert "fingerprint" in served.run("publish", "doors", "hello", *wrong, code=1)
    served.run("clients", "change", "console", "--name", "desk", "--admin")
    assert ("desk", True) in [(one["name"], one["admin"]) for one in served.rows("clients", "list", "--json")]
    assert "--yes" in served.run("clients", "remove", "desk", code=1)
    served.run("clients", "remove", "desk", "--yes")
    assert "clients add" in served.run("publish", "doors", "hello", *remote, code=1)


def test_a_client_that_removes_itself_is_told_that_it_is_out(served: Served) -> None:
    (made,) = served.rows("clients", "add", "leaver", "--admin", "--json")
    remote = (
        "--server", served.ready["addresses"]["jebp"], "--identity", made["key_file"],
        "--server-fingerprint", made["server_fingerprint"],
    )  # fmt: skip
    told = served.run("clients", "remove", "leaver", "--yes", *remote)
    assert "client leaver is removed" in told
    assert "it was the client of this command" in told
    assert "leaver" not in [one["name"] for one in served.rows("clients", "list", "--json")]
    assert "clients add" in served.run("clients", "remove", "leaver", "--yes", *remote, code=1)


def test_a_client_with_a_certificate_of_its_own_gets_no_key_here(served: Served) -> None:
    (made,) = served.rows("clients", "add", "plant7", "--fingerprint", "AB" * 32, "--json")
    assert (made["fingerprint"], made["key_file"]) == ("ab" * 32, None)
    assert "already" in served.run("clients", "add", "plant8", "--fingerprint", "ab" * 32, code=1)
    assert "already" in served.run("clients", "add", "plant7", code=1)
    assert "no fingerprint" in served.run("clients", "add", "plant9", "--fingerprint", "xyz", code=1)
    assert "there is no client" in served.run("clients", "remove", "plant9", "--yes", code=1)


def test_clients_are_changed_without_a_server_too(shell: Shell) -> None:
    shell.data.mkdir()
    text = shell.run("clients", "add", "a%b", "--admin")
    assert "no server runs on this data folder" in text
    assert (shell.data / "conf" / "clients" / "a%25b.key").exists()


def test_a_client_cannot_be_called_like_a_role_and_gets_no_key(shell: Shell) -> None:
    shell.data.mkdir()
    assert "'role:admin' is no name" in shell.run("clients", "add", "role:admin", code=1)
    assert not (shell.data / "conf").exists()
    shell.run("clients", "add", "desk")
    assert "'role:admin' is no name" in shell.run("clients", "change", "desk", "--name", "role:admin", code=1)


def test_a_misspelt_data_folder_is_not_made(shell: Shell, tmp_path: Path) -> None:
    told = shell.run("clients", "add", "a", "--data-folder", "dtaa", code=1)
    assert "there is no data folder" in told
    assert not (tmp_path / "dtaa").exists()
