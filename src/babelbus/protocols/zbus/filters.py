"""The filters of a subscription and of a channel (docs/specifications/zbus.md, section 5.3).

filter := group (";" group)*; a group's parts stand between `.`: `*` is any one part, `#` this and all that follow, none
too; any other part is itself. A message without a tag passes no filter.
"""

import re
from collections.abc import Callable
from functools import lru_cache

from babelbus.protocols.zbus.errors import MalformedMessageError

FILTER_LENGTH_MAX = 4096

Matches = Callable[[str | None], bool]


@lru_cache(maxsize=1024)
def compile_filter(text: str) -> Matches:
    """Return the function that says whether a tag passes. Cached: a refill of a window names its filter again.

    Raises:
        MalformedMessageError: it is longer than `FILTER_LENGTH_MAX`.
    """
    if len(text) > FILTER_LENGTH_MAX:
        raise MalformedMessageError(f"a filter of {len(text)} characters, limit {FILTER_LENGTH_MAX}")
    groups = text.split(";")
    names = frozenset(group for group in groups if not _is_pattern(group))
    patterns = [_expression(group) for group in groups if _is_pattern(group)]
    if not patterns:
        return names.__contains__
    find = re.compile("|".join(patterns), re.DOTALL).fullmatch

    def matches(tag: str | None) -> bool:
        return tag is not None and (tag in names or find(tag) is not None)

    return matches


def _is_pattern(group: str) -> bool:
    parts = group.split(".")
    return "*" in parts or "#" in parts


def _expression(group: str) -> str:
    """Return the regular expression of one group. It does not backtrack: each part ends at its own dot."""
    expression = ""
    for number, part in enumerate(group.split(".")):
        if part == "#":  # what stands behind it is never looked at
            return expression + ("(?:\\..*)?" if number else ".*")
        expression += "\\." if number else ""
        expression += "[^.]*" if part == "*" else re.escape(part)
    return expression
