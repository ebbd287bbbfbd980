"""Links over TCP: certificates for both ends."""

import asyncio
import ssl
from datetime import datetime
from pathlib import Path

import pytest

from babelbus.config import TlsSettings
from babelbus.errors import ConfigError
from babelbus.link.frames import LinkError
from babelbus.link.security import LinkTls
from babelbus.listening.certificates import Certificates
from tests.support.certificates import Authority
from tests.support.link import Linked


def issued(authority: Authority, name: str) -> LinkTls:
    cert_file, key_file = authority.issue(name)
    return LinkTls(str(cert_file), str(key_file), str(authority.path))


def test_both_ends_show_a_certificate_of_one_authority(tmp_path: Path) -> None:
    ours = issued(Authority(tmp_path), "core")
    others = issued(Authority(tmp_path), "core")

    async def test() -> None:
        both = Linked()
        await both.core.listen("127.0.0.1", 0, ours)
        both.address = await both.open(both.edge)
        with pytest.raises(ssl.SSLError):  # another authority
            await both.link(both.edge, "tcp", others.client)
        stranger = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        with pytest.raises((OSError, LinkError)):
            await both.link(both.edge, "tcp", stranger)
        with pytest.raises((OSError, LinkError)):
            await both.link(both.edge, "tcp")
        await both.close()

    asyncio.run(test())


def test_clients_go_over_an_encrypted_link(tmp_path: Path) -> None:
    tls = issued(Authority(tmp_path), "core")

    async def test() -> None:
        both = Linked()
        await both.core.listen("127.0.0.1", 0, tls)
        both.address = await both.open(both.edge)
        await both.link(both.edge, "tcp", tls.client)
        reader, writer = await both.dial()
        writer.write(b"x" * 2**20)
        session = await both.session()
        while len(session.received) < 2**20:  # noqa: ASYNC110  # it has no event of its own
            await asyncio.sleep(0.001)
        session.transport.write(bytes(session.received))
        assert await reader.readexactly(2**20) == b"x" * 2**20
        await both.close()

    asyncio.run(test())


def test_a_certificate_that_was_renewed_ends_the_refusals(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("core", last_day=datetime(2021, 1, 1))
    tls = LinkTls(str(tmp_path / "core.cert"), str(tmp_path / "core.key"), str(authority.path))
    certificates = Certificates(TlsSettings())
    certificates.add(tls)

    async def test() -> None:
        both = Linked()
        await both.core.listen("127.0.0.1", 0, tls)
        with pytest.raises(ssl.SSLError, match="certificate has expired"):
            await both.link(both.edge, "tcp", tls.client)
        authority.issue("core")
        certificates.check()
        await both.link(both.edge, "tcp", tls.client)
        (tmp_path / "core.key").write_text("damaged")
        certificates.check()
        other = both.make_edge("other")
        await both.link(other, "tcp", tls.client)  # with the earlier certificate
        await other.stop()
        await both.close()

    asyncio.run(test())


def test_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    cert_file, key_file = Authority(tmp_path).issue("core")
    key_file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"core\.key"):
        LinkTls(str(cert_file), str(key_file), str(tmp_path / "authority.pem"))
    key_file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        LinkTls(str(cert_file), str(key_file), str(tmp_path / "nothing.pem"))
