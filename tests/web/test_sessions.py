"""The log-in of browsers at the console, over real sockets, by friends and by others."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from babelbus.clock import SystemClock
from babelbus.config import Config
from babelbus.core.access import SERVER, Principal
from babelbus.identities.tokens import make_token
from babelbus.storage.notes import decode
from babelbus.web import callers
from babelbus.web.sessions import NOTE_NAME, KeptSessions, Session
from babelbus.web.token import read_token
from tests.access.house import House, configured
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.console import PAGE, Browser, Told

HOUR_MS = 3_600_000
ROWS = ("role:walkers publish #", "role:walkers subscribe #", "role:walkers read #")


class ShiftedClock(SystemClock):
    """The time of this machine, and what a test adds."""

    __slots__ = ("shift_seconds",)

    def __init__(self) -> None:
        self.shift_seconds = 0.0

    def now_ms(self) -> int:
        return super().now_ms() + int(self.shift_seconds * 1000)

    def monotonic(self) -> float:
        return super().monotonic() + self.shift_seconds


@pytest.fixture(scope="module")
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, clock: ShiftedClock) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("sessions"), clock=clock) as house:
        house.grant(*ROWS)
        yield house


@pytest.fixture(autouse=True)
def forgive(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for the wrong proofs of the test before."""
    monkeypatch.setattr(callers, "REFUSAL_SECONDS", 0.0)
    house.call(house.server.proofs.guessing.clear)


@contextmanager
def browser(house: House) -> Iterator[Browser]:
    with Browser(house.server.addresses["admin"]) as made:
        yield made


@contextmanager
def alice_in(house: House) -> Iterator[Browser]:
    with browser(house) as made:
        assert made.log_in(token=house.alice.token).status == 200
        yield made


def token_of(house: House) -> str:
    return read_token(house.config.data.folder)


def count(house: House) -> int:
    assert house.server.administration.api is not None
    return house.call(lambda: len(house.server.administration.api.sessions))  # type: ignore[union-attr]


def kept(house: House) -> KeptSessions:
    path = house.conf / NOTE_NAME
    return decode(path.read_bytes(), KeptSessions, path=str(path))


def wait_for_end(running: http.client.HTTPResponse) -> None:
    """Return when an answer ends, however."""
    with suppress(OSError, http.client.HTTPException):
        while running.readline():
            pass


# -- log-in ----------------------------------------------------------------------------------------------------------


def test_a_token_logs_a_principal_in_and_log_out_ends_it_everywhere(house: House) -> None:
    with browser(house) as one:
        told = one.log_in(token=house.alice.token)
        assert told.status == 200
        assert (told.body["principal"], told.body["source"], told.body["root"]) == ("alice", "console:alice", None)
        assert told.body["enforcing"]
        kept_cookie = told.headers["Set-Cookie"]
        port = one.address.rpartition(":")[2]
        assert kept_cookie.startswith(f"babelbus_session_{port}=")
        assert all(part in kept_cookie for part in ("; HttpOnly", "; Path=/", "; SameSite=Strict"))
        assert "Secure" not in kept_cookie
        assert one.ask("GET", "/api/console/session").body == told.body
        assert one.ask("GET", "/api/topics").status == 200
        assert one.log_out().body == {"logged_out": True}
        for path in ("/api/topics", "/api/console/session"):  # the thief of the cookie has nothing more
            assert one.ask("GET", path).status == 401
        assert one.log_out().body == {"logged_out": False}


def test_a_user_with_a_password_and_the_token_of_the_folder_log_in(house: House) -> None:
    with browser(house) as one:
        assert one.log_in(user="alice", password=house.alice.password).body["principal"] == "alice"
        assert one.ask("GET", "/api/access").status == 403
    with browser(house) as one:
        told = one.log_in(token=token_of(house))
        assert (told.body["principal"], told.body["source"]) == ("admin", "console")
        assert one.ask("GET", "/api/access").status == 200


