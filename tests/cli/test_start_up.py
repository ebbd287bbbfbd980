"""What each command loads before it is ready: the time of a start is that of its imports, which a test can hold."""

import subprocess
import sys
from pathlib import Path

import click

from babelbus.cli import COMMANDS, program

HEAVY = frozenset(
    {"aiohttp", "cryptography", "google", "hpack", "jwt", "nacl", "numpy", "prometheus_client", "psycopg", "rich"}
    | {"sqlalchemy", "uvloop"}
)
"""Packages that take ten milliseconds or a mebibyte."""


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Return the packages that a fresh interpreter has loaded when `code` ends."""
    end = "import sys; sys.stderr.write(' '.join(sys.modules))"
    script = f"import atexit; atexit.register(lambda: exec({end!r})); {code}"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    modules = done.stderr.split()
    return {name.split(".")[0] for name in modules} | {name for name in modules if name.startswith("babelbus.")}


def test_the_list_of_commands_shows_the_first_words_of_each() -> None:
    context = click.Context(program)
    for name, (_, text) in COMMANDS.items():
        command = program.get_command(context, name)
        assert command is not None
        assert text == command.get_short_help_str(80), name


def test_the_list_of_commands_is_shown_without_loading_any() -> None:
    loaded = loaded_by("from babelbus.cli import main; main(['--help'])")
    assert not loaded & (HEAVY | {"msgspec", "asyncio"})
    assert {name for name in loaded if name.startswith("babelbus.")} == {"babelbus.cli"}


def test_sbusd_loads_no_broker_no_arrays_and_no_metrics(tmp_path: Path) -> None:
    code = (
        "import os, signal, threading; from babelbus.cli import main;"
        "from babelbus.protocols.sbus.packets import PacketServer; listen = PacketServer.listen;"
        "PacketServer.listen = lambda *a: (listen(*a), os.kill(os.getpid(), signal.SIGTERM))[0];"
        f"main(['sbusd', '-f', '-a', {str(tmp_path / 'socket')!r}])"
    )
    loaded = loaded_by(code)
    assert not loaded & (HEAVY | {"babelbus.core.broker", "babelbus.metrics", "babelbus.storage"})
    assert "babelbus.core.router" in loaded


def test_serve_loads_no_library_that_only_some_servers_need(tmp_path: Path) -> None:
    code = (
        "import os, signal, babelbus.server.process as process; from babelbus.cli import main; run = process.run;"
        "process.run = lambda config, ready: run(config, lambda s: (ready(s), os.kill(os.getpid(), signal.SIGTERM)));"
        f"main(['serve', '--server-any-port', '--log-level', 'error', '--data-folder', {str(tmp_path / 'data')!r}])"
    )
    loaded = loaded_by(code)
    assert not loaded & {"aiohttp", "cryptography", "jwt", "psycopg", "rich", "sqlalchemy", "babelbus.web.admin"}
    assert not loaded & {"hpack", "numpy", "tomllib", "babelbus.protocols.eventmesh.rpc"}
    assert not loaded & {f"babelbus.protocols.{name}.http" for name in ("eventmesh", "worterbuch", "zbus")}
    assert {"nacl", "babelbus.core.broker"} <= loaded


def test_the_client_loads_no_arrays_and_nothing_of_the_server() -> None:
    loaded = loaded_by("import babelbus.client")
    assert not loaded & (HEAVY - {"nacl"})
    rooms = {name.split(".")[1] for name in loaded if name.startswith("babelbus.")}
    assert rooms <= {"client", "clients", "clock", "errors", "protocols", "records", "units", "settings", "config"}
    assert not any(name.startswith("babelbus.protocols.") and ".jebp" not in name for name in loaded)
