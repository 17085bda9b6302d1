"""Modes by turns, so that whatever else the machine does hits all of them alike."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Mode = TypeVar("Mode")
Found = TypeVar("Found")


async def by_turns(
    modes: Sequence[Mode], rounds: int, measure: Callable[[Mode, int], Awaitable[Found]]
) -> list[tuple[Mode, list[Found]]]:
    """Measures every mode once per round, there and back: a machine may get slower over time."""
    found: list[tuple[Mode, list[Found]]] = [(mode, []) for mode in modes]
    for number in range(rounds):
        for mode, measured in found if number % 2 == 0 else reversed(found):
            measured.append(await measure(mode, number))
    return found
