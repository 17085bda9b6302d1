"""A recipe that is wrong says where and what to do, in one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from shared.recipe.implied import implied_values
from shared.recipe.recipe import Recipe, load_recipe, override, stored_recipe
from shared.run.run_recipe import check_same_run
from tests.paths import DIGITS, ROOT


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = DIGITS.read_text()
    assert old in text
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(old, new, 1))
    return path


def fault(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        load_recipe(path)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_demo_recipe_is_read_with_its_paths_made_absolute() -> None:
    recipe = load_recipe(DIGITS)
    assert recipe.model.folder == ROOT / "models" / "digits"
    assert recipe.data.prompts.is_absolute()


def test_a_resolved_recipe_can_be_read_back(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = tmp_path / "recipe.json"
    path.write_text(recipe.model_dump_json())
    assert load_recipe(path) == recipe


def test_a_base_in_another_folder_reads_the_files_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "recipe.toml"
    path.parent.mkdir()
    (tmp_path / "there").symlink_to(ROOT)
    path.write_text('base = "../there/recipes/digits.toml"\n[run]\nname = "mine"')
    recipe, base = load_recipe(path), load_recipe(DIGITS)
    assert recipe.run.name == "mine"
    assert recipe.model_copy(update={"run": base.run}) == base


def test_a_base_in_another_folder_may_name_what_the_hosts_folder_of_models_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.setenv("DIGENRL_MODELS", str(tmp_path / "models"))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "base.toml").write_text(f'base = "{DIGITS}"\n[model]\nfolder = "mine"')
    path = tmp_path / "recipe.toml"
    path.write_text('base = "below/base.toml"')
    assert load_recipe(path).model.folder == tmp_path / "models" / "mine"
    (tmp_path / "below" / "mine").mkdir()
    assert load_recipe(path).model.folder == tmp_path / "below" / "mine"


def test_what_a_recipe_says_itself_is_beside_it_whatever_its_base(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "base.toml").write_text(
        f'base = "{DIGITS}"\n[data]\nprompts = "p.txt"\n'
        '[[evaluation.scorers]]\nname = "gold"\ntype = "clip-score"\nfolder = "clip"'
    )
    path = tmp_path / "recipe.toml"
    path.write_text('base = "below/base.toml"\n[model]\nfolder = "model"')
    recipe = load_recipe(path)
    assert recipe.model.folder == tmp_path / "model"
    assert recipe.data.prompts == tmp_path / "below" / "p.txt"
    assert recipe.evaluation.scorers[0].folder == tmp_path / "below" / "clip"
    assert recipe.evaluation.digits == load_recipe(DIGITS).evaluation.digits


def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path) -> None:
    path = changed(tmp_path, "clip_range =", "clip_rnage =")
    assert "algorithm.clip_rnage: unknown key; did you mean clip_range?" in fault(path)


def test_an_unknown_key_in_a_nested_table_names_the_nearest_one(tmp_path: Path) -> None:
    path = changed(tmp_path, "rank = 16", "rnak = 16")
    assert "model.lora.rnak: unknown key; did you mean rank?" in fault(path)


def test_an_unknown_table_names_the_nearest_one(tmp_path: Path) -> None:
    path = changed(tmp_path, "[trainer]", "[trianer]")
    assert "did you mean trainer?" in fault(path)


def test_fragments_that_do_not_fill_a_group_name_the_nearest_that_do(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    text = DIGITS.read_text()
    recipe = load_recipe(DIGITS)
    path.write_text(
        text.replace(f"group_size = {recipe.batch.group_size}", "group_size = 24").replace(
            f"fragment_size = {recipe.schedule.fragment_size}", "fragment_size = 7"
        )
    )
    message = fault(path)
    assert "schedule.fragment_size: 7 does not divide batch.group_size (24)" in message
    assert message.endswith("nearest that do: 6 and 8")


def test_micro_batches_that_do_not_fill_a_group_name_the_nearest_that_do(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"micro_batch = {recipe.trainer.micro_batch}", "micro_batch = 5")
    message = fault(path)
    assert "trainer.micro_batch: 5 does not divide batch.group_size" in message
    assert "nearest that do" in message


def test_a_window_that_reaches_the_last_step_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"window = {recipe.sampling.window}", "window = 10")
    assert "window" in fault(path)


def test_a_value_of_the_wrong_type_is_shown(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"steps = {recipe.run.steps}", 'steps = "many"')
    message = fault(path)
    assert "run.steps" in message and "'many'" in message


def test_a_name_that_would_leave_its_folder_is_refused(tmp_path: Path) -> None:
    assert "run.name" in fault(changed(tmp_path, 'name = "digits"', 'name = "../digits"'))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"groups = {recipe.batch.groups}", "")
    assert "batch.groups: missing" in fault(path)


@pytest.mark.parametrize("text", ["[run", "\x00", "run = 1"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    assert str(path) in fault(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "cannot read the recipe" in fault(tmp_path / "nowhere.toml")


def test_a_key_set_anew_is_checked_as_if_it_stood_in_the_file() -> None:
    recipe = load_recipe(DIGITS)
    assert override(recipe, {"run.steps": 5, "run.name": None}).run.steps == 5
    with pytest.raises(UserError, match=r"run\.steps"):
        override(recipe, {"run.steps": 0})


def test_a_resumed_run_may_take_more_steps_but_not_another_seed() -> None:
    recipe = load_recipe(DIGITS)
    check_same_run(recipe, override(recipe, {"run.steps": 77, "rollout.workers": 5}))
    with pytest.raises(UserError, match=r"run\.seed.*resume with that value"):
        check_same_run(recipe, override(recipe, {"run.seed": 99}))


def with_algorithm(tmp_path: Path, lines: str, sampling: str = "") -> Path:
    """The demo's recipe with another algorithm table, and a sampling table of these lines."""
    head, _, rest = DIGITS.read_text().partition("[sampling]")
    after = rest[rest.index("\n[") :]
    while "[algorithm]" in after:
        before, _, tail = after.partition("[algorithm]")
        after = before + (tail[tail.index("\n[") :] if "\n[" in tail else "")
    path = tmp_path / "recipe.toml"
    tables = f"[sampling]\nsteps = 12\nwindow = 3\n{sampling}\n[algorithm]\n{lines}\n"
    path.write_text(head + tables + after)
    return path


