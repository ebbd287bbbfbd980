"""The wheel as its users have it: built twice, installed into an empty environment, used against a server elsewhere."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import babelbus
from tests.documentation.pages import Reader
from tests.documentation.test_pages import PAGES
from tests.support.bus import SAFETY_NET_SECONDS

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")
ENVIRONMENT_BYTES_MAX = 40_000_000
EPOCH = "1700000000"
COMMANDS_OF_SERVERS = ("serve", "sbusd", "repair", "clients", "migrate", "pipeline", "pipeline_report")
"""They run a server, or work on the data folder of one; pipelines need Spark."""
PAGES_OF_SERVERS = {"docs/backup.md"}
"""Pages about the data folder of a server, which clients elsewhere do not have."""
MODULES_OF_SERVERS = ("babelbus.protocols.worterbuch.archive",)
"""Exports of Wörterbuch, which `state import` reads beside JSON lines: that says what to install."""


def build(folder: Path) -> Path:
    """Build the wheel of a copy of the sources, which has nothing of earlier builds."""
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(copy)],
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def requirements(name: str) -> set[str]:
    """Return the distributions that one needs without its extras, itself included."""
    names, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        needed = map(Requirement, metadata.requires(name) or ())
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return names


def base_requirements() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("\ndependencies = [")[2].partition("]")[0]
    return set[str]().union(*(requirements(Requirement(entry).name) for entry in re.findall(r'"([^"]+)"', listed)))


def copy_distribution(name: str, target: Path) -> None:
    """Install a package as it is installed here: no network is needed, and no index."""
    distribution = metadata.distribution(name)
    for file in distribution.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(str(distribution.locate_file(file))), target / file)


class Environment:
    """A virtual environment with the wheel, and without whatever else is installed here."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        for name in base_requirements():
            copy_distribution(name, self.packages)
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--no-index", str(wheel)], check=True)
        subprocess.run([self.python, "-m", "compileall", "-q", str(self.packages)], check=True)

    def run(self, *command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in a folder, with no variable that leads to the repository."""
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "PATH") if name in os.environ}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=cwd,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=SAFETY_NET_SECONDS,
            check=False,
        )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [build(tmp_path_factory.mktemp(f"build{number}")) for number in range(2)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: list[Path]) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"), wheels[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server of the repository, in another folder than its clients."""
    command = [sys.executable, "-c", "from babelbus.cli import main; main()", "serve", "--server-any-port", "--json"]
    folder = tmp_path_factory.mktemp("elsewhere")
    process = subprocess.Popen([*command, "--data-folder", str(folder / "data")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        yield json.loads(process.stdout.readline())
        process.terminate()
    assert process.wait(SAFETY_NET_SECONDS) == 0


def test_two_builds_of_the_same_sources_are_the_same_bytes(wheels: list[Path]) -> None:
    assert wheels[0].name == wheels[1].name == f"babelbus-{babelbus.__version__}-py3-none-any.whl"
    assert len({hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}) == 1


def test_the_client_and_the_command_line_need_less_than_40_mb(environment: Environment) -> None:
    files = [file for file in environment.packages.rglob("*") if file.is_file()]
    assert 10_000_000 < sum(file.stat().st_size for file in files) < ENVIRONMENT_BYTES_MAX
    installed = {file.name.partition("-")[0].lower() for file in environment.packages.glob("*.dist-info")}
    assert not installed & {"numpy", "aiohttp", "sqlalchemy", "cryptography", "uvloop", "psycopg"}


def test_its_command_line_and_its_client_use_a_server_elsewhere(
    environment: Environment, server: dict[str, Any], tmp_path: Path
) -> None:
    addresses = server["addresses"]
    reach = {
        "BABELBUS_SERVER": addresses["jebp"],
        "BABELBUS_SERVER_FINGERPRINT": server["server_fingerprint"],
        "BABELBUS_IDENTITY": shutil.copy(server["admin_key"], tmp_path),
    }
    program = f"""
from babelbus.client import BlockingClient, Identity
with BlockingClient({addresses["jebp"]!r}, identity=Identity.load("admin_key")) as client:
    client.create_topic("news")
    client.publish_many("news", [b"%d" % number for number in range(1000)])
"""
    (tmp_path / "program.py").write_text(program)
    assert environment.run("babelbus", "--version", cwd=tmp_path).stdout == f"babelbus {babelbus.__version__}\n"
    done = environment.run("python", "program.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = environment.run("babelbus", "publish", "news", "one more", cwd=tmp_path, **reach)
    assert (done.returncode, done.stderr) == (0, "")
    done = environment.run("babelbus", "fetch", "news", "--json", cwd=tmp_path, **reach)
    assert (done.returncode, done.stderr) == (0, "")
    payloads = [json.loads(line)["payload"] for line in done.stdout.splitlines()]
    assert payloads == [*map(str, range(1000)), "one more"]


@pytest.mark.parametrize("page", sorted(PAGES - PAGES_OF_SERVERS))
def test_a_reader_with_the_wheel_and_a_server_elsewhere_can_do_what_the_page_says(
    environment: Environment, tmp_path: Path, page: str
) -> None:
    reader = Reader(tmp_path, installed=environment.folder)
    try:
        reader.follow(ROOT / page)
    finally:
        reader.close()


def test_every_command_shows_its_help_without_the_packages_of_the_server(
    environment: Environment, tmp_path: Path
) -> None:
    program = """
import click
from babelbus.cli import program

def show(command, context):
    command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            show(child, click.Context(child, info_name=name, parent=context))

show(program, click.Context(program, info_name="babelbus"))
"""
    done = environment.run("python", "-c", program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "extra"), [(("serve",), "server"), (("check", "--data-folder", "."), "server")], ids=str
)
def test_a_command_that_needs_an_extra_says_what_to_install(
    environment: Environment, tmp_path: Path, command: tuple[str, ...], extra: str
) -> None:
    done = environment.run("babelbus", *command, cwd=tmp_path)
    assert done.returncode == 1
    assert f"which is not installed: pip install 'babelbus[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_all_that_the_commands_of_a_client_load_later_is_there_without_the_server(
    environment: Environment, tmp_path: Path
) -> None:
    program = f"""
import ast, importlib, pkgutil
import babelbus.cli

for module in pkgutil.iter_modules(babelbus.cli.__path__):
    if module.name in {COMMANDS_OF_SERVERS!r}:
        continue
    source = open(babelbus.cli.__path__[0] + f"/{{module.name}}.py", encoding="utf-8").read()
    tree = ast.parse(source)
    typing = {{id(one) for node in ast.walk(tree) if isinstance(node, ast.If) for one in ast.walk(node)
              if getattr(node.test, "id", "") == "TYPE_CHECKING"}}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing and node.module.startswith("babelbus."):
            if node.module not in {MODULES_OF_SERVERS!r}:
                importlib.import_module(node.module)
"""
    done = environment.run("python", "-c", program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