@pytest.mark.parametrize(
    "proof",
    [
        {"token": "wrong"},
        {"token": "bb_000000000000_" + "A" * 43},
        {"token": ""},
        {"user": "alice", "password": "wrong"},
        {"user": "nobody", "password": "wrong"},
        {"code": "wrong"},
    ],
)
def test_a_wrong_proof_is_a_guess_that_makes_the_next_one_wait(house: House, proof: dict[str, str]) -> None:
    with browser(house) as one:
        told = one.log_in(**proof)
        assert (told.status, told.code, told.headers["Set-Cookie"]) == (401, "unauthorized", None)
        assert one.log_in(**proof).status == 429
        assert one.log_in(token=token_of(house)).status == 200  # 256 bits are not guessed: it passes all the same


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"user": "alice"},
        {"password": "x"},
        {"token": "x", "code": "y"},
        {"token": "x", "user": "alice", "password": "y"},
        {"token": 1},
        {"token": "x", "more": "y"},
        [],
        b"token=x",
        b"",
    ],
)
def test_a_log_in_of_another_shape_is_a_bad_request(house: House, body: Any) -> None:
    with browser(house) as one:
        assert one.ask("POST", "/api/console/login", body).status == 400


def test_a_long_body_is_refused(house: House) -> None:
    with browser(house) as one:
        assert one.log_in(token="x" * 20_000).status == 413


def test_an_expired_token_says_so_and_is_no_guess(house: House, clock: ShiftedClock) -> None:
    token = make_token(int(time.time() * 1000) - 10_000, lifetime_ms=5_000)
    house.change(Principal("late", (), (token.credential,)))
    with browser(house) as one:
        for _ in range(3):
            told = one.log_in(token=token.secret)
            assert (told.status, "expired" in told.body["error"]) == (401, True)


def test_a_new_log_in_has_a_new_id_and_ends_the_log_in_before(house: House) -> None:
    with alice_in(house) as one:
        first = one.cookie
        assert one.log_in(token=house.bob.token).body["principal"] == "bob"
        assert one.cookie != first
        one.cookie = first
        assert one.ask("GET", "/api/topics").status == 401


def test_an_id_that_somebody_else_has_chosen_is_not_taken(house: House) -> None:
    """Fixation: the attacker sets a cookie before the victim logs in."""
    with browser(house) as one:
        name = f"babelbus_session_{one.address.rpartition(':')[2]}"
        one.cookie = f"{name}=chosen"
        assert one.log_in(token=house.alice.token).status == 200
        assert one.cookie not in (None, f"{name}=chosen")
        assert one.ask("GET", "/api/topics").status == 200
        one.cookie = f"{name}=chosen"
        assert one.ask("GET", "/api/topics").status == 401


# -- other pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"X-Babelbus-Console": "0"}, 403),
        ({"X-Babelbus-Console": "1, 1"}, 403),
        ({**PAGE, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**PAGE, "Sec-Fetch-Site": "same-site"}, 403),
        ({**PAGE, "Sec-Fetch-Site": "none"}, 403),
        ({**PAGE, "Origin": "http://evil.example"}, 403),
        ({**PAGE, "Origin": "null"}, 403),
        ({**PAGE, "Host": "evil.example"}, 421),
        ({"X-Babelbus-Console": "1"}, 200),
        (PAGE, 200),
    ],
)
def test_only_a_page_of_this_server_can_use_a_log_in(house: House, headers: dict[str, str], status: int) -> None:
    with alice_in(house) as one:
        for method, path, body in (
            ("GET", "/api/topics", None),
            ("POST", "/api/send", {"subject": "x", "payload": ""}),
        ):
            expected = status
            if method == "GET" and headers.get("Origin"):
                expected = 403
            assert one.ask(method, path, body, headers=dict(headers)).status == expected, method
        for path in ("/api/console/login", "/api/console/logout"):
            told = one.ask("POST", path, {"token": house.alice.token}, headers=dict(headers))
            assert told.status == status, path
            if status == 200:
                break


def test_two_cookies_are_no_log_in(house: House) -> None:
    with alice_in(house) as one:
        mine, name = str(one.cookie), str(one.cookie).partition("=")[0]
        for both in (f"{name}=x; {mine}", f"{mine}; {name}=x", f"{mine}; {mine}"):
            assert one.ask("GET", "/api/topics", headers={**PAGE, "Cookie": both}).status == 401
        assert one.ask("GET", "/api/topics", headers={**PAGE, "Cookie": f"other=1; {mine}; {name}x=2"}).status == 200


@pytest.mark.parametrize("value", ["", "x", "x" * 5_000, "%00", '"', "é", "bb_x", "="])
def test_a_cookie_without_a_meaning_is_no_log_in_and_no_guess(house: House, value: str) -> None:
    with browser(house) as one:
        one.cookie = f"babelbus_session_{one.address.rpartition(':')[2]}={value}"
        for _ in range(5):
            assert one.ask("GET", "/api/topics").status == 401
        assert one.ask("GET", "/api/topics", headers={"Authorization": f"Bearer {house.alice.token}"}).status == 200


