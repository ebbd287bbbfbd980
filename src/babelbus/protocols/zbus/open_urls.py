"""Urls that need no signature, for browsers, which cannot sign.

Specification: docs/specifications/zbus.md, 8: R3's `authExcluedList`.
"""

from collections.abc import Iterable

from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.routing import command_of_query


class OpenUrls:
    """Patterns of paths: each is a whole path, or a prefix with `*` behind it."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        listed = list(patterns)
        self._paths = frozenset(one for one in listed if not one.endswith("*"))
        self._prefixes = tuple(one[:-1] for one in listed if one.endswith("*"))

    def __bool__(self) -> bool:
        return bool(self._paths or self._prefixes)

    def has(self, message: Message, target: str | None = None) -> bool:
        """Return whether a message needs no proof: it only asks for a url, and this one is open.

        A command never is, wherever it stands: in a header, or in the query of `/`. `target` as for `routing.route`.

        Raises:
            MalformedMessageError: a query has too many parameters.
        """
        url = message.url
        if url is None or "cmd" in message.headers or not self:
            return False
        path = url.partition("?")[0]
        if path not in self._paths and not path.startswith(self._prefixes):
            return False
        return command_of_query(message, url if target is None else target) is None
