"""Publications that are the same but for id and body, taken together from what one read of the socket brought.

Most of what a publisher sends differs in nothing else. Such a run is decoded, stored and answered by columns, which
costs a fraction of doing it message by message and gives the same (docs/design/design.md, section 3).
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Final

import msgspec

from babelbus.protocols.zbus.codec import NO_BODY, decode_message
from babelbus.protocols.zbus.content import json_body
from babelbus.protocols.zbus.errors import RequestError
from babelbus.protocols.zbus.http_mapping import decode_request, run_kind
from babelbus.protocols.zbus.messages import HEADERS_MAX, BodyKind, Message, canonical_headers
from babelbus.wire.http import Request, RequestRun

FRAMES_MIN: Final = 4
"""Fewer frames are read one by one."""
PUBLISH: Final = "pub"


class Run(msgspec.Struct, frozen=True, gc=False):
    """Publications of one connection, in order.

    `message` is what they have in common, without id and body; the same object means the same. Each has a body.
    `ids` are UTF-8; those that came without one have `None`.
    """

    message: Message
    ids: Sequence[bytes | None]
    bodies: list[bytes]

    def messages(self) -> Iterable[Message]:
        """Return them one by one."""
        one = self.message
        for request_id, body in zip(self.ids, self.bodies, strict=True):
            headers = dict(one.headers) if request_id is None else {**one.headers, "id": request_id.decode()}
            yield Message(headers, one.url, one.method, None, body, one.body_kind)


Item = Message | Run | RequestError


class _Publication(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A frame of a run, which has no url, method or status."""

    headers: dict[str, str]
    body: msgspec.Raw = NO_BODY


_decode_publications = msgspec.json.Decoder(list[_Publication]).decode
_headers_of = attrgetter("headers")
_decode_strings = msgspec.json.Decoder(list[str]).decode


class FrameReader:
    """Reads the frames of one connection, which need not prove who sends them."""

    def __init__(self) -> None:
        self._sent: dict[str, str] = {}
        self._kind: BodyKind = "json"
        self._message = Message({})

    def read(self, texts: Sequence[bytes]) -> list[Item]:
        """Return what they say, in order; in the place of one that is no message, what is wrong with it."""
        if len(texts) >= FRAMES_MIN:
            try:
                publications = _decode_publications(b"[%b]" % b",".join(texts))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                publications = []
            if len(publications) == len(texts):
                return self._gather(publications, texts)
        return [_read_one(text) for text in texts]

    def _gather(self, publications: list[_Publication], texts: Sequence[bytes]) -> list[Item]:
        ids = [one.headers.pop("id", None) for one in publications]
        items: list[Item] = []
        at = 0
        for headers, group in groupby(publications, _headers_of):
            raws = [bytes(one.body) for one in group]
            end = at + len(raws)
            run = self._run(headers, ids[at:end], raws) if len(raws) >= FRAMES_MIN else None
            if run is not None:
                items.append(run)
            else:
                items += map(_message_of, publications[at:end], ids[at:end], raws, texts[at:end])
            at = end
        return items

    def _run(self, headers: dict[str, str], ids: list[str | None], raws: list[bytes]) -> Run | None:
        """Return the run that these frames are, `None` if they are none."""
        read = _read_bodies(raws)
        if read is None or headers.get("cmd") != PUBLISH or len(headers) >= HEADERS_MAX:
            return None
        bodies, kind = read
        if headers != self._sent or kind != self._kind:
            common = canonical_headers(headers)
            if "id" in common:  # in another spelling
                return None
            self._sent, self._kind = headers, kind
            self._message = Message(common, body_kind=kind)
        try:
            if None not in ids:
                return Run(self._message, list(map(str.encode, ids)), bodies)  # type: ignore[arg-type]  # none is None
            return Run(self._message, [None if one is None else one.encode() for one in ids], bodies)
        except UnicodeEncodeError:
            return None


def _message_of(publication: _Publication, request_id: str | None, raw: bytes, text: bytes) -> Message | RequestError:
    """Return the message of a frame that was decoded with others; `text` is the frame."""
    headers = canonical_headers(publication.headers)
    if "id" in headers or len(headers) >= HEADERS_MAX:  # the id in two spellings, of which the last counts
        return _read_one(text)
    if request_id is not None:
        headers["id"] = request_id
    try:
        body, kind = json_body(raw)
    except ValueError:
        return _read_one(text)
    return Message(headers, None, None, None, body, kind)


def _read_one(text: bytes) -> Message | RequestError:
    try:
        return decode_message(text)
    except RequestError as error:
        return error


def _read_bodies(raws: list[bytes]) -> tuple[list[bytes], BodyKind] | None:
    """Return the bodies whose JSON texts these are, if they are all strings, or all something else that is a body."""
    firsts = {raw[:1] for raw in raws}
    joined = b"".join(raws)
    if not joined.isascii():
        try:
            joined.decode()  # each begins and ends with a letter of ASCII, so none is cut
        except UnicodeDecodeError:
            return None
    if firsts == {b'"'}:
        if b"\\" not in joined:  # the text is what stands between the quotes
            return [raw[1:-1] for raw in raws], "text"
        try:
            return [text.encode() for text in _decode_strings(b"[%b]" % b",".join(raws))], "text"
        except UnicodeEncodeError:
            return None
    if firsts & {b'"', b"n", b""}:
        return None
    return [json_body(raw)[0] or b"" for raw in raws], "json"


class RequestReader:
    """Reads the runs of one HTTP connection, which need not prove who sends them."""

    def __init__(self) -> None:
        self._request: Request | None = None
        self._message: Message | None = None
        """What the publications have in common, whose bodies are of ASCII letters; `None` when they are none."""
        self._others: dict[BodyKind, Message] = {}
        """The same for other bodies."""

    def read(self, run: RequestRun) -> Run | None:
        """Return the run of publications that a run of requests is, `None` if it is none."""
        if run.request is not self._request:
            self._request, self._message, self._others = run.request, _common(run.request), {}
        message = self._message
        bodies, values = run.bodies, run.values
        if message is None or not all(bodies):  # no body is something else than an empty one
            return None
        if not b"".join(bodies).isascii():
            kind = run_kind(message.headers.get("content-type"), bodies)
            if kind is None:
                return None
            if kind != message.body_kind:
                common = message
                message = self._others.get(kind)
                if message is None:
                    message = self._others[kind] = msgspec.structs.replace(common, body_kind=kind)
        if values is None:
            return Run(message, [None] * len(bodies), bodies)
        return Run(message, values, bodies) if b"".join(values).isascii() else None


def _common(request: Request) -> Message | None:
    """Return what publications have in common that come with such requests, `None` if these are something else."""
    try:
        message = decode_request(request)
    except RequestError:
        return None
    headers = message.headers
    ack = headers.get("ack", "true").lower() == "true"  # without an ack it is a call (6.3)
    kind = run_kind(headers.get("content-type"), [b"text"])
    if headers.get("cmd") != PUBLISH or not ack or request.method == "HEAD" or kind is None:
        return None
    return msgspec.structs.replace(message, body_kind=kind)
