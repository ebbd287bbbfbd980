"""The last changes over the administration API, and the requests that are noted as changes."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from aiohttp import web

from babelbus.core.access import Action, may
from babelbus.core.broker import Broker
from babelbus.web.answers import answer, read_number
from babelbus.web.callers import ACCESS_SUBJECT, SERVER_SUBJECT
from babelbus.web.calls import Answer, Call, Handler, Route
from babelbus.web.changes import Changes

COUNT: Final = 50
_GROUP = "group {group!r} of topic {topic!r}"
# Request -> kind, text with the names of the path, and the name in the path that is a topic.
NOTED: dict[tuple[str, str], tuple[str, str, str | None]] = {
    ("POST", "/api/groups"): ("group", f"{_GROUP} was made", "topic"),
    ("PATCH", "/api/topics/{topic}/groups/{group}"): ("group", f"{_GROUP} was changed", "topic"),
    ("DELETE", "/api/topics/{topic}/groups/{group}"): ("group", f"{_GROUP} was removed", "topic"),
    ("POST", "/api/topics/{topic}/groups/{group}/seek"): ("group", f"{_GROUP} was set to another place", "topic"),
    ("POST", "/api/topics/{topic}/groups/{group}/pause"): ("group", f"{_GROUP} was paused", "topic"),
    ("POST", "/api/topics/{topic}/groups/{group}/resume"): ("group", f"{_GROUP} was resumed", "topic"),
    ("POST", "/api/dead-letters/{name}/replay"): ("dead-letters", "dead letters of {name!r} were replayed", None),
    ("POST", "/api/dead-letters/{name}/purge"): ("dead-letters", "dead letters of {name!r} were purged", None),
    ("POST", "/api/clients"): ("client", "a client was added", None),
    ("PATCH", "/api/clients/{fingerprint}"): ("client", "client {fingerprint} was changed", None),
    ("DELETE", "/api/clients/{fingerprint}"): ("client", "client {fingerprint} was removed", None),
    ("DELETE", "/api/connections/{id}"): ("connection", "connection {id} was closed", None),
    ("POST", "/api/reload"): ("server", "the lists of clients and topics were read again", None),
}


class _Group(msgspec.Struct):
    """The part of the answer to POST /api/groups that is noted."""

    topic: str
    name: str


class ChangeLine(msgspec.Struct, frozen=True):
    """One change, as its reader may know it; who made it is told to those who may manage the topic."""

    time_ms: int
    kind: str
    text: str
    principal: str


def noting(changes: Changes, routes: Iterable[Route]) -> list[Route]:
    """Return routes of which those that change something note it when it is done."""
    return [
        (method, path, handler if (method, path) not in NOTED else _noting(changes, handler, *NOTED[method, path]))
        for method, path, handler in routes
    ]


def _noting(changes: Changes, handler: Handler, kind: str, text: str, topic: str | None) -> Handler:
    async def handle(call: Call) -> Answer:
        done = await handler(call)
        principal, values = call.principal, dict(call.path_values)
        if not values and topic is not None:  # of a new group, whose name was in the body
            if not isinstance(done, web.Response) or done.status != 201:
                return done
            assert isinstance(done.body, bytes)
            group = msgspec.json.decode(done.body, type=_Group)
            values = {"topic": group.topic, "group": group.name}
        if topic is not None:
            values[topic] = principal.absolute(values[topic])
        changes.note(kind, text.format(**values), principal.name, "" if topic is None else values[topic])
        return done

    return handle


class ChangeRoutes:
    """The request for the last changes."""

    def __init__(self, broker: Broker, changes: Changes) -> None:
        self._broker = broker
        self._changes = changes

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("GET", "/api/changes", self._list),)

    async def _list(self, call: Call) -> web.Response:
        """Answer with the newest changes that the caller may know of, the newest first."""
        principal, broker = call.principal, self._broker
        count = read_number(call, "count", 1)
        is_admin = may(principal, Action.ADMIN, SERVER_SUBJECT) and may(principal, Action.ADMIN, ACCESS_SUBJECT)
        lines: list[ChangeLine] = []
        for one in reversed(self._changes.kept):
            if len(lines) >= (COUNT if count is None else count):
                break
            if broker.may_see(principal, one.topic) if one.topic else is_admin:
                knows = is_admin or one.principal == principal.name or may(principal, Action.MANAGE, one.topic)
                by = one.principal if knows else ""
                lines.append(ChangeLine(one.time_ms, one.kind, principal.relative_text(one.text), by))
        return answer({"changes": lines})