def test_a_token_in_a_header_wins_over_a_cookie(house: House) -> None:
    with alice_in(house) as one:
        bearer = {"Authorization": f"Bearer {house.bob.token}"}
        assert one.ask("GET", "/api/console/session", headers=bearer).body["source"] == "admin:bob"
        assert one.ask("GET", "/api/topics", headers={"Authorization": "Bearer wrong"}).status == 401


def test_a_browser_that_speaks_tls_with_a_proxy_keeps_its_cookie_to_tls(house: House) -> None:
    with browser(house) as one:
        origin = f"https://{one.address}"
        body = {"token": house.alice.token}
        told = one.ask("POST", "/api/console/login", body, headers=PAGE | {"Origin": origin})
        assert "; Secure" in told.headers["Set-Cookie"]
        assert one.ask("GET", "/api/topics").status == 200


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.0.0.1:8600", "[::1]:8600", "x.localhost:0"])
def test_each_port_of_a_host_has_a_cookie_of_its_own(house: House, host: str) -> None:
    with browser(house) as one:
        told = one.ask("POST", "/api/console/login", {"token": house.alice.token}, headers=PAGE | {"Host": host})
        port = host.rpartition(":")[2] if host.rpartition(":")[2].isdigit() else ""
        name = f"babelbus_session_{port}" if port else "babelbus_session"
        assert told.headers["Set-Cookie"].startswith(f"{name}=")
        assert one.ask("GET", "/api/topics", headers=PAGE | {"Host": host, "Cookie": str(one.cookie)}).status == 200
        assert one.ask("GET", "/api/topics").status == 401  # the port of the test is another one


