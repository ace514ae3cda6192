"""What a step notes on its module: sums, lists and dicts that a user collects from batch to batch.

The step goes on behind the model call on one rank only, so what it appends to ``self.losses`` or adds to ``self.total``
there must be brought to the others, as if they had run it.
"""

import copy
import operator
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Self

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_chimera.runtime.versions import version_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor, tuple)
_COPIED = (set, deque, np.ndarray)
_FOLLOWED = (*_PLAIN, *_COPIED, list, dict)
_FIXED = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Types of what is never changed in place."""

_SHORT = 1000
"""Entries of the longest list that is copied in every pass, whether it grows or not."""

_LARGEST_ARRAY = 1 << 20
"""Bytes of the largest array that is followed, since a copy of it is compared after each step."""

_LIBRARIES = {"torch", "lightning", "transformers", "tokenizers", "datasets", "torchmetrics", "builtins"}
"""Whose objects are not a user's collections, and may be large."""


@dataclass(frozen=True)
class _List:
    """A list as it was: its length, and what was in those of its entries that are containers."""

    length: int
    inside: Mapping[int, Any]


@dataclass(frozen=True)
class _Dict:
    """A dict as it was."""

    entries: Mapping[Any, Any]


@dataclass(frozen=True)
class _Fixed:
    """A dict as it was, none of whose values can change in place."""

    entries: dict[Any, Any]

    def is_of(self, value: dict[Any, Any]) -> bool:
        """Whether a dict has the same entries in the same order. A loop of Python's own would cost many times more."""
        before, now = self.entries, value
        return (
            len(before) == len(now)
            and all(map(operator.is_, before.values(), now.values()))
            and all(map(operator.is_, before, now))
        )


@dataclass(frozen=True)
class _Value:
    """A plain value as it was; a tensor by its version, which every in-place change raises."""

    value: Any
    version: int


@dataclass(frozen=True)
class _Copy:
    """A set, a deque or an array as it was."""

    value: Any


class Set(NamedTuple):
    """A change: another value."""

    value: Any


class Grown(NamedTuple):
    """A change: new entries at the end of a list, and changes inside of older ones."""

    length: int
    items: list[Any]
    inside: dict[int, Any]


class Updated(NamedTuple):
    """A change: entries of a dict."""

    entries: dict[Any, Any]
    removed: tuple[Any, ...]


class Inside(NamedTuple):
    """A change: attributes of an object of the user's own."""

    attributes: Updated


class Addition(NamedTuple):
    """What a list of a module has grown by at once.

    Attributes:
        items: The new entries.
        is_single: Whether it was one that was appended: an entry for the batch, however many rows it has.
    """

    items: list[Any]
    is_single: bool


def _changing(method: Callable[..., Any]) -> Any:
    """A method of a list that may change what was in it before."""

    def changing(self: "_Watched", *args: Any, **kwargs: Any) -> Any:
        self.is_changed = True
        return method(self, *args, **kwargs)

    return changing


class _Watched(list[Any]):
    """A copy of a list that notes how it grows, and whether what was in it before may have changed."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self.original = values
        self.additions: list[Addition] = []
        self.is_changed = False

    __setitem__ = _changing(list.__setitem__)
    __delitem__ = _changing(list.__delitem__)
    __imul__ = _changing(list.__imul__)
    clear = _changing(list.clear)
    insert = _changing(list.insert)
    pop = _changing(list.pop)
    remove = _changing(list.remove)
    reverse = _changing(list.reverse)
    sort = _changing(list.sort)

    def append(self, item: Any) -> None:
        super().append(item)
        self.additions.append(Addition([item], is_single=True))

    def extend(self, items: Iterable[Any]) -> None:
        length = len(self)
        super().extend(items)
        self.additions.append(Addition(self[length:], is_single=False))

    def __iadd__(self, items: Iterable[Any]) -> Self:  # type: ignore[misc]  # as in typeshed's list
        self.extend(items)
        return self


@contextmanager
def growing(module: nn.Module, known: Container[str] | None = None) -> Iterator[dict[str, list[Addition]]]:
    """Notes how the lists among a module's attributes grow, and takes it away from them at the end.

    To see how a list grows a copy takes its place for a while, which is not to be paid for a long one that never does.

    Args:
        module: The module.
        known: Names of the lists that have grown before. Of a long one that has not only the length is noted, and what
            it grows by all the same was appended if it is one entry, and added at once if it is more. By default all
            are watched.

    Yields:
        By the list's name what it has grown by, filled at the end.
    """
    attributes = vars(module)
    before = {name: value for name, value in attributes.items() if type(value) is list and not name.startswith("_")}
    lengths = {name: len(value) for name, value in before.items()}
    attributes.update(
        (name, _Watched(value))
        for name, value in before.items()
        if known is None or lengths[name] <= _SHORT or name in known
    )
    grown: dict[str, list[Addition]] = {}
    try:
        yield grown
    finally:
        for name, length in lengths.items():
            additions = _take_back(attributes, name, before[name], length)
            if additions:
                grown[name] = additions


def _take_back(attributes: dict[str, Any], name: str, original: list[Any], length: int) -> list[Addition]:
    """Gives a module its list back as long as it was, and says what it had grown by."""
    now = attributes.get(name)
    if not isinstance(now, list):
        return []
    items = now[length:]
    if not isinstance(now, _Watched):
        del now[length:]
        return [Addition(items, is_single=now is original and len(items) == 1)] if items else []
    attributes[name] = original
    if now.is_changed or now.original is not original:
        original[:] = now[:length]
    if sum(len(addition.items) for addition in now.additions) == len(items):
        return now.additions
    return [Addition(items, is_single=False)] if items else []


class Notes:
    """What a module has noted at one time: numbers, strings, tensors, arrays, and collections of them.

    They are attributes of the module, or of an object there that is the user's own.

    Args:
        attributes: The state of each.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self._attributes = attributes

    @classmethod
    def of(cls, module: nn.Module) -> "Notes":
        """The notes on a module now; names with an underscore are not a user's."""
        return cls({name: _state_inside(value) for name, value in _public(module).items()})

    def changes(self, module: nn.Module) -> dict[str, Any]:
        """What has changed since, ready to travel."""
        now = _public(module)
        found = {name: _change_inside(self._attributes.get(name), value) for name, value in now.items()}
        return {name: change for name, change in found.items() if change is not None}

    def apply(self, module: nn.Module, changes: Mapping[str, Any]) -> None:
        """Makes the same changes on another rank's module, whatever it has noted itself since."""
        for name, change in changes.items():
            _apply(vars(module), name, change)


