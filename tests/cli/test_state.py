import gzip
import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.shell import Served
from tests.support.bus import SAFETY_NET_SECONDS


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_value_is_set_read_and_deleted(served: Served) -> None:
    served.run("state", "set", "one/temp", "-21.50")
    assert served.run("state", "get", "one/temp") == "-21.50\n"
    served.run("state", "set", "one/ünï", "--text", 'Say "grüß"')
    assert served.run("state", "get", "one/ünï") == '"Say \\"grüß\\""\n'
    assert served.run("state", "get", "one/ünï", "--raw") == 'Say "grüß"\n'
    assert served.rows("state", "get", "one/ünï", "--json") == [{"key": "one/ünï", "value": 'Say "grüß"'}]
    served.run("state", "delete", "one/temp")
    assert "nothing stored under 'one/temp'; 'babelbus state match" in served.run("state", "get", "one/temp", code=1)


def test_a_large_value_comes_from_standard_input(served: Served) -> None:
    value = json.dumps(["ä" * 2**20])
    served.run("state", "set", "large", "-", input=value)
    assert served.rows("state", "get", "large", "--json")[0]["value"] == ["ä" * 2**20]


@pytest.mark.parametrize("value", ["hello", "{", "", "--txt"])
def test_a_value_that_is_no_json_is_refused_with_what_to_do(served: Served, value: str) -> None:
    assert "add --text to store it as a string" in served.run("state", "set", "bad", "--", value, code=1)
    served.run("state", "get", "bad", code=1)


def test_compare_and_set_tells_versions_and_what_to_do(served: Served) -> None:
    assert served.run("state", "set", "cas", "1", "--version", "0") == "cas has version 1\n"
    assert "add --version N" in served.run("state", "set", "cas", "2", code=1)
    assert "somebody was faster" in served.run("state", "set", "cas", "2", "--version", "0", code=1)
    assert served.rows("state", "set", "cas", "2", "--version", "1", "--json") == [{"key": "cas", "version": 2}]


def test_a_pattern_matches_sorted_and_deletes_only_with_yes(served: Served) -> None:
    for key in ("many/b/x", "many/a/x", "many/a/y", "many"):
        served.run("state", "set", key, "1")
    assert served.run("state", "match", "many/?/x") == "many/a/x  1\nmany/b/x  1\n"
    assert [one["key"] for one in served.rows("state", "match", "many/#", "--json")] == [
        "many", "many/a/x", "many/a/y", "many/b/x",
    ]  # fmt: skip
    assert served.run("state", "match", "none/#") == ""
    assert "only at the end; write '?'" in served.run("state", "match", "many/#/x", code=1)
    assert "delete 4 values: add --yes" in served.run("state", "delete", "many/#", code=1)
    assert served.run("state", "delete", "many/#", "--yes") == "4 values deleted\n"


def test_a_delete_of_everything_does_not_count_what_the_server_says_of_itself(served: Served) -> None:
    served.run("state", "delete", "#", "--yes")
    served.run("state", "set", "all/a", "1")
    assert "$SYS/version" in served.run("state", "match", "#")
    assert "delete 1 value: add --yes" in served.run("state", "delete", "#", code=1)
    assert served.run("state", "delete", "#", "--yes") == "1 value deleted\n"


def test_the_history_of_a_key_is_listed_and_asked_for(served: Served) -> None:
    for value in ("1", '"\u202eevil"', "3"):
        served.run("state", "set", "past", value)
    served.run("state", "delete", "past")
    rows = served.rows("state", "history", "past", "--json")
    assert [(one.get("value"), one["source"], "deleted" in one) for one in rows] == [
        (1, "admin", False), ("\u202eevil", "admin", False), (3, "admin", False), (None, "admin", True),
    ]  # fmt: skip
    offset = str(rows[0]["offset"])
    assert served.run("state", "get", "past", "--as-of", offset) == "1\n"
    assert served.run("state", "match", "past", "--as-of", offset) == "past  1\n"
    assert '"value":1' in served.run("state", "export", "-", "--as-of", offset)
    shown = served.run("state", "history", "past", "--max", "3")
    assert "(deleted)" in shown
    assert "\\u202eevil" in shown
    assert "1970" not in served.run("state", "get", "past", "--as-of", "1970-01-01", code=1)
    assert "--as-of also takes a time" in served.run("state", "get", "past", "--as-of", "99999999", code=1)
    assert "or an offset" in served.run("state", "get", "past", "--as-of", "soon", code=2)
    assert "no stored change" in served.run("state", "history", "never")


