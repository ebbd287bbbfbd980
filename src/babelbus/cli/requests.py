"""`babelbus request` and `babelbus respond`: a question to whoever answers a subject, and a command that answers."""

import os
import sys
from typing import TYPE_CHECKING

import click
import msgspec

from babelbus.cli.command import BusCommand, CommandError, examples, json_option, max_option
from babelbus.cli.consume import NOT_RUN_CODES, CommandNotRunError, encode_environment, header_variables
from babelbus.cli.events import PAYLOAD_BYTES_MAX, read_payload
from babelbus.cli.execute import Interrupts, answer_command
from babelbus.cli.groups import Seconds
from babelbus.cli.output import escape, note, plural, print_json, show_bytes, until_interrupted
from babelbus.cli.publish import octets, read_headers
from babelbus.cli.target import Target
from babelbus.cli.target_options import bus_options
from babelbus.records.envelope import CONTENT_TYPE
from babelbus.records.record import Headers

if TYPE_CHECKING:
    from babelbus.cli.api import AdminApi
    from babelbus.web.lines import QuestionLine, ResponderHead

TIMEOUT_SECONDS_MAX = 3600
EXIT_CODES = {"no_responders": 3, "no_reply": 4, "responder_failed": 5}
"""The exit code of a request without a reply, by the code of the server's answer; 1 for other failures."""

header_option = click.option(
    "--header", "headers", multiple=True, callback=read_headers, metavar="NAME=VALUE", help="Header; may be repeated."
)
type_option = click.option("--content-type", metavar="TYPE", help="Type of the payload, such as application/json.")


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus request flights/LH400 'where is it?'",
        "babelbus request orders/price '{\"id\": 17}' --content-type application/json --timeout 5s",
        "babelbus request scans/read - < scan.png > scan.txt",
        "babelbus request MyRpc '[1, 2]' --header zbus.url=/MyRpc/example/plus     a service of zbus",
    ),
)
@click.argument("subject")
@click.argument("payload", required=False)
@click.option(
    "--timeout", "timeout_seconds", type=Seconds(), default="30s", show_default=True, metavar="DURATION",
    help="Wait so long for the reply, at most 1h.",
)  # fmt: skip
@header_option
@type_option
@json_option
@bus_options
def request(
    target: Target,
    subject: str,
    payload: str | None,
    timeout_seconds: float,
    headers: Headers,
    content_type: str | None,
    as_json: bool,
) -> None:
    """Send a request under SUBJECT to a responder of any protocol, and print the payload of the reply.

    Without PAYLOAD, or with '-', the whole standard input is the payload. The answer comes from 'babelbus respond', a
    SYNC subscriber of EventMesh, or a service of zbus; the first reply counts. The payload is printed as it is; with
    --json an object with "payload" (or "payload_base64") and "headers".

    Exit codes: 0 for a reply, 3 if nobody answers this subject, 4 if no reply came in time, 5 if the responder says
    that it failed, 1 for any other failure.
    """
    if not 0 < timeout_seconds <= TIMEOUT_SECONDS_MAX:
        raise click.BadParameter("a reply is waited for more than 0s and at most 1h", param_hint="--timeout")

    from babelbus.cli.api import TIMEOUT_SECONDS, ApiError
    from babelbus.web.lines import ReplyLine
    from babelbus.web.record_lines import bytes_of

    body = {
        "subject_base64": octets(subject),
        "payload_base64": read_payload(payload),
        "headers_base64": _with_type(headers, content_type),
        "timeout_seconds": timeout_seconds,
    }
    try:
        answer = target.api().ask(
            "POST", "/api/request", {}, msgspec.Raw, content=msgspec.json.encode(body),
            timeout_seconds=timeout_seconds + TIMEOUT_SECONDS,
        )  # fmt: skip
    except ApiError as error:
        error.exit_code = EXIT_CODES.get(error.code, 1)
        raise
    if as_json:
        print_json({"subject": subject.encode("utf-8", "surrogateescape").decode("utf-8", "replace")} | _object(answer))
        return
    line = msgspec.json.decode(answer, type=ReplyLine)
    _print_payload(bytes_of(line.payload, line.payload_base64) or b"")


def _object(answer: bytes) -> dict[str, object]:
    return msgspec.json.decode(answer, type=dict[str, object])


def _print_payload(payload: bytes) -> None:
    """Print a payload as it is; a terminal gets no characters that control it."""
    if sys.stdout.isatty():
        payload = "\n".join(map(show_bytes, payload.removesuffix(b"\n").split(b"\n"))).encode() + b"\n"
    click.echo(payload, nl=False)


def _with_type(headers: Headers, content_type: str | None) -> Headers:
    return headers if content_type is None else (*headers, (CONTENT_TYPE, content_type.encode()))


