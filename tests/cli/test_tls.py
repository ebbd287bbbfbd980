"""Commands that speak to an administration endpoint with TLS."""

from pathlib import Path

import pytest

from tests.cli.shell import Served
from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


def serve(folder: Path, authority: Authority, more: str = "") -> Served:
    cert, key = authority.issue("server")
    (folder / "babelbus.toml").write_text(f'[tls]\ncert_file = "{cert}"\nkey_file = "{key}"\n{more}')
    return Served(folder)


def test_commands_find_the_server_beside_them_and_trust_a_named_one_by_its_ca(
    tmp_path: Path, authority: Authority
) -> None:
    served = serve(tmp_path, authority)
    address = served.ready["addresses"]["admin"]
    try:
        served.run("topics", "create", "orders")
        there = ("topics", "list", "--admin", f"https://{address}")
        untrusted = served.run(*there, code=1)
        assert "is not trusted" in untrusted
        assert "--ca FILE" in untrusted
        assert "orders" in served.run(*there, "--ca", str(authority.path))
        assert f"write --admin https://{address}" in served.run("topics", "list", "--admin", address, code=1)
        (tmp_path / "nonsense").touch()
        assert "nonsense" in served.run(*there, "--ca", "nonsense", code=1)
        assert "orders" in served.run("topics", "list")
    finally:
        code = served.stop()
        served.kill_started()
    assert code == 0


def test_commands_show_a_certificate_where_it_is_required(tmp_path: Path, authority: Authority) -> None:
    served = serve(tmp_path, authority, f'client_ca_file = "{authority.path}"\nclient_certificates = "required"\n')
    cert, key = authority.issue("operator")
    both = tmp_path / "operator.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    try:
        assert "does not answer" in served.run("topics", "list", code=1)
        served.run("topics", "create", "orders", "--client-cert", str(both))
        said = served.run("topics", "list", "--client-cert", str(cert), code=1)
        assert f"--client-cert {cert}: " in said
        assert "the certificate and its key in PEM" in said
    finally:
        served.stop()
        served.kill_started()


def test_a_certificate_proves_who_asks_where_there_is_no_data_folder(tmp_path: Path, authority: Authority) -> None:
    more = f'client_ca_file = "{authority.path}"\nclient_certificates = "optional"\n'
    served = serve(tmp_path, authority, more)
    cert, key = authority.issue("operator")
    both = tmp_path / "operator.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    there = ("--admin", f"https://{served.ready['addresses']['admin']}", "--ca", str(authority.path))
    elsewhere = (*there, "--data-folder", str(tmp_path / "none"))
    try:
        served.run("topics", "create", "orders")
        served.run("principals", "add", "olga", "--tls-name", "cn", "operator")
        served.run("access", "grant", "olga", "read", "#")
        assert "orders" in served.run("topics", "list", *elsewhere, "--client-cert", str(both))
        said = served.run("topics", "list", *elsewhere, code=1)
        assert "nothing says who asks" in said
        assert "--token-file, --user or --client-cert" in said
    finally:
        served.stop()
        served.kill_started()
