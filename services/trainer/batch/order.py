"""In which order a batch's groups are trained."""

from collections.abc import AsyncIterator
from typing import Literal, TypeVar

Item = TypeVar("Item")


async def in_order(
    groups: AsyncIterator[tuple[int, Item]], order: Literal["arrival", "index"]
) -> AsyncIterator[tuple[int, Item]]:
    """(index, group) as they come, or held back until every smaller index has been given.

    A group that comes again, in a later attempt, replaces the one that is still held back; if that
    was given already, it is given as well.
    """
    held: dict[int, Item] = {}
    following = 0
    async for index, group in groups:
        if order == "arrival" or index < following:
            yield index, group
            continue
        held[index] = group
        while following in held:
            yield following, held.pop(following)
            following += 1
