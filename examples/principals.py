"""The principals of `make demo`: what each shows at its door; examples/access.toml says what each may do."""

import base64
import hmac
import json
import os
import secrets
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from babelbus.client import Identity
from babelbus.web.token import read_token

TABLE = Path(__file__).parent / "access.toml"
SECONDS = 60.0


class Principals(msgspec.Struct, frozen=True):
    """The proofs of the principals."""

    airline: Identity
    spark_key: str
    """Path of the key file of the service account of Spark."""
    registry: str
    """A JWT."""
    worker: tuple[str, str]
    """API key and secret."""
    passenger: str
    """A password."""


def make_token_key(folder: str) -> str:
    """Write the key of JWTs, and return the path of its file."""
    path = f"{folder}/token.key"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(secrets.token_urlsafe(48))
    return path


def make_principals(folder: str, data_folder: str, admin: str) -> Principals:
    """Create a credential for each principal of the table, through the administration API."""
    identities = {}
    for name in ("airline", "spark"):
        identities[name] = Identity.generate()
        identities[name].save(f"{folder}/{name}.key", name=name)
        _issue(data_folder, admin, name, kind="jebp", fingerprint=identities[name].fingerprint)
    _issue(data_folder, admin, "tower", kind="peer", uid=os.getuid())
    made = _issue(data_folder, admin, "worker", kind="api-key", key="worker")
    password = secrets.token_urlsafe(16)
    _issue(data_folder, admin, "passenger", kind="password", password=password)
    token = sign("registry", Path(f"{folder}/token.key").read_text(encoding="utf-8"))
    return Principals(identities["airline"], f"{folder}/spark.key", token, ("worker", made["secret"]), password)


def _issue(data_folder: str, admin: str, name: str, **wish: object) -> Any:
    request = urllib.request.Request(
        f"http://{admin}/api/principals/{name}",
        json.dumps({"issue": [wish]}).encode(),
        {"authorization": f"Bearer {read_token(data_folder)}", "content-type": "application/json"},
        method="PATCH",
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return next(iter(json.load(response)["secrets"]), None)


def sign(name: str, key: str) -> str:
    """Return a JWT (HS256) of a principal; it grants everything, so that the table alone decides."""
    privileges = {"read": ["#"], "write": ["#"], "delete": ["#"]}
    claims = {"sub": name, "name": name, "exp": time.time() + 3600, "worterbuchPrivileges": privileges}
    text = ".".join(_base64(json.dumps(part).encode()) for part in ({"alg": "HS256", "typ": "JWT"}, claims))
    return f"{text}.{_base64(hmac.digest(key.encode(), text.encode(), 'sha256'))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
