"""A PostgreSQL server of a test's own: made in a temporary folder, on a UNIX socket alone, gone afterwards."""

import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

PLACES = "/usr/lib/postgresql/*/bin"
"""Where the Debian packages put the programs of each version; they are not in the PATH."""
START_SECONDS = 100


class PostgresMissingError(Exception):
    """No server can be started here; the message says what is missing."""


class PostgresServer:
    """One server. `url` connects to it; `kill` ends it as a crash does and `start` brings it up again."""

    def __init__(self, folder: str) -> None:
        self._programs = _find_programs()
        self._folder = folder
        self._user = _unprivileged_user()
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._run("initdb", "-D", f"{folder}/data", "-U", "babelbus", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        with open(f"{folder}/data/postgresql.conf", "a", encoding="utf-8") as settings:
            settings.write(
                f"listen_addresses = ''\nunix_socket_directories = '{folder}'\nlogging_collector = off\n"
                "shared_buffers = 32MB\nmax_connections = 50\nwal_writer_delay = 10s\n"
            )

    def url(self, schema: str = "public", password: str = "") -> str:
        """Give the URL of one schema of the server, which keeps tests apart."""
        secret = f":{quote(password)}" if password else ""
        search = quote(f"-csearch_path={schema}")
        return f"postgresql://babelbus{secret}@/postgres?host={quote(self._folder, safe='')}&options={search}"

    def start(self) -> None:
        """Return when it takes connections."""
        with open(f"{self._folder}/log", "ab") as log:
            self._process = subprocess.Popen(
                [f"{self._programs}/postgres", "-D", f"{self._folder}/data"],
                cwd=self._folder, stdout=log, stderr=log, user=self._user,
            )  # fmt: skip
        self._run("pg_isready", "-h", self._folder, "-t", str(START_SECONDS), retry=True)

    def kill(self) -> None:
        """End it without a word to anybody, as a crash does: what was not made durable may be gone."""
        self._end(signal.SIGQUIT)

    def pause(self) -> None:
        """Let every process of the server stand still until `resume`: it takes calls and answers none."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the server go on."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: signal.Signals) -> None:
        assert self._process is not None
        main = self._process.pid
        with open(f"/proc/{main}/task/{main}/children", encoding="ascii") as children:
            pids = [main, *map(int, children.read().split())]
        for pid in pids:
            os.kill(pid, number)

    def stop(self) -> None:
        """End it in good order, whoever is connected."""
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def sql(self, statement: str) -> str:
        """Run one statement as an administrator beside the programs under test would."""
        return self._run("psql", "-h", self._folder, "-U", "babelbus", "-d", "postgres", "-qAtc", statement)

    def _run(self, program: str, *arguments: str, retry: bool = False) -> str:
        deadline = time.monotonic() + START_SECONDS
        while True:
            done = subprocess.run(
                [f"{self._programs}/{program}", *arguments],
                cwd=self._folder, user=self._user, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                return done.stdout.strip()
            if not retry or time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                raise PostgresMissingError(f"{program} failed: {done.stderr.strip()[-500:]}{self._log_end()}")

    def _log_end(self) -> str:
        try:
            with open(f"{self._folder}/log", encoding="utf-8", errors="replace") as log:
                return f"\n{log.read()[-1000:]}"
        except FileNotFoundError:
            return ""


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server until the block ends.

    Raises:
        PostgresMissingError: none can be started here.
    """
    # A socket's path has 107 bytes at most, and pytest's folders are longer than that.
    with tempfile.TemporaryDirectory(prefix="babelbus-pg-", dir=_short_folder()) as folder:
        os.chmod(folder, 0o755)
        server = PostgresServer(folder)
        try:
            server.start()
            yield server
        finally:
            server.kill()


def _short_folder() -> str | None:
    return next((folder for folder in (os.sep + "tmp", os.sep + "run") if os.access(folder, os.W_OK)), None)


def _find_programs() -> str:
    """Give the folder of the newest PostgreSQL that is installed."""
    for folder in [*sorted(glob.glob(PLACES), reverse=True), os.path.dirname(shutil.which("postgres") or "")]:
        if folder and all(os.access(f"{folder}/{name}", os.X_OK) for name in ("initdb", "postgres", "pg_isready")):
            return folder
    raise PostgresMissingError("PostgreSQL's server programs are not installed (Debian: apt-get install postgresql)")


def _unprivileged_user() -> str | None:
    """Give whom to run the server as: PostgreSQL refuses to run as root. `None`: as ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise PostgresMissingError("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
