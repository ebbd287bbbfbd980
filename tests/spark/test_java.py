import os
import subprocess
from pathlib import Path

import pytest

from babelbus.spark.java import (
    FAST_COLLECTOR,
    FAST_OPTIONS,
    OPTION_VARIABLES,
    JavaMissingError,
    fast_options,
    java_home,
    java_version,
)


def make(home: Path, version: str) -> str:
    """Something that says which Java it is, as Java does."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n")
    program.chmod(0o755)
    return str(home)


@pytest.mark.parametrize(("said", "version"), [("17.0.15", 17), ("1.8.0_412", 8), ("21", 21), ("25-ea", 25)])
def test_a_java_says_which_version_it_is(tmp_path: Path, said: str, version: int) -> None:
    assert java_version(make(tmp_path / "jdk", said)) == version
    assert java_version(str(tmp_path)) is None


def test_java_home_comes_before_path_and_path_before_the_usual_folders(tmp_path: Path) -> None:
    named, on_path, usual = (make(tmp_path / name, "17.0.1") for name in ("named", "on_path", "usual"))
    path = {"PATH": f"{on_path}/bin"}
    folders = [f"{tmp_path}/usu*"]
    assert java_home({"JAVA_HOME": named} | path, folders) == named
    assert java_home(path, folders) == on_path
    assert java_home({"PATH": ""}, folders) == usual


def test_a_java_on_the_path_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old, new, newer = make(tmp_path / "old", "11.0.2"), make(tmp_path / "a", "25"), make(tmp_path / "b", "17.0.2")
    assert java_home({"PATH": f"{old}/bin"}, [new, newer]) == newer


def test_a_collector_that_somebody_chose_is_kept() -> None:
    assert fast_options("-Xmx2g", {}) == f"{FAST_COLLECTOR} {FAST_OPTIONS} -Xmx2g"
    for chosen in ("-XX:+UseG1GC", "-Xmx2g -XX:+UseZGC", "-XX:-UseParallelGC"):
        assert fast_options(chosen, {}) == f"{FAST_OPTIONS} {chosen}"
        assert fast_options("", {"JDK_JAVA_OPTIONS": chosen}) == FAST_OPTIONS
    assert fast_options("", {"SPARK_CONF_DIR": "/etc/spark"}) == FAST_OPTIONS


def test_a_java_starts_with_the_options() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in OPTION_VARIABLES}
    program = [str(Path(java_home()) / "bin" / "java"), *fast_options("", {}).split(), "-version"]
    assert subprocess.run(program, env=environment, capture_output=True, check=False).returncode == 0


def test_without_a_java_that_will_do_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make(tmp_path / "old", "11.0.2")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JavaMissingError, match=r"dnf install java-17-openjdk-headless; .*set JAVA_HOME"):
        java_home({"PATH": ""}, [])
    with pytest.raises(JavaMissingError, match=f"found only Java 11 in {old}"):
        java_home({"PATH": f"{old}/bin"}, [])
    with pytest.raises(JavaMissingError, match=f"JAVA_HOME is {old}, which holds Java 11"):
        java_home({"JAVA_HOME": old}, [])
    installer = tmp_path / "bin" / "apt-get"
    installer.parent.mkdir()
    installer.touch(0o755)
    monkeypatch.setenv("PATH", str(installer.parent))
    with pytest.raises(JavaMissingError, match=r"'(sudo )?apt-get install openjdk-17-jre-headless'"):
        java_home({"PATH": ""}, [])
