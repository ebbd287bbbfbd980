"""The names of a hierarchy of keys: which children a node has, and which keys a pattern finds, without looking at all.

The values lie elsewhere, by whole key, so that what happens most (a value that changes) needs no walk through here. A
node is a dictionary of its children or, as long as its children are a few leaves, a tuple of their names, which takes
half the memory: a leaf is an empty tuple.
"""

import sys
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

import msgspec

Branch = dict[str, "Node"]
Node = Branch | tuple[str, ...]

SEPARATOR = "/"
LEAVES_MAX = 16
"""Most names of leaves in a tuple: each new name copies the tuple."""
PARENTS_MAX = 4096
"""Parents that are found without a walk: new keys mostly come to a parent that others came to lately."""
NAMES_AT_ONCE = 10_000
"""Names that a search for several patterns looks at before others may have a turn: about 10 ms."""


class KeyPattern(msgspec.Struct, frozen=True):
    """A pattern over keys: their elements from the left, `None` for any; with `rest` any number may follow, also none.

    It differs from `subject.PathPattern`, whose rest is one element or more.
    """

    elements: tuple[str | None, ...]
    rest: bool = False

    def matches(self, key: str) -> bool:
        """Return whether a key is meant."""
        elements = self.elements
        parts = key.split(SEPARATOR)
        if len(parts) < len(elements) if self.rest else len(parts) != len(elements):
            return False
        return all(element is None or element == part for element, part in zip(elements, parts, strict=False))


class _Wanted:
    """Patterns that begin with the same elements, as a tree; patterns are known by their numbers."""

    __slots__ = ("any", "first", "names", "rest")

    def __init__(self) -> None:
        self.names: dict[str, _Wanted] = {}
        self.any: _Wanted | None = None
        self.first = _NEVER
        """The first pattern that means a key here."""
        self.rest = _NEVER
        """The first pattern that means all keys here and below."""

    def add(self, number: int, pattern: KeyPattern) -> None:
        """Add a pattern whose number is larger than those of the patterns before."""
        wanted = self
        for element in pattern.elements:
            if element is not None:
                wanted = wanted.names.setdefault(element, _Wanted())
            else:
                wanted.any = wanted = wanted.any or _Wanted()
        wanted.first = min(wanted.first, number)
        if pattern.rest:
            wanted.rest = min(wanted.rest, number)


