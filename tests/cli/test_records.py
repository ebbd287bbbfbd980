import gzip
import json
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from babelbus.testing.ports import free_ports
from tests.cli.shell import COMMAND, ENVIRONMENT, Served
from tests.support.bus import SAFETY_NET_SECONDS


@pytest.fixture(scope="module")
def orders(served: Served) -> str:
    """A topic of three partitions with 300 keyed records and some odd ones."""
    served.run("topics", "create", "orders", "--partitions", "3")
    lines = [
        json.dumps({"key": f"k{n % 7}", "payload": f"order {n}", "headers": {"n": str(n)}, "timestamp": 1_000_000 + n})
        for n in range(300)
    ]
    lines.append('{"payload_base64": "/wA=", "key": "k0", "timestamp": 2000000}')
    lines.append('{"payload": null, "key": "k1", "timestamp": 2000001}')
    (done,) = served.rows("publish", "orders", "--json", input="\n".join(lines))
    assert done["records"] == 302
    return "orders"


def content(served: Served, topic: str) -> dict[int, list[tuple[object, ...]]]:
    found: dict[int, list[tuple[object, ...]]] = {}
    for row in served.rows("fetch", topic, "--json"):
        payload = row.get("payload", row.get("payload_base64"))
        headers = tuple(row.get("headers", {}).items())
        found.setdefault(row["partition"], []).append((row["key"], payload, headers, row["timestamp"]))
    return found


def test_arguments_and_lines_become_records(served: Served) -> None:
    served.run("topics", "create", "lines")
    assert served.run("publish", "lines", "first") == "0:0\n"
    assert "2 records" in served.run("publish", "lines", "a", "b", "--key", "k", "--header", "x=y")
    assert "2 records" in served.run("publish", "lines", input="c\nd\r\n")
    rows = served.rows("fetch", "lines", "--json")
    assert [row["payload"] for row in rows] == ["first", "a", "b", "c", "d"]
    assert (rows[1]["key"], rows[1]["headers"]) == ("k", {"x": "y"})
    assert [row["offset"] for row in served.rows("fetch", "lines", "--from-offset", "3", "--max", "1", "--json")] == [3]
    assert "no offset 9" in served.run("fetch", "lines", "--from-offset", "9", code=1)
    assert len(served.rows("fetch", "lines", "--from-time", "-1h", "--json")) == 5
    assert served.run("fetch", "lines", "--max", "1").startswith("0:0  ")


def test_records_of_a_key_stay_together_and_in_order(served: Served, orders: str) -> None:
    places: dict[object, set[int]] = {}
    for partition, rows in content(served, orders).items():
        for key, *_ in rows:
            places.setdefault(key, set()).add(partition)
        assert [row[3] for row in rows] == sorted(row[3] for row in rows)  # type: ignore[type-var]
    assert len(places) == 7
    assert all(len(found) == 1 for found in places.values())


def test_a_search_prints_what_matches_and_how_far_it_came(served: Served, orders: str) -> None:
    rows = served.rows("search", orders, 'payload = "order 17" or headers["n"] = 18', "--json")
    assert sorted(row["payload"] for row in rows) == ["order 17", "order 18"]
    assert {row["key"] for row in rows} == {"k3", "k4"}
    text = served.run("search", orders, 'payload contains "order 1"', "--max", "5")
    assert text.count("  order 1") == 5
    assert "(removed)" in served.run("search", orders, "payload = null")
    assert served.rows("search", orders, "payload exists", "--from-time", "2099-01-01", "--json") == []
    assert "column 4" in served.run("search", orders, "/a + 5", code=1)
    assert "no topic" in served.run("search", "nothing", "key exists", code=1)


@pytest.mark.parametrize("name", ["orders.json", "orders.json.gz"])
def test_an_export_imported_again_is_the_same_topic(served: Served, orders: str, name: str) -> None:
    copy = name.replace(".", "-")
    (done,) = served.rows("export", orders, name, "--json")
    assert done["records"] == 302
    data = (served.folder / name).read_bytes()
    assert (gzip.decompress(data) if name.endswith("gz") else data).count(b"\n") == 302
    assert "add --create" in served.run("import", copy, name, code=1)
    served.run("topics", "create", copy, "--partitions", "3")
    (done,) = served.rows("import", copy, name, "--json")
    assert done["records"] == 302
    assert content(served, copy) == content(served, orders)


