"""Proofs of identity at the doors of a whole server: key sets, guesses, files of secrets, the ends of tokens."""

import http.client
import json
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from babelbus.config import SbusSettings, WorterbuchSettings, ZbusSettings
from babelbus.core.access import SERVER
from babelbus.errors import ConfigError
from babelbus.protocols.worterbuch.service import WorterbuchService
from babelbus.protocols.zbus.messages import Message
from tests.identities.test_jwts import jwk_of
from tests.support.certificates import Authority
from tests.support.server import LiveServer, configure
from tests.support.signing import sign_frame
from tests.support.web import SECRET, Events, Web, token
from tests.support.zbus import SocketClient


def secret_file(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def serve(folder: Path, *, zbus: dict[str, Any] | None = None, **worterbuch: Any) -> LiveServer:
    config = configure(
        folder / "data",
        zbus=ZbusSettings(port=0, **(zbus or {})),
        worterbuch=WorterbuchSettings(port=0, tcp_port=0, **worterbuch),
    )
    return LiveServer(config)


def test_tokens_of_a_key_set_are_taken_and_those_of_other_keys_are_not(tmp_path: Path) -> None:
    keys = [ed25519.Ed25519PrivateKey.generate() for _ in range(2)]
    place = tmp_path / "keys.json"
    place.write_text(json.dumps({"keys": [jwk_of(keys[0], kid="0")]}))

    def token_of(number: int, **claims: Any) -> str:
        granted = {"worterbuchPrivileges": {"read": ["#"]}}
        content = {"sub": "me", "name": "me", "exp": 2e9, "iss": "id", "aud": "bus"} | granted | claims
        return jwt.encode(content, keys[number], "EdDSA", headers={"kid": str(number)})

    with serve(tmp_path, auth_key_set=str(place), auth_issuer="id", auth_audience="bus") as live, Web(live) as web:

        def ask(bearer: str) -> int:
            return web.get("/api/v1/ls", authorization=f"Bearer {bearer}").status

        fetched = "babelbus_key_set_fetches_total"
        live.until(lambda: live.server.metrics.registry.get_sample_value(fetched, {"result": "ok"}) == 1)
        assert ask(token_of(0)) == 200
        for wrong in (token_of(1), token_of(0, iss="other"), token_of(0, aud="other"), token_of(0, aud=None)):
            assert ask(wrong) == 403
        assert ask(token_of(0)) == 200


def test_a_stream_ends_when_the_key_of_its_token_is_removed_from_the_set(tmp_path: Path) -> None:
    keys = [ed25519.Ed25519PrivateKey.generate() for _ in range(2)]
    place = tmp_path / "keys.json"
    place.write_text(json.dumps({"keys": [jwk_of(key, kid="one id for all") for key in keys]}))
    content = {"sub": "me", "name": "me", "exp": 2e9, "worterbuchPrivileges": {"read": ["#"]}}
    tokens = [jwt.encode(content, key, "EdDSA", headers={"kid": "one id for all"}) for key in keys]
    with serve(tmp_path, auth_key_set=str(place)) as live:
        service = live.server.services["worterbuch"]
        assert isinstance(service, WorterbuchService)
        keys_of_set = service._key_set
        assert keys_of_set is not None
        live.until(lambda: bool(keys_of_set._keys))
        removed, kept = [f"Bearer {one}" for one in tokens]
        path = "/api/v1/subscribe/a?liveOnly"
        with Events(live, path, authorization=removed) as events, Events(live, path, authorization=kept):
            live.call(service.hub.tick)
            assert len(service.hub.clients) == 2
            place.write_text(json.dumps({"keys": [jwk_of(keys[1], kid="one id for all")]}))
            assert live.call(keys_of_set.refresh)
            live.call(service.hub.tick)
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                events.response.read()
            live.until(lambda: len(service.hub.clients) == 1)


def test_a_stream_ends_with_its_token(tmp_path: Path) -> None:
    with serve(tmp_path, auth_key_file=secret_file(tmp_path, "key", SECRET)) as live:
        path, bearer = "/api/v1/subscribe/a?liveOnly", token({"read": ["#"]}, exp=2e9)
        with Events(live, path, authorization=f"Bearer {bearer}") as events:
            assert events.response.status == 200
            service = live.server.services["worterbuch"]
            assert isinstance(service, WorterbuchService)
            (stream,) = service.hub.clients.values()
            assert stream.access.ends_seconds == 2e9 + 60
            live.call(service.hub.tick)
            assert service.hub.clients
            stream.access.ends_seconds = 0.0  # as if the time had come
            live.call(service.hub.tick)
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                events.response.read()
            live.until(lambda: not service.hub.clients)


def test_guesses_count_together_at_all_doors_and_a_reload_ends_the_wait(tmp_path: Path) -> None:
    zbus = {"auth_file": secret_file(tmp_path, "keys", "key secret\n")}
    with serve(tmp_path, zbus=zbus, auth_key_file=secret_file(tmp_path, "key", SECRET)) as live, Web(live) as web:
        wrong = token({"read": ["#"]}, key="another" * 10)
        statuses = [web.get("/api/v1/ls", authorization=f"Bearer {wrong}").status for _ in range(2)]
        assert statuses == [403, 429]
        assert web.get("/api/v1/ls", authorization=f"Bearer {token({'read': ['#']})}").status == 200

        def zbus_answer(secret: str) -> object:
            frame = {"headers": sign_frame(Message({"cmd": "query", "id": "1"}), "key", secret).headers}
            with SocketClient(live.server.addresses["zbus"]) as client:
                client.say_all([frame])
                return client.next()["body"]

        assert zbus_answer("wrong") == "signature mismatched"
        assert zbus_answer("secret") == "too many wrong signatures, try again later"
        live.call(partial(live.server.reload, SERVER))  # type: ignore[unused-coroutine]  # `call` awaits it
        assert zbus_answer("secret") == []
        sample = live.server.metrics.registry.get_sample_value
        for protocol in ("worterbuch", "zbus"):
            assert sample("babelbus_proofs_failed_total", {"protocol": protocol}) == 1
            assert sample("babelbus_proofs_delayed_total", {"protocol": protocol}) == 1


def test_files_of_secrets_that_others_may_read_are_refused(tmp_path: Path) -> None:
    keys, key = secret_file(tmp_path, "keys", "key secret\n"), secret_file(tmp_path, "key", SECRET)
    cert, tls_key = Authority(tmp_path).issue("localhost")
    tls = {"tls_cert_file": str(cert), "tls_key_file": str(tls_key)}
    for path, name, zbus, worterbuch in (
        (keys, r"zbus\.auth_file", {"auth_file": keys}, {}),
        (key, r"worterbuch\.auth_key_file", {}, {"auth_key_file": key}),
        (str(tls_key), r"zbus\.tls_cert_file, zbus\.tls_key_file", tls, {}),
    ):
        Path(path).chmod(0o644)
        refused = rf"{name}: .*may be read by others \(mode 644\); 'chmod 600' it, and replace the secret in it"
        with pytest.raises(ConfigError, match=refused), serve(tmp_path, zbus=zbus, **worterbuch):
            pass
        Path(path).chmod(0o600)
        with serve(tmp_path, zbus=zbus, **worterbuch):
            pass


def test_a_short_secret_works_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(tmp_path, auth_key_file=secret_file(tmp_path, "key", "a word")):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if "auth_key_file" in record.getMessage()]
    assert "could be guessed" in warning
    assert "a word" not in warning


def test_a_key_set_and_a_key_file_exclude_each_other(tmp_path: Path) -> None:
    key = secret_file(tmp_path, "key", SECRET)
    with pytest.raises(ConfigError, match="exclude each other"), serve(tmp_path, auth_key_file=key, auth_key_set=key):
        pass
    with pytest.raises(ConfigError, match=r"auth_key_set: .*https"), serve(tmp_path, auth_key_set="http://id.example/"):
        pass


@pytest.mark.parametrize(("others", "mode"), [(False, 0o700), (True, 0o711)])
def test_users_that_sbus_lets_in_pass_through_the_data_folder_and_see_nothing(
    tmp_path: Path, others: bool, mode: int
) -> None:
    config = msgspec.structs.replace(configure(tmp_path / "data"), sbus=SbusSettings(others=others))
    with LiveServer(config) as live:
        root = Path(live.server.folder)
        assert root.stat().st_mode & 0o777 == mode
        private = [path for path in root.iterdir() if path.name != "run"]
        assert {"conf", "lock", "topics"} <= {path.name for path in private}
        assert not [path for path in private if path.stat().st_mode & 0o077]