def _public(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object in which a user may collect something; ``None`` for anything else."""
    if isinstance(value, (*_FOLLOWED, nn.Module, Dataset, type, FunctionType, MethodType, ModuleType)):
        return None
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    return getattr(value, "__dict__", None)


def _state_inside(value: Any) -> Any:
    """How an attribute of the module is now, and the attributes of an object of the user's own."""
    attributes = _attributes(value)
    return _state(value) if attributes is None else _state(attributes)


def _change_inside(before: Any, value: Any) -> Any:
    """How an attribute of the module differs from its earlier state."""
    attributes = _attributes(value)
    if attributes is None:
        return _change(before, value)
    change = _change(before, attributes) if isinstance(before, _Dict | _Fixed) else None
    return None if change is None else Inside(change)


def _state(value: Any) -> Any:
    """How a value is now; ``None`` for one that is not followed."""
    if type(value) is list:
        holds_containers = any(issubclass(kind, list | dict) for kind in set(map(type, value)))
        items = enumerate(value) if holds_containers else ()
        return _List(len(value), {index: _state(item) for index, item in items if isinstance(item, list | dict)})
    if isinstance(value, dict):
        is_fixed = _FIXED.issuperset(map(type, value.values()))
        return _Fixed(dict(value)) if is_fixed else _Dict({key: _state(item) for key, item in value.items()})
    if isinstance(value, _PLAIN):
        return _Value(value, version_of(value))
    if isinstance(value, _COPIED) and not (isinstance(value, np.ndarray) and value.nbytes > _LARGEST_ARRAY):
        return _Copy(copy.copy(value))
    return None


def _change(before: Any, value: Any) -> Any:
    """How a value differs from its earlier state; ``None`` if it does not, or is not followed."""
    if type(value) is list and isinstance(before, _List) and len(value) >= before.length:
        inside = {index: _change(state, value[index]) for index, state in before.inside.items()}
        inside = {index: change for index, change in inside.items() if change is not None}
        items = value[before.length :]
        return Grown(before.length, items, inside) if items or inside else None
    if isinstance(value, dict) and isinstance(before, _Fixed):
        if before.is_of(value):
            return None
        before = _Dict({key: _Value(item, 0) for key, item in before.entries.items()})
    if isinstance(value, dict) and isinstance(before, _Dict):
        entries = {key: _change(before.entries.get(key), item) for key, item in value.items()}
        entries = {key: change for key, change in entries.items() if change is not None}
        removed = tuple(key for key in before.entries if key not in value)
        return Updated(entries, removed) if entries or removed else None
    if isinstance(value, _PLAIN):
        return None if _is_same(before, value) else Set(value)
    if isinstance(before, _Copy) and type(before.value) is type(value) and _is_equal(before.value, value):
        return None
    if isinstance(value, np.ndarray) and value.nbytes > _LARGEST_ARRAY:
        return None
    return Set(value) if isinstance(value, (*_COPIED, list, dict)) else None


def _is_equal(before: Any, value: Any) -> bool:
    if isinstance(value, np.ndarray):
        kinds = (before.shape, before.dtype) == (value.shape, value.dtype)
        return kinds and bool(before.tobytes() == value.tobytes())
    if isinstance(value, deque):
        return len(before) == len(value) and all(map(operator.is_, before, value))
    return bool(before == value)


def _is_same(before: Any, value: Any) -> bool:
    if not isinstance(before, _Value):
        return False
    if isinstance(value, Tensor | tuple):
        return before.value is value and before.version == version_of(value)
    return type(before.value) is type(value) and bool(before.value == value)


def _apply(container: Any, key: Any, change: Any) -> None:
    """Makes one change to an entry of a list, a dict or a module's attributes."""
    if isinstance(change, Set):
        container[key] = change.value
    elif isinstance(change, Inside):
        for name, inner in change.attributes.entries.items():
            _apply(vars(container[key]), name, inner)
        for name in change.attributes.removed:
            vars(container[key]).pop(name, None)
    elif isinstance(change, Grown):
        grown = container[key]
        grown[change.length :] = change.items
        for index, inner in change.inside.items():
            _apply(grown, index, inner)
    else:
        for name, inner in change.entries.items():
            _apply(container[key], name, inner)
        for name in change.removed:
            container[key].pop(name, None)
