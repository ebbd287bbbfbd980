"""Tables fit the terminal: no word is broken, no number cut."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.cli.tables import lay_out

COLUMNS = ("Topic", "Group", "Ack", "Members", "Lag", "In flight", "Redelivered", "Dead letters")
ROW = ("orders/europe", "billing", "on-delivery", "2", "10,002", "1,000", "1,234,567", "3")
NUMBERS = COLUMNS[3:]

words = st.text("abcdefgh", min_size=1, max_size=12)
cells = st.lists(words, min_size=1, max_size=4).map(" ".join)


def words_of(text: str) -> list[str]:
    return sorted(re.sub("[─ ]+", " ", text).split())


@pytest.mark.parametrize("width", [*range(60, 201, 7), 56, 80, None])
def test_the_table_of_groups_fits_every_terminal(width: int | None) -> None:
    lines = lay_out(COLUMNS, [ROW, ROW], numbers=NUMBERS, width=width)
    assert max(map(len, lines)) <= (width or 200)
    text = "\n".join(lines)
    for word in (*" ".join(COLUMNS).split(), *ROW):
        assert word in re.split(r"\s+", text), word


@given(st.lists(st.tuples(cells, cells, cells), max_size=4), st.integers(20, 200))
def test_no_word_is_lost_or_broken(rows: list[tuple[str, ...]], width: int) -> None:
    columns = ("One", "Two words", "Three")
    lines = lay_out(columns, rows, numbers=("Three",), width=width)
    if not any(line.startswith("One  ") and "─" not in "".join(lines) for line in lines):
        assert words_of("\n".join(lines)) == words_of(" ".join((*columns, *(cell for row in rows for cell in row))))
    longest = max(len(cell) for row in [columns, *rows] for cell in row)
    assert all(len(line) <= max(width, longest + len("Two words  ")) for line in lines)


def test_what_has_no_room_is_stacked() -> None:
    assert lay_out(("Name", "Fingerprint"), [("ada", "f" * 64), ("bob", "0" * 64)], width=60) == [
        "Name         ada",
        f"Fingerprint  {'f' * 64}",
        "",
        "Name         bob",
        f"Fingerprint  {'0' * 64}",
    ]


def test_a_file_gets_a_row_a_line() -> None:
    assert lay_out(("A", "B"), [("x " * 300, "1")], numbers=("B",))[2] == f"{'x ' * 300}   1"


def test_wide_letters_count_as_two_columns() -> None:
    head, rule, first, second = lay_out(("A", "B"), [("日本", "1"), ("ab", "2")])
    assert (head, rule, first, second) == ("A      B", "─" * 8, "日本   1", "ab     2")
