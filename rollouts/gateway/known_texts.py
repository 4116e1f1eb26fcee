"""Known texts: a tree in which the longest text that another one begins with is found in one pass over that one, however many are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class _Node(Generic[Value]):
    """A place in the tree, behind the items of its label, which no sibling's begins with."""

    __slots__ = ("children", "label", "values")

    def __init__(self, label: Sequence[Any]) -> None:
        self.label = label
        self.children: dict[Any, _Node[Value]] = {}  # by the first item of their labels
        self.values: list[Value] = []


class KnownTexts(Generic[Value]):
    """Values by texts, or by tuples of tokens: a tree of one of the two. Items that texts have in common are kept once."""

    def __init__(self) -> None:
        self._root: _Node[Value] = _Node("")

    def add(self, text: Sequence[Any], value: Value) -> None:
        """Add the value of a text; earlier ones of an equal text stay. The time is that of one pass over the text."""
        node, at = self._root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = _Node(text[at:])
                at = len(text)
            else:
                equal = _count_equal(child.label, text[at : at + len(child.label)])
                if equal < len(child.label):
                    child = node.children[text[at]] = _split(child, equal)
                at += equal
            node = child
        node.values.append(value)

    def find(self, text: Sequence[Any], is_good: Callable[[Value], bool]) -> Value | None:
        """Return the newest good value of the longest known text that this longer text begins with; None = there is none."""
        node, at, found = self._root, 0, None
        while at < len(text):
            child = node.children.get(text[at])
            if child is None or text[at : at + len(child.label)] != child.label:
                return found
            node, at = child, at + len(child.label)
            if at < len(text):
                found = next(filter(is_good, reversed(node.values)), found)
        return found


def _split(node: _Node[Value], at: int) -> _Node[Value]:
    """Return a node with the begin of a node's label, above the rest of it."""
    above: _Node[Value] = _Node(node.label[:at])
    node.label = node.label[at:]
    above.children[node.label[0]] = node
    return above


def _count_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal items at the beginning: halves are compared, so that few steps are Python's."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
