"""The state over the administration endpoint: values now and as they were, changes, and the tree as JSON lines."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from aiohttp import web

from babelbus.core.access import Identity
from babelbus.core.state import REVISIONS_MAX, Entry, Revision, StateEditor, ValueChangedError
from babelbus.units import MIB
from babelbus.web.answers import answer, read_body, read_moment, read_number, read_text, write_lines
from babelbus.web.calls import Answer, Call, Route
from babelbus.web.state_views import clip, digest_of

EditorOf = Callable[[Identity], StateEditor]
"""Builds the state as a principal may see and change it."""
VALUE_BYTES_MAX = 64 * MIB
"""A longer value, or batch of them, is refused before it is here."""


class StateLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One value; `version` is left out for a plain one."""

    key: str
    value: msgspec.Raw
    version: int = 0


class RevisionLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One stored change of a key: a value, or that it was deleted. `timestamp` is milliseconds since 1970.

    If the request limits the bytes of a value, there is `text` and `bytes` instead of `value`.
    """

    offset: int
    timestamp: int
    source: str
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    version: int = 0
    deleted: bool = False
    text: str | msgspec.UnsetType = msgspec.UNSET
    bytes: int | msgspec.UnsetType = msgspec.UNSET


class PutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/state/values."""

    values: list[StateLine]


encode = msgspec.json.Encoder().encode


class StateRoutes:
    """The requests below /api/state but for the live one."""

    def __init__(self, editor_of: EditorOf) -> None:
        self._editor_of = editor_of

    def _state(self, call: Call) -> StateEditor:
        return self._editor_of(call.principal)

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers. Keys are in the query: no rule for paths can touch them there."""
        return (
            ("GET", "/api/state/value", self._get),
            ("PUT", "/api/state/value", self._set),
            ("DELETE", "/api/state/value", self._delete),
            ("GET", "/api/state/values", self._match),
            ("POST", "/api/state/values", self._put_all),
            ("DELETE", "/api/state/values", self._delete_matching),
            ("GET", "/api/state/tree", self._tree),
            ("GET", "/api/state/revisions", self._revisions),
        )

    async def _get(self, call: Call) -> web.Response:
        return answer(line_of(await self._state(call).get(read_text(call, "key"), read_moment(call))))

    async def _set(self, call: Call) -> web.Response:
        """Set a key to the body; `version` in the query makes it a compare-and-set, 0 if the key must not exist.

        With `digest`, the key must have the value that has this digest, which is empty for no value.
        """
        key, version = read_text(call, "key"), read_number(call, "version")
        value = await call.read(VALUE_BYTES_MAX)
        state = self._state(call)
        await _check_digest(call, state, key)
        if version is None:
            state.set(key, value)
        else:
            version = state.compare_and_set(key, value, version)
        await state.commit().wait()
        return answer({"key": key, "version": version or 0})

    async def _delete(self, call: Call) -> web.Response:
        state, key = self._state(call), read_text(call, "key")
        await _check_digest(call, state, key)
        deleted = state.delete(key)
        await state.commit().wait()
        return answer(line_of(deleted))

    async def _match(self, call: Call) -> Answer:
        pattern, moment = read_text(call, "pattern"), read_moment(call)
        return await _stream(call, await self._state(call).match(pattern, moment))

    async def _put_all(self, call: Call) -> web.Response:
        body = await read_body(call, PutBody, VALUE_BYTES_MAX)
        state = self._state(call)
        state.put_all([(one.key, bytes(one.value), one.version) for one in body.values])
        await state.commit().wait()
        return answer({"stored": len(body.values)})

    async def _delete_matching(self, call: Call) -> web.Response:
        state = self._state(call)
        deleted = state.delete_matching(read_text(call, "pattern"))
        await state.commit().wait()
        return answer({"deleted": len(deleted)})

    async def _tree(self, call: Call) -> Answer:
        return await _stream(call, await self._state(call).tree(read_moment(call)))

    async def _revisions(self, call: Call) -> web.Response:
        key, before = read_text(call, "key"), read_number(call, "before")
        count_max, bytes_max = read_number(call, "max", 1), read_number(call, "bytes_max")
        found, complete_from = await self._state(call).revisions(
            key, before, REVISIONS_MAX if count_max is None else count_max
        )
        lines = [revision_line(one, bytes_max) for one in found]
        return answer({"key": key, "complete_from": complete_from, "revisions": lines})


async def _check_digest(call: Call, state: StateEditor, key: str) -> None:
    """Check that a key still has the value that the caller has seen, if the request says which.

    Raises:
        ValueChangedError: it has not.
    """
    digest = call.query.get("digest")
    if digest is None:
        return
    entry = state.find(key)
    if ("" if entry is None else await digest_of(entry)) != digest:
        raise ValueChangedError(key)
    present = state.find(key)
    if entry is not None and (present is None or present[1] is not entry[1] or present[2] != entry[2]):
        raise ValueChangedError(key)


def revision_line(revision: Revision, bytes_max: int | None = None) -> RevisionLine:
    """Return a change as its line; with `bytes_max`, with the beginning of its value as text."""
    value = revision.value
    line = RevisionLine(
        revision.offset, revision.timestamp, revision.source, version=revision.version, deleted=value is None
    )
    if value is None:
        return line
    if bytes_max is None:
        return msgspec.structs.replace(line, value=msgspec.Raw(one_line(value)))
    return msgspec.structs.replace(line, text=clip(value, bytes_max), bytes=len(value))


async def _stream(call: Call, entries: Sequence[Entry]) -> Answer:
    response = await call.begin_lines()
    await write_lines(response, encode_entries(entries))
    return response


def encode_entries(entries: Iterable[Entry]) -> Iterator[bytes]:
    """Return a line for each entry."""
    for entry in entries:
        yield encode(line_of(entry))


def line_of(entry: Entry) -> StateLine:
    """Return an entry as its line."""
    return StateLine(entry[0], msgspec.Raw(one_line(entry[1])), entry[2])


def one_line(value: bytes) -> bytes:
    """Return a JSON text without raw line ends between its tokens: events of other protocols may have brought them."""
    return msgspec.json.format(value, indent=-1) if b"\n" in value or b"\r" in value else value
