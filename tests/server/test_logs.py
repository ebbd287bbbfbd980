import io
import json
import logging
from collections.abc import Iterator

import pytest

from babelbus.server import logs

log = logging.getLogger("babelbus.test")


@pytest.fixture
def root_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("root_restored")
class TestLogs:
    def test_a_json_line_has_time_level_logger_message_and_the_fields(self) -> None:
        stream = io.StringIO()
        logs.configure("info", "json", stream)
        log.info("listening on %s", "127.0.0.1", extra={"protocol": "jebp", "port": 5320, "peer": ("::1", 4)})
        line = json.loads(stream.getvalue())
        assert line.pop("time").endswith("Z")
        assert line == {
            "level": "info",
            "logger": "babelbus.test",
            "message": "listening on 127.0.0.1",
            "protocol": "jebp",
            "port": 5320,
            "peer": ["::1", 4],
        }

    def test_a_text_line_ends_with_the_fields(self) -> None:
        stream = io.StringIO()
        logs.configure("info", "text", stream)
        log.warning("slow flush", extra={"seconds": 1.5})
        assert stream.getvalue().endswith("Z WARNING babelbus.test: slow flush seconds=1.5\n")

    def test_less_important_lines_are_left_out(self) -> None:
        stream = io.StringIO()
        logs.configure("warning", "text", stream)
        log.info("nothing")
        assert stream.getvalue() == ""

    @pytest.mark.parametrize("format_", ["text", "json"])
    def test_a_peers_words_forge_no_line_and_steer_no_terminal(self, format_: str) -> None:
        stream = io.StringIO()
        logs.configure("info", format_, stream)
        log.info(
            "client %s", "x\n2024 INFO babelbus: all is well\x1b[2J\r\x9b2J", extra={"name_of": "a\nb\u202e\u2028"}
        )
        assert stream.getvalue().count("\n") == 1
        assert set("\x1b\r\x9b\u202e\u2028").isdisjoint(stream.getvalue())

    @pytest.mark.parametrize("format_", ["text", "json"])
    def test_bytes_that_are_no_utf_8_lose_no_line(self, format_: str) -> None:
        stream = io.StringIO()
        logs.configure("info", format_, stream)
        log.info("client %s", "x\udcff", extra={"name_of": "a\udcff"})
        assert stream.getvalue().encode().count(b"udcff") == 2

    def test_a_json_line_says_which_characters_came(self) -> None:
        stream = io.StringIO()
        logs.configure("info", "json", stream)
        log.info("client %s", "x\x9b\u202e\u2028ö")
        assert json.loads(stream.getvalue())["message"] == "client x\x9b\u202e\u2028ö"

    @pytest.mark.parametrize("format_", ["text", "json"])
    def test_fields_named_like_a_secret_are_withheld(self, format_: str) -> None:
        stream = io.StringIO()
        logs.configure("info", format_, stream)
        log.info("hello", extra={"token": "abc123", "payload": b"abc123"})
        assert "abc123" not in stream.getvalue()

    @pytest.mark.parametrize("format_", ["text", "json"])
    def test_an_exception_brings_its_traceback(self, format_: str) -> None:
        stream = io.StringIO()
        logs.configure("info", format_, stream)
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("failed")
        assert "ValueError: broken" in stream.getvalue()

    def test_configuring_again_replaces_what_was_there(self) -> None:
        first, second = io.StringIO(), io.StringIO()
        logs.configure("info", "text", first)
        logs.configure("info", "text", second)
        log.info("once")
        assert first.getvalue() == ""
        assert second.getvalue().count("once") == 1

    @pytest.mark.parametrize("format_", ["text", "json"])
    def test_passwords_in_urls_are_withheld(self, format_: str) -> None:
        stream = io.StringIO()
        logs.configure("info", format_, stream)
        url = "postgresql://me:hunter2@host/bus?sslpassword=hunter2&x=1"
        log.info("cannot reach %s", url, extra={"place": url})
        try:
            raise ValueError(f"no {url}")
        except ValueError:
            log.exception("failed")
        told = stream.getvalue()
        assert "hunter2" not in told
        assert told.count("postgresql://me:[withheld]@host/bus?sslpassword=[withheld]&x=1") == 3