def test_the_log_format_keeps_the_stored_bytes_of_one_partition(served: Served, orders: str) -> None:
    assert "--partition N" in served.run("export", orders, "all.log", "--format", "log", code=1)
    assert not list(served.folder.glob("all.log*"))
    served.run("export", orders, "one.log", "--format", "log", "--partition", "1")
    served.run("import", "one", "one.log", "--format", "log", "--create")
    assert content(served, "one")[0] == content(served, orders)[1]
    (served.folder / "cut.log").write_bytes((served.folder / "one.log").read_bytes()[:-1])
    assert "cut off" in served.run("import", "one", "cut.log", "--format", "log", code=1)


def test_an_export_goes_through_a_pipe(served: Served, orders: str) -> None:
    lines = served.run("export", orders, "-")
    (done,) = served.rows("import", "piped", "-", "--create", "--json", input=lines)
    assert done["records"] == 302


@pytest.mark.parametrize("wrong", ['{"paylod":"b"}', '{"payload":"b","timestamp":-1}'])
def test_what_stands_before_a_wrong_line_is_imported_and_the_line_named(served: Served, wrong: str) -> None:
    topic = f"half{len(wrong)}"
    told = served.run("import", topic, "-", "--create", input=f'{{"payload":"a"}}\n{wrong}\n', code=1)
    assert "line 2 is no record" in told
    assert "1 record imported" in told
    assert len(served.rows("fetch", topic, "--json")) == 1


@pytest.mark.parametrize("content", [None, '{"paylod":"b"}'])
def test_an_import_of_a_wrong_file_makes_no_topic(served: Served, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "wrong.json").write_text(content)
    served.run("import", "nothing", str(tmp_path / "wrong.json"), "--create", code=1)
    assert "nothing" not in [row["name"] for row in served.rows("topics", "list", "--json")]


def test_what_stands_before_the_cut_of_a_compressed_file_is_imported_and_counted(served: Served) -> None:
    lines = "".join(f'{{"payload":"{number}"}}\n' for number in range(20_000)).encode()
    (served.folder / "cut.json.gz").write_bytes(gzip.compress(lines, 0)[:-100])
    told = served.run("import", "cut", "cut.json.gz", "--create", code=1)
    rows = served.rows("fetch", "cut", "--json")
    assert 19_000 < len(rows) < 20_000
    assert "cut off" in told
    assert f"; {len(rows):,} records imported" in told


def test_a_publisher_that_fails_says_how_many_records_are_stored(served: Served) -> None:
    served.run("topics", "create", "partly")
    told = served.run("publish", "partly", "--json", input='{"payload":"a"}\n{"payload":"b"}\nnonsense\n', code=1)
    assert "line 3 is no record" in told
    assert "2 of 2 records stored" in told


@pytest.mark.parametrize("partition", [[], ["--partition", "1"]])
def test_tail_shows_what_comes_and_ends_with_code_0_on_ctrl_c(
    served: Served, orders: str, partition: list[str]
) -> None:
    process = served.start("tail", orders, "--from-offset", "0", "--json", *partition)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["offset"] == 0
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    count = 1 + len(process.stdout.readlines())  # not `communicate`, which forgets what `readline` has read ahead
    told = process.stderr.read()
    assert (process.wait(SAFETY_NET_SECONDS), told) == (0, f"stopped: {count:,} record{'' if count == 1 else 's'}\n")


def test_tail_tells_when_the_server_goes_and_when_it_is_back(tmp_path: Path) -> None:
    port = ("--jebp-port", str(free_ports(1)[0]))
    server = Served(tmp_path, *port)
    servers = [server]
    server.run("topics", "create", "t")
    server.run("publish", "t", "before")
    tail = server.start("tail", "t", "--from-offset", "0", "--json")
    net = threading.Timer(SAFETY_NET_SECONDS, tail.kill)  # a silent command would let the test wait for ever
    net.start()
    try:
        assert tail.stdout is not None
        assert tail.stderr is not None
        assert json.loads(tail.stdout.readline())["payload"] == "before"
        assert server.stop() == 0
        assert "is lost" in tail.stderr.readline()
        again = Served(tmp_path, *port)
        servers.append(again)
        assert "again" in tail.stderr.readline()
        again.run("publish", "t", "after")
        assert json.loads(tail.stdout.readline())["payload"] == "after"
        tail.send_signal(signal.SIGINT)
        assert tail.wait(SAFETY_NET_SECONDS) == 0
        assert again.stop() == 0
    finally:
        net.cancel()
        for one in servers:
            one.kill_started()


