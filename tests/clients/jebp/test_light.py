"""What importing the client loads: nothing of the server, and no library that a client does without."""

import subprocess
import sys

import pytest

HEAVY = ("numpy", "aiohttp", "sqlalchemy", "prometheus_client", "click", "rich", "yaml", "uvloop")
OURS = ("core", "server", "web", "storage", "protocols.connection", "protocols.jebp.session", "records.columns")


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import babelbus", ()),
        ("from babelbus import Client, BlockingClient, Message, Identity", ("asyncio", "nacl", "msgspec")),
        ("from babelbus.client import *", ("asyncio", "nacl", "msgspec")),
    ],
)
def test_the_client_is_light(code: str, allowed: tuple[str, ...]) -> None:
    names = [*HEAVY, *(f"babelbus.{name}" for name in OURS), "asyncio", "nacl", "msgspec", "typing"]
    told = f"{code}; import sys; print(' '.join(name for name in {names!r} if name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {told}"],
                            capture_output=True, text=True, check=True)  # fmt: skip
    assert set(loaded.stdout.split()) - {"typing"} == set(allowed)


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    import babelbus

    with pytest.raises(AttributeError, match="no attribute 'Sever'"):
        babelbus.Sever  # noqa: B018
