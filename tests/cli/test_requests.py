"""`babelbus request` and `babelbus respond` through the real command line and a real server."""

import base64
import json
import signal
import subprocess

import pytest

from tests.cli.shell import COMMAND, Served
from tests.cli.test_groups import Near
from tests.support.bus import SAFETY_NET_SECONDS


@pytest.fixture(scope="module")
def near(served: Served) -> Near:
    return Near(served)


def respond(near: Near, subject: str, command: str, *args: str) -> "subprocess.Popen[str]":
    """A responder that is there."""
    process = near.start("respond", subject, "--exec", command, *args)
    assert process.stderr is not None
    assert process.stderr.readline() == f"requests to {subject} are answered now\n"
    return process


def end(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """Wait for the end of a responder; give what it said."""
    _, told = process.communicate(timeout=SAFETY_NET_SECONDS)
    assert process.returncode == code, told
    assert "Traceback" not in told
    return told


def test_a_command_answers_with_its_output_and_knows_the_request(near: Near) -> None:
    show = 'printf "%s|%s|%s|" "$BABELBUS_SUBJECT" "$BABELBUS_GROUP" "$BABELBUS_HEADERS"; tr a-z A-Z'
    process = respond(near, "plant/shout", show, "--max", "2", "--header", "a=b", "--content-type", "text/plain")
    output = near.run("request", "plant/shout", "hello", "--header", "colour=red", "--content-type", "text/plain")
    asked = '{"colour":"red","content-type":"text/plain","ce_source":"admin"}'
    assert output == f"plant/shout|respond|{asked}|HELLO"
    (row,) = near.rows("request", "plant/shout", "-", "--json")
    assert row["subject"] == "plant/shout"
    assert row["payload"].startswith("plant/shout|respond|")
    assert row["headers"] == {"a": "b", "content-type": "text/plain", "ce_source": "admin"}
    end(process)


def test_bytes_go_both_ways_as_they_are(near: Near) -> None:
    process = respond(near, "echo", "cat", "--max", "2")
    payload = bytes(range(256))
    command = [*COMMAND, "request", "echo", "--data-folder", str(near.served.data)]
    done = subprocess.run(command, input=payload, capture_output=True, check=True, timeout=SAFETY_NET_SECONDS)
    assert done.stdout == payload
    (row,) = near.rows("request", "echo", "\udcff", "--json")
    assert base64.b64decode(row["payload_base64"]) == b"\xff"
    end(process)


def test_a_responder_says_of_each_request_what_became_of_it_as_json(near: Near) -> None:
    process = respond(near, "told", "cat", "--max", "1", "--json")
    near.run("request", "told", "yes", code=0)
    assert process.stdout is not None
    row = json.loads(process.stdout.readline())
    assert row == {"request": 1, "subject": "told", "delivered": True, "error": None}
    end(process)


def test_a_request_without_a_reply_says_why_with_its_exit_code(near: Near) -> None:
    told = near.run("request", "nobody", "?", code=3)
    assert "nobody answers requests to 'nobody'; 'babelbus respond SUBJECT --exec CMD' answers" in told
    process = respond(near, "never", "echo begun >&2; exec sleep 600")
    assert "no reply has come in time; --timeout waits longer" in near.run(
        "request", "never", "?", "--timeout", "10ms", code=4
    )
    process.terminate()
    end(process)
    process = respond(near, "fails", "exit 3", "--max", "1")
    assert "the responder has failed: the command ended with code 3" in near.run("request", "fails", "?", code=5)
    told = end(process, 1)
    assert "request 1: the command ended with code 3" in told
    assert "1 of 1 request got no reply" in told


def test_a_command_that_is_none_ends_the_responder_and_the_requester_is_told(near: Near) -> None:
    process = respond(near, "typo", "no-such-command-here")
    assert "the responders of 'typo' have gone" in near.run("request", "typo", "?", code=3)
    assert "the command cannot be run (code 127)" in end(process, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_request_of_a_responder_that_is_asked_to_stop_goes_to_another(near: Near, number: int) -> None:
    subject = f"stopped-{number}"
    first = respond(near, subject, "echo begun >&2; sleep 600; true")
    asked = near.start("request", subject, "who")
    assert first.stderr is not None
    assert first.stderr.readline() == "begun\n"
    second = respond(near, subject, "cat; echo ' else'", "--max", "1")
    first.send_signal(number)
    assert asked.communicate(timeout=SAFETY_NET_SECONDS)[0] == "who else\n"
    end(first)
    end(second)


def test_responders_of_a_group_share_the_requests(near: Near) -> None:
    processes = [respond(near, "shared", f"echo {name}", "--max", "2") for name in "ab"]
    assert sorted(near.run("request", "shared", "?") for _ in range(4)) == ["a\n", "a\n", "b\n", "b\n"]
    for process in processes:
        end(process)


def test_what_nobody_can_send_is_refused(near: Near) -> None:
    assert "the server's own" in near.run("request", "$SYS/x", "?", code=1)
    assert near.run_raw("request", "x", "?", "--timeout", "soon").exit_code == 2
    for seconds in ("2h", "0"):
        assert "more than 0s and at most 1h" in near.run("request", "x", "?", "--timeout", seconds, code=2)
    assert near.run_raw("respond", "x").exit_code == 2