@pytest.mark.parametrize(
    ("name", "variant", "starts", "moves"),
    [
        ("flow-grpo", "flow", (0, 0), "group"),
        ("flow-grpo-fast", "flow", (0, 3), "group"),
        ("cps", "cps", (0, 0), "group"),
        ("dance-grpo", "dance", (0, 0), "group"),
        ("mix-grpo", "flow", (0, 8), "progressive"),
        ("grpo-guard", "flow", (0, 0), "group"),
        ("diffusion-nft", "flow", (0, 0), "group"),
    ],
)
def test_an_algorithm_implies_its_sampling(
    tmp_path: Path, name: str, variant: str, starts: tuple[int, int], moves: str
) -> None:
    recipe = load_recipe(with_algorithm(tmp_path, f'name = "{name}"'))
    sampling = recipe.sampling
    assert (sampling.variant, sampling.first_window_starts) == (variant, starts)
    assert sampling.moving_window.moves == moves


def test_what_a_recipe_says_of_sampling_goes_before_what_its_algorithm_implies(
    tmp_path: Path,
) -> None:
    lines = 'variant = "cps"\nfirst_window_starts = [1, 2]\nwindows = "decay"\nwindow_stride = 2'
    sampling = load_recipe(with_algorithm(tmp_path, 'name = "mix-grpo"', lines)).sampling
    assert (sampling.variant, sampling.first_window_starts) == ("cps", (1, 2))
    assert (sampling.windows, sampling.moving_window.stride) == ("decay", 2)


@pytest.mark.parametrize(
    ("name", "noise_level", "clip_range"),
    [
        ("flow-grpo", 0.7, 1e-4),
        ("flow-grpo-fast", 0.8, 1e-5),
        ("cps", 0.8, 1e-5),
        ("dance-grpo", 0.3, 1e-4),
        ("mix-grpo", 0.7, 1e-4),
        ("grpo-guard", 0.7, 2e-6),
    ],
)
def test_a_name_stands_for_the_noise_and_the_clip_of_its_paper(
    tmp_path: Path, name: str, noise_level: float, clip_range: float
) -> None:
    recipe = load_recipe(with_algorithm(tmp_path, f'name = "{name}"'))
    assert (recipe.sampling.noise_level, recipe.algorithm.clip_range) == (noise_level, clip_range)
    said = with_algorithm(tmp_path, f'name = "{name}"\nclip_range = 0.5', "noise_level = 2.0")
    recipe = load_recipe(said)
    assert (recipe.sampling.noise_level, recipe.algorithm.clip_range) == (2.0, 0.5)


