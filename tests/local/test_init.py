"""`digenrl init` writes a first recipe for a model, prompts and a reward, or lists all faults."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.checking.reward_trial import RewardTrialResult
from digenrl.local.first_recipe import InitRequest, first_tables, recipe_from, write_recipe
from digenrl.local.first_run import first_run, reward_lines
from shared.errors import ScoringError, UserError
from shared.recipe.files import merged, read_layers
from shared.recipe.recipe import Recipe, load_recipe
from shared.recipe.toml import explained_toml
from tests import tiny_models
from tests.local.test_verdict import with_gpus
from tests.paths import RECIPES

REWARD = "def score(image, prompt):\n    return image.mean() / 255\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a reward, on a machine without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bright.py").write_text(REWARD)
    return tmp_path


def request(
    model: Path | str | None, *prompts: str, rewards: tuple[str, ...] = ("bright.py",)
) -> InitRequest:
    return InitRequest(str(model or ""), prompts, rewards, Path("mine.toml"), {})


def faults(asked: InitRequest) -> list[str]:
    with pytest.raises(UserError) as refused:
        list(first_run(asked, sampled=False, say=print))
    return str(refused.value).splitlines()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_explained_recipe_has_the_same_values(path: Path) -> None:
    tables = merged(read_layers(path))

    assert tomllib.loads("\n".join(explained_toml(tables, Recipe))) == tables


def test_every_key_has_its_meaning_above_it() -> None:
    tables = {"trainer": {"learning_rate": 1e-4}, "schedule": {"mode": "fluid"}}
    lines = list(explained_toml(tables, Recipe))

    assert lines[:4] == ["", "[trainer]", "# Learning rate of AdamW", "learning_rate = 0.0001"]
    assert lines[-2].startswith("# `fluid`: each device generates, trains and")


def test_all_faults_are_listed_at_once(folder: Path) -> None:
    (folder / "mine.toml").touch()
    asked = request("no-model", "no.txt", rewards=("no.py:score", "pickscore", "judge"))

    lines = faults(asked._replace(options={"batch.groups": 0}))

    beginnings = ["--model: no folder", "--prompts: no file", "--reward: cannot read"]
    beginnings += ["--reward: no scorer", "--reward: judge needs judge", "--out: mine.toml"]
    beginnings += ["--batch.groups: input should be greater than 0"]
    assert all(
        line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True)
    )


def test_faults_name_the_options_that_were_typed(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "no.txt").touch()
    (folder / "bright.py").write_text(REWARD.replace("score", "grade"))

    model, prompts, reward = faults(request("empty", "no.txt"))

    assert model.startswith("--model: ") and model.endswith("or a model of the hub as --model")
    assert prompts == "--prompts: no.txt holds no prompt"
    assert reward.startswith("--reward: ") and reward.endswith("--reward bright.py:name")
    asked = request("empty")._replace(options={"data.prompts": "no.txt"})
    assert asked.name_options("data.prompts: no file") == "--data.prompts: no file"


def test_what_is_missing_is_named(folder: Path) -> None:
    lines = faults(request(None, rewards=()))

    assert [line.partition(":")[0] for line in lines] == ["--model", "--prompts", "--reward"]


@pytest.mark.parametrize("prompt", ["a fox", "prompts.txt"])
def test_a_recipe_that_cannot_be_written_is_a_fault_before_anything_is_traced(
    folder: Path, prompt: str
) -> None:
    (folder / "prompts.txt").write_text("a fox\na hare\n")
    asked = request(None, prompt)._replace(out=folder / "bright.py" / "mine.toml")
    assert faults(asked)[-1] == "--out: File exists; name another file"


def test_an_empty_prompt_is_a_missing_one(folder: Path) -> None:
    assert any(line.startswith("--prompts: missing") for line in faults(request(None, " ")))


def test_a_folder_that_holds_no_model_leaves_no_file(folder: Path) -> None:
    (folder / "empty").mkdir()
    words = ["init", "--model", "empty", "--prompts", "a fox", "--reward", "bright.py"]

    refused = CliRunner().invoke(app, words)

    assert "is not a diffusers model" in str(refused.exception)
    assert sorted(path.name for path in folder.iterdir()) == ["bright.py", "empty"]


@pytest.mark.parametrize("family", tiny_models.but_slow(["flux"]))
def test_the_recipe_fits_the_model_and_a_cpu(folder: Path, family: str) -> None:
    model = tiny_models.save(family, folder / "model")
    image = {"image": "a.png"} if family in tiny_models.EDITS else {}
    rows = "".join(f"{json.dumps({'prompt': str(n), **image})}\n" for n in range(10))
    (folder / "prompts.jsonl").write_text(rows)
    tiny_models.picture(16, 16).save(folder / "a.png")
    asked = request(model, "prompts.jsonl")

    tables = first_tables(asked)
    write_recipe(asked, tables, "the CPU")

    recipe = load_recipe(asked.out)
    assert recipe == recipe_from(asked, tables)
    assert (recipe.model.device, recipe.model.dtype) == ("cpu", "float32")
    assert recipe.evaluation.held_out == 2
    assert 'folder = "model"' in asked.out.read_text()


def scores(*numbers: float | None) -> list[RewardTrialResult]:
    return [
        RewardTrialResult(image=f"{n}.png", prompt="a fox", score=score, reason="NameError: no x")
        for n, score in enumerate(numbers)
    ]


def test_the_samples_show_what_training_prefers() -> None:
    lines = list(reward_lines([scores(0.1, 0.3), scores(0.1, 0.0)], [1.0, -1.0]))

    assert lines[0] == "  0.png  0  a fox"
    assert "like 1.png (0.3) more frequent, and like 0.png (0) rarer" in lines[-1]
    assert "all rewards are equal" in list(reward_lines([scores(1, 1)], [1.0]))[-1]


def test_a_sample_without_a_reward_is_an_error_after_its_reason() -> None:
    lines = reward_lines([scores(None)], [1.0])

    assert next(lines) == "  0.png  no reward: NameError: no x  a fox"
    with pytest.raises(ScoringError, match="1 of 1 samples have no reward"):
        next(lines)


@pytest.mark.slow
def test_init_ends_with_four_samples_of_the_model(folder: Path) -> None:
    tiny_models.save("flux", folder / "model")
    words = ["init", "--model", "model", "--prompts", "a fox", "--reward", "bright.py"]

    done = CliRunner().invoke(app, words, catch_exceptions=False)

    assert done.exit_code == 0
    assert "this can run here: on the CPU" in done.stdout
    assert len(list((folder / "mine.samples").iterdir())) == 4
    assert CliRunner().invoke(app, ["check", "mine.toml"]).exit_code == 0


@pytest.mark.slow
def test_init_plans_for_the_gpus_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(folder / "bin", monkeypatch, 2)
    tiny_models.save("flux", folder / "model")
    words = ["init", "--model", "model", "--prompts", "a fox", "--reward", "bright.py"]

    done = CliRunner().invoke(app, [*words, "--no-samples"], catch_exceptions=False)

    assert "this can run here: on 2 x NVIDIA H100" in done.stdout
    assert load_recipe(Path("mine.toml")).trainer.devices == 2