class Names:
    """The nodes of a tree whose keys with values are `keys`, a live view that the owner of the values changes."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = keys
        self._root: Branch = {}
        self._parents: dict[str, tuple[Branch, str]] = {}
        """By the path of a parent, the node above it and its name there."""

    def add(self, key: str) -> int:
        """Build the nodes of a key; return how many of its elements were there, from the left. About 0.6 us a key."""
        path, separator, last = key.rpartition(SEPARATOR)
        parent = self._parents.get(path) if separator else None
        if parent is None:
            return self._build(key, path)
        above, name = parent
        children = above[name]
        there = key.count(SEPARATOR)
        if last in children:
            return there + 1
        if isinstance(children, dict):
            children[sys.intern(last)] = _LEAF
        else:
            above[name] = _with_leaf(children, last)
        return there

    def _build(self, key: str, path: str) -> int:
        """Build the nodes of a key below the parent at `path`, and remember the parent; see `add`."""
        if len(self._parents) >= PARENTS_MAX:
            self._parents.clear()
        above = node = self._root
        elements = key.split(SEPARATOR)
        there, name = 0, ""
        for element in elements:
            child = node.get(element)
            if not isinstance(child, dict):
                break
            above, name, node = node, element, child
            there += 1
        else:
            return there
        leaves = _LEAF if child is None else child
        if there + 2 == len(elements):  # most keys
            element = sys.intern(element)
            self._parents[path] = node, element
            if elements[-1] in leaves:
                return there + 2
            node[element] = _with_leaf(leaves, elements[-1])
            return there + (child is not None)
        if there and there + 1 == len(elements):
            self._parents[path] = above, name
        if there + 1 < len(elements):
            node[sys.intern(element)] = _branch(leaves, elements[there + 1 :])
            there += elements[there + 1] in leaves
        elif child is None:
            node[sys.intern(element)] = _LEAF
        return there + (child is not None)

    def remove(self, key: str) -> int:
        """Remove the nodes of a key without a value; return how many of its elements are still there.

        Costs the length of the key for each removed node: callers bound the elements of clients' keys.
        """
        elements = key.split(SEPARATOR)
        path: list[Node] = []
        node: Node = self._root
        for element in elements:
            if element not in node:
                return len(path)
            path.append(node)
            node = node[element] if isinstance(node, dict) else _LEAF
        if node:
            return len(elements)
        left, prefix = len(elements), key
        while left:
            left -= 1
            self._parents.pop(prefix, None)
            parent, name = path[left], elements[left]
            if isinstance(parent, dict):
                del parent[name]
            else:
                at = parent.index(name)
                parent = parent[:at] + parent[at + 1 :]
            if left and (not parent or isinstance(parent, tuple)):
                above = path[left - 1]
                assert isinstance(above, dict)  # the children of a tuple have none
                above[elements[left - 1]] = parent or _LEAF
            prefix = prefix.rpartition(SEPARATOR)[0]
            if parent or (left and prefix in self._keys):
                break
        return left

    def children(self, parent: Sequence[str]) -> list[str] | None:
        """Return the names of the children of a node, `None` if it does not exist; no elements mean the root."""
        node: Node = self._root
        for element in parent:
            if element not in node:
                return None
            node = node[element] if isinstance(node, dict) else _LEAF
        return list(node)

    def child_count(self, parent: Sequence[str]) -> int:
        """Return how many children a node has, 0 if it does not exist."""
        node: Node = self._root
        for element in parent:
            if element not in node:
                return 0
            node = node[element] if isinstance(node, dict) else _LEAF
        return len(node)

    def children_matching(self, pattern: KeyPattern) -> list[str]:
        """Return the names of the children of all nodes that the elements of a pattern mean, each once."""
        found: dict[str, None] = {}
        for _, node in self._find(pattern.elements):
            found.update(dict.fromkeys(node))
        return list(found)

    def match(self, pattern: KeyPattern) -> list[str]:
        """Return the keys with a value that a pattern means; costs what it finds, not what there is."""
        elements, rest = pattern.elements, pattern.rest
        if not elements:
            return list(self._keys) if rest else []
        keys: Container[str] = self._keys
        nodes = self._find(elements)
        if not rest:
            return [path for path, _ in nodes if path in keys]
        found: list[str] = []
        while nodes:
            deeper: list[tuple[str, Node]] = []
            for path, node in nodes:
                if path in keys:
                    found.append(path)
                if node:
                    deeper += [(f"{path}{SEPARATOR}{name}", child) for name, child in _children(node)]
            nodes = deeper
        return found

    def search(self, patterns: Iterable[KeyPattern], found: list[tuple[int, str]]) -> Iterator[None]:
        """Append each key with a value that patterns mean to `found` once, with the number of the first such pattern.

        Looks at each name once, however many patterns may mean it; yields wherever others may have a turn. A key that
        comes or goes meanwhile may be found or not.
        """
        wanted = _Wanted()
        for number, pattern in enumerate(patterns):
            wanted.add(number, pattern)
        keys: Container[str] = self._keys
        nodes: list[_Place] = [("", self._root, (wanted,), wanted.rest)]
        seen = 0
        while nodes:
            deeper: list[_Place] = []
            for place in nodes:
                for first, key, below in _below(*place):
                    seen += 1
                    if first < _NEVER and key in keys:
                        found.append((first, key))
                    if below is not None:
                        deeper.append(below)
                if seen >= NAMES_AT_ONCE:
                    seen = 0
                    yield
            nodes = deeper

    def _find(self, elements: Sequence[str | None]) -> list[tuple[str, Node]]:
        """Return path and node of everything that these elements mean."""
        if not elements:
            return [("", self._root)]
        first = elements[0]
        root = self._root
        nodes = list(root.items()) if first is None else [(first, root[first])] if first in root else []
        for element in elements[1:]:
            if element is None:
                nodes = [(f"{path}{SEPARATOR}{name}", child) for path, node in nodes for name, child in _children(node)]
            else:
                nodes = [
                    (f"{path}{SEPARATOR}{element}", _child(node, element)) for path, node in nodes if element in node
                ]
        return nodes


_LEAF: tuple[str, ...] = ()
_NEVER = sys.maxsize
_Place = tuple[str, Node, tuple[_Wanted, ...], int]
"""The path of a node's children up to their names, the node, what patterns want of it, and the first that wants all."""


def _with_leaf(leaves: tuple[str, ...], name: str) -> Node:
    """Return a node that has these leaves and one more."""
    if len(leaves) >= LEAVES_MAX:
        return _branch(leaves, [name])
    return leaves + (sys.intern(name),)  # noqa: RUF005 - half the time of `(*leaves, name)`


def _branch(leaves: tuple[str, ...], names: list[str]) -> Branch:
    """Return a node that has these leaves, and a child for the first name, with the nodes of the other names below."""
    below: Node = _LEAF
    for name in map(sys.intern, reversed(names[1:])):
        below = {name: below} if below else (name,)
    branch: Branch = dict.fromkeys(leaves, _LEAF)
    branch[sys.intern(names[0])] = below
    return branch


def _child(node: Node, name: str) -> Node:
    """Return the child of a node that has this name."""
    return node[name] if isinstance(node, dict) else _LEAF


def _children(node: Node) -> Iterable[tuple[str, Node]]:
    """Return names and nodes of all children of a node."""
    return node.items() if isinstance(node, dict) else [(name, _LEAF) for name in node]


def _below(prefix: str, node: Node, wanted: tuple[_Wanted, ...], rest: int) -> Iterator[tuple[int, str, _Place | None]]:
    """Yield the first pattern for each child that patterns mean, its key, and its place if it has children."""
    named = _named(node, wanted)
    others = tuple(one.any for one in wanted if one.any is not None)
    for name in node if others or rest < _NEVER else named:
        below = others + named.get(name, ())
        first, all_of = min([rest, *[one.first for one in below]]), min([rest, *[one.rest for one in below]])
        key, child = prefix + name, _child(node, name)
        yield first, key, (key + SEPARATOR, child, below, all_of) if child else None


def _named(node: Node, wanted: tuple[_Wanted, ...]) -> dict[str, tuple[_Wanted, ...]]:
    """Return what patterns want of the children that they name."""
    named: dict[str, tuple[_Wanted, ...]] = {}
    for one in wanted:
        fewer, more = (one.names, node) if len(one.names) < len(node) else (node, one.names)
        for name in fewer:
            if name in more:
                named[name] = (*named.get(name, ()), one.names[name])
    return named
