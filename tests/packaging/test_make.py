"""The Makefile: what it installs where, and the wheel of a release."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import babelbus

ROOT = Path(__file__).parent.parent.parent
COPIED = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"),
    *("constraints.txt", "deploy", "docs", "examples", "mkdocs.yml", "pyproject.toml", "src"),
)
EPOCH = "1700000000"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, *arguments: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={**kept, "SOURCE_DATE_EPOCH": EPOCH, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_later_target_leaves_the_package_where_a_running_server_has_it(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    stamps = [f"{environment}/.ready-{name}" for name in ("run", "dev", "spark", "docs", "bench")]
    variables = (f"VENV={environment}", f"PYTHON={sys.executable}")
    assert make(ROOT, "-n", *variables, *stamps).count(" -e .") == 1
    later = make(ROOT, "-n", "-o", f"{environment}/.ready-package", *variables, *stamps[1:])
    assert "requirements.txt" in later
    assert " -e ." not in later


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a release from a copy of the sources, with the packages of the environment of this test."""
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, folder)
    (folder / "src" / "babelbus" / "pages").mkdir(exist_ok=True)
    (folder / "src" / "babelbus" / "pages" / "old.html").write_text("a page of an earlier build")
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    (bin_folder / "python").chmod(0o755)
    make(folder, "-o", ".venv/.ready-docs", "wheel")
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


needs_generator = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None,
    reason="MkDocs is not installed: pip install 'babelbus[docs]'",
)


@needs_generator
def test_the_wheel_of_a_release_has_the_pages_of_the_documentation(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "copy")
    assert wheel.name == f"babelbus-{babelbus.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"babelbus/pages/index.html", "babelbus/pages/start.html", "babelbus/server/app.py"} <= names
    assert "babelbus/pages/old.html" not in names
    assert not [name for name in names if name.endswith((".py", ".pyc")) and "/pages/" in name]
    assert not (tmp_path / "copy" / "src" / "babelbus" / "pages").exists()


@pytest.mark.slow
@needs_generator
def test_two_wheels_of_a_release_are_the_same_bytes(tmp_path: Path) -> None:
    wheels = [build_wheel(tmp_path / f"copy{number}") for number in range(2)]
    assert len({hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}) == 1
