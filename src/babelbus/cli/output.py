"""The output of commands: tables for people, JSON lines for programs, progress on standard error."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import click
import msgspec

from babelbus.clock import SystemClock

if TYPE_CHECKING:
    from rich.progress import Progress

    from babelbus.records.record import Record

# C0 (with tabs), DEL, C1, and the characters that reverse text: a payload must neither control the terminal
# nor look like another text.
_STEERING = (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _STEERING}
_ESCAPES |= {9: "\\t", 10: "\\n", 13: "\\r"}

_TIME_MS_MAX = 253_402_300_799_999
"""The last millisecond of a date with a year of four digits."""


def escape(text: str) -> str:
    """Return `text` as one line without characters that control a terminal."""
    return text.translate(_ESCAPES)


def show_bytes(data: bytes) -> str:
    """Return bytes for a person: UTF-8 as it is, `\\xff` for other bytes and for characters that control a terminal."""
    return escape(data.decode("utf-8", "backslashreplace"))


def print_line(text: str) -> None:
    """Print one line to standard output."""
    click.echo(text)


def note(text: str) -> None:
    """Print a message for a person on standard error, apart from the output that programs read."""
    click.echo(text, err=True)


def print_json(value: Any) -> None:
    """Print one JSON line, and flush it: a reader may wait for it."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table; the columns named in `numbers` are aligned to the right."""
    from babelbus.cli.tables import lay_out

    cells = [[escape(str(cell)) for cell in row] for row in rows]
    head_style = "1" if has_colours() else ""
    for line in lay_out(columns, cells, numbers=set(numbers), width=terminal_width(), head_style=head_style):
        print_line(line)


def terminal_width() -> int | None:
    """Return the columns of the terminal; `None` for a file or pipe, in which a row is one line of any length."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def has_colours() -> bool:
    """Return whether standard output is a terminal whose user wants colours (https://no-color.org)."""
    import os

    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str) -> str:
    """Return text in a style of the terminal ("31" is red), or as it is where there are no colours."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and has_colours() else text


def print_all(
    items: Sequence[Any],
    as_json: bool,
    nothing: str,
    columns: dict[str, Callable[[Any], object]],
    *,
    numbers: Sequence[str] = (),
) -> None:
    """Print JSON lines, or a table whose `columns` compute the cells of an item; the text `nothing` without items."""
    if as_json:
        for item in items:
            print_json(item)
    elif items or not nothing:
        rows = [[cell(item) for cell in columns.values()] for item in items]
        print_table(tuple(columns), rows, numbers=numbers)
    else:
        print_line(nothing)


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: "1 record", "1,000 records"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"


def human_bytes(size: float) -> str:
    """Return a size in two to four digits: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_time(timestamp_ms: int) -> str:
    """Return a record's time in UTC; the number itself if it is beyond the range of dates."""
    if not 0 <= timestamp_ms <= _TIME_MS_MAX:
        return str(timestamp_ms)
    moment = datetime.fromtimestamp(timestamp_ms // 1000, UTC).replace(microsecond=timestamp_ms % 1000 * 1000)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_record(record: "Record", topic: str, partition: int) -> dict[str, Any]:
    """Return a record as the JSON object of `tail`, `fetch` and `export`, which `publish` and `import` read."""
    from babelbus.web.record_lines import line_of

    no_key = {"key": None} if record.key is None else {}
    return {"topic": topic, **no_key, **msgspec.to_builtins(line_of(record, partition))}


def show_record(record: "Record", partition: int) -> str:
    """Return a record as one line for a person: place, time, key, payload."""
    key = "" if record.key is None else f"  {show_bytes(record.key)}"
    payload = "(removed)" if record.payload is None else show_bytes(record.payload)
    headers = "".join(
        f" {show_bytes(name)}={'' if value is None else show_bytes(value)}" for name, value in record.headers
    )
    return f"{partition}:{record.offset}  {human_time(record.timestamp)}{key}  {payload}" + (
        f"  [{headers.strip()}]" if headers else ""
    )


class Advance(Protocol):
    """Moves a progress bar by `step`; `total` is passed if it is known only now."""

    def __call__(self, step: int, total: int | None = None) -> None:
        """Move the bar."""


@contextmanager
def until_interrupted(done: Callable[[], str]) -> Iterator[None]:
    """Run a block that ends with Ctrl-C, if not before; then show what was done."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"stopped: {done()}")


PATIENCE_SECONDS = 2.0
"""How long a command may be silent before it shows on the terminal that it works."""


@contextmanager
def progress(what: str, total: int | None, unit: str, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a progress bar on standard error after two seconds, if that is a terminal; yield the function that moves it.

    `unit` is "records", "values" or "bytes"; `total` may be unknown.
    """
    if quiet or not sys.stderr.isatty():
        yield _stand_still
        return
    with _LateBar(what, total, unit) as bar:
        yield bar.advance


class _LateBar:
    """A bar that appears when the work has taken two seconds: most work is done before."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._clock = SystemClock()
        self._start = self._clock.monotonic()
        self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> "_LateBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int, total: int | None = None) -> None:
        self._done += step
        self._total = self._total if total is None else total
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, total=self._total)
        elif self._clock.monotonic() - self._start > PATIENCE_SECONDS:
            self._show()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        count = DownloadColumn(binary_units=True) if self._unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(escape(self._what), total=self._total, completed=self._done)
        self._bar.start()


def _stand_still(step: int, total: int | None = None) -> None:
    """Move no bar: standard error is no terminal."""


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Show on standard error, if that is a terminal, that the block still works when it takes longer than two seconds.

    For work without steps, such as a request.
    """
    if not sys.stderr.isatty():
        yield
        return
    import threading

    ended = threading.Event()

    def show() -> None:
        clock = SystemClock()
        start = clock.monotonic()
        wait = PATIENCE_SECONDS
        while not ended.wait(wait):
            wait = 1.0
            sys.stderr.write(f"\r{escape(what)}: {clock.monotonic() - start:.0f} s ")
            sys.stderr.flush()
        if wait != PATIENCE_SECONDS:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    thread = threading.Thread(target=show, name="patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
