"""An algorithm's name implies keys of the recipe."""

from pathlib import Path

import pytest

from shared.recipe.recipe import implied_values, load_recipe
from tests.shared.recipe.recipes import with_algorithm


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
    assert sampling.moving_window.rule == moves


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
    """Its authors' script has 25 steps, a window of 4, 25 batches each and 300 in all."""
    text = with_algorithm(tmp_path, 'name = "mix-grpo"').read_text()
    path = tmp_path / "mix.toml"
    path.write_text(text.replace("steps = 12\nwindow = 3", "steps = 25\nwindow = 4"))
    windows = load_recipe(path).sampling.moving_window
    starts = [windows.start(0, batch, group=0) for batch in range(600)]
    assert starts[:300] == [batch // 25 for batch in range(300)]
    assert starts[21 * 25 :] == [batch // 25 for batch in range(75)]


@pytest.mark.parametrize(
    ("name", "shared", "stochastic", "trained"),
    [
        ("flow-grpo", False, "trained", "window"),
        ("dance-grpo", True, "all", "random"),
        ("mix-grpo", True, "trained", "window"),
    ],
)
def test_a_name_stands_for_the_noise_that_its_paper_s_groups_share(
    tmp_path: Path, name: str, shared: bool, stochastic: str, trained: str
) -> None:
    sampling = load_recipe(with_algorithm(tmp_path, f'name = "{name}"')).sampling
    found = (sampling.shared_noise, sampling.stochastic, sampling.trained)
    assert found == (shared, stochastic, trained)
    said = 'shared_noise = false\nstochastic = "trained"\ntrained = "window"'
    sampling = load_recipe(with_algorithm(tmp_path, f'name = "{name}"', said)).sampling
    assert (sampling.shared_noise, sampling.trained) == (False, "window")


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
        "sampling.variant", "sampling.noise_level", "algorithm.clip_range",
        "sampling.shared_noise", "sampling.stochastic", "sampling.trained", "algorithm.kl_beta",
    }  # fmt: skip
    assert {key for key, each in told.items() if each.is_overridden} == {"sampling.noise_level"}
    noise = told["sampling.noise_level"]
    assert (noise.implied, noise.value) == (0.3, 0.25)


def test_names_stand_for_the_spread_of_the_whole_batch_where_every_published_recipe_has_it(
    tmp_path: Path,
) -> None:
    for name, over in (("diffusion-nft", "batch"), ("awm", "batch"), ("flow-grpo", "group")):
        table = load_recipe(with_algorithm(tmp_path, f'name = "{name}"')).algorithm
        assert table.advantage_std == over
    table = load_recipe(with_algorithm(tmp_path, 'name = "awm"')).algorithm
    assert (table.advantage_clip, table.kl_beta) == (5.0, 1e-4)
    said = 'name = "diffusion-nft"\nadvantage_std = "group"'
    assert load_recipe(with_algorithm(tmp_path, said)).algorithm.advantage_std == "group"


def test_diffusion_nft_stands_for_its_old_policy(tmp_path: Path) -> None:
    table = load_recipe(with_algorithm(tmp_path, 'name = "diffusion-nft"')).algorithm
    assert (table.nft_decay, table.nft_beta, table.kl_beta) == (1, 1.0, 1e-4)
    said = 'name = "diffusion-nft"\nnft_decay = 2\nnft_beta = 0.1\nkl_beta = 0'
    table = load_recipe(with_algorithm(tmp_path, said)).algorithm
    assert (table.nft_decay, table.nft_beta, table.kl_beta) == (2, 0.1, 0.0)


@pytest.mark.parametrize(
    ("name", "zero_advantages"),
    [
        ("flow-grpo", "dropped"), ("flow-grpo-fast", "dropped"), ("cps", "dropped"),
        ("grpo-guard", "dropped"), ("dance-grpo", "kept"), ("mix-grpo", "kept"), ("awm", "kept"),
        ("diffusion-nft", "kept"),
    ],
)  # fmt: skip
def test_the_names_of_flow_grpo_drop_samples_without_advantage(
    tmp_path: Path, name: str, zero_advantages: str
) -> None:
    recipe = load_recipe(with_algorithm(tmp_path, f'name = "{name}"'))
    assert recipe.algorithm.zero_advantages == zero_advantages
    said = with_algorithm(tmp_path, f'name = "{name}"\nzero_advantages = "kept"')
    assert load_recipe(said).algorithm.zero_advantages == "kept"
