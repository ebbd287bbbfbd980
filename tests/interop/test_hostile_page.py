"""Pages of others in a real browser, against a server with its defaults (`make interop`; skipped without Chromium).

The browser finds `evil.example` here. For `rebound.example` it asks a SOCKS proxy, which stands for a name server whose
answer changes: the connection that asks for the page reaches the attacker, the others the bus.
"""

import json
import queue
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from babelbus.config import ServerSettings, ZbusSettings
from tests.support.browsers import export, picture, tree
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.chromium import find_browser
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient

PAGES = Path(__file__).parent / "hostile_page"
EVIL, REBOUND = "evil.example", "rebound.example"
PAGE_REQUEST = b"GET /rebound "
DOORS = ("zbus", "zbus-monitor", "worterbuch", "admin")
# What the browser itself does against such pages is off: it is the server that is tested.
BROWSER_FEATURES = "LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets,HttpsUpgrades,HttpsFirstBalancedMode"


class Attacker(ThreadingHTTPServer):
    """A web site that is bad. `reports` has what its pages tell it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Site)
        self.pages: dict[str, bytes] = {}
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.origin = f"http://{EVIL}:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, name="attacker")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.shutdown()
        self._thread.join(SAFETY_NET_SECONDS)
        self.server_close()

    def show(self, script: str, **values: object) -> None:
        """Make a page of a script at `/SCRIPT`."""
        constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
        code = (PAGES / f"{script}.js").read_text(encoding="utf-8")
        self.pages[f"/{script}"] = f"<!DOCTYPE html><body><script>{constants}{code}</script>".encode()


class _Site(BaseHTTPRequestHandler):
    server: Attacker

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        self._answer(404 if page is None else 200, page or b"")

    def do_POST(self) -> None:
        report = self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, b"")
        self.server.reports.put(json.loads(report))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class has named it
        """Keep standard error for failures."""


class NameServer:
    """SOCKS 5 (RFC 1928): the rebound name is the attacker's address for the page, else that of what listens here."""

    def __init__(self, attacker: Attacker) -> None:
        self._attacker = attacker
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="socks")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(SAFETY_NET_SECONDS)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        """Serve one connection; it ends as a refused one does when the server, or the browser, is gone before it."""
        try:
            self._pass_on(client)
        except (OSError, ValueError, IndexError):  # the last two: a message that ends in the middle
            client.close()

    def _pass_on(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as reader:
            greeting = reader.read(2)
            if len(greeting) < 2:  # opened in advance, and not used
                return
            reader.read(greeting[1])
            client.sendall(b"\x05\x00")
            _, command, _, kind = reader.read(4)
            assert (command, kind) == (1, 3), "only CONNECT to a name is expected"
            name = reader.read(reader.read(1)[0]).decode()
            port = int.from_bytes(reader.read(2), "big")
            if name != REBOUND:  # the browser's own traffic goes nowhere
                client.sendall(b"\x05\x02\x00\x01" + bytes(6))
                return
            client.sendall(b"\x05\x00\x00\x01" + bytes(6))
            # A browser opens connections before it needs them, so it is the first request that tells what one is for.
            begin = client.recv(2**16)
            if not begin:
                return
            address = self._attacker.server_port if begin.startswith(PAGE_REQUEST) else port
            with socket.create_connection(("127.0.0.1", address)) as upstream:
                upstream.sendall(begin)
                back = threading.Thread(target=_copy, args=(upstream, client), daemon=True)
                back.start()
                _copy(client, upstream)
                back.join(SAFETY_NET_SECONDS)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture(scope="module")
def program() -> str:
    path = find_browser()
    if path is None:
        pytest.skip("Chromium is not installed: no page was opened (Debian: apt-get install chromium)")
    return path


@pytest.fixture
def attacker() -> Iterator[Attacker]:
    with Attacker() as site:
        yield site


class Browser:
    """A browser with a profile of its own that shows one page until `with` ends."""

    def __init__(self, program: str, folder: Path, names: NameServer, url: str) -> None:
        self._log = (folder / "browser.log").open("wb")
        self._process = subprocess.Popen(
            [
                program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
                *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
                f"--disable-features={BROWSER_FEATURES}",
                f"--user-data-dir={folder / 'profile'}",
                f"--host-resolver-rules=MAP {EVIL} 127.0.0.1",
                f"--proxy-server=socks5://127.0.0.1:{names.port}",
                f"--proxy-bypass-list={EVIL}",
                url,
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(SAFETY_NET_SECONDS)
        finally:
            self._process.kill()
            self._log.close()


def serve(folder: Path, attacker: Attacker, *, trusted: bool) -> LiveServer:
    """A server with its defaults, or one whose operator trusts the page and the name."""
    settings = ServerSettings(allowed_origins=attacker.origin, host_names=REBOUND) if trusted else None
    return LiveServer(
        configure(folder / "data", zbus=ZbusSettings(port=0, monitor_port=0), server=settings, admin=True)
    )


def prepare(live: LiveServer) -> bytes:
    """Make what the pages are after; give an older state of the tree."""
    with HttpClient(live.server.addresses["zbus"]) as client:
        for mq in ("T", "Image", "Form"):
            assert client.do("create", mq=mq, channel="C").status == 200
            assert client.do("pub", b"secret", mq=mq).status == 200
    with HttpClient(live.server.addresses["worterbuch"]) as client:
        assert client.ask("POST", "/api/v1/set/k", b'"old"', content_type="application/json").status == 200
        old = export(live)
        assert client.ask("POST", "/api/v1/set/k", b'"secret"', content_type="application/json").status == 200
    return old


def open_attack(program: str, folder: Path, live: LiveServer, attacker: Attacker, old: bytes) -> dict[str, Any]:
    """Show the attacking page, and give its report."""
    addresses = live.server.addresses
    doors = {
        name: addresses[door] for name, door in zip(("zbus", "monitor", "worterbuch", "admin"), DOORS, strict=True)
    }
    raw = [addresses["worterbuch-tcp"], addresses["jebp"]]
    attacker.show("attack", DOORS={**doors, "raw": raw, "tree": old.decode()}, REPORT="/report")
    with NameServer(attacker) as names, Browser(program, folder, names, f"{attacker.origin}/attack"):
        return attacker.reports.get(timeout=SAFETY_NET_SECONDS)


def open_rebound(program: str, folder: Path, live: LiveServer, attacker: Attacker) -> dict[str, dict[str, Any]]:
    """Show a page of the rebound name for each door, and give the reports by the names of the doors."""
    ports = {live.server.addresses[door].rpartition(":")[2]: door for door in DOORS}
    attacker.show("rebound", REPORT=f"{attacker.origin}/report")
    frames = "".join(f'<iframe src="http://{REBOUND}:{port}/rebound"></iframe>' for port in ports)
    attacker.pages["/frames"] = f"<!DOCTYPE html><body>{frames}".encode()
    reports: dict[str, Any] = {}
    with NameServer(attacker) as names, Browser(program, folder, names, f"{attacker.origin}/frames"):
        while len(reports) < len(ports):
            reports |= attacker.reports.get(timeout=SAFETY_NET_SECONDS)
    return {ports[port]: report for port, report in reports.items()}


@pytest.mark.interop
def test_a_hostile_page_reads_nothing_and_changes_nothing(program: str, tmp_path: Path, attacker: Attacker) -> None:
    with serve(tmp_path, attacker, trusted=False) as live:
        old = prepare(live)
        before = picture(live)
        report = open_attack(program, tmp_path, live, attacker, old)
        assert picture(live) == before
        # Every attack was made.
        assert report == {"images": 9, "frames": 16, "forms": 10, "posts": 5, "opened": [], "read": []}


@pytest.mark.interop
def test_the_same_page_may_do_all_of_it_where_the_operator_lists_its_origin(
    program: str, tmp_path: Path, attacker: Attacker
) -> None:
    with serve(tmp_path, attacker, trusted=True) as live:
        report = open_attack(program, tmp_path, live, attacker, prepare(live))
        addresses = live.server.addresses
        topics, _, _ = picture(live)
        # By images nothing was made or removed, and the ports without HTTP take nothing from anybody's page.
        assert topics == {"FromForm": 0, "FromPost": 0, "FromSocket": 0, "Image": 1, "T": 2}
        assert tree(live) == {"k/form": 1, "k/post": 1, "k/json": 1, "k/socket": "last"}
        assert [url.partition(" ")[2].partition(" ")[0] for url in report["read"]] == [
            f"http://{addresses['worterbuch']}/api/v1/set/k/json",
            f"http://{addresses['worterbuch']}/api/v1/delete/k",
            f"http://{addresses['zbus']}/?cmd=query",
            f"http://{addresses['zbus-monitor']}/?cmd=query",
            f"http://{addresses['worterbuch']}/api/v1/pget/%23",
        ]
        assert len(report["opened"]) == 3


@pytest.mark.interop
@pytest.mark.parametrize("trusted", [False, True])
def test_a_rebound_name_reads_nothing_unless_the_operator_lists_it(
    program: str, tmp_path: Path, attacker: Attacker, trusted: bool
) -> None:
    with serve(tmp_path, attacker, trusted=trusted) as live:
        prepare(live)
        before = picture(live)
        reports = open_rebound(program, tmp_path, live, attacker)
        if not trusted:
            assert picture(live) == before
            for report in reports.values():
                assert report.pop("socket") == "refused"
                assert set(report.values()) == {421}
        else:
            assert picture(live) != before
            assert reports["zbus"]["GET /?cmd=query"] == reports["zbus"]["GET /?cmd=create&mq=Rebound"] == 200
            assert reports["worterbuch"]["GET /api/v1/pget/%23"] == reports["worterbuch"]["POST /api/set"] == 200
            assert reports["admin"]["GET /metrics"] == 200
            assert reports["zbus"]["socket"] == reports["worterbuch"]["socket"] == "open"
