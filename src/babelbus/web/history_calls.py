"""The history over the administration API: which series there are, and their points."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from babelbus.core.access import Action, Identity, check_may
from babelbus.web.answers import answer, read_number
from babelbus.web.callers import METRICS_SUBJECT
from babelbus.web.calls import Call, Route
from babelbus.web.groups import may_see
from babelbus.web.history import RINGS, History, Series, escape
from babelbus.web.server import Host

SERIES_AT_ONCE = 100


class SeriesInfo(msgspec.Struct, frozen=True):
    """A series, as a principal may name it."""

    name: str
    unit: str
    label: str


class SeriesList(msgspec.Struct, frozen=True):
    """All series that a principal may see; `left_out` counts the busy topics and the groups that have none."""

    series: list[SeriesInfo]
    left_out: dict[str, int]
    started_ms: int


class SeriesPoints(msgspec.Struct, frozen=True):
    """The points of a series, the oldest first; null where there is no figure."""

    name: str
    unit: str
    label: str
    points: list[float | None]


class HistoryPoints(msgspec.Struct, frozen=True):
    """Points that are `step_s` seconds apart, the last of which ends at `end_ms`.

    Names of series that are not there any more are in `missing`. The server started at each of `resets_ms`.
    """

    step_s: int
    end_ms: int
    series: list[SeriesPoints]
    missing: list[str]
    resets_ms: list[int]


class HistoryRoutes:
    """The requests about the history."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._broker = server.broker

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/history", self._show),)

    async def _show(self, call: Call) -> web.Response:
        """Answer with the list of series, or with the points of those in `series`."""
        principal, history = call.principal, self._server.history
        if self._broker.gate.enforcing:
            check_may(principal, Action.READ, METRICS_SUBJECT)
        if history is None:
            raise web.HTTPNotFound
        visible = self._visible(history, principal)
        names = call.query.get("series")
        if names is None:
            lines = [SeriesInfo(name, one.unit, principal.relative_text(one.label)) for name, one in visible.items()]
            left_out = {"topics": history.topics_left_out, "groups": history.groups_left_out}
            return answer(SeriesList(lines, left_out, history.started_ms))
        return answer(self._points(call, history, visible, names.split(",")))

    def _points(self, call: Call, history: History, visible: dict[str, Series], names: list[str]) -> HistoryPoints:
        if len(names) > SERIES_AT_ONCE:
            raise web.HTTPBadRequest(text=f"at most {SERIES_AT_ONCE} series at once")
        step = read_number(call, "step")
        step = 1 if step is None else step
        if step not in RINGS:
            raise web.HTTPBadRequest(text=f"step is one of {', '.join(map(str, RINGS))} seconds, not {step}")
        count = read_number(call, "count", 1)
        count = RINGS[step] if count is None else min(count, RINGS[step])
        end = history.ticks - history.ticks % step
        end_ms = history.end_ms - (history.ticks - end) * 1000
        relative_text = call.principal.relative_text
        lines = [
            SeriesPoints(name, one.unit, relative_text(one.label), one.points(step, end, count))
            for name in dict.fromkeys(names)
            if (one := visible.get(name)) is not None
        ]
        missing = [name for name in names if name not in visible]
        resets = [history.started_ms] if history.started_ms > end_ms - count * step * 1000 else []
        return HistoryPoints(step, end_ms, lines, missing, resets)

    def _visible(self, history: History, principal: Identity) -> dict[str, Series]:
        """Return the series that a principal may see, under the names that it gives them."""
        topics, groups = history.topics, history.groups
        of_some = {one.name for one in (*topics.values(), *groups.values())}
        visible = {name: one for name, one in sorted(history.series.items()) if name not in of_some}
        relative = principal.relative
        for topic, series in sorted(topics.items()):
            if may_see(self._broker, principal, topic):
                visible[f"topic.{escape(relative(topic))}.published"] = series
        for (topic, group), series in sorted(groups.items()):
            if may_see(self._broker, principal, topic):
                visible[f"group.{escape(relative(topic))}.{escape(group)}.lag"] = series
        return visible