def test_tail_stops_after_the_records_that_were_asked_for(served: Served, orders: str) -> None:
    assert len(served.rows("tail", orders, "--from-offset", "0", "--max", "20", "--json")) == 20
    assert (
        len(served.rows("tail", orders, "--from-time", "1970-01-01", "--partition", "0", "--max", "5", "--json")) == 5
    )


def places_of(rows: list[dict[str, object]]) -> set[tuple[object, object]]:
    return {(row["partition"], row["offset"]) for row in rows}


def test_all_partitions_are_read_from_a_server_whose_administration_is_out_of_reach(
    served: Served, orders: str
) -> None:
    away = ("--server", served.ready["addresses"]["jebp"])
    everything = places_of(served.rows("fetch", orders, "--json"))
    assert len({partition for partition, _ in everything}) == 3
    assert places_of(served.rows("fetch", orders, "--json", *away)) == everything
    tailed = served.rows("tail", orders, "--from-offset", "0", "--max", str(len(everything)), "--json", *away)
    assert places_of(tailed) == everything
    served.run("export", orders, "away.json", *away)
    assert len((served.folder / "away.json").read_text().splitlines()) == len(everything)
    told = served.run("fetch", orders, "--partition", "3", *away, code=1)
    assert "has partitions 0 to 2, not 3" in told
    assert "no topic 'nope'" in served.run("fetch", "nope", *away, code=1)


def test_a_reader_that_goes_away_is_no_error(served: Served, orders: str) -> None:
    process = served.start("fetch", orders)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    with process.stderr as told:
        assert told.read() == ""
    process.wait(timeout=SAFETY_NET_SECONDS)


@pytest.mark.parametrize("args", [("--help",), ("-V",), ("topics", "list", "--help")])
def test_a_help_that_cannot_be_written_fails_in_one_line(tmp_path: Path, args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *args], cwd=tmp_path, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"babelbus: No space left on device (error 28)\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("args", [("status",), ("topics", "list", "--json"), ("export", "ORDERS", "-")])
def test_a_command_works_without_the_standard_files(
    served: Served, orders: str, closed: str, args: tuple[str, ...]
) -> None:
    args = tuple(orders if one == "ORDERS" else one for one in args)
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    done = subprocess.run([*shell, *COMMAND, *args], cwd=served.folder, env=ENVIRONMENT, capture_output=True)
    assert (done.returncode, done.stdout != b"", b"Traceback" in done.stderr) == (0, closed == "2>&-", False)


def test_bytes_that_are_no_utf_8_are_published_and_refused_where_a_text_is_needed(served: Served) -> None:
    other = b"a\xff".decode("utf-8", "surrogateescape")
    served.run("topics", "create", "octets")
    served.run("publish", "octets", other, "--key", other, "--header", f"{other}={other}")
    (record,) = served.rows("fetch", "octets", "--json")
    assert (record["payload_base64"], record["key_base64"], record["headers_base64"]) == (
        "Yf8=",
        "Yf8=",
        [["Yf8=", "Yf8="]],
    )
    for args in (("topics", "create", other), ("fetch", other), ("config", "--jebp-port", other)):
        assert served.run(*args, code=1) == "babelbus: 'a\\udcff' cannot be written as utf-8\n"


def test_nobody_there_is_told_with_what_to_do(served: Served) -> None:
    told = served.run("publish", "orders", "x", "--server", "127.0.0.1:1", code=1)
    assert "nothing listens on 127.0.0.1:1; start one with 'babelbus serve'" in told
    told = served.run("fetch", "orders", "--server", served.ready["addresses"]["admin"], code=1)
    assert "said nothing for 3 s: this may be the port of another protocol; that of jebp is 5320" in told


def test_bench_leaves_figures_and_no_topic(served: Served) -> None:
    (result,) = served.rows("bench", "--records", "5000", "--single", "10", "--json")
    assert min(result["publish_per_second"], result["read_per_second"], result["single_per_second"]) > 0
    assert not any(topic["name"].startswith("bench-") for topic in served.rows("topics", "list", "--json"))