@click.command(
    cls=BusCommand,
    epilog=examples(
        "babelbus respond shout --exec 'tr a-z A-Z'                    until Ctrl-C; run several, they share",
        "babelbus respond orders/price --exec ./price --content-type application/json",
        "babelbus respond flights/LH400 --exec 'cat position.json' --max 1",
        "babelbus request shout 'is anybody there?'                    in another shell",
    ),
)
@click.argument("subject")
@click.option(
    "--exec",
    "command",
    required=True,
    metavar="CMD",
    help="Run this with the shell for each request; its output is the reply.",
)
@click.option(
    "--group", default="respond", show_default=True, metavar="GROUP",
    help="Responders of one group share the requests; each group is asked, and the first reply counts.",
)  # fmt: skip
@max_option
@header_option
@type_option
@json_option
@bus_options
def respond(
    target: Target,
    subject: str,
    command: str,
    group: str,
    count_max: int | None,
    headers: Headers,
    content_type: str | None,
    as_json: bool,
) -> None:
    """Answer the requests of any protocol under SUBJECT with the output of a command.

    CMD gets the payload on its input and the rest in its environment: BABELBUS_SUBJECT, _GROUP, and _HEADERS as JSON.
    Its output is the payload of the reply; --header and --content-type describe the reply. With --json a line on
    standard output says of each request whether its reply was delivered, else why not. If CMD ends with another
    code than 0, the requester is told that the responder failed. One request at a time is answered; other requests
    wait, or go to other responders of the group.

    Ctrl-C stops CMD and all processes that it started; a second Ctrl-C kills them. Its request goes to another
    responder of the group. The exit code is 0 when every request got its reply, else 1.
    """
    query = {"subject": subject, "group": group, "window": "1"}
    if count_max is not None:
        query["max"] = str(count_max)
    interrupts = Interrupts()
    responding = _Responding(target.api(), group, command, _with_type(headers, content_type), interrupts, as_json)
    with until_interrupted(lambda: f"{plural(responding.count, 'request')} answered"), interrupts.raised():
        responding.run(query, count_max)
    if responding.failed:
        raise CommandError(f"{responding.failed:,} of {plural(responding.count, 'request')} got no reply")


class _Responding:
    """One responder: runs the command for each question."""

    def __init__(
        self, api: "AdminApi", group: str, command: str, headers: Headers, interrupts: Interrupts, as_json: bool
    ) -> None:
        self._api = api
        self._as_json = as_json
        self._group = group
        self._command = command
        self._headers = headers
        self._interrupts = interrupts
        self._head: ResponderHead | None = None
        self.count = 0
        self.failed = 0

    def run(self, query: dict[str, str], count_max: int | None) -> None:
        """Answer questions until `count_max` were answered, or the server ends the connection."""
        from babelbus.web.lines import ResponderHead, RespondLine

        lines = self._api.lines("/api/respond", query, msgspec.Raw, live=True)
        try:
            for raw in lines:
                if raw is None:
                    continue
                if self._head is None:
                    self._head = msgspec.json.decode(raw, type=ResponderHead)
                    note(f"requests to {escape(query['subject'])} are answered now")
                    continue
                line = msgspec.json.decode(raw, type=RespondLine)
                if line.question is None:
                    raise CommandError(f"{line.end}; unanswered requests go to other responders")
                self._answer(line.question)
                if self.count == count_max:
                    return
            raise CommandError("the server ended the connection; unanswered requests go to other responders")
        finally:
            lines.close()  # type: ignore[attr-defined]  # a generator: closes the connection, which ends the responder

    def _answer(self, question: "QuestionLine") -> None:
        from babelbus.web.lines import Replied
        from babelbus.web.record_lines import bytes_of

        payload = bytes_of(question.payload, question.payload_base64) or b""
        headers = header_variables(question.headers, question.headers_base64)
        variables = {"SUBJECT": question.subject, "GROUP": self._group} | headers
        environment = dict(os.environb) | encode_environment(variables)
        reply: dict[str, object] = {"number": question.number}
        try:
            code, output = answer_command(self._command, payload, environment, self._interrupts)
            failure = "" if code == 0 else f"the command ended with code {code}"
            if code < 0:
                failure = f"the command was ended by signal {-code}"
            if len(output) > PAYLOAD_BYTES_MAX:
                failure = f"the reply has {len(output)} bytes, the limit is {PAYLOAD_BYTES_MAX}"
        except OSError as error:  # headers that are too long for an environment
            code, output, failure = 1, b"", f"the command could not be run: {error.strerror}"
        if code in NOT_RUN_CODES:
            raise CommandNotRunError(f"the command cannot be run (code {code}); the request goes to other responders")
        self.count += 1
        reply |= {"failed": failure} if failure else {"payload_base64": output, "headers_base64": self._headers}
        assert self._head is not None
        with self._interrupts.held():  # a finished reply must not be lost because its transfer was cut off
            path = f"/api/responders/{self._head.responder}/reply"
            replied = self._api.ask("POST", path, {}, Replied, content=msgspec.json.encode(reply))
        if not failure and not replied.delivered:
            failure = "the reply came too late"
        if self._as_json:
            print_json(
                {"request": self.count, "subject": question.subject, "delivered": not failure, "error": failure or None}
            )
        if failure:
            self.failed += 1
            note(f"babelbus: request {self.count}: {failure}")
