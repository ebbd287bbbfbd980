"""A tree over the elements of subjects and patterns, which finds what concerns a subject without reading every item.

An edge of the tree is a whole element, or the beginning of an element (`a*` of sbus; the empty beginning for any
element). Up to `FEW_MAX` items below an edge are a list, so that a lone item costs no branch; a longer list becomes a
branch. A look-up follows the edges that fit the subject and returns candidates, which the caller compares.
"""

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from babelbus.core.subject import Element

FEW_MAX = 8
"""Longest list below an edge: a look-up returns all its items as candidates."""
FEW_AGAIN = 4
"""A branch with so few items becomes a list; less than `FEW_MAX`, so that no item makes and unmakes a branch."""
DEPTH_MAX = 16
"""Deepest branch: patterns that are equal up to there share one, and need no more memory for their further elements."""
SCAN_MAX = 512
"""Most items that `take` tests one by one."""


class Item(Protocol):
    """A pattern, or a subject as the pattern of itself alone."""

    @property
    def rest(self) -> bool:
        """See `Pattern.rest`."""

    def element(self, depth: int) -> Element | None:
        """Return the element; see `Pattern.element`."""


T = TypeVar("T", bound=Item)


class _Branch(Generic[T]):
    """The items that have the edges up to here in common; `size` counts all of them."""

    __slots__ = ("beginnings", "ended", "lengths", "literals", "rest", "size")

    def __init__(self) -> None:
        self.size = 0
        self.ended: dict[T, None] = {}
        """Items for subjects that end here."""
        self.rest: dict[T, None] = {}
        """Items for subjects with further elements, which are not compared here."""
        self.literals: dict[str, _Branch[T] | list[T]] = {}
        self.beginnings: dict[str, _Branch[T] | list[T]] = {}
        self.lengths: dict[int, int] = {}
        """Number of beginnings of each length."""

    def __iter__(self) -> Iterator[T]:
        yield from self.ended
        yield from self.rest
        for edges in (self.literals, self.beginnings):
            for child in edges.values():
                yield from child

    def held(self, item: T, depth: int) -> dict[T, None] | None:
        """Return the dictionary here that an item belongs to, `None` if it belongs below an edge."""
        if item.element(depth) is None:
            return self.rest if item.rest else self.ended
        return self.rest if depth == DEPTH_MAX else None

    def add(self, item: T, depth: int) -> "_Branch[T] | None":
        """Add an item; return the branch that has to add the item next, `None` if no branch has to."""
        self.size += 1
        held = self.held(item, depth)
        if held is not None:
            held[item] = None
            return None
        text, whole = item.element(depth) or ("", False)
        edges = self.literals if whole else self.beginnings
        child = edges.get(text)
        if child is None:
            edges[text] = [item]
            if not whole:
                self.lengths[len(text)] = self.lengths.get(len(text), 0) + 1
        elif not isinstance(child, list):
            return child
        elif len(child) < FEW_MAX:
            child.append(item)
        else:
            edges[text] = branch = _Branch[T]()
            for one in child:
                branch.add(one, depth + 1)  # goes no deeper: its lists are short enough
            return branch
        return None

    def remove_edge(self, text: str, *, whole: bool) -> None:
        """Remove an edge that nothing is below."""
        if whole:
            del self.literals[text]
            return
        del self.beginnings[text]
        self.lengths[len(text)] -= 1
        if not self.lengths[len(text)]:
            del self.lengths[len(text)]


