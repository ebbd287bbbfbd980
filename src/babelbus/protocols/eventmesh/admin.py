"""The paths of EventMesh's admin server that have a meaning here (docs/specifications/eventmesh.md, 12)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from babelbus.core.access import AccessRefusedError, Action, Identity, check_may
from babelbus.core.receipt import DONE, Promise
from babelbus.core.work import Work, settled
from babelbus.errors import UNREADABLE, BabelbusError
from babelbus.identities.errors import InvalidProofError, TooManyProofsError
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh.http_requests import credentials_of
from babelbus.protocols.eventmesh.hub import PROTOCOL, Hub
from babelbus.protocols.eventmesh.idle import IdleSession
from babelbus.protocols.eventmesh.records import read_cloud_event
from babelbus.protocols.eventmesh.session import Session
from babelbus.protocols.eventmesh.webhooks import Webhooks
from babelbus.wire import http
from babelbus.wire.browsers import BrowserGuard, Refusal
from babelbus.wire.http import HttpError, encode_response, parse_query

ADMIN: Final = Identity(f"{PROTOCOL}:admin", "admin", None)
SERVER_SUBJECT: Final = "$server"
"""The subject of requests that are about the server itself."""
ANSWER_BYTES: Final = 512
MANAGE: Final = "/clientManage/"
REASON: Final = "rejected by the administrator"

_encode = msgspec.json.Encoder().encode
_decode_object = msgspec.json.Decoder(dict[str, Any]).decode

Answer = tuple[Promise, Callable[[], object]]
"""The promise that an answer waits for, and the data of the answer."""


class _RefusedError(BabelbusError):
    """A request that cannot be carried out."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class AdminSession(IdleSession):
    """The requests of one connection to the admin port."""

    def __init__(
        self,
        hub: Hub,
        webhooks: Webhooks,
        streams: Callable[[], list[dict[str, str]]],
        outbox: Outbox,
        close: Callable[[], None],
        guard: BrowserGuard,
        peer: str | None,
    ) -> None:
        super().__init__(hub, outbox, close, guard, hub.settings.grpc_bytes_max, peer)
        self._webhooks = webhooks
        self._streams = streams
        """Returns the subscriptions over gRPC."""

    def answer_request(self, request: http.Request, refusal: Refusal | None) -> bool:
        """Handle a request; return `False` to be called again when the outbox has room."""
        if self._outbox.full:
            return False
        is_read = request.method == "GET" and not request.path.startswith((f"{MANAGE}reject", f"{MANAGE}redirect"))
        if refusal is not None and not (refusal.allows_reading and is_read):
            self.refuse(refusal)
            return True
        work = Work(self._answer_later(request))
        weight = ANSWER_BYTES if work.done or not self._hub.callers.enforcing else self._outbox.bytes_max
        self._outbox.answer_when([work], partial(self._encode, request, work), weight)
        return True

    def _encode(self, request: http.Request, work: Work[bytes]) -> bytes:
        if work.error is not None:
            return _encode_content(request, 500, {"message": str(work.error)})
        return work.value

    async def _answer_later(self, request: http.Request) -> bytes:
        """Return the answer to a request, as soon as it is known who sends the request."""
        try:
            principal = await self._prove(request)
            query = dict(parse_query(request.query))
            promise, describe = self._carry_out(request, query, principal)
            await settled(promise)
            if promise.error is not None:
                raise promise.error
        except HttpError as error:
            return _encode_content(request, 400, {"message": str(error)})
        except BabelbusError as error:
            return _encode_content(request, _status(error), {"message": str(error)})
        return _encode_content(request, 200, {"status": 200, "data": describe()})

    async def _prove(self, request: http.Request) -> Identity:
        """Return who sends a request.

        Raises:
            AccessRefusedError: it is no administrator.
            InvalidProofError, TooManyProofsError: see `Callers.identify`.
        """
        if not self._hub.callers.enforcing:
            return ADMIN
        found = self._hub.callers.identify(credentials_of(request), self._address, self._outbox.peer_certificate)
        if isinstance(found, Work):
            await settled(found)
            found = found.result()
        self._caller = found
        check_may(found.principal, Action.ADMIN, SERVER_SUBJECT)
        return found.principal

    def _carry_out(self, request: http.Request, query: dict[str, str], principal: Identity) -> Answer:
        method, path = request.method, request.path.rstrip("/")
        if path == "/client/tcp" and method in ("GET", "DELETE"):
            return self._clients(method, self._matching(_fields(request, query) if method == "DELETE" else {}))
        if path == "/client/http" and method == "GET":
            return DONE, lambda: self._webhooks.entries()
        if path == "/client/grpc" and method == "GET":
            return DONE, self._streams
        if path == "/topic" and method in ("GET", "POST", "DELETE"):
            return self._topics(method, request, principal)
        if path == "/event" and method == "POST":
            event, _ = read_cloud_event(request.body, principal.source)
            return self._hub.publish([event], principal), lambda: "success"
        if path.startswith(MANAGE) and method == "GET":
            return self._manage(path.removeprefix(MANAGE), query)
        raise _RefusedError(404, f"{method} {path[:100]} is not served: see docs/protocols/eventmesh.md")

    # -- clients -----------------------------------------------------------------------------------------------------

    def _matching(self, wanted: dict[str, str]) -> list[Session]:
        """Return the sessions over TCP whose description has all the wanted values."""
        sessions = [peer for peer in self._hub.peers if isinstance(peer, Session) and peer.established]
        return [
            session
            for session in sessions
            if all(str(session.describe().get(name)) == value for name, value in wanted.items())
        ]

    def _clients(self, method: str, sessions: Sequence[Session]) -> Answer:
        if method == "DELETE":
            for session in sessions:
                session.say_goodbye(REASON)
        found = [session.describe() for session in sessions]
        return DONE, lambda: found

    def _manage(self, action: str, query: dict[str, str]) -> Answer:
        if action == "showClient":
            return self._clients("GET", self._matching({}))
        if action == "showClientBySystem":
            return self._clients("GET", self._matching(_need(query, subsystem="subsystem")))
        if action == "showListenClientByTopic":
            topic = _need(query, topic="topic")["topic"]
            return self._clients("GET", [one for one in self._matching({}) if topic in one.describe()["topics"]])
        if action == "rejectAllClient":
            return self._clients("DELETE", self._matching({}))
        wanted = {
            "ByIpPort": {"host": "ip", "port": "port"},
            "BySubSystem": {"subsystem": "subsystem"},
            "ByPath": {"path": "path"},
        }.get(action.removeprefix("rejectClient").removeprefix("redirectClient"))
        if wanted is None or action == "rejectClientByPath":
            raise _RefusedError(404, f"{MANAGE}{action[:100]} is not served: see docs/protocols/eventmesh.md")
        sessions = self._matching(_need(query, **wanted))
        if action.startswith("rejectClient"):
            return self._clients("DELETE", sessions)
        target = _need(query, ip="desteventmeship", port="desteventmeshport")
        if not (target["port"].isascii() and target["port"].isdigit() and 0 < int(target["port"]) < 65536):
            raise _RefusedError(400, "desteventmeshport is no port")
        for session in sessions:
            session.redirect(target["ip"], int(target["port"]))
        return self._clients("GET", sessions)

    # -- topics ------------------------------------------------------------------------------------------------------

    def _topics(self, method: str, request: http.Request, principal: Identity) -> Answer:
        if method == "GET":
            names = [topic.name for topic in self._hub.broker.topics() if not topic.reserved]
            return DONE, lambda: [{"name": name} for name in names]
        name = _fields(request, {}).get("name")
        if not name:
            raise _RefusedError(400, "name is missing")
        if method == "POST":
            return Work(self._hub.create_topic(name, principal)), lambda: "success"
        return self._hub.broker.remove_topic(name, principal), lambda: "success"


