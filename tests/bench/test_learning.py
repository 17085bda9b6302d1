"""The learning bench: what it counts, what it keeps, and what its tables say."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.learning import figures
from bench.learning.case import Case, changes_of, learn, recipe_of
from bench.learning.choices import BY_NAME, CHOICES, NOTHING, Choice
from bench.learning.output import BEGIN, END, with_tables
from bench.learning.suite import RESULTS, cases, is_done, wanted
from bench.learning.task import DIGITS, TASKS
from bench.stored import write_result
from shared.errors import UserError
from shared.learning.algorithms import ALGORITHMS
from shared.recipe.recipe import load_recipe
from tests.paths import DEMO

TINY = {
    "batch.groups": 2, "batch.group_size": 3, "schedule.fragment_size": 3, "trainer.micro_batch": 3,
}  # fmt: skip
FEW = replace(DIGITS, always={**DIGITS.always, "evaluation.samples_per_prompt": 1})


def tiny(**changes: Any) -> Choice:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return Choice(name="tiny", title="tiny", changes=TINY | named, steps=1)


def test_the_baseline_is_the_demo_as_it_was() -> None:
    recipe = load_recipe(DIGITS.recipe)
    sampling, algorithm, trainer = recipe.sampling, recipe.algorithm, recipe.trainer
    assert (recipe.run.steps, recipe.batch.groups, recipe.batch.group_size) == (30, 10, 24)
    assert (sampling.steps, sampling.sigmas, sampling.noise_level) == (10, "linear", 0.7)
    assert (sampling.window, sampling.first_window_starts) == (3, (0, 2))
    assert (algorithm.name, algorithm.clip_range, algorithm.kl_beta) == ("flow-grpo", 2e-3, 1.0)
    assert (trainer.learning_rate, trainer.decay_steps, trainer.updates) == (3e-3, 30, 1)
    assert (trainer.ema, recipe.schedule.staleness_limit, recipe.rollout.workers) == (None, 0, 2)
    assert recipe.model.lora.rank == 16 and recipe.evaluation.samples_per_prompt == 20


def test_the_demo_is_the_benchs_best_choice() -> None:
    demo, best = load_recipe(DEMO), recipe_of(DIGITS, BY_NAME["best"], seed=0)
    for table in ("model", "data", "sampling", "batch", "algorithm", "reward"):
        assert getattr(demo, table) == getattr(best, table)
    same = {"deterministic": True}  # how the bench runs, not what is learned
    assert demo.trainer.model_copy(update=same) == best.trainer
    assert demo.run.steps == BY_NAME["best"].steps
    for key in ("steps", "sigmas", "digits"):
        assert getattr(demo.evaluation, key) == getattr(best.evaluation, key)


def test_every_choice_is_a_recipe_that_can_run() -> None:
    names = [choice.name for choice in CHOICES]
    assert len(names) == len(set(names))
    for choice in CHOICES:
        for name in choice.tasks:
            recipe = recipe_of(TASKS[name], choice, seed=3)
            assert recipe.run.seed == 3 and recipe.rollout.threads == 1
            assert recipe.evaluation.sigmas == "linear"  # all are judged alike


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_a_choice_of_a_named_algorithm_has_what_the_name_implies(choice: Choice) -> None:
    """But for the keys that the choice sets itself, which its result lists."""
    name = choice.changes.get("algorithm.name")
    tables = recipe_of(DIGITS, choice, seed=0).model_dump()
    for key, implied in (ALGORITHMS[name].implies if name else {}).items():
        table, field = key.split(".")
        assert tables[table][field] == choice.changes.get(key, implied), key
        assert changes_of(choice)[key] == choice.changes.get(key, implied)


def test_what_the_baseline_has_is_not_trained_under_an_algorithm_s_name() -> None:
    kl = {
        name: recipe_of(DIGITS, BY_NAME[name], seed=0).algorithm.kl_beta
        for name in ("base", "dance", "nft-decay-0", "nft-decay-1", "nft-decay-2")
    }
    assert kl == {
        "base": 1.0, "dance": 0.0, "nft-decay-0": 1e-4, "nft-decay-1": 1e-4, "nft-decay-2": 1e-4,
    }  # fmt: skip


def test_every_stored_result_is_of_its_choice_as_it_is_now() -> None:
    for choice in CHOICES:
        for name in choice.tasks:
            for seed in choice.seeds:
                case = Case(TASKS[name], choice, seed)
                assert is_done(case, RESULTS) or not (RESULTS / case.file).exists(), case.file


@pytest.mark.parametrize(
    ("changes", "rollout", "training"),
    [
        ({}, 2 * 3 * 10, 2 * 3 * 3 * 4),
        ({"algorithm.kl_beta": 0.0, "sampling.window": 1}, 2 * 3 * 10, 2 * 3 * 3),
        ({"sampling.steps": 6}, 2 * 3 * 6, 2 * 3 * 3 * 4),
    ],
)
def test_work_is_counted_at_the_network(
    changes: Mapping[str, Any], rollout: int, training: int
) -> None:
    from bench.learning.loop import Learning

    choice = replace(tiny(), changes=TINY | dict(changes))
    learning = Learning(recipe_of(DIGITS, choice, seed=0))
    [metrics] = learning.steps(1)
    assert learning.work.units == {"rollout": rollout, "training": training}
    assert metrics["onpolicy_ratio_error"] < 1e-5
    assert all(seconds > 0 for seconds in learning.work.seconds.values())


def test_one_step_generates_by_the_version_before_and_two_updates_are_two_steps() -> None:
    from bench.learning.loop import Learning

    changes = {"schedule__max_staleness": 1, "trainer__updates": 2}
    learning = Learning(recipe_of(DIGITS, tiny(**changes), seed=0))
    metrics = list(learning.steps(2))
    # The second half of a batch is trained at weights that have not generated it.
    assert [each["stale_fraction"] for each in metrics] == [0.5, 1]
    assert learning.trainer.num_steps == 2


@pytest.mark.slow
def test_a_case_is_judged_before_and_after_and_done_once_its_result_is_there(
    tmp_path: Path,
) -> None:
    case = Case(FEW, tiny(), seed=1)
    result = learn(case)
    before, after = result["evaluations"]
    assert (before["version"], after["version"], after["samples"]) == (0, 1, 6)
    assert figures.units(after) == 2 * 3 * (10 + 12)
    assert not is_done(case, tmp_path)
    write_result(tmp_path / case.file, result)
    assert is_done(case, tmp_path)
    other = replace(case, choice=tiny(trainer__learning_rate=1e-4))
    assert not is_done(other, tmp_path)


def evaluation(version: int, height: float, nn: float = 2.5, **more: float) -> dict[str, Any]:
    guards = {"nn": nn, "div": 3.0, "worst": 0.8} | more
    counted = {"units": {"rollout": 100 * version, "training": 50 * version}}
    seconds = {"seconds": {"rollout": version / 2, "training": version / 2}}
    judged = {"height": height, "gold": height + 0.01, "svm": height - 0.01}
    return {"version": version, "samples": 10 * version, **counted, **seconds, **judged, **guards}


def result(seed: int, *evaluations: dict[str, Any], choice: str = "base") -> dict[str, Any]:
    return {
        "task": "digits", "choice": choice, "seed": seed, "stops": False,
        "evaluations": [evaluation(0, 0.5, nn=2.9), *evaluations],
    }  # fmt: skip


LEARNED = result(0, evaluation(2, 0.9), evaluation(4, 1.0))
NEVER = result(1, evaluation(2, 0.6), evaluation(4, 0.7))


def test_the_cost_of_a_goal_is_linear_between_evaluations() -> None:
    assert figures.cost_of(LEARNED, 0.95, figures.units) == pytest.approx(450)
    assert figures.cost_of(LEARNED, 0.95, figures.steps) == pytest.approx(3)
    assert figures.cost_of(NEVER, 0.95, figures.units) is None
    assert figures.middle(figures.costs([LEARNED, NEVER, LEARNED], 0.9, figures.steps)) == 2
    assert figures.middle(figures.costs([LEARNED, NEVER, NEVER], 0.9, figures.steps)) is None


def test_the_area_is_the_mean_height_over_samples() -> None:
    assert figures.area(LEARNED, until=40) == pytest.approx((0.7 + 0.95) / 2)
    assert figures.area(LEARNED, until=20) == pytest.approx(0.7)
    assert figures.area(LEARNED, until=10) == pytest.approx(0.6)


def test_guards_are_those_of_every_evaluation_on_the_way() -> None:
    assert figures.guards(LEARNED).hold()
    on_the_way = result(0, evaluation(2, 0.9, nn=2.95), evaluation(4, 1.0))
    assert not figures.guards(on_the_way).hold()
    assert not figures.guards(result(0, evaluation(2, 0.9, div=2.4))).hold()
    low = figures.guards(result(0, evaluation(2, 0.9, worst=0.6)))
    assert not low.hold() and low.hold(keeps_accuracy=True)
    assert not figures.guards(result(0, evaluation(2, 0.4))).hold(keeps_accuracy=True)


def test_a_page_gets_a_row_per_choice_with_medians_and_spreads(tmp_path: Path) -> None:
    for each in (LEARNED, NEVER, {**LEARNED, "seed": 2}):
        (tmp_path / f"digits.base.{each['seed']}.json").write_text(json.dumps(each))
    page = with_tables(f"a\n{BEGIN}\nwas here\n{END}\nb\n", tmp_path)
    [row] = [line for line in page.splitlines() if "baseline" in line]
    assert row.startswith("| baseline: the demo until 2026-11 | 3 | 0.3 (0.3–never) | 0.4 (0.")
    assert "| hold |" in row and "was here" not in page
    assert page.startswith("a\n") and page.endswith("b\n")
    assert with_tables(page, tmp_path) == page


def test_a_command_names_choices_and_their_seeds() -> None:
    main = wanted(everything=False, names=(), task=None, most_seeds=None)
    assert {each.choice.name for each in main} >= {"base"}
    assert all(each.choice.is_main for each in main)
    two = wanted(everything=False, names=("base",), task="digits", most_seeds=2)
    assert [each.seed for each in two] == [0, 1]
    assert [each.seed for each in cases(DIGITS, [NOTHING], 3)] == [0, 1, 2]
    with pytest.raises(UserError, match="--choice: none is called 'best ever'"):
        wanted(everything=False, names=("best ever",), task=None, most_seeds=None)
