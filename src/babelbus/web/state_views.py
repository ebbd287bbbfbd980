"""The state as pages show it: levels of the tree, one key with all that is known of it, differences, locks and wills.

No answer has a whole value: each has the beginning of the text, with the size of the whole one.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from babelbus.core.access import Identity
from babelbus.core.state import Entry, Node, Nodes, PageRequest, Revision, StateEditor
from babelbus.units import MIB
from babelbus.web.answers import answer, read_moment, read_number, read_text
from babelbus.web.calls import Call, Route

COUNT = 200
COUNT_MAX = 1_000
PREVIEW_BYTES = 200
"""Bytes of a value in lists."""
ROW_BYTES = 4_096
"""Bytes of a value where two values stand side by side."""
ENTRY_BYTES = 64 * 1024
"""Bytes of the value of one key."""
BYTES_MAX = 64 * MIB
LIST_BYTES_MAX = 8 * MIB
"""Most bytes of the values of a list: it is made within one turn of the event loop."""
INLINE_BYTES = MIB
"""Most bytes that the event loop itself computes a digest of."""


class ValueView(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The beginning of a value: `text` is JSON text, which is whole if it is not `clipped`."""

    text: str
    bytes: int
    clipped: bool = False
    version: int = 0


class NodeView(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One name of a level. `children` is left out if there are none, and -1 if there may be some."""

    name: str
    key: str
    value: ValueView | None = None
    children: int = 0


class MomentView(msgspec.Struct, frozen=True, gc=False):
    """The value of a key at a moment, with the change that made it."""

    offset: int
    timestamp: int
    source: str
    value: ValueView


class StateViews:
    """The requests below /api/state that bring a part of something large."""

    def __init__(self, editor_of: Callable[[Identity], StateEditor], now_ms: Callable[[], int]) -> None:
        self._editor_of = editor_of
        self._now_ms = now_ms

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("GET", "/api/state/nodes", self._level),
            ("GET", "/api/state/search", self._search),
            ("GET", "/api/state/entry", self._entry),
            ("GET", "/api/state/differences", self._differences),
            ("GET", "/api/state/ends", self._ends),
            ("GET", "/api/state/locks", self._locks),
            ("GET", "/api/state/wills", self._wills),
        )

    async def _level(self, call: Call) -> web.Response:
        """Return a page of the children of `parent`, of the root without it."""
        nodes = await self._editor_of(call.principal).level(call.query.get("parent"), _page(call), read_moment(call))
        return answer(_nodes_view(nodes, _bytes_of_each(call, PREVIEW_BYTES)))

    async def _search(self, call: Call) -> web.Response:
        """Return a page of the present keys that a pattern means and that contain a text."""
        nodes = await self._editor_of(call.principal).search(call.query.get("pattern", "#"), _page(call))
        return answer(_nodes_view(nodes, _bytes_of_each(call, PREVIEW_BYTES)))

    async def _entry(self, call: Call) -> web.Response:
        """Return the beginning of the value of a key, `null` if it has none, and what a change of it needs."""
        key, state, moment = read_text(call, "key"), self._editor_of(call.principal), read_moment(call)
        bytes_max = _bytes_max(call, ENTRY_BYTES)
        if moment is not None:
            _, value, version = await state.get(key, moment)
            return answer({"key": key, "value": view_of(value, version, bytes_max)})
        entry = state.find(key)
        digest = "" if entry is None else await digest_of(entry)
        value_view = None if entry is None else view_of(entry[1], entry[2], bytes_max)
        return answer({"key": key, "value": value_view, "digest": digest, "children": state.child_count(key)})

    async def _differences(self, call: Call) -> web.Response:
        """Return how the keys of a pattern differ between the moments `from_...` and `to_...`."""
        first, second = read_moment(call, "from"), read_moment(call, "to")
        if first is None:
            raise web.HTTPBadRequest(text="the query has no from_offset and no from_time")
        page, bytes_max = _page(call), _bytes_of_each(call, ROW_BYTES)
        differences = await self._editor_of(call.principal).differences(
            call.query.get("pattern", "#"), first, second, after=page.after, count=page.count
        )
        rows = [
            {
                "key": row.key,
                "difference": row.difference.value,
                "before": _moment_view(row.before, bytes_max),
                "after": _moment_view(row.after, bytes_max),
            }
            for row in differences.rows
        ]
        return answer(
            {
                "rows": rows,
                "counts": {difference.value: count for difference, count in differences.counts.items()},
                "from_offset": differences.first_offset - 1,
                "to_offset": differences.end_offset - 1,
                "after": differences.next_after,
            }
        )

    async def _ends(self, call: Call) -> web.Response:
        """Return the earliest moment that can be asked for, and that of the last change."""
        earliest, latest = await self._editor_of(call.principal).ends()
        return answer({"earliest": _moment(earliest), "latest": _moment(latest), "now_ms": self._now_ms()})

    async def _locks(self, call: Call) -> web.Response:
        """Return the locks that somebody holds: those of one `key`, or a page in the order of the keys."""
        locks, key, page = self._editor_of(call.principal).locks(), call.query.get("key"), _page(call)
        if key is not None:
            locks = [one for one in locks if one.key == key]
        chosen = sorted((one for one in locks if page.search.lower() in one.key.lower()), key=lambda one: one.key)
        later = [one for one in chosen if page.after is None or one.key > page.after]
        after = later[page.count - 1].key if len(later) > page.count else None
        return answer({"locks": later[: page.count], "total": len(chosen), "after": after})

    async def _wills(self, call: Call) -> web.Response:
        """Return what is deleted and set when clients are gone: all, or what concerns one `key`."""
        bytes_max, page, key = _bytes_of_each(call, PREVIEW_BYTES), _page(call), call.query.get("key")
        state = self._editor_of(call.principal)
        wills: list[dict[str, Any]] = []
        for owner, (testament, goods) in sorted(state.testaments().items()):
            values = [(name, bytes(value)) for name, value in testament.last_will]
            if key is not None:
                goods = [pattern for pattern in goods if state.read_pattern(pattern).matches(key)]
                values = [(name, value) for name, value in values if name == key]
            if goods or values:
                will = [{"key": name, "value": view_of(value, 0, bytes_max)} for name, value in values]
                parts = {"grave_goods": goods[: page.count], "last_will": will[: page.count]}
                more = max(0, len(goods) - page.count) + max(0, len(will) - page.count)
                wills.append({"owner": owner, "principal": testament.principal, **parts, "more": more})
        later = [will for will in wills if page.after is None or will["owner"] > page.after]
        after = later[page.count - 1]["owner"] if len(later) > page.count else None
        return answer({"wills": later[: page.count], "total": len(wills), "after": after})


def clip(value: bytes, bytes_max: int) -> str:
    """Return the beginning of a JSON text, without a last character that is cut."""
    return value[:bytes_max].decode("utf-8", "ignore")


def view_of(value: bytes, version: int, bytes_max: int) -> ValueView:
    """Return the beginning of a value."""
    return ValueView(clip(value, bytes_max), len(value), len(value) > bytes_max, version)


async def digest_of(entry: Entry) -> str:
    """Return a text that equal values of equal version have, and no others."""
    _, value, version = entry

    def compute() -> str:
        return hashlib.blake2b(value, digest_size=12, salt=b"%d" % (version % 10**15)).hexdigest()

    if len(value) <= INLINE_BYTES:
        return compute()
    return await asyncio.get_running_loop().run_in_executor(None, compute)


def _page(call: Call) -> PageRequest:
    count = min(read_number(call, "count", 1) or COUNT, COUNT_MAX)
    return PageRequest(count, call.query.get("after"), call.query.get("search", ""))


def _bytes_max(call: Call, default: int) -> int:
    bytes_max = read_number(call, "bytes_max")
    return default if bytes_max is None else min(bytes_max, BYTES_MAX)


def _bytes_of_each(call: Call, default: int) -> int:
    """Return how much of each value of a page is shown."""
    return min(_bytes_max(call, default), LIST_BYTES_MAX // _page(call).count)


def _node_view(node: Node, bytes_max: int) -> NodeView:
    value = None if node.value is None else view_of(node.value, node.version, bytes_max)
    return NodeView(node.name, node.key, value, -1 if node.children is None else node.children)


def _nodes_view(nodes: Nodes, bytes_max: int) -> dict[str, Any]:
    shown = [_node_view(node, bytes_max) for node in nodes.nodes]
    return {"nodes": shown, "total": nodes.total, "after": nodes.after}


def _moment_view(revision: Revision | None, bytes_max: int) -> MomentView | None:
    if revision is None or revision.value is None:
        return None
    value = view_of(revision.value, revision.version, bytes_max)
    return MomentView(revision.offset, revision.timestamp, revision.source, value)


def _moment(moment: tuple[int, int | None]) -> dict[str, int | None]:
    return {"offset": moment[0], "time_ms": moment[1]}
