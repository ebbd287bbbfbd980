"""Finding a Java that Spark runs on, or saying how to get one."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from glob import glob

from babelbus.errors import BabelbusError

VERSION_MIN = 17
VERSION_SECONDS_MAX = 20.0
FOLDERS = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/usr/local/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "~/.sdkman/candidates/java/*",
    "~/.jdk/*",
)
"""Where systems and version managers put Java; the oldest that is new enough is taken."""
FAST_OPTIONS = "-Darrow.enable_null_check_for_get=false"
"""Arrow does not look once more whether there is a value, after Spark has looked."""
FAST_COLLECTOR = "-XX:+UseParallelGC"
"""Has no barriers for collecting beside the work, which cost a task more than its pauses do."""
OPTION_VARIABLES = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
CONFIGURATION_VARIABLES = ("SPARK_HOME", "SPARK_CONF_DIR")
_COLLECTOR = re.compile(r"-XX:[+-]Use\w*GC\b")
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_INSTALLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "apt-get": ("apt-get install openjdk-17-jre-headless", ("-y", "-qq")),
    "dnf": ("dnf install java-17-openjdk-headless", ("-y",)),
    "yum": ("yum install java-17-openjdk-headless", ("-y",)),
    "zypper": ("zypper install java-17-openjdk-headless", ("--non-interactive",)),
    "pacman": ("pacman -S jre17-openjdk-headless", ("--noconfirm",)),
    "apk": ("apk add openjdk17-jre-headless", ()),
    "brew": ("brew install openjdk@17", ()),
}
"""Program -> its command, and the options with which it asks nothing."""


class JavaMissingError(BabelbusError):
    """There is no Java that is new enough; the message says how to install one here."""


def java_home(environment: Mapping[str, str] | None = None, folders: Iterable[str] = FOLDERS) -> str:
    """Return the folder of a Java of version 17 or newer: of JAVA_HOME, else of PATH, else of the usual places.

    Raises:
        JavaMissingError: there is no such Java. A JAVA_HOME that is set counts alone, as it does for Spark.
    """
    environment = os.environ if environment is None else environment
    named = environment.get("JAVA_HOME")
    if named:
        version = java_version(named)
        if version is not None and version >= VERSION_MIN:
            return named
        what = "holds no Java" if version is None else f"holds Java {version}"
        raise JavaMissingError(f"JAVA_HOME is {named}, which {what}; Spark needs {VERSION_MIN} or newer: {_advice()}")
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    first = None if on_path is None else os.path.dirname(os.path.dirname(os.path.realpath(on_path)))
    homes = sorted(path for pattern in folders for path in glob(os.path.expanduser(pattern)))
    old: list[str] = []
    found: list[tuple[int, str]] = []
    for home in dict.fromkeys([*filter(None, [first]), *homes]):
        version = java_version(home)
        if version is not None and version < VERSION_MIN:
            old.append(f"{version} in {home}")
        elif version is not None and home == first:
            return home
        elif version is not None:
            found.append((version, home))
    if found:
        # The oldest that is new enough: Spark is tested with that version.
        return min(found)[1]
    have = f"found only Java {', '.join(old)}" if old else "found none"
    raise JavaMissingError(f"Spark needs Java {VERSION_MIN} or newer, {have}: {_advice()}")


def java_version(home: str) -> int | None:
    """Return the major version of the Java in a folder, `None` without a Java that runs."""
    program = os.path.join(home, "bin", "java")
    if not os.access(program, os.X_OK):
        return None
    try:
        told = subprocess.run(  # noqa: S603 - a program of this machine, named by its owner
            [program, "-version"], capture_output=True, text=True, timeout=VERSION_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(told.stderr + told.stdout)
    return int(match[1]) if match else None


def fast_options(given: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Return options for a JVM that gets its rows from Python, a tenth faster in that, and behind them those `given`.

    A JVM does not start with two collectors: it gets none where another one is chosen, by `given`, by a variable or
    perhaps by a configuration of Spark that has a place of its own.
    """
    environment = os.environ if environment is None else environment
    chosen = " ".join([given, *(environment.get(name, "") for name in OPTION_VARIABLES)])
    free = not (_COLLECTOR.search(chosen) or any(environment.get(name) for name in CONFIGURATION_VARIABLES))
    return " ".join(filter(None, [FAST_COLLECTOR if free else "", FAST_OPTIONS, given]))


def install() -> int:
    """Run this system's package manager to install a Java, if we may; return its exit code.

    Raises:
        JavaMissingError: there is no package manager that we know, or only root may use it; it says what to do.
    """
    command = _install_command()
    if command is None or _needs_root(command):
        raise JavaMissingError(f"Spark needs Java {VERSION_MIN} or newer, found none: {_advice()}")
    program, verb, package = command.split()
    if program == "apt-get":  # a fresh image knows no packages yet
        subprocess.run([program, "update", "-qq"], check=False)  # noqa: S603
    return subprocess.run([program, verb, *_INSTALLERS[program][1], package], check=False).returncode  # noqa: S603


def main() -> int:
    """Find a Java, else install one: `python -m babelbus.spark.java`, as the Makefile does."""
    try:
        java_home()
    except JavaMissingError as error:
        print(f"{error}; trying to install it", file=sys.stderr)  # noqa: T201
        try:
            install()
            java_home()
        except JavaMissingError as missing:
            print(missing, file=sys.stderr)  # noqa: T201
            return 1
    return 0


def _install_command() -> str | None:
    return next((command for program, (command, _) in _INSTALLERS.items() if shutil.which(program)), None)


def _needs_root(command: str) -> bool:
    return not command.startswith("brew") and os.geteuid() != 0


def _advice() -> str:
    command = _install_command()
    if command is not None:
        return f"run '{'sudo ' if _needs_root(command) else ''}{command}'"
    every = "; ".join(command for command, _ in _INSTALLERS.values())
    return f"install one with your package manager ({every}), or unpack a JRE and set JAVA_HOME"


if __name__ == "__main__":
    sys.exit(main())
