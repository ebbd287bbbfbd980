"""Which heads of requests a door lets in: names, origins, and what browsers send without an origin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.wire.browsers import ACCEPTED_MAX, BrowserGuard, Refusal

OWN = "localhost:15555"
CHROME = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0 Safari/537.36"
LISTED = "https://app.example"
GUARD = BrowserGuard(hosts=["bus.internal"], origins=frozenset({LISTED}))


def reason(headers: dict[str, str], guard: BrowserGuard = GUARD) -> str | None:
    """Why the guard refuses a head; `_` in the names of headers stands for `-`."""
    refusal = guard.check({name.replace("_", "-"): value for name, value in headers.items()})
    return None if refusal is None else refusal.reason


@pytest.mark.parametrize(
    "host",
    [
        *(
            "localhost",
            "localhost:15555",
            "LOCALHOST:1",
            "localhost.",
            "localhost.:80",
            "a.b.localhost:3",
            "localhost:",
        ),
        *("127.0.0.1", "127.0.0.1:8080", "10.1.2.3:80", "[::1]", "[::1]:8600", "[fe80::1:2]:1", "[::ffff:1.2.3.4]"),
        *("bus.internal", "Bus.Internal.:8080"),
    ],
)
def test_names_of_the_server_and_addresses_are_accepted(host: str) -> None:
    assert reason({"host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:15555", "localhost.evil.example", "evillocalhost", "bus.internal.evil.example"),
        *("127.0.0.1.evil.example", "127.0.0.1.nip.io:80", "1.2.3", "1.2.3.4.5", "256.1.1.1", "::1", "[::1", "[::g]"),
        *("", ":80", "localhost:80:80", "localhost:x", "localhost, evil.example", "evil.example, localhost"),
        *("user@localhost", "localhost/", "localhost..", ".localhost.evil", "local host", "b\xfcs.internal", "[]"),
    ],
)
def test_other_names_are_misdirected(host: str) -> None:
    refusal = GUARD.check({"host": host})
    assert refusal is not None
    assert (refusal.reason, refusal.status, refusal.allows_reading) == ("host", 421, False)
    assert "server.host_names" in refusal.text


def test_the_name_counts_more_than_who_asks() -> None:
    same = {"origin": "http://evil.example", "sec_fetch_site": "same-origin", "referer": "http://evil.example/"}
    assert reason({"host": "evil.example", **same}) == "host"
    assert reason({"host": "evil.example", "origin": LISTED}) == "host"


def test_without_a_name_only_tools_are_let_in() -> None:
    assert reason({}) is None
    assert reason({"user_agent": "ApacheBench/2.3"}) is None
    for mark in ({"user_agent": CHROME}, {"origin": LISTED}, {"referer": "http://x/"}, {"sec_fetch_site": "none"}):
        assert reason(mark) == "host"


@pytest.mark.parametrize("origin", [LISTED, "HTTPS://App.example", f"http://{OWN}", f"https://{OWN}"])
@pytest.mark.parametrize("site", [{}, {"sec_fetch_site": "cross-site"}])
def test_pages_of_the_server_and_listed_ones_may_do_everything(origin: str, site: dict[str, str]) -> None:
    assert reason({"host": OWN, "origin": origin, "user_agent": CHROME, **site}) is None


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example", "null", "", "http://localhost", "http://localhost:15556", "http://127.0.0.1:15555"),
        *("http://app.example", f"{LISTED}:8443", f"{LISTED}.evil", f"http://{OWN}/", f"http://{OWN}.evil.example"),
        *(f"http://evil@{OWN}", f"http://{OWN}, http://evil.example", f"ftp://{OWN}", OWN, "*", "file://"),
    ],
)
def test_pages_of_other_origins_are_refused(origin: str) -> None:
    for more in ({}, {"sec_fetch_site": "same-origin"}, {"referer": f"http://{OWN}/"}):
        refusal = GUARD.check({"host": OWN, "origin": origin, **more})
        assert refusal is not None
        assert (refusal.reason, refusal.status, refusal.allows_reading) == ("origin", 403, False)
        assert "server.allowed_origins" in refusal.text


def test_any_page_may_ask_where_the_operator_says_so_but_images_may_still_change_nothing() -> None:
    guard = BrowserGuard(origins=frozenset({"*"}))
    assert reason({"host": OWN, "origin": "http://evil.example"}, guard) is None
    assert reason({"host": OWN, "origin": "null"}, guard) is None
    assert reason({"host": OWN, "user_agent": CHROME, "sec_fetch_site": "cross-site"}, guard) == "change"
    assert reason({"host": "evil.example", "origin": "http://evil.example"}, guard) == "host"


@pytest.mark.parametrize(
    "marks",
    [
        {"user_agent": CHROME},
        {"user_agent": "AppleCoreMedia/1.0.0.20E252 (Macintosh; U; Intel Mac OS X 13_3_1; en_us)"},
        *({"user_agent": CHROME, "sec_fetch_site": site} for site in ("cross-site", "same-site", "none", "", "x")),
        {"sec_fetch_site": "same-origin, cross-site"},
        {"sec_fetch_site": "cross-site", "referer": f"http://{OWN}/"},
        *(
            {"user_agent": CHROME, "referer": page}
            for page in ("http://evil.example/", "", OWN, "http://localhost:1/", f"http://{OWN}.evil/", "about:blank")
        ),
        {"referer": f"http://{OWN}@evil.example/"},
        {"referer": f"http://evil.example/http://{OWN}/"},
    ],
)
def test_without_an_origin_a_browser_may_only_read(marks: dict[str, str]) -> None:
    refusal = GUARD.check({"host": OWN, **{name.replace("_", "-"): value for name, value in marks.items()}})
    assert refusal is not None
    assert (refusal.reason, refusal.status, refusal.allows_reading) == ("change", 403, True)


@pytest.mark.parametrize(
    "marks",
    [
        {"user_agent": CHROME, "sec_fetch_site": "same-origin"},
        {"user_agent": CHROME, "sec_fetch_site": "same-origin", "referer": "http://evil.example/"},
        {"user_agent": CHROME, "referer": f"http://{OWN}/page?a#b"},
        {"user_agent": CHROME, "referer": f"http://{OWN}"},
    ],
)
def test_without_an_origin_a_page_of_the_server_may_do_everything(marks: dict[str, str]) -> None:
    assert reason({"host": OWN, **marks}) is None


@pytest.mark.parametrize(
    "agent", ["curl/8.5.0", "ApacheBench/2.3", "Python-urllib/3.11", "node", "Prometheus/3.0", "kube-probe/1.30", ""]
)
def test_tools_may_do_everything(agent: str) -> None:
    assert reason({"host": OWN, "user_agent": agent}) is None
    assert reason({"host": OWN, "user_agent": agent, "sec_fetch_mode": "cors"}) is None  # Node's fetch


def test_with_tls_a_page_without_is_another_origin_for_browsers() -> None:
    guard = BrowserGuard(is_tls=True)
    assert reason({"host": OWN, "origin": f"https://{OWN}", "user_agent": CHROME}, guard) is None
    assert reason({"host": OWN, "origin": f"http://{OWN}", "user_agent": CHROME}, guard) == "origin"
    assert reason({"host": OWN, "referer": f"http://{OWN}/", "user_agent": CHROME}, guard) == "change"
    assert reason({"host": OWN, "origin": f"http://{OWN}"}, guard) is None  # websocket-client 0.57, of zbuspy


def test_only_so_many_names_are_remembered() -> None:
    guard = BrowserGuard()
    for port in range(3 * ACCEPTED_MAX):
        assert reason({"host": f"localhost:{port}"}, guard) is None
        assert len(guard._accepted) <= ACCEPTED_MAX
    assert reason({"host": "evil.example"}, guard) == "host"


def test_refusals_are_counted_by_who_answers_them() -> None:
    counted: list[Refusal] = []
    guard = BrowserGuard(on_refused=counted.append)
    refusal = guard.check({"host": "evil.example"})
    assert refusal is not None
    assert counted == []
    guard.refused(refusal)
    assert counted == [refusal]


TEXTS = st.text(st.characters(max_codepoint=255), max_size=40) | st.sampled_from(
    [
        OWN,
        f"http://{OWN}",
        LISTED,
        "null",
        "[::1]",
        "http://",
        "://",
        "[",
        "same-origin",
        CHROME,
        "\u0130",
        "localhost.",
    ]
)
NAMES = st.sampled_from(["host", "origin", "referer", "sec-fetch-site", "user-agent", "cmd"])


@given(st.dictionaries(NAMES, TEXTS))
def test_any_head_gets_an_answer_that_can_be_sent(headers: dict[str, str]) -> None:
    refusal = GUARD.check(headers)
    if refusal is not None:
        assert refusal.text.isprintable()
        assert len(refusal.text) < 1000
    elif "origin" in headers:
        assert headers["origin"].lower() in (
            LISTED,
            *(f"{scheme}://{headers['host'].lower()}" for scheme in ("http", "https")),
        )
    # The same head is judged the same way again.
    assert GUARD.check(headers) == refusal
