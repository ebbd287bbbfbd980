"""The messages of zbus (docs/specifications/zbus.md, 2.1, 3, 4 and 5.4): their parts, header names and texts.

A body has exactly one form. A body that came as bytes stays bytes; a JSON string is its text as UTF-8; every other JSON
value is the JSON text that its sender wrote, which is stored and delivered without being decoded.
"""

import re
from collections.abc import Iterable, Sequence
from enum import IntFlag
from functools import partial
from typing import Final, Literal

import msgspec

from babelbus.protocols.zbus.errors import MalformedMessageError

BodyKind = Literal["json", "text", "bytes"]

HEADERS_MAX: Final = 100
"""Headers of one message. A record holds 127, and the mapping (records.py) needs some for itself."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. `headers` are read only: a message that was received may be stored, delivered and answered.

    Protocol headers have the spelling of `HEADER_NAMES`, whatever case they were sent in; others are as sent.
    `body` is `None` without a body. `body_kind` describes its bytes: `json` the text of a JSON value that is neither
    string nor null, `text` UTF-8, `bytes` anything.
    """

    headers: dict[str, str]
    url: str | None = None
    method: str | None = None
    status: int | None = None
    body: bytes | None = None
    body_kind: BodyKind = "json"


class Run(msgspec.Struct, frozen=True, gc=False):
    """Publications of one connection, in order, which are the same but for id and body.

    `message` is what they have in common, without id, with an empty body: each has a body of its own. Those without an
    id have `None`.
    """

    message: Message
    ids: Sequence[str | None]
    bodies: list[bytes]

    def messages(self) -> Iterable[Message]:
        """Return the publications one by one."""
        common = self.message
        for request_id, body in zip(self.ids, self.bodies, strict=True):
            headers = dict(common.headers) if request_id is None else {**common.headers, "id": request_id}
            yield Message(headers, common.url, common.method, None, body, common.body_kind)


Item = Message | Run | MalformedMessageError
"""The content of one or more frames; an error stands in the place of a frame that is no message."""

PROTOCOL: Final = "zbus"
PUBLISH: Final = "pub"
RUN_MIN: Final = 4
"""Fewer publications are no run."""

HEADER_NAMES: Final = (
    *("cmd", "id", "mq", "channel", "mqType", "mqMask", "channelMask", "offset", "checksum", "filter", "tag", "window"),
    *("ack", "source", "target", "apiKey", "signature", "signFields", "clearBind", "remote-addr", "content-type"),
)
"""The protocol's own headers, as they are written (section 2.1)."""

SET_COOKIE: Final = "set-cookie"
"""The one header that may not be joined with commas when it comes as a list, as R3's services send it (6.4)."""
COOKIES_BETWEEN: Final = "\n"
"""Separates several cookies in the one value: HTTP has a header for each."""

SECRETS: Final = frozenset({"apiKey", "signature", "signFields"})
"""Headers that are never stored or delivered (section 4.2, DECISION)."""

BY_LOWER: Final = {name.lower(): name for name in HEADER_NAMES}
_EXACT: Final = frozenset(HEADER_NAMES)
_INTEGER: Final = re.compile("[+-]?[0-9]{1,19}")


def canonical_name(name: str) -> str:
    """Return a header name in the spelling of `HEADER_NAMES` if it is one of them in any case, else as it is."""
    return name if name in _EXACT else BY_LOWER.get(name.lower(), name)


_KNOWN_MAX: Final = 4096
_KNOWN_LENGTH_MAX: Final = 64
_known = set(HEADER_NAMES)
"""Names that are spelled as we do, as far as they are remembered: clients choose them."""


def canonical_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return headers with the protocol's own ones in their spelling; of several that become one, the last stays."""
    if headers.keys() <= _known:
        return headers
    if all(map(_is_canonical, headers.keys() - _known)):
        return headers
    return {canonical_name(name): value for name, value in headers.items()}


def _is_canonical(name: str) -> bool:
    """Return whether a name has our spelling or is not ours, and remember the name if so."""
    if canonical_name(name) != name:
        return False
    if len(name) <= _KNOWN_LENGTH_MAX:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        _known.add(name)
    return True


