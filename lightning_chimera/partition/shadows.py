"""Attributes in front of a module's own, or another object's, for a while.

They live in the instance's ``__dict__``, where Python and ``nn.Module`` look before the class and the module's parts.
"""

from collections.abc import Sequence
from typing import Any

Shadow = tuple[Any, str, Any]
"""An attribute that is put in front of an object's own: the object, its name, and its value."""


class Shadows:
    """Puts attributes in front of objects' own for a while.

    A class, since a context for each pass that is made of a generator costs several times as much.

    Args:
        shadows: The attributes.
    """

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self._shadows = shadows
        self._before: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        for owner, name, value in self._shadows:
            own = owner.__dict__
            self._before.append({name: own[name]} if name in own else {})
            own[name] = value

    def __exit__(self, *_: object) -> None:
        for (owner, name, _value), before in zip(reversed(self._shadows), reversed(self._before), strict=True):
            owner.__dict__.pop(name, None)
            owner.__dict__.update(before)
