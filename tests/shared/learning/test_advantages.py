import json
import math
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.learning.advantages import Advantages, batch_scale, group_advantages, population_std
from tests.paths import VECTORS

CASES: list[dict[str, Any]] = json.loads((VECTORS / "advantages.json").read_text())

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_centred_advantages_scaled_by_the_batch_are_those_over_its_deviation(
    case: dict[str, Any],
) -> None:
    """What a trainer does that trains groups before the last reward is known."""
    prompts, rewards = case["prompts"], case["rewards"]
    std, scale = population_std(rewards), batch_scale(rewards)
    for prompt in set(prompts):
        group = [r for p, r in zip(prompts, rewards, strict=True) if p == prompt]
        found = [scale * value for value in Advantages(std="batch").for_group(group, {})]
        assert found == pytest.approx(group_advantages(group, std=std), abs=1e-9)


def test_scores_may_be_compared_one_by_one() -> None:
    """Scores are normalised so that large numbers do not drown the others."""
    parts = {"ocr": [0.0, 1.0, 1.0, 0.0], "size": [900.0, 100.0, 900.0, 100.0]}
    rewards = [2 * ocr - size for ocr, size in zip(*parts.values(), strict=True)]
    summed = Advantages().for_group(rewards, parts)
    assert summed == group_advantages(rewards)
    alone = Advantages(weights=(("ocr", 2.0), ("size", -1.0))).for_group(rewards, parts)
    ocr, size = (group_advantages(scores) for scores in parts.values())
    assert alone == pytest.approx([2 * a - b for a, b in zip(ocr, size, strict=True)])
    assert [round(value) for value in alone] == [-3, 3, 1, -1]


@given(rewards, st.data())
def test_a_sample_without_a_score_changes_no_other_s_advantage(
    rewards: list[float], data: st.DataObject
) -> None:
    failed = data.draw(st.sets(st.integers(0, len(rewards) - 1), max_size=len(rewards) // 2))
    given_ = [None if sample in failed else reward for sample, reward in enumerate(rewards)]
    rule = Advantages()
    found = rule.for_group(given_, {})
    known = [reward for reward in given_ if reward is not None]
    if rule.why_dropped(given_) is not None:
        assert failed and len(known) < 2 and found == (0.0,) * len(rewards)
        return
    assert [found[s] for s in range(len(rewards)) if s not in failed] == list(
        group_advantages(known)
    )
    assert all(found[sample] == 0 for sample in failed)


@pytest.mark.parametrize(
    ("failed", "limit", "is_dropped"),
    [(0, 0.0, False), (1, 0.0, True), (2, 0.5, False), (3, 0.5, True), (3, 0.9, True)],
)
def test_how_many_may_fail(failed: int, limit: float, is_dropped: bool) -> None:
    """At least two have to be left."""
    rewards = [None] * failed + [float(number) for number in range(4 - failed)]
    assert (Advantages(max_failed=limit).why_dropped(rewards) is not None) == is_dropped
