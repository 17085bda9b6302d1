"""Results that many readers share."""

import asyncio

import pytest

from shared.caches import SharedResults


async def test_concurrent_callers_share_one_computation_and_only_the_newest_values_stay() -> None:
    results: SharedResults[str, str] = SharedResults(2)
    computed: list[str] = []

    async def value(key: str) -> str:
        computed.append(key)
        await asyncio.sleep(0)
        return key

    found = await asyncio.gather(*(results.get("a", lambda: value("a")) for _ in range(50)))
    assert found == ["a"] * 50 and computed == ["a"]
    for key in ("b", "c", "b", "a"):
        await results.get(key, lambda key=key: value(key))  # type: ignore[misc]
    assert computed == ["a", "b", "c", "a"]


async def test_a_failure_is_not_kept_and_a_caller_that_leaves_does_not_end_the_work() -> None:
    results: SharedResults[int, int] = SharedResults(2)
    answers = [ValueError("the store is silent"), None, 3]

    async def value() -> int:
        answer = answers.pop(0)
        await asyncio.sleep(0.01)
        if isinstance(answer, ValueError):
            raise answer
        return answer  # type: ignore[return-value]

    with pytest.raises(ValueError, match="silent"):
        await results.get(0, value)
    assert await results.get(0, value) is None
    leaving = asyncio.create_task(results.get(0, value))
    await asyncio.sleep(0)
    staying = asyncio.create_task(results.get(0, value))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == 3 and answers == []
