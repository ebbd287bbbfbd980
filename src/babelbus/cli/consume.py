"""`babelbus consume`: records of a topic as a member of a consumer group, each acked when it is done."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
import msgspec

from babelbus.cli.command import BusCommand, CommandError, complete, examples, json_option, max_option
from babelbus.cli.execute import Interrupts, run_command
from babelbus.cli.groups import Seconds, group_path, place_options, read_place
from babelbus.cli.output import json_record, note, plural, print_json, print_line, show_record, until_interrupted
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.units import format_duration

if TYPE_CHECKING:
    from babelbus.cli.api import AdminApi
    from babelbus.web.lines import ConsumerHead, DeliveryLine

NOT_RUN_CODES = (126, 127)
"""Exit codes of a shell that cannot run its command."""


class CommandNotRunError(CommandError):
    """The shell cannot run the command of `--exec`."""


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus consume orders --group workers                            until Ctrl-C; run several, they share",
        "babelbus consume orders --group workers --from beginning --max 10",
        "babelbus consume orders --group workers --json --timeout 5s | jq -r .payload",
        "babelbus consume orders --group mailer --exec 'mail -s \"order $BABELBUS_KEY\" sales@example.org'",
        "babelbus consume orders --group import --exec ./import.sh --ack-seconds 10m",
    ),
)
@click.argument("topic", shell_complete=complete("topics"))
@click.option(
    "--group",
    required=True,
    metavar="GROUP",
    shell_complete=complete("groups"),
    help="The group to join; created if it does not exist.",
)
@click.option("--exec", "command", metavar="CMD", help="Run this with the shell for each record, payload on its input.")
@max_option
@click.option(
    "--timeout", "--wait", "idle_seconds", type=Seconds(), metavar="DURATION", help="Stop when none came for so long."
)
@click.option(
    "--window", type=click.IntRange(1, 10_000), metavar="N",
    help="Records to hold at once.  [default: 1 with --exec, else 100]",
)  # fmt: skip
@place_options("from", "Where a new group begins.  [default: end]")
@click.option(
    "--ack-seconds", type=Seconds(), metavar="DURATION",
    help="For a new group: a record without an ack for so long is delivered again.  [default: 1m]",
)  # fmt: skip
@json_option
@bus_options
def consume(
    target: Target,
    topic: str,
    group: str,
    command: str | None,
    count_max: int | None,
    idle_seconds: float | None,
    window: int | None,
    place_at: str | None,
    place_offset: int | None,
    place_time: int | None,
    ack_seconds: float | None,
    as_json: bool,
) -> None:
    """Read records of TOPIC as a member of a consumer group, and ack each when it is done.

    Without --exec a record is printed and acked: partition:offset, time, key, payload, and headers, as 'tail' does.
    With --exec, CMD gets the payload on its input and the rest in its environment: BABELBUS_TOPIC, _PARTITION, _OFFSET,
    _TIMESTAMP (ms), _ATTEMPT, _SUBJECT, _GROUP, _KEY, and _HEADERS as JSON. If it ends with code 0 the record is acked;
    with any other it is nacked: it is delivered again after a while, and becomes a dead letter in the end.

    Ctrl-C stops CMD and all processes that it started; a second Ctrl-C kills them. In any case other members get the
    records without an ack at once. The exit code is 0 when every record was done, else 1.
    """
    if command is not None and as_json:
        raise click.UsageError("--json prints records, --exec hands them to a command: give one of them")
    if idle_seconds == 0:
        raise click.UsageError("--timeout must be above 0: records take a moment to arrive")
    start = read_place("from", place_at, place_offset, place_time)
    api = target.api()
    _ensure(api, topic, group, start, ack_seconds)
    query = {"window": str(window or (1 if command else 100))}
    if count_max is not None:
        query["max"] = str(count_max)
    if idle_seconds is not None:
        query["idle_ms"] = str(max(round(idle_seconds * 1000), 1))
    interrupts = Interrupts()
    consumption = _Consumption(api, topic, group, command, as_json, interrupts)
    with until_interrupted(consumption.summary), interrupts.raised():
        consumption.run(query, count_max)
    if consumption.failed:
        raise CommandError(
            f"{consumption.failed:,} of {plural(consumption.count, 'record was', 'records were')} not done; "
            f"'babelbus groups show {topic} {group}' shows what is delivered again, "
            "'babelbus dead-letters list' what was given up"
        )


def _ensure(
    api: "AdminApi", topic: str, group: str, start: dict[str, object] | None, ack_seconds: float | None
) -> None:
    """Create the group if it does not exist."""
    settings: dict[str, object] = {"ack": "explicit"}
    if ack_seconds is not None:
        settings["ack_seconds"] = ack_seconds
    body = {"topic": topic, "name": group, "settings": settings, "start": start or {"at": "end"}}
    from babelbus.cli.api import ApiError

    try:
        api.call("POST", "/api/groups", body)
    except ApiError as error:
        if error.code != "group_exists":
            raise
        if start is not None or ack_seconds is not None:
            note(f"group {group} exists: it continues at its position, with its own settings")
        return
    if start is None:
        note(f"created group {group}: it begins with records from now on (--from beginning also takes the stored ones)")


class _Consumption:
    """One membership: handles the deliveries and answers each."""

    def __init__(
        self, api: "AdminApi", topic: str, group: str, command: str | None, as_json: bool, interrupts: Interrupts
    ) -> None:
        self._api = api
        self._topic, self._group = topic, group
        self._command = command
        self._as_json = as_json
        self._interrupts = interrupts
        self._head: ConsumerHead | None = None
        self._done: list[int] = []
        self.count = 0
        self.failed = 0

    def summary(self) -> str:
        """Return what was done."""
        return f"{plural(self.count - self.failed, 'record')} done" + (f", {self.failed:,} not" if self.failed else "")

    def run(self, query: Mapping[str, str], count_max: int | None) -> None:
        """Read records until `count_max` were handled, or none arrived within the timeout."""
        from babelbus.cli.api import ApiError
        from babelbus.web.lines import IDLE, ConsumeLine, ConsumerHead

        refusal: ApiError | None = None
        lines = self._api.lines(group_path(self._topic, self._group, "consume"), query, msgspec.Raw, live=True)
        try:
            for raw in lines:
                if raw is None:
                    continue
                if self._head is None:
                    self._head = msgspec.json.decode(raw, type=ConsumerHead)
                    self._greet(self._head)
                    continue
                line = msgspec.json.decode(raw, type=ConsumeLine)
                if line.end == IDLE:
                    return
                if line.end:
                    raise CommandError(f"{line.end}; records without an ack are delivered to others")
                if refusal is not None:
                    continue
                try:
                    self._handle(line.deliveries)
                except ApiError as error:
                    if error.code != "unknown_consumer":
                        raise
                    refusal = error  # the membership ended meanwhile: its last line, which comes yet, tells why
                    continue
                if count_max is not None and self.count >= count_max:
                    return
            raise refusal or CommandError("the server ended the connection; records without an ack are delivered again")
        except (KeyboardInterrupt, CommandNotRunError, BrokenPipeError):
            self._leave()
            raise
        finally:
            lines.close()  # type: ignore[attr-defined]  # a generator: gives the connection, and so the records, back

    def _greet(self, head: "ConsumerHead") -> None:
        if head.paused:
            note(f"group {self._group} is paused: 'babelbus groups resume {self._topic} {self._group}' resumes it")
        if head.ack != "explicit":
            note(f"group {self._group} takes no acks: a record is done when it is delivered, handled or not")

    def _handle(self, deliveries: "list[DeliveryLine]") -> None:
        try:
            for delivery in deliveries:
                if self._command is None:
                    self._print(delivery)
                    self._done.append(delivery.number)
                    self.count += 1
                else:
                    self._execute(self._command, delivery)
                    self._ack()  # one by one: the next record may take long
        finally:
            self._ack()

    def _print(self, delivery: "DeliveryLine") -> None:
        from babelbus.web.record_lines import record_of

        partition, record = delivery.record.partition, record_of(delivery.record)
        if self._as_json:
            more = {"subject": delivery.subject, "attempt": delivery.attempt}
            print_json(json_record(record, self._topic, partition) | more)
        else:
            again = f"  (delivery {delivery.attempt})" if delivery.attempt > 1 else ""
            print_line(show_record(record, partition) + again)

    def _execute(self, command: str, delivery: "DeliveryLine") -> None:
        from babelbus.web.record_lines import record_of

        record = record_of(delivery.record)
        where = f"{delivery.record.partition}:{record.offset}"
        try:
            environment = dict(os.environb) | record_environment(self._topic, self._group, delivery)
            code = run_command(command, record.payload or b"", environment, self._interrupts)
            reason = "" if code == 0 else f"the command ended with code {code}"
            if code < 0:
                reason = f"the command was ended by signal {-code}"
        except OSError as error:  # a key or headers that are too long for an environment
            code, reason = 1, f"the command could not be run: {error.strerror}"
        if code in NOT_RUN_CODES:
            raise CommandNotRunError(f"the command cannot be run (code {code}); record {where} is given back")
        self.count += 1
        if not reason:
            self._done.append(delivery.number)
            return
        self.failed += 1
        note(f"babelbus: {where} (delivery {delivery.attempt}): {reason}")
        assert self._head is not None
        if self._head.ack == "explicit":
            self._answer("nack", {"numbers": [delivery.number], "reason": reason})
        else:
            self._answer("ack", {"numbers": [delivery.number]})

    def _ack(self) -> None:
        if self._done:
            done, self._done = self._done, []
            with self._interrupts.held():  # a finished record must not be delivered again because its ack was cut off
                self._answer("ack", {"numbers": done})

    def _leave(self) -> None:
        """Release the open deliveries; they count as no failed attempt of their records."""
        if self._head is not None:
            path = f"/api/consumers/{self._head.consumer}/leave"
            with self._interrupts.held(), suppress(CommandError):  # a server that is gone takes the records back anyway
                self._api.ask("POST", path, {}, dict[str, int], content=b"{}")

    def _answer(self, what: str, body: object) -> None:
        from babelbus.web.lines import Answered

        assert self._head is not None
        path = f"/api/consumers/{self._head.consumer}/{what}"
        answered = self._api.ask("POST", path, {}, Answered, content=msgspec.json.encode(body))
        if answered.stale and what == "ack":
            self.failed += answered.stale
            note(
                f"babelbus: {plural(answered.stale, 'ack')} came too late: records took longer than "
                f"{format_duration(self._head.ack_seconds)}, or the group was moved; they are delivered again. "
                f"'babelbus groups alter {self._topic} {self._group} --ack-seconds' gives more time"
            )


def record_environment(topic: str, group: str, delivery: "DeliveryLine") -> dict[bytes, bytes]:
    """Return the environment variables of a record.

    A value that an environment cannot hold (a NUL byte) is under `..._BASE64` instead, as are headers that are no text.
    """
    line = delivery.record
    variables: dict[str, Any] = {
        "TOPIC": topic,
        "GROUP": group,
        "SUBJECT": delivery.subject,
        "PARTITION": str(line.partition),
        "OFFSET": str(line.offset),
        "TIMESTAMP": str(line.timestamp),
        "ATTEMPT": str(delivery.attempt),
    }
    if line.payload is None:
        variables["REMOVED"] = "1"
    variables |= header_variables(line.headers, line.headers_base64)
    key = line.key.encode() if isinstance(line.key, str) else line.key_base64
    if isinstance(key, bytes):
        if b"\0" in key:
            variables["KEY_BASE64"] = msgspec.json.encode(key).strip(b'"')
        else:
            variables["KEY"] = key
    return encode_environment(variables)


def header_variables(headers: object, pairs: object) -> dict[str, bytes]:
    """Return the variables of the headers that a line has as an object, or as pairs."""
    variables = {}
    if isinstance(headers, dict):
        variables["HEADERS"] = msgspec.json.encode(headers)
    if isinstance(pairs, list):
        variables["HEADERS_BASE64"] = msgspec.json.encode(pairs)
    return variables


def encode_environment(variables: Mapping[str, Any]) -> dict[bytes, bytes]:
    """Return variables with their prefix, without values that an environment cannot hold."""
    environment = {
        f"BABELBUS_{name}".encode(): value if isinstance(value, bytes) else os.fsencode(value)
        for name, value in variables.items()
    }
    return {name: value for name, value in environment.items() if b"\0" not in value}
