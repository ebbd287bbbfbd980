"""The watches of the state: receivers of the changes of a key or pattern, found by the elements of the keys.

A change costs the watches that want it, however many there are: the watches of a key are looked up once.
"""

import logging
from collections.abc import Callable, Sequence

from babelbus.core.state.key_index import KeyPattern
from babelbus.core.state.log import Change, Commit, Kind
from babelbus.core.state.patterns import subjects_of
from babelbus.core.subject import Element, PathPattern
from babelbus.core.subject_index import SubjectIndex

log = logging.getLogger(__name__)

TOLD_KINDS = frozenset((Kind.SET, Kind.DELETED, Kind.RETAINED))
KEYS_MAX = 65_536
"""Keys whose watches are remembered."""
REMEMBERED_LENGTH_MAX = 256
"""Longer keys are looked up each time: clients choose the keys."""

Receive = Callable[[Sequence[Change], str], None]
"""Takes changes of one commit, in order, and their source."""


class Watch:
    """One receiver of the changes of a pattern from a commit on. `may_see` is asked for each key that changed."""

    __slots__ = ("may_see", "pattern", "receive", "since")

    def __init__(
        self, pattern: KeyPattern, receive: Receive, since: int, may_see: Callable[[str], bool] | None
    ) -> None:
        self.pattern = pattern
        self.receive = receive
        self.since = since
        self.may_see = may_see


class _Place:
    """One of the patterns that a watch has in the index."""

    __slots__ = ("pattern", "watch")

    def __init__(self, pattern: PathPattern, watch: Watch) -> None:
        self.pattern = pattern
        self.watch = watch

    @property
    def rest(self) -> bool:
        """See `Pattern.rest`."""
        return self.pattern.rest

    def element(self, depth: int) -> Element | None:
        """Return the element; see `Pattern.element`."""
        return self.pattern.element(depth)


class Watches:
    """All watches of a state."""

    def __init__(self) -> None:
        self._index: SubjectIndex[_Place] = SubjectIndex()
        self._places: dict[Watch, list[_Place]] = {}
        self._by_key: dict[str, tuple[Watch, ...]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, watch: Watch) -> None:
        """Add a watch."""
        places = [_Place(pattern, watch) for pattern in subjects_of(watch.pattern)]
        for place in places:
            self._index.add(place)
        self._places[watch] = places
        self._by_key.clear()

    def remove(self, watch: Watch) -> None:
        """Remove a watch, which may be gone already."""
        for place in self._places.pop(watch, ()):
            self._index.discard(place)
        self._by_key.clear()

    def hear(self, changes: Sequence[Change], commit: Commit) -> None:
        """Call the receivers of the changes of a commit."""
        if not self._places:
            return
        runs: dict[Watch, list[Change]] = {}
        for change in changes:
            key = change[1]
            if key is None or change[0] not in TOLD_KINDS:
                continue
            watches = self._by_key.get(key)
            for watch in self._find(key) if watches is None else watches:
                run = runs.get(watch)
                if run is None:
                    runs[watch] = [change]
                else:
                    run.append(change)
        for watch, run in runs.items():
            if watch.since >= commit.number:
                continue  # it has seen their result
            may_see = watch.may_see
            granted = run if may_see is None else [change for change in run if may_see(change[1] or "")]
            try:
                if granted:
                    watch.receive(granted, commit.source)
            except Exception:  # the bug of one receiver must not cost the others their changes
                log.exception("a receiver of a watch failed")

    def _find(self, key: str) -> tuple[Watch, ...]:
        if len(self._by_key) >= KEYS_MAX:
            self._by_key.clear()
        found = [place.watch for place in self._index.candidates(key) if place.pattern.matches(key)]
        watches = tuple(dict.fromkeys(found))
        if len(key) <= REMEMBERED_LENGTH_MAX:
            self._by_key[key] = watches
        return watches
