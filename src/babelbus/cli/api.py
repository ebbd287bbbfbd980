"""The administration API as the command line uses it (docs/operations.md, "Administration endpoint").

A request goes over HTTP to the endpoint of a server on this machine, or over jebp to a server elsewhere: the answers
are the same.
"""

from collections.abc import Generator, Iterator, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from babelbus.cli.command import CommandError
from babelbus.cli.output import patience

TIMEOUT_SECONDS = 30.0
LONG_TIMEOUT_SECONDS = 600.0
"""Timeout of requests that read a log from its beginning."""

T = TypeVar("T")

# Advice for an error, by the code of the answer.
HINTS = {
    "unknown_topic": "'babelbus topics list' shows what there is, 'babelbus topics create' makes one",
    "topic_exists": "'babelbus topics alter' changes its settings",
    "unknown_group": "'babelbus groups list' shows what there is, 'babelbus groups create TOPIC GROUP' makes one",
    "group_exists": "'babelbus groups alter' changes its settings, 'babelbus groups seek' its place",
    "group_owned": "wait until that has ended",
    "unknown_filter": "'babelbus groups alter TOPIC GROUP --filter none' takes it away",
    "no_dead_letters": "'babelbus dead-letters list' shows what there is",
    "ambiguous_group": "'babelbus dead-letters list' shows the topics",
    "letters_waiting": "'babelbus dead-letters replay' sends them back, --all purges them too",
    "no_responders": "'babelbus respond SUBJECT --exec CMD' answers",
    "no_reply": "--timeout waits longer",
    "no_such_key": "'babelbus state match PATTERN' shows what there is, 'babelbus state history KEY' what there was",
    "invalid_pattern": "write '?' for one element and '#' at the end for the rest, as in 'plant/?/temp' or 'plant/#'",
    "invalid_key": "'babelbus state match' takes patterns",
    "versioned": "add --version N with the version that 'babelbus state get --json' shows",
    "version_mismatch": "somebody was faster, or it is the wrong number: 'babelbus state get --json' shows it",
    "access_conflict": "'babelbus access list' shows the table as it is now",
    "unknown_principal": "'babelbus principals list' shows who there is",
    "imported_principal": "'babelbus clients' changes the clients of jebp",
    "history_gone": "ask for that moment or a later one; state.history_seconds says how long changes are kept",
    "offset_out_of_range": "'babelbus state history KEY' shows the offsets of a key, --as-of also takes a time",
}


class ApiError(CommandError):
    """The server refused a request; `code` is the word of its answer (`unknown_topic`, `topic_exists`, ...)."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class UnsupportedError(CommandError):
    """The server is older than jebp/1.2, which carries this API."""


class CutAnswerError(CommandError):
    """The connection ended before the end of an answer of lines."""

    def __init__(self, address: str, reason: object) -> None:
        super().__init__(f"{address} ended the connection before the end of its answer: {reason}")


SILENT_ADVICE = "the server hangs or is overloaded: look at its log, and try again"


def no_answer(address: str, reason: str, method: str = "GET") -> CommandError:
    """Return the error of a request to a server that is silent."""
    outcome = "" if method == "GET" else "; the request may be done or not"
    return CommandError(f"{address} does not answer: {reason}{outcome}; {SILENT_ADVICE}")


class Transport(Protocol):
    """Carries the requests to one server. Every method may raise `CommandError` when no server answers."""

    address: str
    """The server, "host:port"."""

    def ask(self, method: str, path: str, content: bytes | None, timeout_seconds: float) -> tuple[int, bytes]:
        """Send a request; return the status and the body of its answer."""

    def begin(self, path: str, timeout_seconds: float) -> tuple[int, Generator[bytes, None, None]]:
        """Begin a request whose answer is lines; return the status and the parts of the answer as they arrive.

        The caller closes the generator, which raises `CutAnswerError` if the connection ends before the answer.
        """

    def advice(self, status: int, code: str) -> str | None:
        """Return the text that replaces the error of an answer, `None` to keep the text."""


class AdminApi:
    """The API of one server. Every method may raise `ApiError`, or `CommandError` when no server answers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def call(
        self, method: str, path: str, body: object = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """Send a request with a JSON body, and return the JSON object of its answer."""
        content = None if body is None else msgspec.json.encode(body)
        answer: dict[str, Any] = self.ask(
            method, path, {}, dict[str, Any], content=content, timeout_seconds=timeout_seconds
        )
        return answer

    def topic(self, name: str) -> dict[str, Any]:
        """Return one topic."""
        return self.call("GET", path_of("topics", name))

    def create_topic(self, name: str, partitions: int | None, settings: Mapping[str, object]) -> dict[str, Any]:
        """Create a topic, and return its description."""
        body: dict[str, object] = {"name": name, "settings": dict(settings)}
        if partitions is not None:
            body["partitions"] = partitions
        return self.call("POST", "/api/topics", body)

    def ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        type_: type[T],
        *,
        content: bytes | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> T:
        """Send a request, and return its answer as an object of `type_`."""
        with patience(f"waiting for {self._transport.address}"):
            status, answer = self._transport.ask(method, _with_query(path, query), content, timeout_seconds)
        self._check(status, answer)
        return self._read(answer, type_)

    def lines(
        self,
        path: str,
        query: Mapping[str, str],
        type_: type[T],
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        live: bool = False,
    ) -> Iterator[T | None]:
        """Yield the objects of an answer of JSON lines as they arrive; `None` after a while without a line.

        The iterator ends when the server ends the answer; a `live` answer, which has no end of its own, may end with
        its connection. The server sends a line or a sign of life every ten seconds.
        """
        status, chunks = self._transport.begin(_with_query(path, query), timeout_seconds)
        try:
            if status >= 400:
                self._check(status, b"".join(chunks))
            decoder = msgspec.json.Decoder(type_)
            parts: list[bytes] = []  # of an incomplete line
            for chunk in chunks:
                first, *ends = chunk.split(b"\n")
                parts.append(first)
                for end in ends:
                    line = b"".join(parts)
                    parts = [end]
                    yield self._read_line(line, decoder) if line else None
        except CutAnswerError:
            if not live:
                raise
        finally:
            chunks.close()

    def _check(self, status: int, answer: bytes) -> None:
        """Raise the error of an answer that is an error."""
        if status < 400:
            return
        read = self._read(answer, dict[str, Any])
        text, code = str(read.get("error", "it failed")), str(read.get("code", "failed"))
        instead = self._transport.advice(status, code)
        if instead is not None:
            text = instead
        elif code in HINTS:
            text += f"; {HINTS[code]}"
        raise ApiError(text, code)

    def _read(self, answer: bytes, type_: type[T]) -> T:
        try:
            return msgspec.json.decode(answer, type=type_)
        except msgspec.DecodeError:
            raise self._no_endpoint() from None

    def _read_line(self, line: bytes, decoder: msgspec.json.Decoder[T]) -> T:
        try:
            return decoder.decode(line)
        except msgspec.DecodeError:
            raise self._no_endpoint() from None

    def _no_endpoint(self) -> CommandError:
        return CommandError(f"{self._transport.address} is no administration endpoint of Babelbus")


def _with_query(path: str, query: Mapping[str, str]) -> str:
    if not query:
        return path
    # Bytes of the shell that are not UTF-8 are sent unchanged; the server refuses them where it needs UTF-8.
    return f"{path}?{urlencode(query, errors='surrogateescape')}"


def path_of(*parts: str) -> str:
    """Return the path of a request: `("topics", "a/b")` is /api/topics/a%2Fb."""
    return "/".join(("/api", *(quote(part, safe="") for part in parts)))