def flag(message: Message, name: str, *, default: bool) -> bool:
    """Read a header that is true or false: true only for the text `true` in any case."""
    text = message.headers.get(name)
    return default if text is None else text.lower() == "true"


def integer(message: Message, name: str) -> int | None:
    """Read a header that is decimal text; `None` when it is absent.

    Raises:
        MalformedMessageError: it is no integer of 64 bits (section 3, item 8, DECISION).
    """
    text = message.headers.get(name)
    if text is None:
        return None
    if _INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(text)
    raise MalformedMessageError(f"{name} is no integer: {text[:40]}")


class Mask(IntFlag):
    """The bits of `mqMask` and `channelMask` (section 5.4)."""

    DELETE_ON_EXIT = 1
    EXCLUSIVE = 2
    TAKEOVER = 4


OK: Final = 200
BAD_REQUEST: Final = 400
FORBIDDEN: Final = 403
NOT_FOUND: Final = 404
FAILED: Final = 500
GATEWAY_TIMEOUT: Final = 504
NO_DATA: Final = 604

MEMORY: Final = "memory"
DISK: Final = "disk"
DATABASE: Final = "db"

TEXT_TYPE: Final = "text/plain; charset=utf8"
JSON_TYPE: Final = "application/json; charset=utf8"

# What is said when a command was refused (sections 3, 4 and 6).
CMD_REQUIRED: Final = "cmd key required"
SUB_NEEDS_MQ: Final = "Missing mq field"
SUB_NEEDS_CHANNEL: Final = "Missing channel field"
BIND_NEEDS_BODY: Final = "bind command, missing url entry list data in body"
BIND_OTHER_MQ: Final = "UrlEntry's mq should be same"
ROUTE_NEEDS_TARGET: Final = "route command, missing target field"
ROUTED: Final = "OK"

# What is said when somebody does not prove who he is (section 7), in the order in which it is looked at.
MISSING_API_KEY: Final = "missing apiKey in request"
MISSING_SIGNATURE: Final = "missing signature in request"
UNKNOWN_API_KEY: Final = "apiKey not exists"
UNKNOWN_SECRET_KEY: Final = "secretKey not exists"  # noqa: S105  # a text, no secret
SIGNATURE_MISMATCHED: Final = "signature mismatched"
MADE_ELSEWHERE: Final = "made by another protocol, which zbus cannot change unless access.mode is enforce"
NOT_TAKEN: Final = "only who took a request may answer it"
TOO_MANY_PROOFS: Final = "too many wrong signatures, try again later"


missing_mq: Final = "{} command, missing mq field".format
mq_not_found: Final = "MQ({}) Not Found".format
channel_not_found: Final = "Channel({}) Not Found".format
command_not_found: Final = "Command({}) Not Found".format
"""The name is in lower case."""
url_not_found: Final = "{} Not Found".format
target_not_found: Final = "Target={} Not Found".format
type_not_supported: Final = "mqType({}) Not Support".format


def _done(command: str, mq: str, channel: str | None = None) -> str:
    return f"OK, {command} (mq={mq})" if channel is None else f"OK, {command} (mq={mq},channel={channel})"


created: Final = partial(_done, "CREATE")
published: Final = partial(_done, "PUB")
subscribed: Final = partial(_done, "SUB")
removed: Final = partial(_done, "REMOVE")
bound: Final = partial(_done, "BIND URL")


def text_reply(request_id: str | None, status: int, text: str) -> Message:
    """Return the answer that is a text; plain text, because it may name what a client chose (section 3, DECISION)."""
    headers = {"content-type": TEXT_TYPE}
    if request_id is not None:
        headers["id"] = request_id
    return Message(headers, status=status, body=text.encode(), body_kind="text")


def json_reply(request_id: str | None, status: int, body: bytes, **headers: str) -> Message:
    """Return the answer that is a JSON value; `body` is its text, `headers` are those of `take`: `mq` and `channel`."""
    headers["content-type"] = JSON_TYPE
    if request_id is not None:
        headers["id"] = request_id
    return Message(headers, status=status, body=body, body_kind="json")


def urls_are_taken(refusal: str) -> str:
    """Return the text of bindings that would take calls of another service; `refusal` is the id in the audit."""
    return f"a url begins like that of another service (refusal {refusal})"