def test_the_tree_goes_out_and_comes_back(served: Served) -> None:
    served.run("state", "set", "tree/a", '{"x": [1, 2]}')
    served.run("state", "set", "tree/v", "7", "--version", "0")
    served.run("state", "export", "tree.jsonl.gz")
    lines = gzip.decompress((served.folder / "tree.jsonl.gz").read_bytes()).decode().splitlines()
    assert '{"key":"tree/v","value":7,"version":1}' in lines
    assert not any("$SYS" in line for line in lines)
    served.run("state", "delete", "tree/#", "--yes")
    assert served.rows("state", "import", "tree.jsonl.gz", "--json") == [
        {"file": "tree.jsonl.gz", "values": len(lines)}
    ]
    assert served.rows("state", "match", "tree/#", "--json") == [
        {"key": "tree/a", "value": {"x": [1, 2]}},
        {"key": "tree/v", "value": 7, "version": 1},
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_an_export_of_worterbuch_is_recognised(served: Served, packed: bool) -> None:
    text = b'{ "data": {"t":{"wb":{"v":1,"t":{"x":{"v":{"Cas":["y",3]}}}}}}}'
    path: Path = served.folder / "export.json.gz"
    path.write_bytes(gzip.compress(text) if packed else text)
    served.run("state", "delete", "wb/#", "--yes")
    served.run("state", "import", str(path))
    assert served.rows("state", "match", "wb/#", "--json") == [
        {"key": "wb", "value": 1},
        {"key": "wb/x", "value": "y", "version": 3},
    ]


@pytest.mark.parametrize("bad", ['{"key":"i/?","value":1}', '{"key":"i/b"}', "nonsense", '{"key":"b","value":1e999}'])
def test_what_stands_before_a_wrong_line_is_imported_and_the_line_named(served: Served, bad: str) -> None:
    told = served.run("state", "import", "-", input=f'{{"key":"i/a","value":1}}\n\n{bad}\n', code=1)
    assert "line 3 is no value" in told
    assert "1 value imported" in told


def test_a_damaged_file_is_told(served: Served) -> None:
    (served.folder / "cut.gz").write_bytes(gzip.compress(b'{"key":"a","value":1}\n' * 1000)[:40])
    assert "cut off or damaged" in served.run("state", "import", "cut.gz", code=1)


def test_a_watch_shows_what_there_is_and_what_changes_until_ctrl_c(served: Served) -> None:
    served.run("state", "set", "w/a", "1")
    process = served.start("state", "watch", "w/#", "--json")
    assert json.loads(first_line(process)) == {"key": "w/a", "value": 1}
    served.run("state", "set", "w/b", "2")
    line = json.loads(first_line(process))
    assert (line["key"], line["value"], line["source"]) == ("w/b", 2, "admin")
    served.run("state", "delete", "w/b")
    assert json.loads(first_line(process))["deleted"] is True
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=SAFETY_NET_SECONDS) == ("", "stopped: 3 changes\n")
    assert process.returncode == 0


def test_a_watch_for_people_ends_after_the_lines_that_were_asked_for(served: Served) -> None:
    served.run("state", "set", "p/a", "1")
    process = served.start("state", "watch", "p/#", "--max", "2")
    assert first_line(process) == "p/a  1\n"
    served.run("state", "delete", "p/a")
    assert first_line(process).endswith("Z  admin  p/a  (deleted)\n")
    assert process.wait(timeout=SAFETY_NET_SECONDS) == 0
    process.communicate()


def test_nothing_is_answered_without_a_server_or_with_another_folder(served: Served, tmp_path: Path) -> None:
    assert "nothing listens" in served.run("state", "get", "a", "--admin", "127.0.0.1:1", code=1)
    assert "start a server there once" in served.run("state", "get", "a", "--data-folder", str(tmp_path / "no"), code=1)


def test_a_listener_hears_what_is_sent_set_and_published_with_its_source(served: Served) -> None:
    process = served.start("listen", "heard/#")
    while not served.rows("send", "heard/first", "hello", "--json")[0]["receivers"]:
        assert process.poll() is None
    assert first_line(process).endswith("Z  heard/first  admin  hello\n")
    served.run("state", "set", "heard/state", '{"a": 1}')
    assert first_line(process).endswith('Z  heard/state  admin  {"a": 1}\n')
    served.run("send", "heard/x", "pay\x1b[31mload", "--key", "k", "--header", "h=1", "--content-type", "text/plain")
    assert first_line(process).endswith("Z  heard/x  admin  k  pay\\x1b[31mload  [h=1]\n")
    served.run("topics", "create", "heard")
    served.run("publish", "heard", "not below heard")
    served.run("state", "delete", "heard/state")
    assert first_line(process).endswith("Z  heard/state  admin  (removed)\n")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=SAFETY_NET_SECONDS) == ("", "stopped: 4 events\n")
    assert process.returncode == 0


def test_a_listener_ends_after_the_events_that_were_asked_for(served: Served) -> None:
    process = served.start("listen", "--max", "1", "--json")
    while not served.rows("send", "max/a", "{}", "--json")[0]["receivers"]:
        assert process.poll() is None
    event = json.loads(first_line(process))
    assert (event["subject"], event["source"], event["payload"]) == ("max/a", "admin", "{}")
    assert process.wait(timeout=SAFETY_NET_SECONDS) == 0
    process.communicate()


def test_send_tells_where_an_event_was_recorded_or_that_it_was_live_only(served: Served) -> None:
    served.run("topics", "create", "sent")
    assert served.run("send", "sent/a", "x").startswith("sent 0:0; live subscriptions: ")
    assert "live only" in served.run("send", "nowhere/a", "x")
    (told,) = served.rows("send", "sent", "-", "--json", "--content-type", "text/plain", input="lines\nof ä\n")
    assert (told["topic"], told["partition"], told["offset"], told["subject"]) == ("sent", 0, 1, "sent")
    first, second = served.rows("fetch", "sent", "--json")
    assert (first["headers"]["ce_subject"], first["headers"]["ce_source"]) == ("sent/a", "admin")
    assert (second["payload"], second["headers"]["content-type"]) == ("lines\nof ä\n", "text/plain")


def test_send_refuses_what_would_lie(served: Served) -> None:
    assert "the server's own" in served.run("send", "$SYS/x", "x", code=1)
    assert "ce_source" in served.run("send", "a", "x", "--header", "ce_source=me", code=1)
    assert "NAME=VALUE" in served.run("send", "a", "x", "--header", "=x", code=2)


def test_a_listener_is_told_when_the_server_stops(tmp_path: Path) -> None:
    server = Served(tmp_path)
    try:
        server.run("state", "set", "a", "1")
        process = server.start("state", "watch", "#")
        assert first_line(process)
    finally:
        assert server.stop() == 0
    _, told = process.communicate(timeout=SAFETY_NET_SECONDS)
    assert process.returncode == 1
    assert told == "babelbus: the server ended the watch: it stops\n"
