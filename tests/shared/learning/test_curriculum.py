"""Prompts whose groups are saturated are drawn less often, and every process draws the same."""

from collections import Counter
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.learning.curriculum import BEHIND, Draws, Saturated, saturated
from shared.learning.prompts import PromptOrder
from shared.messages.contracts import Prompt
from shared.recipe.recipe import load_recipe
from tests.shared.recipe.recipes import changed

NUM, GROUPS, BATCHES = 12, 5, 200
PROMPTS = tuple(Prompt(text=f"prompt {number}") for number in range(NUM))
EASY = frozenset(range(0, NUM, 2))


def learned(order: PromptOrder, batches: int) -> tuple[list[list[int]], list[Saturated]]:
    """A run in which groups of every second prompt are saturated: prompts and what was seen."""
    drawn: list[list[int]] = []
    seen: list[Saturated] = []
    draws = order.first_draws(GROUPS)
    for batch in range(batches):
        prompts = [order.of_group(batch, group, GROUPS, draws) for group in range(GROUPS)]
        drawn.append([PROMPTS.index(prompt) for prompt in prompts])
        seen.append(tuple(prompt in EASY for prompt in drawn[-1]))
        draws = draws and draws.seeing(seen[-1:])
    return drawn, seen


def test_a_group_is_saturated_if_its_rewards_hardly_differ() -> None:
    assert saturated([[1.0, 1.0], [0.0, 1.0], [0.5, 0.5, 0.52]]) == (True, False, True)
    assert saturated([[1.0, 1.0], [1.0, 1.0]]) == (True, True)
    assert saturated([[None, 1.0], [], [0.0, 4.0]]) == (False, False, False), "unknown"
    assert saturated([]) == () and saturated([[None], [None]]) == (False, False)
    assert saturated([[9.0, 9.1], [0.0, 0.1]]) == (True, True), "prompts that differ in difficulty"


def test_prompts_of_saturated_groups_are_drawn_less_often_and_come_back() -> None:
    drawn, _ = learned(PromptOrder(PROMPTS, 3, 0.75), BATCHES)
    counts = Counter(prompt for batch in drawn for prompt in batch)
    easy, hard = (sum(counts[p] for p in ps) / 6 for ps in (EASY, set(range(NUM)) - EASY))
    assert 0.2 < easy / hard < 0.3
    late = {prompt for batch in drawn[BATCHES // 2 :] for prompt in batch}
    assert late == set(range(NUM))


def test_what_is_drawn_follows_from_the_seed_and_from_batches_three_before() -> None:
    drawn, seen = learned(PromptOrder(PROMPTS, 3, 0.75), 40)
    first = PromptOrder(PROMPTS, 3, 0.75).first_draws(GROUPS)
    assert first is not None
    for batch in range(40):
        known = seen[: max(0, batch - BEHIND + 1)]
        assert list(first.seeing(known).of_batch(batch)) == drawn[batch]
        assert list(first.seeing(seen[: batch + 1]).of_batch(batch)) == drawn[batch]
    assert learned(PromptOrder(PROMPTS, 4, 0.75), 40)[0] != drawn
    with pytest.raises(ValueError, match="batch 7 counts for batch 10"):
        first.seeing(seen[:7]).of_batch(10)
    with pytest.raises(ValueError, match=r"batch 7 .* long past"):
        first.seeing(seen[:11]).of_batch(7)


def test_the_prompts_of_the_newest_six_batches_are_known() -> None:
    """Three batches are drawn ahead of the newest rewards; the three before those are those that
    late fragments and encoders may still name."""
    drawn, seen = learned(PromptOrder(PROMPTS, 3, 0.75), 14)
    first = PromptOrder(PROMPTS, 3, 0.75).first_draws(GROUPS)
    assert first is not None
    known = first.seeing(seen[:11])
    for batch in (8, 9, 10, 11, 12, 13):
        assert list(known.of_batch(batch)) == drawn[batch]


def test_a_run_whose_prompts_are_all_saturated_goes_on() -> None:
    draws = Draws(seed=0, size=4, skipped=0.999, num_groups=3)
    for batch in range(30):
        assert len(draws.of_batch(batch)) == 3
        draws = draws.seeing([(True,) * 3])


def test_without_a_curriculum_prompts_take_turns() -> None:
    order = PromptOrder(PROMPTS, 3)
    drawn, _ = learned(order, 24)
    assert Counter(prompt for batch in drawn for prompt in batch) == dict.fromkeys(range(NUM), 10)
    first = [order.of_group(0, group, GROUPS) for group in range(GROUPS)]
    assert [PROMPTS.index(prompt) for prompt in first] == drawn[0]


def test_encoders_may_not_be_further_ahead_than_prompts_are_known(tmp_path: Path) -> None:
    lines = "curriculum = 0.5\n\n[encoder]\nworkers = 1\nahead = {}\n\n[sampling]"
    load_recipe(changed(tmp_path, "[sampling]", lines.format(2)))
    with pytest.raises(UserError, match=r"encoder\.ahead: 3 is more than data\.curriculum, .* 2"):
        load_recipe(changed(tmp_path, "[sampling]", lines.format(3)))
