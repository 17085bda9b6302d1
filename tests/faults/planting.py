"""Plants bugs by replacing names on the code that really runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from services.scheduler.sim.cluster import Cluster, build
from tests.faults import sweep

Mutant = Callable[[], AbstractContextManager[None]]


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, new in changes:
            stack.enter_context(patch.object(owner, name, new))
        yield


@contextmanager
def together(*managers: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


def built(change: Callable[[Cluster], None]) -> AbstractContextManager[None]:
    """Change every cluster once it is built."""

    def build_and_change(*args: Any, **options: Any) -> Cluster:
        cluster = build(*args, **options)
        change(cluster)
        return cluster

    return patched((sweep, "build", build_and_change))
