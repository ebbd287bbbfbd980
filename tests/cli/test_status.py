"""`babelbus status` and `babelbus top`: one screen, live or once."""

import json
import signal

import pytest

from babelbus.cli.status import _rate, _screen, _uptime, _with_rates
from tests.cli.shell import COMMAND, ENVIRONMENT, Served
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.terminal import Terminal


def sample(at: float, acknowledged: int, lag: int) -> dict[str, object]:
    counts = {"published": 10 * at, "published_bytes": 0, "fetched": 0, "live_received": 0, "live_delivered": 0}
    return {
        "version": "1", "uptime_seconds": 100.0, "time_seconds": at, "health": "degraded", "enforcing": True,
        "reasons": ["topic orders: no space\x1b[31m is left"], "memory_bytes": 2**20, "addresses": {},
        "disk": {"log_bytes": 1, "free_bytes": 2, "total_bytes": 3},
        "protocols": [counts | {"protocol": "zbus", "connections": 12_345, "connections_refused": 0, "fetched_bytes": 0,
                                "live_dropped": 0, "waiting_bytes": 0}],
        "topics": [counts | {"name": f"t{number}", "records": 1, "bytes": 1} for number in range(30)],
        "groups": [{"topic": "orders", "name": "workers", "members": 2, "paused": False, "lag": lag, "in_flight": 1,
                    "delivered": 0, "acknowledged": acknowledged, "redelivered": 0}],
    }  # fmt: skip


def test_two_samples_make_rates_and_find_slow_groups() -> None:
    shown = _with_rates(sample(0.0, 0, 100), sample(2.0, 20, 10_002))
    assert shown["rates"]["published"] == 10.0
    assert shown["rates"]["acknowledged"] == 10.0
    assert shown["slow"] == [{"topic": "orders", "name": "workers", "why": "the lag grows"}]
    assert _with_rates(sample(0.0, 0, 100), sample(2.0, 100, 10))["slow"] == []


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_screen_fits_the_terminal_and_cuts_no_number(width: int) -> None:
    lines = _screen(_with_rates(sample(0.0, 0, 0), sample(2.0, 20, 10_002)), 10, width)
    text = "\n".join(lines)
    assert "10,002" in text.split()
    assert "12,345" in text.split()
    assert "\x1b[31m is left" not in text
    assert "and 20 more topics" in lines
    table = [line for line in lines if not line.startswith(("  !", "published", "babelbus", "topics "))]
    assert max(map(len, table)) <= width


def test_numbers_are_written_for_people() -> None:
    assert [_rate(0), _rate(0.25), _rate(12_345.6)] == ["0/s", "0.2/s", "12,346/s"]
    assert [_uptime(5), _uptime(1_122), _uptime(273_000)] == ["5s", "18m 42s", "3d 3h"]


def test_a_server_is_shown_once_and_live_without_a_terminal(served: Served) -> None:
    served.run("topics", "create", "orders")
    served.run("publish", "orders", "a", "b")
    text = served.run("status", "--interval", "100ms")
    assert text.startswith("babelbus ")
    assert ": ok, up " in text
    assert "orders" in text
    (shown,) = served.rows("status", "--json", "--interval", "100ms")
    assert shown["health"] == "ok"
    assert [topic["records"] for topic in shown["topics"] if topic["name"] == "orders"] == [2]
    (line,) = served.rows("top", "--once", "--json", "--interval", "100ms")
    assert line["slow"] == []
    live = served.start("top", "--json", "--interval", "50ms")
    assert live.stdout is not None
    assert [json.loads(live.stdout.readline())["health"] for _ in range(3)] == ["ok"] * 3
    live.send_signal(signal.SIGINT)
    live.communicate(timeout=SAFETY_NET_SECONDS)
    assert live.returncode == 0


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_top_fits_a_real_terminal_and_leaves_it_as_it_was(served: Served, columns: int) -> None:
    topic = f"a-topic-with-a-name-that-is-rather-long-{columns}"
    served.run("topics", "create", topic)
    served.run("publish", topic, "one")
    command = [*COMMAND, "top", "--interval", "50ms"]
    with Terminal(command, served.folder, ENVIRONMENT, columns=columns) as terminal:
        terminal.expect("published")
        terminal.expect(topic if columns == 200 else topic[:10])
        shown = len(terminal.raw)
        while len(terminal.raw) < 3 * shown:  # the screen is drawn again in place
            assert terminal.read(SAFETY_NET_SECONDS)
        assert max(map(len, terminal.text.splitlines())) <= columns
        terminal.type("\x03")
        assert terminal.wait() in (0, 130)
        assert terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l") > 0  # the cursor is back
        assert "Traceback" not in terminal.text