def test_mix_grpo_moves_by_one_step_and_begins_again(tmp_path: Path) -> None:
    """As its authors' script does: 25 steps, a window of 4, 25 batches each, 300 in all."""
    text = with_algorithm(tmp_path, 'name = "mix-grpo"').read_text()
    path = tmp_path / "mix.toml"
    path.write_text(text.replace("steps = 12\nwindow = 3", "steps = 25\nwindow = 4"))
    windows = load_recipe(path).sampling.moving_window
    starts = [windows.start(0, batch, group=0) for batch in range(600)]
    assert starts[:300] == [batch // 25 for batch in range(300)]
    assert starts[21 * 25 :] == [batch // 25 for batch in range(75)]


def test_a_random_window_is_drawn_for_every_batch(tmp_path: Path) -> None:
    lines = 'name = "mix-grpo"'
    drawn = load_recipe(with_algorithm(tmp_path, lines, 'windows = "random"')).sampling
    assert drawn.window_batches == 1
    said = 'windows = "random"\nwindow_batches = 7'
    assert load_recipe(with_algorithm(tmp_path, lines, said)).sampling.window_batches == 7
    assert load_recipe(with_algorithm(tmp_path, lines)).sampling.window_batches == 25


def test_what_a_name_stands_for_is_told_beside_what_the_recipe_has(tmp_path: Path) -> None:
    path = with_algorithm(tmp_path, 'name = "dance-grpo"', "noise_level = 0.25")
    told = {each.key: each for each in implied_values(load_recipe(path))}
    assert told.keys() == {
        "sampling.variant", "sampling.windows", "sampling.noise_level", "algorithm.clip_range",
    }  # fmt: skip
    assert {key for key, each in told.items() if each.is_overridden} == {"sampling.noise_level"}
    noise = told["sampling.noise_level"]
    assert (noise.implied, noise.value) == (0.3, 0.25)


def test_a_key_without_an_effect_is_refused(tmp_path: Path) -> None:
    path = with_algorithm(tmp_path, 'name = "diffusion-nft"\nnft_beta = 0.1')
    said = fault(path)
    assert "algorithm.nft_beta: it cancels out of the gradient" in said and "leave it out" in said


def test_a_stored_run_keeps_what_it_had(tmp_path: Path) -> None:
    """In the words of releases that had fewer keys, and one that did nothing."""
    recipe = load_recipe(with_algorithm(tmp_path, 'name = "mix-grpo"'))
    plain = recipe.model_dump(mode="json")
    plain["algorithm"] |= {"nft_beta": 1.0, "clip_range": 1e-4}
    plain["sampling"] |= {"window_stride": None, "noise_level": 0.9}
    plain["trainer"]["ema"] = 0.99
    del plain["sampling"]["roll_back"], plain["trainer"]["ema_warmup"]
    found = stored_recipe(json.dumps(plain).encode())
    windows = found.sampling.moving_window
    assert (windows.stride, windows.rolls_back) == (recipe.sampling.window, False)
    assert (found.sampling.noise_level, found.trainer.ema_warmup) == (0.9, False)
    assert stored_recipe(found.model_dump_json().encode()) == found
    check_same_run(found, Recipe.model_validate(found.model_dump()))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('[trainer]\norder = "index"', 'trainer.order: "index" is renamed to deterministic = true'),
        ('[trainer]\norder = "arrival"', "is renamed to deterministic = false"),
        ('[schedule]\nmode = "naive"', 'schedule.mode: "naive" is renamed to mode = "sequential"'),
    ],
)
def test_a_key_or_value_of_an_earlier_release_is_refused_with_its_new_name(
    tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'base = "{DIGITS}"\n{line}')
    assert said in fault(path)
    table, key, value = re.split(r"\W+", line.strip('["'))
    with pytest.raises(UserError, match="is renamed to"):
        override(load_recipe(DIGITS), {f"{table}.{key}": value})


