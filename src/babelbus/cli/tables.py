"""Tables that fit the terminal: no word is broken and no number cut; what has no room for its columns is stacked."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

RULE = "─"
GAPS = (3, 2)
"""Spaces between two columns, and where that is too wide."""


def lay_out(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Iterable[str] = (),
    width: int | None = None,
    head_style: str = "",
) -> list[str]:
    """Return the lines of a table of at most `width` columns, any width if `None`.

    Text is wrapped between words. If that does not fit either, each row is a block with a line for each column; a word
    that is longer than the terminal stays whole. `head_style` is a style of the terminal for the head.
    """
    right = [column in set(numbers) for column in columns]
    natural = [
        max(_width(cell) for cell in (column, *cells))
        for column, cells in zip(columns, _turn(columns, rows), strict=True)
    ]
    for gap in GAPS:
        if width is None or sum(natural) + gap * (len(columns) - 1) <= width:
            return _table(columns, rows, natural, right, gap, head_style)
    assert width is not None
    gap = GAPS[-1]
    least = [
        max([_longest_word(column), *(_width(cell) if is_number else _longest_word(cell) for cell in cells)])
        for column, cells, is_number in zip(columns, _turn(columns, rows), right, strict=True)
    ]
    spare = width - sum(least) - gap * (len(columns) - 1)
    if spare < 0:
        return _blocks(columns, rows)
    widths = least.copy()
    for at in sorted(range(len(columns)), key=lambda at: natural[at] - least[at]):
        more = min(natural[at] - least[at], spare)
        widths[at] += more
        spare -= more
    return _table(columns, rows, widths, right, gap, head_style)


def _turn(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the cells by column."""
    return [[row[at] for row in rows] for at in range(len(columns))]


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
    gap: int,
    head_style: str,
) -> list[str]:
    head = list(_row(columns, widths, right, gap))
    if head_style:
        head = [f"\x1b[{head_style}m{line}\x1b[0m" for line in head]
    lines = [*head, RULE * (sum(widths) + gap * (len(widths) - 1))]
    for row in rows:
        lines += _row(row, widths, right, gap)
    return lines


def _row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], gap: int) -> Iterator[str]:
    """Yield the lines of one row."""
    wrapped = [_wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for at in range(max(map(len, wrapped))):
        parts = []
        for lines, width, is_right in zip(wrapped, widths, right, strict=True):
            text = lines[at] if at < len(lines) else ""
            fill = " " * (width - _width(text))
            parts.append(fill + text if is_right else text + fill)
        yield (" " * gap).join(parts).rstrip()


def _wrap(cell: str, width: int) -> list[str]:
    if _width(cell) <= width:
        return [cell]
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]


def _blocks(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a block for each row, a line for each column."""
    indent = max(map(_width, columns)) + 2
    lines: list[str] = []
    for row in rows:
        if lines:
            lines.append("")
        lines += [
            (column + " " * (indent - _width(column)) + cell).rstrip()
            for column, cell in zip(columns, row, strict=True)
            if column or cell
        ]
    return lines


def _longest_word(text: str) -> int:
    return max(map(_width, text.split(" ")))


def _width(text: str) -> int:
    """Return the columns that a terminal needs for a text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
