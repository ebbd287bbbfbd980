"""Groups, consumers and dead letters through the real command line and a real server."""

import json
import shlex
import subprocess
from typing import Any

import pytest
from click.testing import CliRunner

from babelbus.cli import program
from babelbus.cli.execute import SIGNALS
from babelbus.cli.groups import DEFAULTS
from babelbus.cli.topics import setting_text
from babelbus.core.groups.settings import GroupSettings
from tests.cli.shell import COMMAND, Served
from tests.support.bus import SAFETY_NET_SECONDS

OURS = shlex.join(COMMAND)

# What cannot be done comes again at once, twice, and is a dead letter then.
QUICK = ("--attempts-max", "2", "--retry-seconds", "10ms")


class Near:
    """A server, and the commands in this process: a new one for each would be most of the time."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.folder, self.start = served.folder, served.start

    def run(self, *args: str, input: str = "", code: int = 0) -> str:  # noqa: A002 - the name that click has
        done = self.run_raw(*args, input=input)
        assert done.exit_code == code, done.stderr
        return str(done.stdout if code == 0 else done.stderr)

    def run_raw(self, *args: str, input: str = "") -> Any:  # noqa: A002 - the same
        return CliRunner().invoke(program, [*args, "--data-folder", str(self.served.data)], input=input)

    def rows(self, *args: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run(*args).splitlines()]


@pytest.fixture(scope="module")
def near(served: Served) -> Near:
    return Near(served)


def publish(near: Near, topic: str, *payloads: str, key: str | None = None) -> None:
    near.run("topics", "create", topic)
    near.run("publish", topic, *payloads, *(("--key", key) if key else ()))


def payloads(output: str) -> list[str]:
    return [json.loads(line)["payload"] for line in output.splitlines()]


def lag(near: Near, topic: str, group: str) -> int:
    (found,) = near.rows("groups", "show", topic, group, "--json")
    return int(found["lag"])


def follow(near: Near, *args: str) -> "subprocess.Popen[str]":
    """A consumer that has its first record; it holds as many as its window has, and answers none while it waits."""
    process = near.start("consume", *args)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_a_group_is_made_shown_changed_set_paused_and_removed(near: Near) -> None:
    publish(near, "life", "a", "b", "c")
    assert "lag 3" in near.run("groups", "create", "life", "g", "--from", "beginning", "--ack-seconds", "5m")
    assert "has a group 'g'; 'babelbus groups alter'" in near.run("groups", "create", "life", "g", code=1)
    assert "5m" in near.run("groups", "show", "life", "g")
    near.run("groups", "alter", "life", "g", "--attempts-max", "none", "--order", "none")
    (row,) = near.rows("groups", "list", "life", "--json")
    assert (row["settings"]["attempts_max"], row["settings"]["order"], row["settings"]["ack"]) == (
        None,
        "none",
        "explicit",
    )
    assert "lag 1" in near.run("groups", "seek", "life", "g", "--to-offset", "2", "--partition", "0")
    assert "lag 3" in near.run("groups", "seek", "life", "g", "--to-time", "-1h")
    assert "partitions 0 to 0, not 7" in near.run(
        "groups", "seek", "life", "g", "--to", "end", "--partition", "7", code=1
    )
    near.run("groups", "pause", "life", "g")
    assert "paused" in near.run("groups", "list")
    told = near.run_raw("consume", "life", "--group", "g", "--timeout", "50ms")
    assert (told.exit_code, told.stdout) == (0, "")
    assert "is paused: 'babelbus groups resume life g'" in told.stderr
    near.run("groups", "resume", "life", "g")
    assert "add --yes" in near.run("groups", "remove", "life", "g", code=1)
    near.run("groups", "remove", "life", "g", "--yes")
    assert "'babelbus groups list' shows" in near.run("groups", "show", "life", "g", code=1)


def test_a_group_says_why_its_records_wait_and_a_seek_what_it_would_do(near: Near) -> None:
    publish(near, "stuck", "a", "b", "c")
    near.run("groups", "create", "stuck", "g", "--from", "beginning")
    assert near.run("groups", "show", "stuck", "g").startswith("The group has no members.\n")
    (effect,) = near.rows("groups", "seek", "stuck", "g", "--to-offset", "2", "--preview", "--json")
    assert (effect["again"], effect["skipped"], effect["partitions"][0]["target"]) == (0, 2, 2)
    told = near.run("groups", "seek", "stuck", "g", "--to", "end", "--preview")
    assert "0 records would be delivered again, 3 skipped; acks of 0 in flight would count as stale" in told
    assert lag(near, "stuck", "g") == 3
    near.run("groups", "pause", "stuck", "g")
    assert near.run("groups", "show", "stuck", "g").startswith("The group is paused: nothing is delivered until")


def test_the_help_of_create_tells_the_defaults_that_a_group_gets() -> None:
    shown = {name: setting_text(name, getattr(GroupSettings(), name)) for name in DEFAULTS}
    assert shown == DEFAULTS
    told = CliRunner().invoke(program, ["groups", "create", "--help"]).output
    assert "[default: 1m]" in told
    assert "[default: 16]" in told


def test_a_place_behind_the_end_is_told_since_the_group_skips_what_comes_in_front_of_it(near: Near) -> None:
    near.run("topics", "create", "wide", "--partitions", "2")
    near.run("publish", "wide", "a", "b", "c", "--key", "k")
    near.run("groups", "create", "wide", "g", "--from", "beginning")
    (full, empty) = sorted(near.rows("groups", "list", "wide", "--json")[0]["lanes"], key=lambda lane: -lane["end"])
    told = near.run_raw("groups", "seek", "wide", "g", "--to-offset", "2")
    assert f"partition {empty['partition']} ends at 0: the group skips new records there until offset 2" in told.stderr
    assert f"partition {full['partition']}" not in told.stderr
    told = near.run_raw("groups", "create", "wide", "h", "--from-offset", "3")
    assert f"partition {empty['partition']} ends at 0" in told.stderr


def test_two_places_are_refused(near: Near) -> None:
    told = near.run_raw("groups", "create", "life", "h", "--from", "end", "--from-offset", "1")
    assert told.exit_code == 2
    assert "give only one" in told.stderr


def test_consume_takes_as_many_as_it_may_and_the_next_one_goes_on_there(near: Near) -> None:
    publish(near, "jobs", *map(str, range(10)), key="k")
    first = near.run("consume", "jobs", "--group", "w", "--from", "beginning", "--max", "4", "--json")
    assert payloads(first) == ["0", "1", "2", "3"]
    assert json.loads(first.splitlines()[0]).keys() >= {"topic", "partition", "offset", "key", "attempt", "subject"}
    assert lag(near, "jobs", "w") == 6
    (row,) = near.rows("groups", "list", "jobs", "--json")
    assert row["counts"]["delivered"] == 4  # no more was taken than was asked for
    assert near.run("consume", "jobs", "--group", "w", "--max", "1").startswith("0:4  ")
    rest = near.run("consume", "jobs", "--group", "w", "--timeout", "300ms", "--json")
    assert payloads(rest) == ["5", "6", "7", "8", "9"]
    assert lag(near, "jobs", "w") == 0


def test_a_group_that_was_there_keeps_its_place_and_that_is_said(near: Near) -> None:
    publish(near, "kept", "a", "b")
    near.run("groups", "create", "kept", "g")
    told = near.run_raw("consume", "kept", "--group", "g", "--from", "beginning", "--timeout", "50ms")
    assert (told.exit_code, told.stdout) == (0, "")
    assert "continues at its position" in told.stderr


def test_a_command_gets_the_payload_on_its_input_and_the_rest_in_its_environment(near: Near) -> None:
    near.run("topics", "create", "plant")
    line = {"key": "k\u00e4y", "payload": "two\nlines", "headers": {"a": "b"}, "timestamp": 5000}
    near.run("publish", "plant", "--json", input=json.dumps(line))
    show = (
        'printf "%s|" "$BABELBUS_TOPIC" "$BABELBUS_GROUP" "$BABELBUS_PARTITION:$BABELBUS_OFFSET" "$BABELBUS_KEY" '
        '"$BABELBUS_TIMESTAMP" "$BABELBUS_ATTEMPT" "$BABELBUS_SUBJECT" "$BABELBUS_HEADERS"; cat'
    )
    output = near.served.run("consume", "plant", "--group", "g", "--from", "beginning", "--max", "1", "--exec", show)
    assert output == 'plant|g|0:0|k\u00e4y|5000|1|plant|{"a":"b"}|two\nlines'
    assert lag(near, "plant", "g") == 0


def test_a_command_may_be_one_of_ours(near: Near) -> None:
    publish(near, "from", "x")
    near.run("topics", "create", "to")
    command = f"{OURS} publish to -"
    process = near.start("consume", "from", "--group", "g", "--from", "beginning", "--max", "1", "--exec", command)
    process.communicate(timeout=SAFETY_NET_SECONDS)
    (row,) = near.rows("fetch", "to", "--json")
    assert row["payload"] == "x"


def test_a_record_whose_command_fails_comes_again_and_the_exit_code_says_so(near: Near) -> None:
    publish(near, "again", "a", "b", key="k")
    near.run("groups", "create", "again", "g", "--from", "beginning", "--retry-seconds", "10ms")
    command = 'echo "$BABELBUS_OFFSET.$BABELBUS_ATTEMPT"; test $BABELBUS_ATTEMPT = 2'
    told = near.served.run_raw("consume", "again", "--group", "g", "--max", "4", "--exec", command)
    assert told.returncode == 1
    # In the order of their key: the second waits until the first is done.
    assert told.stdout.split() == ["0.1", "0.2", "1.1", "1.2"]
    assert "0:0 (delivery 1): the command ended with code 1" in told.stderr
    assert "2 of 4 records were not done" in told.stderr
    assert "'babelbus dead-letters list' what was given up" in told.stderr
    assert lag(near, "again", "g") == 0


def test_a_command_that_is_none_stops_before_it_uses_records_up(near: Near) -> None:
    publish(near, "typo", "a", "b")
    near.run("groups", "create", "typo", "g", "--from", "beginning", *QUICK)
    told = near.run("consume", "typo", "--group", "g", "--exec", "no-such-command-here", code=1)
    assert "the command cannot be run (code 127); record 0:0 is given back" in told
    assert lag(near, "typo", "g") == 2
    again = near.run("consume", "typo", "--group", "g", "--max", "2", "--json")
    assert [json.loads(line)["attempt"] for line in again.splitlines()] == [1, 1]


def test_an_ack_that_comes_too_late_is_said(near: Near) -> None:
    publish(near, "late", "a")
    seek = f"{OURS} groups seek late g --to beginning"
    near.run("groups", "create", "late", "g", "--from", "beginning")
    told = near.served.run("consume", "late", "--group", "g", "--max", "1", "--exec", seek, code=1)
    assert "1 ack came too late" in told


def test_records_of_a_consumer_that_is_killed_go_to_the_next_one(near: Near) -> None:
    publish(near, "killed", *map(str, range(5)))
    args = ("killed", "--group", "g", "--window", "2", "--exec", 'echo "$BABELBUS_OFFSET"; exec cat fifo')
    subprocess.run(["mkfifo", str(near.folder / "fifo")], check=True)
    process = follow(near, *args, "--from", "beginning")
    (row,) = near.rows("groups", "list", "killed", "--json")
    assert (row["members"], row["in_flight"]) == (1, 2)
    process.kill()
    process.wait(timeout=SAFETY_NET_SECONDS)
    # Its command still waits for the pipe: somebody must write, or it would stay.
    (near.folder / "fifo").write_text("go on")
    process.communicate(timeout=SAFETY_NET_SECONDS)
    rest = near.run("consume", "killed", "--group", "g", "--max", "5", "--json")
    assert sorted(payloads(rest)) == ["0", "1", "2", "3", "4"]
    attempts = {json.loads(line)["payload"]: json.loads(line)["attempt"] for line in rest.splitlines()}
    assert attempts == {"0": 2, "1": 2, "2": 1, "3": 1, "4": 1}


@pytest.mark.parametrize("number", SIGNALS)
def test_a_consumer_that_is_asked_to_stop_gives_back_what_is_not_done(near: Near, number: int) -> None:
    topic = f"stopped-{number}"
    publish(near, topic, "a", "b")
    # The shell has a child, and both must go: what goes on would work on a record that is another's by then.
    process = follow(near, topic, "--group", "g", "--from", "beginning", "--exec", "echo begun; sleep 600; true")
    process.send_signal(number)
    _, told = process.communicate(timeout=SAFETY_NET_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in told
    rest = near.run("consume", topic, "--group", "g", "--max", "2", "--json")
    assert payloads(rest) == ["a", "b"]
    assert [json.loads(line)["attempt"] for line in rest.splitlines()] == [1, 1]  # nobody failed


def test_a_command_that_takes_its_time_to_end_is_waited_for_unless_it_is_asked_twice(near: Near) -> None:
    publish(near, "stubborn", "a")
    command = "trap 'echo ending' TERM; echo begun; while :; do sleep 600 & wait; done"
    process = follow(near, "stubborn", "--group", "g", "--from", "beginning", "--exec", command)
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    process.terminate()
    process.communicate(timeout=SAFETY_NET_SECONDS)
    assert process.returncode == 0
    assert lag(near, "stubborn", "g") == 1


def test_several_consumers_share_the_records_of_a_group(near: Near) -> None:
    near.run("topics", "create", "shared")
    near.run("groups", "create", "shared", "g")
    both = [near.start("consume", "shared", "--group", "g", "--json", "--max", "20") for _ in range(2)]
    while near.rows("groups", "list", "shared", "--json")[0]["members"] < 2:
        pass
    near.run("publish", "shared", input="\n".join(map(str, range(40))))
    outputs = [process.communicate(timeout=SAFETY_NET_SECONDS)[0] for process in both]
    assert [len(output.splitlines()) for output in outputs] == [20, 20]
    assert sorted(map(int, payloads("".join(outputs)))) == list(range(40))


def test_a_group_that_takes_no_acks_is_consumed_with_a_word_about_that(near: Near) -> None:
    publish(near, "once", *map(str, range(150)))
    near.run("groups", "create", "once", "g", "--ack", "on-delivery", "--from", "beginning")
    told = near.run_raw("consume", "once", "--group", "g", "--max", "150", "--json", "--window", "7")
    assert payloads(told.stdout) == [str(n) for n in range(150)]
    assert "takes no acks" in told.stderr


def test_a_consumer_of_a_group_that_is_removed_is_told(near: Near) -> None:
    publish(near, "gone", "a")
    process = follow(near, "gone", "--group", "g", "--from", "beginning")
    near.run("groups", "remove", "gone", "g", "--yes")
    _, told = process.communicate(timeout=SAFETY_NET_SECONDS)
    assert process.returncode == 1
    assert "group 'g' on topic 'gone' was removed" in told


def test_a_consumer_whose_group_is_removed_before_its_ack_is_told_so_too(near: Near) -> None:
    publish(near, "slow", "a")
    near.run("groups", "create", "slow", "g", "--from", "beginning")
    remove = f"{OURS} groups remove slow g --yes --data-folder {shlex.quote(str(near.served.data))}"
    told = near.run("consume", "slow", "--group", "g", "--exec", remove, code=1)
    assert "group 'g' on topic 'slow' was removed" in told


def test_dead_letters_are_shown_replayed_once_and_purged(near: Near) -> None:
    publish(near, "sick", "a", "b", "c", key="k")
    near.run("groups", "create", "sick", "doctors", "--from", "beginning", *QUICK)
    command = ("consume", "sick", "--group", "doctors", "--exec", "exit 3")
    near.run(*command, "--max", "6", code=1)
    while lag(near, "sick", "doctors"):  # until the last dead letter is durable
        pass
    (row,) = near.rows("dead-letters", "list", "--json")
    assert (row["topic"], row["letters"], row["waiting"]) == ("dead-letters/doctors", 3, 3)
    assert row["senders"] == [{"topic": "sick", "group": "doctors", "dead_lettered": 3}]
    letters = near.rows("dead-letters", "show", "doctors", "--json")
    assert [one["payload"] for one in letters] == ["a", "b", "c"]
    assert (letters[0]["reason"], letters[0]["attempts"]) == ("the command ended with code 3", 2)
    assert letters[1]["origin"] == {"topic": "sick", "partition": 0, "offset": 1}
    assert "waits; the command ended with code 3; 2 deliveries by group doctors; was sick 0:0" in near.run(
        "dead-letters", "show", "dead-letters/doctors"
    )

    assert "3 of the 3 dead letters" in near.run("dead-letters", "purge", "doctors", code=1)
    (done,) = near.rows("dead-letters", "replay", "doctors", "--at", "1", "--json")
    assert (done["replayed"], done["waiting"]) == (1, 2)
    assert "1 dead letter could not be replayed" in near.run("dead-letters", "replay", "doctors", "--at", "1", code=1)
    assert len(near.rows("dead-letters", "show", "doctors", "--waiting", "--json")) == 2
    assert "1 dead letter of dead-letters/doctors replayed, 1 wait" in near.run(
        "dead-letters", "replay", "doctors", "--max", "1"
    )
    near.run("dead-letters", "replay", "dead-letters/doctors")
    assert "0 dead letters of dead-letters/doctors replayed, 0 wait" in near.run("dead-letters", "replay", "doctors")
    again = near.run("consume", "sick", "--group", "doctors", "--max", "3", "--json")
    assert payloads(again) == ["b", "a", "c"]
    assert "headers" not in json.loads(again.splitlines()[0])

    assert "add --yes" in near.run("dead-letters", "purge", "doctors", code=1)
    assert "is removed, with 3 dead letters, 0 of them not replayed" in near.run(
        "dead-letters", "purge", "doctors", "--yes"
    )
    assert near.rows("dead-letters", "list", "--json") == []
    assert "'babelbus dead-letters list' shows" in near.run("dead-letters", "show", "doctors", code=1)


def test_a_topic_that_holds_no_dead_letters_is_never_purged(near: Near) -> None:
    publish(near, "precious", "a")
    told = near.run("dead-letters", "purge", "precious", "--all", "--yes", code=1)
    assert "topic 'precious' has no dead letters" in told
    assert len(near.rows("fetch", "precious", "--json")) == 1


def test_letters_whose_topic_is_gone_wait_and_are_named(near: Near) -> None:
    publish(near, "short-lived", "a")
    near.run("groups", "create", "short-lived", "lost", "--from", "beginning", *QUICK)
    near.run("consume", "short-lived", "--group", "lost", "--exec", "false", "--max", "2", code=1)
    near.run("topics", "remove", "short-lived", "--yes")
    told = near.run("dead-letters", "replay", "lost", code=1)
    assert "0:0 was not replayed: there is no topic 'short-lived'" in told
    near.run("dead-letters", "purge", "lost", "--all", "--yes")


def test_a_restart_keeps_groups_and_what_was_acked_and_ends_consumers(near: Near) -> None:
    publish(near, "durable", "a", "b", "c")
    publish(near, "followed", "x")
    follower = follow(near, "followed", "--group", "g", "--from", "beginning")
    near.run("consume", "durable", "--group", "g", "--from", "beginning", "--max", "1")
    assert near.served.stop() == 0
    _, told = follower.communicate(timeout=SAFETY_NET_SECONDS)
    assert follower.returncode == 1
    assert "the server stops; records without an ack are delivered to others" in told
    near.served.__init__(near.folder)  # type: ignore[misc]
    assert payloads(near.run("consume", "durable", "--group", "g", "--max", "2", "--json")) == ["b", "c"]
