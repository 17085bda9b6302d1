"""Results of tail checks are known again by what decides them, and by nothing else."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from digenrl.local.check import check
from digenrl.local.preflight import Request, prepare
from digenrl.tail.agreement import Agreement
from digenrl.tail.results import TailCheck, check_tail, digest_of_tail, keep, known
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import DIGITS

AGREED = Agreement(within=0.95, error=0.01, groups=4, overall=0.99)


def coarse(**changes: Any) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    sampling = {
        "sampling.steps": 10, "sampling.sigmas": "linear", "sampling.window": 1,
        "sampling.first_window_starts": (0, 2), "sampling.tail": 3,
    }  # fmt: skip
    return override(load_recipe(DIGITS), {**sampling, **dotted})


def result(recipe: Recipe, within: float | None = 0.95) -> TailCheck:
    return TailCheck(
        digest=digest_of_tail(recipe), model="digits", steps=10, num_steps=6, prompts=4, samples=8,
        reward=AGREED.model_copy(update={"within": within}), scorers={"proxy": AGREED},
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"run__seed": 7}, {"batch__groups": 20, "trainer__updates": 1}, {"algorithm__kl_beta": 2.0},
        {"trainer__learning_rate": 1e-3}, {"model__lora": {"rank": 4}}, {"rollout__workers": 1},
        {"sampling__tail_correlation": 0.5}, {"sampling__noise_level": 0.9},
    ],
)  # fmt: skip
def test_what_does_not_decide_a_result_does_not_ask_for_another(changes: dict[str, Any]) -> None:
    assert digest_of_tail(coarse(**changes)) == digest_of_tail(coarse())


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling__tail": 2}, {"sampling__sigmas": "shifted"}, {"sampling__shared_noise": True},
        {"sampling__first_window_starts": (0, 1)}, {"model__height": 16, "model__width": 16},
        {"model__guidance": 2.0}, {"algorithm__rewards": "normalised"},
    ],
)  # fmt: skip
def test_what_decides_a_result_does(changes: dict[str, Any]) -> None:
    assert digest_of_tail(coarse(**changes)) != digest_of_tail(coarse())


def test_other_weights_and_another_scorer_are_another_result(tmp_path: Path) -> None:
    own = coarse()
    model = tmp_path / "model"
    shutil.copytree(own.model.folder, model)
    moved = coarse(model__folder=model)
    assert digest_of_tail(moved) == digest_of_tail(own), "the same files under another path"
    weights = next(model.glob("transformer/*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert digest_of_tail(moved) != digest_of_tail(own)
    scorer = own.reward.scorers[0].model_copy(update={"weight": 2.0})
    reward = own.reward.model_copy(update={"scorers": (scorer,)})
    assert digest_of_tail(own.model_copy(update={"reward": reward})) != digest_of_tail(own)


def _file(folder: Path) -> Path:
    path = folder / "coarse.json"
    path.write_text(coarse(run__name="coarse").model_dump_json())
    return path


def test_a_run_needs_a_result_first(tmp_path: Path) -> None:
    recipe, path, runs = coarse(), _file(tmp_path), tmp_path / "runs"

    def begin() -> None:
        prepare(Request(path, {}, False, 0, runs)).lock.close()

    with pytest.raises(UserError) as raised:
        begin()
    said = str(raised.value)
    assert f"run `digenrl tail-check {path}` first" in said and "\n" not in said
    keep(runs, result(recipe, 0.85))
    with pytest.raises(UserError, match=r"of 0\.85 only, less than sampling\.tail_correlation"):
        begin()
    keep(runs, result(recipe, None))
    with pytest.raises(UserError, match="in none of 4 groups do rewards differ"):
        begin()
    assert not (runs / "coarse").exists()
    keep(runs, result(recipe))
    begin()
    assert (runs / "coarse").is_dir()


def test_results_are_beside_the_runs_so_that_nothing_deletes_them(tmp_path: Path) -> None:
    recipe = coarse()
    path = keep(tmp_path, result(recipe))
    assert path.relative_to(tmp_path).parts[0].startswith("."), "no run can have that name"
    assert known(tmp_path, recipe) == result(recipe)
    path.write_text("{")
    assert known(tmp_path, recipe) is None
    check_tail(load_recipe(DIGITS).with_whole_grid, DIGITS, tmp_path)


def test_check_says_what_is_known_of_a_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _file(tmp_path)
    [line] = [line for line in check(path).lines if "sampling.tail" in line]
    assert f"6 of 10 steps; run `digenrl tail-check {path}` before a run" in line
    keep(Path("runs"), result(coarse()))
    [line] = [line for line in check(path).lines if "sampling.tail" in line]
    assert "6 of 10 steps rank a group's samples as all do with a correlation of 0.95" in line
