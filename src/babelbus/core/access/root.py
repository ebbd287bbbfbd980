"""The root of a principal: it names subjects relative to the root, and sees them without the root (docs/access.md).

Protocols translate at their edges, in the messages of rooted principals alone: behind the edge, all subjects are
absolute. The rights of a rooted principal end at its root (`Rights`): a name that nobody has translated is refused.
"""

import re
from typing import Final
from urllib.parse import quote

import msgspec

from babelbus.core.subject import PathPattern, below, check_topic_name
from babelbus.errors import BabelbusError

UNROOTED: Final = ("$", "!/")
"""Begin the names that are the same for everybody: those of the server's own, and the secret keys of sbus."""
ROOT_BYTES_MAX = 180
_FORBIDDEN = frozenset("?#*{}$!")


class InvalidRootError(BabelbusError):
    """A text is no root; the message says why."""


class Root(msgspec.Struct, frozen=True):
    """A root; `prefix` is its name with a `/` behind it. Make it with `root_of`."""

    name: str
    prefix: str

    def absolute(self, name: str) -> str:
        """Return the subject, or pattern, that a relative one means; an empty text means nothing, and stays."""
        return self.prefix + name if name and not name.startswith(UNROOTED) else name

    def relative(self, subject: str) -> str:
        """Return what a subject below the root is called there; any other subject stays."""
        return subject.removeprefix(self.prefix)

    def relative_text(self, text: str) -> str:
        """Return a message of the server with its names relative, also in names of files."""
        text = re.sub(rf"(?<![\w.%-]){re.escape(quote(self.prefix, safe=''))}", "", text)
        return re.sub(rf"(?<![\w.%/-]){re.escape(self.prefix)}", "", text)

    def contains(self, subject: str) -> bool:
        """Return whether a subject is below the root."""
        return subject.startswith(self.prefix)

    @property
    def pattern(self) -> PathPattern:
        """The pattern of all subjects below the root."""
        return below(self.name)


def root_of(name: str) -> Root:
    """Return the root of a name that `check_root` takes."""
    return Root(name, f"{name}/")


def check_root(name: str) -> None:
    """Check that subjects can be relative to a name: elements between `/`, none empty, no wildcard and no `$`.

    Raises:
        InvalidRootError: they cannot.
    """
    if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= ROOT_BYTES_MAX:
        raise InvalidRootError(f"a root has 1 to {ROOT_BYTES_MAX} bytes")
    if "" in name.split("/"):
        raise InvalidRootError(f"root {name!r}: no / at the beginning or the end, and none behind another")
    if not _FORBIDDEN.isdisjoint(name):
        raise InvalidRootError(f"root {name!r}: it has none of {' '.join(sorted(_FORBIDDEN))}")
    try:
        check_topic_name(name)
    except BabelbusError as error:
        raise InvalidRootError(f"root {name!r}: {error}") from error
