"""Keys that do not go together are refused in one line with a remedy."""

import re
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from shared.models.memory import WeightsHolding
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS, ROOT
from tests.shared.recipe.recipes import fault, with_algorithm, with_evaluation

NFT = 'name = "diffusion-nft"'
DRAWN = 'stochastic = "all"\ntrained = "random"\n'


@pytest.mark.parametrize(
    ("lines", "sampling", "said"),
    [
        ('name = "flow-gpo"', "", "algorithm.name: input should be 'flow-grpo'"),
        ('name = "cps"', 'variant = "flow"', "sampling.variant: cps does not sample with 'flow'"),
        ('name = "grpo-guard"', 'variant = "cps"', "use 'flow' or 'dance'"),
        (
            'name = "grpo-guard"\nstale_loss = "decoupled"',
            "",
            'algorithm.stale_loss: "decoupled" is not defined for grpo-guard; use "bypass"',
        ),
        ("nft_beta = 0.5", "", "algorithm.nft_beta: flow-grpo is trained on its own samples"),
        ('name = "cps"\nnft_decay = 1', "", 'set name to "diffusion-nft"'),
        (NFT, "shared_noise = true", "sampling.shared_noise: diffusion-nft samples without"),
        (NFT, 'stochastic = "all"', "sampling.stochastic: diffusion-nft samples without"),
        ("", 'trained = "random"', 'set stochastic to "all"'),
        (
            "",
            f"{DRAWN}first_window_starts = [0, 2]",
            "sampling.first_window_starts: places windows",
        ),
        ("", f"{DRAWN}roll_back = true", "sampling.roll_back: places windows"),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(
    tmp_path: Path, lines: str, sampling: str, said: str
) -> None:
    assert said in fault(with_algorithm(tmp_path, lines, sampling))


@pytest.mark.parametrize(
    ("sampling", "shared", "merged"),
    [
        ("first_window_starts = [0, 3]", 0.0, 0),
        ("first_window_starts = [0, 3]\nshared_noise = true", 2.5, 1),
        ('first_window_starts = [0, 3]\nshared_noise = true\nstochastic = "all"', 1.0, 0),
        ('shared_noise = true\nstochastic = "all"', 1.0, 1),
        (f"{DRAWN}shared_noise = true", 1.0, 1),
    ],
)
def test_steps_that_samples_have_in_common(
    tmp_path: Path, sampling: str, shared: float, merged: int
) -> None:
    found = load_recipe(with_algorithm(tmp_path, "", sampling)).sampling
    assert (found.shared_steps, found.merged_steps) == (shared, merged)


def test_keys_of_windows_that_a_name_implies_are_left_out_where_steps_are_drawn(
    tmp_path: Path,
) -> None:
    found = load_recipe(with_algorithm(tmp_path, 'name = "mix-grpo"', DRAWN)).sampling
    assert (found.windows, found.window_stride, found.roll_back) == ("group", None, False)
    assert found.shared_noise


SHARED = {"schedule.mode": "fluid", "trainer.devices": 2, "trainer.shard_devices": 2}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**SHARED, "trainer.deterministic": True}, "trainer.deterministic: ranks take fewer"),
        ({"model.trained": "full", "model.dtype": "float16"}, "model.dtype: gradients of all"),
        (
            {"model.trained": "full", "algorithm.kl_beta": 0.1, **SHARED},
            "trainer.shard_devices: devices do not share the weights that all weights are compared",
        ),
        (
            {"trainer.memory": "streamed"},
            "trainer.memory: blocks would stay on the device until the backward pass",
        ),
        (
            {**SHARED, "trainer.memory": "streamed", "trainer.gradient_checkpointing": "offloaded"},
            "trainer.memory: devices that share the weights hold a part",
        ),
        (
            {"trainer.memory": "streamed", "model.trained": "full", "algorithm.kl_beta": 0.0},
            "trainer.memory: weights that are trained stay on the device",
        ),
        (
            {"model.weights": "nf4", "model.trained": "full", "algorithm.kl_beta": 0.0},
            'model.weights: an adapter is trained on "nf4" weights, and no weight of theirs',
        ),
        (
            {"model.weights": "int8", **SHARED},
            'trainer.shard_devices: devices do not share "int8" weights',
        ),
        ({"model.weights": "bf16"}, "model.weights"),
        (
            {"rollout.memory": "streamed", "model.trained": "full", "algorithm.kl_beta": 0.0},
            "rollout.memory: weights that are trained stay on the device",
        ),
        (
            {"rollout.weights": "int8", "model.trained": "full", "algorithm.kl_beta": 0.0},
            "rollout.weights: every version of all weights would be converted again",
        ),
        (
            {"rollout.weights": "int8", "algorithm.name": "grpo-guard"},
            "rollout.weights: grpo-guard",
        ),
        (
            {"rollout.weights": "int8", "schedule.max_staleness": 1},
            'stale_loss: "bypass" would clip',
        ),
        ({"rollout.weights": "bf16", "trainer.updates": 2}, 'use "decoupled"'),
        ({"rollout.weights": "int4"}, "rollout.weights"),
        ({"rollout.weights": "int8", "rollout.weight_cap": 1.0}, "rollout.weight_cap"),
        ({"trainer.updates": 3}, "trainer.updates: 3 does not divide batch.groups (10)"),
        ({"trainer.ema": 1.0}, "trainer.ema"),
        (
            {"algorithm.cfg_gradient": "conditional"},
            "algorithm.cfg_gradient: without classifier-free guidance (model.guidance 1)",
        ),
        (
            {"model.compile": "regional", "rollout.memory": "streamed"},
            "rollout.memory: the blocks' weights come and go between their calls, set it to \"resi",
        ),
        (
            {"model.compile": "regional", **SHARED},
            "trainer.shard_devices: the blocks' weights come and go",
        ),
        (
            {"model.compile": "auto", "trainer.deterministic": True},
            'model.compile: "auto" depends on timings',
        ),
        ({"trainer.gradient_checkpointing": "some"}, "trainer.gradient_checkpointing"),
        (
            {"exchange.down": "int8", "model.trained": "full", "algorithm.kl_beta": 0.0},
            'exchange.down: "int8" does not go with model.trained as it is; set it to "exact", or',
        ),
        (
            {"exchange.up": "auto", "trainer.deterministic": True},
            'exchange.up: "auto" does not go with trainer.deterministic',
        ),
        ({"exchange.up": "int4", "trainer.exchange": "group"}, 'or trainer.exchange to "store"'),
        ({"exchange.up": "int8", **SHARED}, "or trainer.shard_devices to 1"),
        ({"exchange.down": "int2"}, "exchange.down"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_remedy(
    changes: dict[str, Any], said: str
) -> None:
    base = {"batch.groups": 10, "batch.group_size": 24}
    with pytest.raises(UserError) as error:
        override(load_recipe(DIGITS), {**base, **changes})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


TEN = "[1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]"


@pytest.mark.parametrize(
    ("lines", "sampling", "said"),
    [
        ("every = 0", "", "evaluation.every: input should be greater than 0, not 0"),
        ("evry = 3", "", "evaluation.evry: unknown key; did you mean every?"),
        ("steps = 1", "", "evaluation.steps: input should be greater than or equal to 2, not 1"),
        ("height = 0", "", "evaluation.height: input should be greater than 0"),
        ("steps = 4\nsigmas = [1.0, 0.5, 0.0]", "", "evaluation.sigmas: 3 numbers; 4 steps need 5"),
        ("steps = 2\nsigmas = [1.0, 1.0, 0.0]", "", "evaluation.sigmas: every number must be"),
        ("steps = 2\nsigmas = [0.8, 0.5, 0.0]", "", "so the first number must be 1, or nearly"),
        (
            "steps = 3\nsigmas = [1.0, 0.999999, 0.5, 0.0]",
            "",
            "evaluation.sigmas: only the first number may be as good as 1, and 0.999999 is as well",
        ),
        ('sigmas = "liner"', "", "evaluation.sigmas: "),
        (
            "steps = 40",
            f"sigmas = {TEN}",
            "evaluation.steps: sampling.sigmas are numbers, for 10 steps; give evaluation.sigmas "
            "as well, 41 numbers",
        ),
    ],
)
def test_an_evaluation_that_does_not_work_out_is_refused(
    tmp_path: Path, lines: str, sampling: str, said: str
) -> None:
    assert said in fault(with_evaluation(tmp_path, lines, sampling))


def test_an_evaluation_may_have_settings_of_its_own(tmp_path: Path) -> None:
    lines = 'every = 5\nsteps = 40\nsigmas = "shifted"'
    evaluation = load_recipe(with_evaluation(tmp_path, lines, f"sigmas = {TEN}")).evaluation
    assert (evaluation.every, evaluation.steps, evaluation.sigmas) == (5, 40, "shifted")


def test_the_models_own_sigmas_are_numbers_for_the_evaluations_steps_too(tmp_path: Path) -> None:
    path = with_evaluation(tmp_path, "steps = 4", 'sigmas = "model"')
    path.write_text(path.read_text().replace('"../../', f'"{ROOT}/'))
    recipe = load_recipe(path)
    assert len(recipe.sampling.sigmas) == 11
    assert recipe.evaluation.sigmas is not None and len(recipe.evaluation.sigmas) == 5
    assert override(recipe, {}) == recipe, "numbers are checked as numbers"


def test_a_group_that_no_message_takes_is_refused_with_the_largest_that_one_takes() -> None:
    recipe = load_recipe(DIGITS)
    scorers = recipe.reward.scorers * 4
    many = [scorer.model_copy(update={"name": f"s{n}"}) for n, scorer in enumerate(scorers)]
    plain = recipe.model_copy(update={"reward": recipe.reward.model_copy(
        update={"scorers": tuple(many)}
    )})  # fmt: skip
    plain = override(plain, {"trainer.micro_batch": 1})
    override(plain, {"batch.group_size": 64, "schedule.fragment_size": 1})
    with pytest.raises(UserError, match=r"batch\.group_size: 1024 .* at most (\d+)") as refused:
        override(plain, {"batch.group_size": 1024, "schedule.fragment_size": "auto"})
    found = re.search(r"at most (\d+)", str(refused.value))
    assert found is not None
    override(plain, {"batch.group_size": int(found[1]), "schedule.fragment_size": "auto"})


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.weights": "nf4", "rollout.memory": "streamed"},
        {"model.weights": "nf4", "algorithm.name": "grpo-guard", "model.compile": "regional"},
        {
            "rollout.weights": "int8",
            "schedule.max_staleness": 1,
            "algorithm.stale_loss": "decoupled",
        },
        {"rollout.weights": "int8", "schedule.max_staleness": 1, "algorithm.name": "diffusion-nft"},
        {"rollout.weights": "bf16", "model.dtype": "bfloat16"},
    ],
)
def test_what_weights_of_rollout_go_with(changes: dict[str, Any]) -> None:
    override(load_recipe(DIGITS), changes)


def test_rows_are_weighted_only_where_rollout_computes_with_other_weights() -> None:
    recipe = load_recipe(DIGITS)
    assert recipe.largest_weight is None
    half = override(recipe, {"rollout.weights": "bf16", "rollout.weight_cap": 3.0})
    assert half.largest_weight == 3.0
    assert override(half, {"model.dtype": "bfloat16"}).largest_weight is None
    base = override(recipe, {"model.weights": "int8"})
    assert base.largest_weight is None
    assert base.holding == base.trainer_holding == WeightsHolding("int8")
    assert override(base, {"rollout.weights": "int8"}).largest_weight is None
    assert override(base, {"rollout.weights": "w8a8"}).largest_weight == 1.1
    bfloat16 = {"model.dtype": "bfloat16", "rollout.weights": "bf16"}
    assert override(base, bfloat16).largest_weight == 1.1
