"""Planted bugs: patches of the code that really runs."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def planted(name: str) -> AbstractContextManager[None]:
    """Return what plants a bug in its block; nothing if ``name`` is empty."""
    return PLANTS[name]() if name else contextlib.nullcontext()
