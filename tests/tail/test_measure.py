"""What a tail does to the digits' rewards, measured with the demo's model."""

from pathlib import Path

import pytest

from digenrl.commands.tail_check import lines
from digenrl.tail.measure import tail_check
from digenrl.tail.results import check_tail, keep, why_refused
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import DIGITS


def with_tail(tail: int, last: int = 2) -> Recipe:
    return override(
        load_recipe(DIGITS),
        {
            "sampling.steps": 10, "sampling.sigmas": "linear", "sampling.window": 1,
            "sampling.first_window_starts": (0, last), "sampling.tail": tail,
            "sampling.shared_noise": True,
        },
    )  # fmt: skip


def test_a_tail_that_ranks_as_all_steps_do_may_be_used_and_a_bad_one_may_not(
    tmp_path: Path,
) -> None:
    good, bad = with_tail(4), with_tail(1, last=0)
    found = {
        tail: tail_check(recipe, num_prompts=2, num_samples=8, progress=lambda done, of: None)
        for tail, recipe in (("good", good), ("bad", bad))
    }
    assert found["good"].reward.groups == 2
    assert why_refused(good, found["good"]) is None
    assert (found["good"].num_steps, found["bad"].num_steps) == (7, 2)
    reason = why_refused(bad, found["bad"])
    assert reason is not None and "use more steps than 1" in reason
    assert list(lines(found["good"]))[2].startswith("reward (decides)")
    for each in found.values():
        keep(tmp_path, each)
    check_tail(good, DIGITS, tmp_path)
    with pytest.raises(UserError, match="with a correlation of"):
        check_tail(bad, DIGITS, tmp_path)
