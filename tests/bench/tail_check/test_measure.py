"""What a tail does to the digits' rewards, measured with the demo's model."""

from bench.tail_check.commands import lines
from bench.tail_check.measure import tail_check
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import DIGITS


def with_tail(tail: int, last: int = 2) -> Recipe:
    return override(
        load_recipe(DIGITS),
        {
            "sampling.steps": 10, "sampling.sigmas": "linear", "sampling.window": 1,
            "sampling.first_window_starts": (0, last), "sampling.tail": tail,
            "sampling.tail_correlation": 1.0, "sampling.shared_noise": True,
        },
    )  # fmt: skip


def test_a_tail_ranks_as_all_steps_do_if_it_is_not_too_coarse() -> None:
    good, bad = with_tail(4), with_tail(1, last=0)
    found, worse = (
        tail_check(recipe, num_prompts=2, num_samples=6, progress=lambda done, of: None)
        for recipe in (good, bad)
    )
    assert found.reward.groups == 2
    assert found.reward.within is not None and found.reward.within >= 0.9
    assert worse.reward.within is not None and worse.reward.within < 0.9
    said = list(lines(found, good))
    assert said[0].startswith(f"{good.model.name}: 7 steps beside all 10, 2 prompts")
    assert said[2].startswith("reward (decides)")
    assert said[-1] == (
        f"for the recipe: sampling.tail = 4, tail_correlation = {found.reward.within:.2f}"
    )
    assert list(lines(worse, bad))[-1].startswith("less than 0.9, which recipes need")
