"""The language of filters: what it means, and what is wrong at which column."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.web.search import language
from babelbus.web.search.language import Both, Comparison, Either, Exists, Field, FilterError, Not, parse

A = Comparison(Field("pointer", parts=("a",)), "=", 1, "1")
B = Comparison(Field("key"), "!=", "x")


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("/a = 1", A),
        ("/a == 1", A),
        ('key != "x"', B),
        ("key != 'x'", B),
        ('/a = 1 and key != "x"', Both((A, B))),
        ('/a = 1 or key != "x" AND /a = 1', Either((A, Both((B, A))))),
        ('(/a = 1 or key != "x") and /a = 1', Both((Either((A, B)), A))),
        ("not /a = 1", Not(A)),
        ("not (not /a=1)", Not(Not(A))),
        ("/a/0/b exists", Exists(Field("pointer", parts=("a", "0", "b")))),
        ("/a~1b~0 exists", Exists(Field("pointer", parts=("a/b~",)))),
        ('payload["/a b/c"] exists', Exists(Field("pointer", parts=("a b", "c")))),
        ('payload[""] = true', Comparison(Field("pointer"), "=", True)),
        ('headers["x y"] contains "z"', Comparison(Field("header", "x y"), "contains", "z")),
        ('subject ~ "orders/*"', Comparison(Field("subject"), "like", "orders/*")),
        ('payload like "a?c"', Comparison(Field("payload"), "like", "a?c")),
        (
            r'key = "\"\\\/\b\f\n\r\tä\u00fc\ud83d\ude00"',
            Comparison(Field("key"), "=", '"\\/\b\f\n\r\tä\u00fc\U0001f600'),
        ),
        ("/a >= -1.5e3", Comparison(Field("pointer", parts=("a",)), ">=", -1500.0, "-1.5e3")),
        ("/a = null", Comparison(Field("pointer", parts=("a",)), "=", None)),
    ],
)
def test_a_filter_is_read(text: str, node: object) -> None:
    assert parse(text) == node


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("", 1, "the filter is empty"),
        ("  ", 1, "the filter is empty"),
        ("/a =", 5, "the end of the filter"),
        (f"key like '*{'a?' * 60}*' or key like '*{'?' * 81}*'", 147, "200 characters"),
        ("/a 1", 4, "= , !="),
        ("/a = foo", 6, "in quotes"),
        ('/a = "foo', 6, "does not end"),
        ("/a = 01", 6, "no number"),
        ("/a = 1x", 6, "no number"),
        ("/a = 1 /b = 2", 8, "'and' or 'or'"),
        ("(/a = 1", 8, "column 1"),
        ("/a = 1)", 7, "'and' or 'or'"),
        ("headers = 1", 9, 'headers["name"]'),
        ("headers[x] = 1", 9, "name in quotes"),
        ('payload["x"] = 1', 9, "begins with /"),
        ("price > 5", 1, "a field is expected"),
        ("/a < true", 6, "numbers or strings"),
        ("/a like 5", 9, "a string"),
        ('/a contains ""', 13, "not empty"),
        (r'/a = "\x"', 7, "no escape"),
        (r'/a = "\ud800"', 6, "half of a letter"),
        ("/a = 1e999", 6, "too large"),
        ("/a = $", 6, "means nothing"),
        ("not", 4, "ends here"),
        ("/a = " + "1" * 41, 6, "too long"),
        ("/a = 1" + " " * 2_000, 2_001, "2000 characters"),
        ("(" * 60, 51, "50 levels"),
        (" or ".join(["/a=1"] * 101), 801, "100 comparisons"),
    ],
)
def test_an_error_names_its_column(text: str, column: int, words: str) -> None:
    with pytest.raises(FilterError) as raised:
        parse(text)
    assert raised.value.column == column
    assert str(raised.value).startswith(f"column {column}: ")
    assert words.replace("= , !=", "=, !=") in str(raised.value)


def test_the_limits_hold_at_them() -> None:
    parse("/a=1" + " " * (language.LENGTH_MAX - 4))
    parse("(" * 49 + "/a=1" + ")" * 49)
    parse(" or ".join(["/a=1"] * 100))


WORDS = [
    "and",
    "or",
    "not",
    "exists",
    "contains",
    "like",
    "true",
    "false",
    "null",
    "key",
    "subject",
    "payload",
    "headers",
]
PIECES = st.sampled_from(
    [*language.SIGNS, *WORDS, "(", ")", "[", "]", "/a", '"b"', "'c'", "1", "-2.5", "\\", '"', "\0", "ä"]
)


@given(st.one_of(st.text(), st.lists(PIECES).map(" ".join), st.lists(PIECES).map("".join)))
def test_garbage_raises_our_error_alone(text: str) -> None:
    columns = range(1, len(text) + 2)
    with suppress(FilterError):
        parse(text)
        return
    with pytest.raises(FilterError) as raised:
        parse(text)
    assert raised.value.column in columns
