"""The names of a hierarchy of keys: which children a node has, and which keys a pattern finds, without looking at all.

The values lie elsewhere, by whole key, so that what happens most (a value that changes) needs no walk through here. A
node is a dictionary of its children, or `None` while it has none: a leaf costs its entry in its parent.
"""

import sys
from collections.abc import Collection, Container, Sequence
from typing import Optional

import msgspec

Node = dict[str, Optional["Node"]]

SEPARATOR = "/"


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


class Names:
    """The nodes of a tree whose keys with values are `keys`, a live view that the owner of the values changes."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = keys
        self._root: Node = {}

    def add(self, key: str) -> int:
        """Build the nodes of a key; return how many of its elements were there, from the left. About 1 us a new key."""
        node = self._root
        elements = key.split(SEPARATOR)
        last = elements.pop()
        there = 0
        fresh = False
        for element in elements:
            child = node.get(element)
            if child is None:
                there += not fresh and element in node  # a leaf that gets its first child
                fresh = True
                child = {}
                node[sys.intern(element)] = child
            elif not fresh:
                there += 1
            node = child
        if last in node:
            return len(elements) + 1
        node[sys.intern(last)] = None
        return there

    def remove(self, key: str) -> int:
        """Remove the nodes of a key without a value; return how many of its elements are still there.

        Costs the length of the key for each removed node: callers bound the elements of clients' keys.
        """
        elements = key.split(SEPARATOR)
        path: list[Node] = []
        node: Node | None = self._root
        for element in elements:
            if node is None or element not in node:
                return len(path)
            path.append(node)
            node = node[element]
        if node:
            return len(elements)
        left, prefix = len(elements), key
        while left:
            parent = path[left - 1]
            del parent[elements[left - 1]]
            left -= 1
            if left and not parent:
                path[left - 1][elements[left - 1]] = None
            prefix = prefix.rpartition(SEPARATOR)[0]
            if parent or (left and prefix in self._keys):
                break
        return left

    def children(self, parent: Sequence[str]) -> list[str] | None:
        """Return the names of the children of a node, `None` if it does not exist; no elements mean the root."""
        node: Node | None = self._root
        for element in parent:
            if node is None or element not in node:
                return None
            node = node[element]
        return list(node) if node else []

    def children_matching(self, pattern: KeyPattern) -> list[str]:
        """Return the names of the children of all nodes that the elements of a pattern mean, each once."""
        found: dict[str, None] = {}
        for _, node in self._find(pattern.elements):
            found.update(dict.fromkeys(node or ()))
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
            deeper: list[tuple[str, Node | None]] = []
            for path, node in nodes:
                if path in keys:
                    found.append(path)
                if node:
                    deeper += [(f"{path}{SEPARATOR}{name}", child) for name, child in node.items()]
            nodes = deeper
        return found

    def _find(self, elements: Sequence[str | None]) -> list[tuple[str, Node | None]]:
        """Return path and node of everything that these elements mean."""
        if not elements:
            return [("", self._root)]
        first = elements[0]
        root = self._root
        nodes = list(root.items()) if first is None else [(first, root[first])] if first in root else []
        for element in elements[1:]:
            if element is None:
                nodes = [
                    (f"{path}{SEPARATOR}{name}", child) for path, node in nodes if node for name, child in node.items()
                ]
            else:
                nodes = [
                    (f"{path}{SEPARATOR}{element}", node[element]) for path, node in nodes if node and element in node
                ]
        return nodes
