"""No secret stands where somebody might read it, after logins with right and wrong proofs at every door."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.access.drivers import DRIVERS, Admin
from tests.access.house import VALUE, House, configured
from tests.cli.shell import Shell


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with House(tmp_path) as house:
        house.grant("alice * #")
        yield house


def visit(house: House) -> dict[str, str]:
    """Let alice, and somebody with wrong proofs, do something at every door; return what nobody may see."""
    wrong = house.forged()
    for driver in DRIVERS:
        for proof in (house.alice, wrong):
            house.call(house.server.proofs.guessing.clear)
            with contextlib.suppress(Exception), driver(house, proof) as client:  # each client has its own error
                client.publish("walk/a", VALUE)
    return {
        **house.alice.secrets,
        **{f"wrong {name}": text for name, text in wrong.secrets.items() if name != "JWT secret"},
    }


def test_no_secret_is_in_logs_audit_metrics_or_answers(house: House, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        secrets = visit(house)
        with Admin(house, house.alice) as client:
            paths = ("/metrics", "/api/principals", "/api/principals/alice", "/api/access", "/api/audit", "/api/server")
            shown = {path: client.open("GET", path).read().decode() for path in paths}
    shown["the audit"] = json.dumps(house.audit())
    shown["the log"] = "\n".join(record.getMessage() for record in caplog.records)
    assert "alice" in shown["the audit"]
    assert shown["/metrics"]
    found = [(name, place) for place, text in shown.items() for name, secret in secrets.items() if secret in text]
    assert found == []


def test_no_secret_is_in_the_topics_and_the_state_of_the_data_folder(house: House) -> None:
    secrets = visit(house)
    folder = Path(house.config.data.folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "conf"]
    assert files
    found = [
        (name, str(path.relative_to(folder)))
        for path in files
        for name, secret in secrets.items()
        if secret.encode() in path.read_bytes()
    ]
    assert found == []


def test_no_secret_is_an_argument_of_a_process_or_part_of_the_configuration(tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert config.worterbuch.auth_key_file is not None
    secret = Path(config.worterbuch.auth_key_file).read_text(encoding="utf-8")
    shell = Shell(tmp_path)
    process = shell.start(
        "serve", "--server-any-port", "--json", "--worterbuch-auth-key-file", config.worterbuch.auth_key_file
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        password = "a password of the command line"
        adding = shell.start("principals", "add", "paul", "--password", stdin=subprocess.PIPE)
        before = Path(f"/proc/{adding.pid}/cmdline").read_bytes()
        said, error = adding.communicate(f"{password}\n")
        assert adding.returncode == 0, error
        made = shell.run("principals", "add", "grafana", "--token")
        shown = shell.run("config") if "config" in shell.run("--help") else ""
        token = (
            (shell.data / "conf" / "admin_token").read_text(encoding="utf-8").strip()
            if (shell.data / "conf" / "admin_token").exists()
            else "no token"
        )
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes() + before
        for text in (secret, password, token):
            assert text.encode() not in arguments
            assert text not in said + error + shown + made
    finally:
        process.terminate()
        _, log = process.communicate()
    assert password not in log
    assert secret not in log
