"""Pipelined requests that are the same but for one header, the length and the body: cut with one match each.

A client that sends many requests writes the same head again and again, with another id. The pattern of such a head is
learned from two heads that were read in full one behind the other, so all that does not vary in later ones is checked.
"""

import re
from collections.abc import Sequence

import msgspec

from babelbus.wire.http.request import Request, RequestRun

PATTERNS_MAX = 8
"""Most patterns made for one connection: each costs as much as some hundred requests."""
LENGTHS_MAX = 64
_LENGTH_NAME = b"content-length"
# A value as `fields` allows it; blanks in front of it are part of the pattern, and behind it there are none.
_VALUE = rb"([!-~\x80-\xff][\t -~\x80-\xff]{0,255})(?<![ \t])"
_LENGTH = rb"([0-9]{1,9})"


class RunCutter:
    """Cuts requests by the pattern of one head. One cutter for each connection.

    `varying` is the name, in lower case, of the header whose value differs in each request.
    """

    def __init__(self, varying: str, *, body_bytes_max: int) -> None:
        self._varying = varying
        self._body_bytes_max = body_bytes_max
        self._before: Sequence[bytes] = ()
        self._patterns = 0
        self._pattern: re.Pattern[bytes] | None = None
        self._known: list[bytes] = []
        self._groups = (0, 0)
        """Which group of the pattern is the value, and which the length; 0 for none."""
        self._model: Request
        self._requests: dict[bytes, Request] = {}
        """The request for each length of a body, as it is written."""

    def learn(self, lines: Sequence[bytes], request: Request) -> None:
        """Record a head that was read in full: its lines and what they mean.

        The request must keep its connection and have no body of unknown length.
        """
        before, self._before = self._before, lines
        if len(lines) != len(before) or lines[0] != before[0]:  # few heads of mixed traffic are looked at further
            return
        places = [-1, -1]
        skeleton = self._skeleton(lines, places)
        if not skeleton or skeleton == self._known or self._patterns >= PATTERNS_MAX:
            return
        if skeleton == self._skeleton(before, [-1, -1]):
            self._patterns += 1
            self._known = skeleton
            self._make(skeleton, places, request)

    def forget(self) -> None:
        """Drop the pattern, and do not make it again."""
        self._pattern = None

    def _skeleton(self, lines: Sequence[bytes], places: list[int]) -> list[bytes]:
        """Return the lines without what varies, whose places are noted; nothing if a header is repeated."""
        names = (self._varying.encode(), _LENGTH_NAME)
        skeleton = list(lines)
        for at, line in enumerate(lines):
            name, colon, value = line.partition(b":")
            if at and name.lower() in names:
                which = names.index(name.lower())
                if places[which] >= 0:
                    return []
                places[which] = at
                skeleton[at] = name + colon + value[: len(value) - len(value.lstrip(b" \t"))]
        return skeleton

    def _make(self, skeleton: list[bytes], places: list[int], request: Request) -> None:
        parts = []
        for at, line in enumerate(skeleton):
            part = re.escape(line)
            if at in places:
                part += _VALUE if at == places[0] else _LENGTH
            parts.append(part + rb"\r\n")
        self._pattern = re.compile(b"".join(parts) + rb"\r\n")
        value, length = places
        self._groups = (
            0 if value < 0 else 2 if 0 <= length < value else 1,
            0 if length < 0 else 2 if 0 <= value < length else 1,
        )
        headers = {name: text for name, text in request.headers.items() if name != self._varying}
        self._model = msgspec.structs.replace(request, headers=headers)
        self._requests = {}

    def cut(self, data: bytes, position: int) -> tuple[RequestRun | None, int]:
        """Return the equal and complete requests that begin at `position`, and where they end."""
        pattern = self._pattern
        if pattern is None:
            return None, position
        match_ = pattern.match(data, position)
        if match_ is None:
            return None, position
        value_at, length_at = self._groups
        match, size = pattern.match, len(data)
        length_text = match_[length_at] if length_at else b""
        length = int(length_text or 0)
        if length > self._body_bytes_max:
            return None, position
        values: list[bytes] = []
        bodies: list[bytes] = []
        add_value, add_body = values.append, bodies.append
        while match_ is not None and (not length_at or match_[length_at] == length_text):
            start = match_.end()
            end = start + length
            if end > size:
                break
            add_value(match_[value_at])
            add_body(data[start:end])
            position = end
            match_ = match(data, position)
        if not bodies:
            return None, position
        return RequestRun(self._request(length_text), values if value_at else None, bodies), position

    def _request(self, length_text: bytes) -> Request:
        request = self._requests.get(length_text)
        if request is None:
            headers = dict(self._model.headers)
            if length_text:
                headers["content-length"] = length_text.decode()
            request = msgspec.structs.replace(self._model, headers=headers)
            if len(self._requests) >= LENGTHS_MAX:
                self._requests.clear()
            self._requests[length_text] = request
        return request