def test_a_request_without_a_host_is_answered(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise AssertionError("the network was asked for a name")

    monkeypatch.setattr(socket, "getfqdn", fail)
    host, _, port = house.server.addresses["admin"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS) as raw:
        raw.sendall(b"GET /api/topics HTTP/1.0\r\nX-Babelbus-Console: 1\r\nCookie: babelbus_session=x\r\n\r\n")
        assert raw.recv(100).split(b" ")[1] == b"401"


def test_a_get_neither_logs_in_nor_out(house: House) -> None:
    with alice_in(house) as one:
        for path in ("/api/console/login", "/api/console/logout", "/api/console/links", "/api/console/may"):
            assert one.ask("GET", path).status == 405
        assert one.ask("GET", "/api/topics").status == 200


# -- what ends a log-in ----------------------------------------------------------------------------------------------


def test_a_changed_credential_ends_the_log_in_and_what_runs_in_it(house: House) -> None:
    principal = house.call(lambda: house.broker.gate.table.principal("bob"))
    assert principal is not None
    with browser(house) as one:
        assert one.log_in(token=house.bob.token).status == 200
        running = one.open("GET", "/api/listen", pattern="#")
        assert running.readline() == b"\n"
        house.change(msgspec.structs.replace(principal, credentials=principal.credentials[:-1]))
        wait_for_end(running)
        assert one.ask("GET", "/api/topics").status == 401
        house.change(principal)  # what has ended does not begin again
        assert one.ask("GET", "/api/topics").status == 401


def test_a_credential_that_changes_while_it_is_proved_opens_no_session(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    principal = house.call(lambda: house.broker.gate.table.principal("bob"))
    assert principal is not None
    others = principal.credentials[:1]
    find = callers.Callers.find_session

    async def find_slowly(self: callers.Callers, request: web.Request) -> Session | None:
        await house.broker.gate.put([msgspec.structs.replace(principal, credentials=others)], SERVER)
        return await find(self, request)

    monkeypatch.setattr(callers.Callers, "find_session", find_slowly)
    with browser(house) as one:
        for proof in ({"token": house.bob.token}, {"user": "bob", "password": house.bob.password}):
            one.log_in(**proof)
            monkeypatch.undo()
            status = one.ask("GET", "/api/topics").status
            house.change(principal)
            monkeypatch.setattr(callers.Callers, "find_session", find_slowly)
            assert status == 401


def test_a_removed_principal_or_one_made_anew_has_no_log_in(house: House) -> None:
    proof = house.prove("carol")
    principal = house.call(lambda: house.broker.gate.table.principal("carol"))
    assert principal is not None
    with browser(house) as one:
        assert one.log_in(token=proof.token).status == 200
        house.remove("carol")
        house.change(principal)
        assert one.ask("GET", "/api/topics").status == 401
    house.remove("carol")


def test_another_root_ends_the_log_in(house: House) -> None:
    proof = house.prove("dave", root="tenants/one")
    principal = house.call(lambda: house.broker.gate.table.principal("dave"))
    assert principal is not None
    with browser(house) as one:
        assert one.log_in(token=proof.token).body["root"] == "tenants/one"
        house.change(msgspec.structs.replace(principal, root="tenants/two"))
        assert one.ask("GET", "/api/topics").status == 401
    house.remove("dave")


def test_a_right_that_is_taken_away_counts_at_once_and_the_log_in_stays(house: House) -> None:
    with alice_in(house) as one:
        assert one.ask("POST", "/api/send", {"subject": "x", "payload": ""}).status == 200
        house.grant("role:walkers read #")
        assert one.ask("POST", "/api/send", {"subject": "x", "payload": ""}).status == 403
        house.grant(*ROWS)


def test_a_log_in_ends_with_the_credential_that_made_it(house: House, clock: ShiftedClock) -> None:
    token = make_token(clock.now_ms(), lifetime_ms=HOUR_MS)
    house.change(Principal("erin", ("walkers",), (token.credential,)))
    with browser(house) as one:
        told = one.log_in(token=token.secret)
        assert told.body["expires_ms"] == token.credential.expires
        clock.shift_seconds += 3_601
        assert one.ask("GET", "/api/topics").status == 401
    house.remove("erin")


def test_a_log_in_ends_when_it_is_not_used_and_at_its_last_moment(house: House, clock: ShiftedClock) -> None:
    settings = house.config.admin
    with alice_in(house) as one, alice_in(house) as other:
        clock.shift_seconds += settings.session_idle_seconds / 2
        assert one.ask("GET", "/api/topics").status == 200
        clock.shift_seconds += settings.session_idle_seconds / 2 + 1
        assert one.ask("GET", "/api/topics").status == 200
        assert other.ask("GET", "/api/topics").status == 401
        while clock.now_ms() < one.ask("GET", "/api/console/session").body["expires_ms"] - 3_600_000:
            clock.shift_seconds += 3_600
            if (told := one.ask("GET", "/api/console/session")).status == 401:
                break
        clock.shift_seconds += 3_600
        assert (told := one.ask("GET", "/api/console/session")).status == 401, told


def test_the_last_moment_ends_what_runs(house: House, clock: ShiftedClock) -> None:
    with alice_in(house) as one:
        running = one.open("GET", "/api/listen", pattern="#")
        assert running.readline() == b"\n"
        clock.shift_seconds += house.config.admin.session_idle_seconds + 1
        house.call(lambda: house.server.administration.api.sessions.expire())  # type: ignore[union-attr]
        house.emit("walk/a")  # what runs keeps its log-in
        assert any(b"walk/a" in running.readline() for _ in range(100))
        clock.shift_seconds += house.config.admin.session_seconds
        house.call(lambda: house.server.administration.api.sessions.expire())  # type: ignore[union-attr]
        wait_for_end(running)


def test_log_out_ends_what_runs_in_another_tab(house: House) -> None:
    with alice_in(house) as one, browser(house) as tab:
        tab.cookie = one.cookie
        running = tab.open("GET", "/api/listen", pattern="#")
        assert running.readline() == b"\n"
        assert one.log_out().status == 200
        wait_for_end(running)


def test_a_principal_has_so_many_log_ins_and_the_oldest_goes(house: House) -> None:
    limit = house.config.admin.sessions_per_principal_max
    with alice_in(house) as first, alice_in(house) as second:
        for _ in range(limit - 2):
            with alice_in(house):
                pass
        assert first.ask("GET", "/api/topics").status == 200  # so that the second one is the oldest
        with alice_in(house) as last:
            assert second.ask("GET", "/api/topics").status == 401
            assert first.ask("GET", "/api/topics").status == 200
            assert last.ask("GET", "/api/topics").status == 200


def test_ten_thousand_log_ins_hold_no_more_than_the_limit(house: House) -> None:
    sessions = house.server.administration.api.sessions  # type: ignore[union-attr]

    async def log_in() -> None:
        for number in range(10_000):
            sessions.open(f"visitor{number}", float("inf"))

    house.run(log_in)
    assert count(house) == house.config.admin.sessions_max
    house.call(sessions.access_changed)  # no such principals
    assert count(house) == 0


# -- codes -----------------------------------------------------------------------------------------------------------


def link(house: House, token: str) -> Told:
    with browser(house) as one:
        return one.ask("POST", "/api/console/links", headers={"Authorization": f"Bearer {token}"})


def test_a_code_logs_in_once_and_within_a_minute(house: House, clock: ShiftedClock) -> None:
    told = link(house, house.alice.token)
    assert told.status == 201
    assert 59_000 < told.body["expires_ms"] - clock.now_ms() <= 60_000
    with browser(house) as one, browser(house) as other:
        assert one.log_in(code=told.body["code"]).body["source"] == "console:alice"
        assert other.log_in(code=told.body["code"]).status == 401
        assert one.ask("POST", "/api/console/links").code == "no_login"
    house.call(house.server.proofs.guessing.clear)
    code = link(house, token_of(house)).body["code"]
    clock.shift_seconds += 61
    with browser(house) as one:
        assert one.log_in(code=code).status == 401
        house.call(house.server.proofs.guessing.clear)
        assert one.log_in(code=link(house, token_of(house)).body["code"]).body["source"] == "console"


def test_a_code_of_a_principal_that_has_changed_is_wrong(house: House) -> None:
    proof = house.prove("frank")
    code = link(house, proof.token).body["code"]
    house.remove("frank")
    house.prove("frank")
    with browser(house) as one:
        assert one.log_in(code=code).status == 401
    house.remove("frank")


def test_a_code_ends_with_the_first_credential_that_expires(house: House, clock: ShiftedClock) -> None:
    token = make_token(clock.now_ms(), lifetime_ms=HOUR_MS)
    house.change(Principal("grace", ("walkers",), (token.credential,)))
    with browser(house) as one:
        told = one.log_in(code=link(house, token.secret).body["code"])
        assert told.body["expires_ms"] == token.credential.expires
    house.remove("grace")


def test_codes_that_nobody_uses_are_forgotten_and_those_of_others_stay(house: House) -> None:
    sessions = house.server.administration.api.sessions  # type: ignore[union-attr]
    kept = link(house, house.alice.token).body["code"]
    codes = [link(house, house.bob.token).body["code"] for _ in range(120)]
    assert sum(code.name == "bob" for code in sessions._codes.values()) == 10
    with browser(house) as one:
        assert one.log_in(code=codes[-11]).status == 401
        house.call(house.server.proofs.guessing.clear)
        for code, name in ((codes[-10], "bob"), (codes[-1], "bob"), (kept, "alice")):
            assert one.log_in(code=code).body["principal"] == name


class NoLines:
    """Where an answer of lines would go."""

    address = "local"

    async def write(self, data: bytes) -> None:
        raise AssertionError


def test_a_code_comes_over_jebp_too(house: House) -> None:
    with browser(house) as one:
        one.ask("GET", "/health")  # the endpoint is loaded

        async def ask() -> tuple[int, bytes]:
            identity = house.server.authorise(house.alice.identity.fingerprint)
            assert identity is not None
            api = await house.server.administration.load_api()
            return await api.direct.answer(identity, "POST", "/api/console/links", b"", NoLines())

        status, body = house.run(ask)
        assert status == 201
        assert one.log_in(code=json.loads(body)["code"]).body["principal"] == "alice"


# -- rights ----------------------------------------------------------------------------------------------------------


def test_may_answers_each_question_as_the_table_does(house: House) -> None:
    house.grant("alice publish walk/#", "deny alice publish walk/b")
    questions = [
        {"action": action, "subject": subject}
        for action, subject in (("publish", "walk/a"), ("publish", "walk/b"), ("publish", "x"), ("admin", "$server"))
    ]
    with alice_in(house) as one:
        asked = one.ask("POST", "/api/console/may", {"questions": questions})
        assert asked.body == {"answers": [True, False, False, False]}
        parts = [
            {"action": "publish", "subject": subject, "some": True} for subject in ("#", "walk/#", "walk/b", "x/#")
        ]
        assert one.ask("POST", "/api/console/may", {"questions": parts}).body == {"answers": [True, True, False, False]}
        wrong = {"questions": [{"action": "fly", "subject": "x"}]}
        assert one.ask("POST", "/api/console/may", wrong).status == 400
        many = {"questions": [questions[0]] * 1_001}
        assert one.ask("POST", "/api/console/may", many).status == 400
    house.grant(*ROWS)
    assert not [one for one in house.audit() if one["kind"] == "refusal" and one.get("subject") == "walk/b"]


def test_may_means_subjects_below_the_root(house: House) -> None:
    proof = house.prove("heidi", root="tenants/h")
    house.change(*[])
    house.grant("role:walkers publish tenants/h/a")
    with browser(house) as one:
        assert one.log_in(token=proof.token).status == 200
        questions = [{"action": "publish", "subject": subject} for subject in ("a", "tenants/h/a", "b")]
        asked = one.ask("POST", "/api/console/may", {"questions": questions})
        assert asked.body == {"answers": [True, False, False]}
    house.grant(*ROWS)
    house.remove("heidi")


def test_log_ins_and_log_outs_are_in_the_audit(house: House) -> None:
    with alice_in(house) as one:
        one.log_out()
        one.log_in(user="alice", password="wrong")
    kinds = [(record["kind"], record["principal"]) for record in house.audit() if "console" in record.get("source", "")]
    assert {("login", "alice"), ("logout", "alice"), ("login-refused", "alice")} <= set(kinds)


# -- restarts --------------------------------------------------------------------------------------------------------


def test_a_log_in_outlives_the_server_and_a_log_out_does_too(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with House(tmp_path, config) as house:
        house.grant(*ROWS)
        bob = house.bob
        with alice_in(house) as one, alice_in(house) as out, browser(house) as other, browser(house) as top:
            assert other.log_in(token=bob.token).status == 200
            assert top.log_in(token=token_of(house)).status == 200
            assert out.log_out().status == 200
            cookies = [str(each.cookie).partition("=")[2] for each in (one, out, other, top)]
        note = (house.conf / NOTE_NAME).read_text()
        assert not any(cookie in note for cookie in cookies)
        assert (house.conf / NOTE_NAME).stat().st_mode & 0o777 == 0o600
        assert len(kept(house).sessions) == 3
    statuses = []
    with Restarted(tmp_path, config) as again:
        principal = again.call(lambda: again.server.gate.table.principal("bob"))
        assert principal is not None
        address = again.server.addresses["admin"]
        again.run(lambda: again.server.gate.put([msgspec.structs.replace(principal, credentials=())], SERVER))
        for cookie in cookies:
            with Browser(address) as each:
                each.cookie = f"babelbus_session_{address.rpartition(':')[2]}={cookie}"
                statuses.append(each.ask("GET", "/api/console/session").status)
    assert statuses == [200, 401, 401, 200]


class Restarted(House):
    """The server once more; its principals are those that it has kept."""

    def __init__(self, folder: Path, config: Config) -> None:
        super().__init__(folder, config)

    def __enter__(self) -> "Restarted":
        super(House, self).__enter__()
        self.broker = self.server.broker
        return self


def test_another_token_of_the_folder_ends_the_log_ins_of_the_administrator(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with House(tmp_path, config) as house, browser(house) as one:
        assert one.log_in(token=token_of(house)).status == 200
        cookie = str(one.cookie).partition("=")[2]
    (house.conf / "admin_token").unlink()
    with Restarted(tmp_path, config) as again:
        address = again.server.addresses["admin"]
        with Browser(address) as each:
            each.cookie = f"babelbus_session_{address.rpartition(':')[2]}={cookie}"
            assert each.ask("GET", "/api/topics").status == 401


def test_a_damaged_note_costs_the_log_ins_and_nothing_else(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with House(tmp_path, config) as house, browser(house) as one:
        assert one.log_in(token=token_of(house)).status == 200
    (house.conf / NOTE_NAME).write_bytes(b"00000000\n{}")
    with Restarted(tmp_path, config) as again, Browser(again.server.addresses["admin"]) as each:
        assert each.log_in(token=token_of(again)).status == 200


def test_without_the_console_nobody_logs_in(tmp_path: Path) -> None:
    config = configured(tmp_path)
    config = msgspec.structs.replace(config, admin=msgspec.structs.replace(config.admin, console=False))
    with House(tmp_path, config) as house, browser(house) as one:
        for path in ("/", "/console/app.js", "/api/console/session"):
            assert one.ask("GET", path).status == 404
        assert one.log_in(token=token_of(house)).status == 404
        assert link(house, token_of(house)).code == "no_login"


def test_the_gate_turned_off_ends_the_log_ins_of_principals_alone(tmp_path: Path) -> None:
    config = msgspec.structs.replace(configured(tmp_path), access=Config().access)
    with House(tmp_path, config) as house, alice_in(house) as one, browser(house) as top:
        assert top.log_in(token=token_of(house)).status == 200
        house.run(lambda: house.broker.gate.enable(SERVER))
        assert one.ask("GET", "/api/topics").status == 401
        assert top.ask("GET", "/api/console/session").body["enforcing"]
