"""Requests of the console that every door has: what the caller may do, and codes that log a browser in."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from aiohttp import web

from babelbus.core.access import ACTIONS, Narrowing, may, overlaps
from babelbus.core.access.model import read_pattern
from babelbus.web.answers import answer, read_body
from babelbus.web.callers import ADMIN, CONSOLE
from babelbus.web.calls import Call, Route
from babelbus.web.errors import SessionsClosedError
from babelbus.web.server import Host
from babelbus.web.sessions import Sessions

QUESTIONS_MAX = 1_000


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the caller may do something to a subject, or with `some` to a part of a pattern."""

    action: str
    subject: str
    some: bool = False


class Questions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /api/console/may."""

    questions: Annotated[list[Question], msgspec.Meta(max_length=QUESTIONS_MAX)]


class ConsoleCalls:
    """The requests about rights and codes."""

    def __init__(self, server: Host, sessions: Sessions) -> None:
        self._server = server
        self._sessions = sessions

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (("POST", "/api/console/may", self._may), ("POST", "/api/console/links", self._link))

    async def _may(self, call: Call) -> web.Response:
        """Answer each question with true or false; nothing of it is a refusal, so the audit has nothing of it."""
        asked = await read_body(call, Questions)
        principal, answers = call.principal, []
        for question in asked.questions:
            action = ACTIONS.get(question.action)
            if action is None:
                raise web.HTTPBadRequest(text=f"there is no action {question.action[:40]!r}")
            subject = principal.absolute(question.subject)
            if question.some:
                patterns = read_pattern(subject.replace("{", "{{").replace("}", "}}"))
                parts = (overlaps(principal, action, pattern) for pattern in patterns)
                answers.append(any(part is not Narrowing.NONE for part in parts))
            else:
                answers.append(may(principal, action, subject))
        return answer({"answers": answers})

    async def _link(self, call: Call) -> web.Response:
        """Answer with a code that logs the caller in once."""
        principal = call.principal
        if principal.source.partition(":")[0] == CONSOLE:
            # A session has an end, which a code made in it would put off again and again.
            raise SessionsClosedError("a log-in of the console makes no codes; use a token or a password")
        code, expires_ms = self._sessions.make_code(principal, ADMIN)
        address, tls = self._server.addresses.get("admin", ""), self._server.admin_tls
        return answer({"code": code, "expires_ms": expires_ms, "address": address, "tls": tls}, status=201)