def _status(error: BabelbusError) -> int:
    if isinstance(error, _RefusedError):
        return error.status
    if isinstance(error, InvalidProofError):
        return 401
    if isinstance(error, AccessRefusedError):
        return 403
    return 429 if isinstance(error, TooManyProofsError) else 400


def _encode_content(request: http.Request, status: int, content: object) -> bytes:
    return encode_response(
        status,
        [("content-type", "application/json")],
        _encode(content),
        keep_alive=request.keep_alive,
        head_only=request.method == "HEAD",
        version=request.version,
    )


def _fields(request: http.Request, query: dict[str, str]) -> dict[str, str]:
    """Return the members of a JSON body as text, else the query.

    Raises:
        _RefusedError: the body is no JSON object, or nothing is named at all.
    """
    try:
        fields = {name: str(value) for name, value in _decode_object(request.body).items()} if request.body else query
    except UNREADABLE as error:
        raise _RefusedError(400, f"the body is no JSON object: {error}") from None
    if not fields:
        raise _RefusedError(400, "nothing is named in the body or the query")
    return fields


def _need(query: dict[str, str], **names: str) -> dict[str, str]:
    """Return values of the query by the names of a description; names in the query have any case.

    Raises:
        _RefusedError: a value is missing.
    """
    lowered = {name.lower(): value for name, value in query.items()}
    for name in names.values():
        if not lowered.get(name):
            raise _RefusedError(400, f"{name} is missing in the query")
    return {member: lowered[name] for member, name in names.items()}
