"""The server's log: one line per event on standard error, as text or as JSON.

Facts go in `extra`: `log.info("connection opened", extra={"peer": peer, "protocol": "jebp"})`. Payloads, keys and
secrets are never logged; fields that are named like one are withheld, should someone forget.
"""

import logging
import re
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

WITHHELD = frozenset({"authorization", "key", "password", "payload", "private_key", "secret", "token", "value"})

# What a library may write of a url, and what nobody may read: the password in front of a host, or as an option.
_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*:)[^@\s]+(?=@)|((?:password|passwd|secret|token)=)[^&\s'\"]+", re.IGNORECASE)

# What every LogRecord has by itself; whatever else is on one came through `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# A peer's words must not end a line and forge the next one, nor steer a terminal or reverse the text in it.
_STEERING = (*range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_JSON_ESCAPES = {code: f"\\u{code:04x}" for code in _STEERING}
"""Escapes of JSON, whose reader gets the character that was logged."""
_LONE = {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
"""Bytes of names that are no UTF-8: no encoder takes them, and the line would be lost."""
_CONTROL = _LONE | {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in (*range(32), *_STEERING)}
_CONTROL |= {9: "\\t", 10: "\\n", 13: "\\r"}


class TextFormatter(logging.Formatter):
    """`2024-05-01T12:00:00.123Z INFO babelbus.server: connection opened peer=127.0.0.1:50000`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the lines of a traceback if there is one."""
        fields = "".join(f" {name}={value}" for name, value in _extra(record).items())
        message = (record.getMessage() + fields).translate(_CONTROL)
        line = f"{_time(record)} {record.levelname} {record.name}: {_masked(message)}"
        trace = _trace(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the extra fields, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _masked(record.getMessage()).translate(_LONE),
        }
        extra = _extra(record).items()
        more = {name: _masked(one).translate(_LONE) if isinstance(one, str) else one for name, one in extra}
        line |= {name: value for name, value in more.items() if name not in line}
        trace = _trace(record)
        if trace:
            line["exception"] = trace.translate(_LONE)
        return msgspec.json.encode(line, enc_hook=str).decode().translate(_JSON_ESCAPES)


def configure(level: str, format: str, stream: TextIO | None = None) -> logging.Handler:  # noqa: A002 - the setting's name
    """Send everything from `level` on ("debug" to "error") to `stream`, standard error by default.

    `format` is "text" or "json". Called again, it replaces what it set up before; handlers of others stay.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Every scrape would be a line; what the endpoint does that matters is logged by us.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that `configure` can tell it from the handlers of others."""


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {
        name: "[withheld]" if name in WITHHELD else value for name, value in vars(record).items() if name not in _OWN
    }


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(record: logging.LogRecord) -> str:
    return _masked(logging.Formatter().formatException(record.exc_info)) if record.exc_info else ""


def _masked(text: str) -> str:
    return _PASSWORD.sub(lambda match: f"{match[1] or match[2]}[withheld]", text)