class SubjectIndex(Generic[T]):
    """Items by the elements of their subjects."""

    def __init__(self) -> None:
        self._root: _Branch[T] = _Branch()

    def __len__(self) -> int:
        return self._root.size

    def clear(self) -> None:
        """Remove every item."""
        self._root = _Branch()

    def add(self, item: T) -> None:
        """Add an item that is not there yet."""
        branch: _Branch[T] | None = self._root
        depth = 0
        while branch is not None:
            branch = branch.add(item, depth)
            depth += 1

    def discard(self, item: T) -> bool:
        """Remove an item; return whether it was there."""
        path: list[tuple[_Branch[T], Element]] = []
        place: _Branch[T] | list[T] = self._root
        while not isinstance(place, list):
            held = place.held(item, len(path))
            if held is not None:
                if item not in held:
                    return False
                del held[item]
                place.size -= 1
                self._settle(path, 1)
                return True
            text, whole = item.element(len(path)) or ("", False)
            path.append((place, (text, whole)))
            child = (place.literals if whole else place.beginnings).get(text)
            if child is None:
                return False
            place = child
        if item not in place:
            return False
        place.remove(item)
        self._settle(path, 1)
        return True

    def candidates(self, subject: str) -> list[T]:
        """Return the items that may concern a subject, in no order; none that does is left out."""
        parts = subject.split("/", DEPTH_MAX)
        found: list[T] = []
        branches = [self._root]
        for part in parts:
            following = []
            for branch in branches:
                found += branch.rest
                child = branch.literals.get(part)
                if isinstance(child, list):
                    found += child
                elif child is not None:
                    following.append(child)
                for length in branch.lengths:
                    child = branch.beginnings.get(part[:length]) if length <= len(part) else None
                    if isinstance(child, list):
                        found += child
                    elif child is not None:
                        following.append(child)
            branches = following
        for branch in branches:
            found += branch.ended
        return found

    def around(self, pattern: Item) -> Iterator[T]:
        """Yield the items that may contain every subject of a pattern; none that does is left out."""
        branches, depth = [self._root], 0
        while branches:
            step = pattern.element(depth) if depth < DEPTH_MAX else None
            following = []
            for branch in branches:
                yield from branch.rest
                if step is None:
                    yield from branch.ended
                    continue
                children = [] if not step[1] else [branch.literals.get(step[0])]
                children += [child for text, child in branch.beginnings.items() if step[0].startswith(text)]
                for child in children:
                    if isinstance(child, list):
                        yield from child
                    elif child is not None:
                        following.append(child)
            branches = following
            depth += 1

    def related(self, pattern: Item) -> Iterator[T]:
        """Yield the items that may have a subject in common with a pattern; none that has is left out."""
        waiting = [(self._root, 0)]
        while waiting:
            branch, depth = waiting.pop()
            yield from branch.rest
            step = pattern.element(depth) if depth < DEPTH_MAX else None
            if step is None:
                yield from branch.ended
                if not pattern.rest:
                    continue
                step = ("", False)
            text, whole = step
            children = list(_related_edges(branch, text, whole=whole))
            for child in children:
                if isinstance(child, list):
                    yield from child
                else:
                    waiting.append((child, depth + 1))

    def take(self, pattern: Item, concerns: Callable[[T], bool]) -> list[T]:
        """Remove and return the items that a pattern concerns.

        If more than `SCAN_MAX` items begin with the elements before the pattern's first wildcard, all of them are
        taken untested: testing costs more than a caller that has to make an item again.
        """
        path: list[tuple[_Branch[T], Element]] = []
        place: _Branch[T] | list[T] = self._root
        while not isinstance(place, list):
            step = pattern.element(len(path)) if len(path) < DEPTH_MAX else None
            if step is None or not step[1]:
                break
            child = place.literals.get(step[0])
            if child is None:
                return []
            path.append((place, step))
            place = child
        taken = list(place)
        if len(taken) <= SCAN_MAX:
            taken = [item for item in taken if concerns(item)]
            for item in taken:
                self.discard(item)
        elif path and not isinstance(place, list):
            place.size = 0
            self._settle(path, len(taken))
        else:
            self.clear()
        return taken

    @staticmethod
    def _settle(path: list[tuple[_Branch[T], Element]], removed: int) -> None:
        """Count what was removed below a path, and remove or shorten what is empty or small now."""
        for branch, (text, whole) in reversed(path):
            branch.size -= removed
            edges = branch.literals if whole else branch.beginnings
            child = edges[text]
            size = len(child) if isinstance(child, list) else child.size
            if not size:
                branch.remove_edge(text, whole=whole)
            elif not isinstance(child, list) and size <= FEW_AGAIN:
                edges[text] = list(child)


def _related_edges(branch: _Branch[T], text: str, *, whole: bool) -> Iterator["_Branch[T] | list[T]"]:
    """Yield what is below the edges that may fit an element of a pattern."""
    if whole:
        if text in branch.literals:
            yield branch.literals[text]
    else:
        yield from (child for literal, child in branch.literals.items() if literal.startswith(text))
    for beginning, child in branch.beginnings.items():
        if text.startswith(beginning) or (not whole and beginning.startswith(text)):
            yield child