@pytest.mark.parametrize(("order", "deterministic"), [("index", True), ("arrival", False)])
def test_a_stored_run_is_read_by_the_names_that_it_had(order: str, deterministic: bool) -> None:
    recipe = load_recipe(DIGITS)
    plain = recipe.model_dump(mode="json")
    del plain["trainer"]["deterministic"]
    plain["trainer"]["order"] = order
    plain["schedule"]["mode"] = "naive"
    found = stored_recipe(json.dumps(plain).encode())
    changes = {"trainer.deterministic": deterministic, "schedule.mode": "sequential"}
    assert found == override(recipe, changes)


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
        ('advantage_std = "batch"\nkl_beta = 0.1', "", "set kl_beta to 0"),
        ('name = "diffusion-nft"\nadvantage_std = "batch"', "", 'use "group"'),
        ('advantage_std = "batch"\nrewards = "normalised"', "", "advantage_std"),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(
    tmp_path: Path, lines: str, sampling: str, said: str
) -> None:
    assert said in fault(with_algorithm(tmp_path, lines, sampling))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer.sharded": True}, "trainer.sharded: shares weights among ranks"),
        (
            {"trainer.ranks": 5, "trainer.sharded": True},
            "trainer.ranks: 5 does not divide batch.group_size (24); nearest that do: 4 and 6",
        ),
        ({"trainer.ranks": 2, "trainer.devices": 2}, "trainer.devices: every rank has one"),
        ({"trainer.ranks": 2, "trainer.deterministic": True}, "trainer.ranks: sums gradients"),
        (
            {"trainer.ranks": 2, "schedule.mode": "colocated", "rollout.workers": 0},
            "trainer.ranks: ranks do not generate",
        ),
        ({"model.trained": "full", "model.dtype": "bfloat16"}, "model.dtype: all weights are"),
        ({"model.trained": "full", "algorithm.kl_beta": 0.1}, "algorithm.kl_beta: the reference"),
        (
            {"model.trained": "full", "algorithm.kl_beta": 0.0, "rollout.can_train": True},
            "rollout.can_train: gradients of all weights",
        ),
        ({"trainer.updates": 3}, "trainer.updates: 3 does not divide batch.groups (10)"),
        ({"trainer.updates": 2, "rollout.can_train": True}, "trainer.updates: rollout devices"),
        (
            {"trainer.updates": 2, "algorithm.advantage_std": "batch", "algorithm.kl_beta": 0.0},
            'trainer.updates: algorithm.advantage_std "batch"',
        ),
        ({"trainer.ema": 1.0}, "trainer.ema"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_remedy(
    changes: dict[str, Any], said: str
) -> None:
    base = {"batch.groups": 10, "batch.group_size": 24, "rollout.can_train": False}
    with pytest.raises(UserError) as error:
        override(load_recipe(DIGITS), {**base, **changes})
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def with_evaluation(tmp_path: Path, lines: str, sampling: str = "") -> Path:
    """The demo's recipe with these lines in its evaluation, and these instead of its sigmas."""
    text = DIGITS.read_text().replace("[evaluation]", f"[evaluation]\n{lines}", 1)
    if sampling:
        text = text.replace('sigmas = "linear"', sampling, 1)
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


TEN = "[1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]"


@pytest.mark.parametrize(
    ("lines", "sampling", "said"),
    [
        ("every = 0", "", "evaluation.every: input should be greater than 0, not 0"),
        ("evry = 3", "", "evaluation.evry: unknown key; did you mean every?"),
        ("steps = 1", "", "evaluation.steps: input should be greater than or equal to 2, not 1"),
        ("height = 0", "", "evaluation.height: input should be greater than 0"),
        (
            "steps = 4\nsigmas = [1.0, 0.5, 0.0]",
            "",
            "evaluation.sigmas: 3 numbers; 4 steps need 5",
        ),
        ("steps = 2\nsigmas = [1.0, 1.0, 0.0]", "", "evaluation.sigmas: every number must be"),
        (
            "steps = 2\nsigmas = [0.8, 0.5, 0.0]",
            "",
            "so the first number must be 1, or nearly",
        ),
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
    text = path.read_text().replace('"../', f'"{ROOT}/')
    path.write_text(text.replace('"digits.prompts', f'"{DIGITS.parent}/digits.prompts'))
    recipe = load_recipe(path)
    assert len(recipe.sampling.sigmas) == 11
    assert recipe.evaluation.sigmas is not None and len(recipe.evaluation.sigmas) == 5
    assert override(recipe, {}) == recipe, "numbers are checked as numbers"


def test_a_resumed_run_may_be_evaluated_in_another_way() -> None:
    recipe = load_recipe(DIGITS)
    changes = {"every": 2, "steps": 30, "sigmas": "shifted", "height": 4, "width": 4, "threads": 2}
    others = {f"evaluation.{key}": value for key, value in changes.items()}
    check_same_run(recipe, override(recipe, others))


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
