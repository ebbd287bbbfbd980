"""The client of Wörterbuch over TLS."""

from pathlib import Path

import pytest

from babelbus.clients.worterbuch.client import connect
from babelbus.clients.worterbuch.errors import ConnectionLostError
from babelbus.config import TlsSettings
from tests.support.bus import in_loop
from tests.support.certificates import Authority
from tests.support.server import configure, running


@in_loop
@pytest.mark.parametrize(("scheme", "listener"), [("tcps", "worterbuch-tcp"), ("wss", "worterbuch")])
async def test_values_come_and_go_over_tls(tmp_path: Path, scheme: str, listener: str) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    config = configure(tmp_path / "data", tls=TlsSettings(cert_file=str(cert), key_file=str(key)))
    async with running(config) as server:
        url = f"{scheme}://{server.addresses[listener]}"
        async with await connect(url, tls=authority.client_context()) as client:
            await client.set("a", 1)
            assert await client.get("a") == 1
        with pytest.raises(ConnectionLostError, match=r"(?i)certificate"):
            await connect(url)
