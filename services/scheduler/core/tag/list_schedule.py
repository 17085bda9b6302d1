"""List scheduling of equal fragments by earliest completion, for classes of alike devices.

Alike devices finish at the same times, so one entry represents all of them: the cost grows with the
number of rounds and classes, and not with the number of devices.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Class = tuple[float, int]
"""Seconds of a fragment on each of these alike devices."""


@dataclass(frozen=True, slots=True)
class GenerationForecast:
    ready: list[float]
    """When each group is generated, in order of issue."""
    free: list[tuple[float, int, int]]
    """Times at which devices of a class, by its place, have generated everything."""


def completions(classes: Iterable[Class]) -> Iterator[tuple[float, int, int]]:
    """Yield when fragments are done, how many at a time and by which class, without end."""
    ends = [(seconds, place, count, seconds) for place, (seconds, count) in enumerate(classes)]
    heapq.heapify(ends)
    while ends:
        end, place, count, seconds = ends[0]
        yield end, count, place
        heapq.heapreplace(ends, (end + seconds, place, count, seconds))


def generate(
    classes: tuple[Class, ...], num_groups: int, fragments_per_group: int
) -> GenerationForecast:
    """Place the groups' fragments one after the other, each where it is done first.

    A slow device gets no fragment that a fast one would finish sooner. Fragments are thus done in
    the order of issue, and a group with its last.
    """
    ready: list[float] = []
    last: list[float] = [0.0] * len(classes)
    left, missing = num_groups * fragments_per_group, fragments_per_group
    rest: tuple[int, int, float] | None = None
    for done, count, place in completions(classes):
        if left <= 0:
            break
        number = min(count, left)
        left -= number
        if number < count:
            rest = place, count - number, last[place]
        last[place] = done
        while number >= missing and len(ready) < num_groups:
            ready.append(done)
            number, missing = number - missing, fragments_per_group
        missing -= number
    free = [
        (last[place], count - (rest[1] if rest is not None and rest[0] == place else 0), place)
        for place, (_, count) in enumerate(classes)
    ]
    if rest is not None:
        free.append((rest[2], rest[1], rest[0]))
    return GenerationForecast(ready, free)
