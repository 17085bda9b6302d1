import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.advantage import group_advantages, population_std

VECTORS = Path(__file__).parents[1] / "vectors" / "advantages.json"
CASES: list[dict[str, Any]] = json.loads(VECTORS.read_text())

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def advantages_of(case: dict[str, Any]) -> list[float]:
    """Group by prompt, as the reference does, and put the results back in their places."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(case["prompts"]):
        places[prompt].append(index)
    std = population_std(case["rewards"]) if case["global_std"] else None
    found = [0.0] * len(case["rewards"])
    for indices in places.values():
        values = group_advantages([case["rewards"][i] for i in indices], std=std)
        for index, value in zip(indices, values, strict=True):
            found[index] = value
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_advantages_are_the_references(case: dict[str, Any]) -> None:
    found = advantages_of(case)
    assert found == pytest.approx(case["flow_grpo"], abs=1e-9)
    clipped = [max(-5.0, min(5.0, value)) for value in found]
    assert clipped == pytest.approx(case["flow_grpo_clip5"], abs=1e-9)


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    assert math.isclose(math.fsum(group_advantages(rewards)), 0.0, abs_tol=1e-6)


@given(st.floats(-10, 10), st.integers(1, 16))
def test_equal_rewards_carry_no_signal(reward: float, size: int) -> None:
    assert group_advantages([reward] * size) == (0.0,) * size
