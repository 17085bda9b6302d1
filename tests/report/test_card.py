"""The model card says what the run was and what came of it, and its code works."""

import hashlib
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from digenrl.evaluation.records import EvaluationRecord, Quality
from digenrl.evaluation.sampler import Sampler
from digenrl.evaluation.settings import as_evaluated
from digenrl.local.running.display import make_console
from digenrl.reading.schedule import summarise_schedule
from digenrl.report.card import write_card
from digenrl.report.export import export_adapter
from digenrl.report.make import summarise
from digenrl.report.output import figure_fields, make_table
from digenrl.report.summary import Summary
from shared.diffusion.weights.trained_weights import load_weights, trained_tensors
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import CommitRecord
from tests import examples, tiny_models
from tests.paths import DIGITS, ROOT
from tests.report.tiny_recipes import HEIGHT, WIDTH, recipe_of
from tests.tiny_models import PROMPT

PICTURE = b"a picture"
BEFORE = Quality(
    reward=0.25, num_samples=40, rewards={"proxy": 0.125}, gold={"taste": 5.5}, gold_accuracy=0.5
)
AFTER = Quality(
    reward=0.75, num_samples=40, rewards={"proxy": 0.875}, gold={"taste": 4.5}, gold_accuracy=0.9375
)


def record(version: int) -> CommitRecord:
    if not version:
        return examples.record(0)
    metrics = {"reward_mean": 0.1 + version / 16, "onpolicy_ratio_error": 0.0}
    group = examples.trained_group(version=version - 1)
    return examples.record(version, trained=(group,), metrics=metrics)


def evaluated(chain: list[CommitRecord]) -> list[EvaluationRecord]:
    return [
        EvaluationRecord(
            run="test", policy=each.policy, settings="0" * 64, quality=quality, samples=(),
            worker="report", seconds=1.0,
        )
        for each, quality in ((chain[0], BEFORE), (chain[-1], AFTER))
    ]  # fmt: skip


def summary_of(recipe: Recipe) -> Summary:
    chain = [record(version) for version in range(4)]
    return summarise(
        recipe, chain, summarise_schedule([each.staleness.items() for each in chain], []),
        evaluated(chain), adapter_sha256="0" * 64, wall_seconds=1.0, report_seconds=1.0,
    )  # fmt: skip


def card(recipe: Recipe, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder.parent / "curve.png").write_bytes(PICTURE)
    path = write_card(
        folder, recipe, summary_of(recipe), folder.parent / "curve.png", figure_fields(recipe)
    )
    assert path == folder / "README.md"
    return path.read_text()


def block(text: str, language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    return str(found)


def test_a_hub_finds_what_the_adapter_is_for(tmp_path: Path) -> None:
    text = card(load_recipe(DIGITS), tmp_path / "adapter")
    assert text.startswith("---\n")
    assert yaml.safe_load(text.split("---\n")[1]) == {
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "base_model": "digits",
        "base_model_relation": "adapter",
        "tags": ["lora", "reinforcement-learning", "flow-grpo", "text-to-image", "digenrl"],
    }
    [picture] = re.findall(r"!\[[^]]+\]\((.*?)\)", text)
    assert (tmp_path / "adapter" / picture).read_bytes() == PICTURE


def test_the_figures_are_the_run_s_own(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    text = card(recipe, tmp_path / "adapter")
    assert "3 optimizer steps on 12 samples" in text
    assert "reward of the first batch 0.1625, of the last 0.2875" in text
    assert "40 samples of the prompts of training" in text
    for row in (
        "| training reward: digit-probability | 0.25 | 0.75 |",
        "| gold accuracy (held-out MLP) | 0.5 | 0.9375 |",
        "| `proxy` (trained on) | 0.125 | 0.875 |",
        "| `taste` (gold: never trained on) | 5.5 | 4.5 |",
        "| `proxy` | digit-probability | 1 |",
    ):
        assert row in text.splitlines()
    assert "SVM" not in text, "which nobody measured"
    assert "the gold reward taste fell from 5.5 to 4.5" in text
    data = hashlib.sha256(recipe.data.prompts.read_bytes()).hexdigest()
    assert f"`digits.prompts.jsonl`, 40 prompts, sha256 `{data}`" in text
    assert "The licence of the base model `digits` applies" in text
    assert str(ROOT) not in text, "a path of this machine"


def test_its_recipe_is_what_decided_the_update(tmp_path: Path) -> None:
    changes = {"sampling.sigmas": [1.0, 0.8, 0.5, 0.2, 0.0], "sampling.steps": 4,
               "sampling.window": 2, "sampling.first_window_starts": [0, 1],
               "trainer.learning_rate": 1e-5}  # fmt: skip
    recipe = override(load_recipe(DIGITS), {})
    plain = recipe.model_dump()
    for key, value in changes.items():
        table, name = key.split(".")
        plain[table][name] = value
    recipe = Recipe.model_validate(plain)
    found = tomllib.loads(block(card(recipe, tmp_path / "adapter"), "toml"))
    said = json.loads(recipe.model_dump_json())
    for table, keys in found.items():
        assert keys == {key: said[table][key] for key in keys}
    assert found["trainer"]["learning_rate"] == 1e-5
    assert found["model"]["lora"] == {
        "rank": 16, "alpha": 32.0, "targets": [], "experts": "both"
    }  # fmt: skip
    assert found["sampling"]["sigmas"] == [1.0, 0.8, 0.5, 0.2, 0.0]
    assert found["run"] == {"seed": 0, "steps": 30}


def test_prompts_that_are_elsewhere_are_named_all_the_same(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    moved = recipe.data.model_copy(update={"prompts": tmp_path / "elsewhere.parquet"})
    text = card(recipe.model_copy(update={"data": moved}), tmp_path / "adapter")
    assert text.split("## Data\n\n")[1].startswith("`elsewhere.parquet`\n")


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_its_code_draws_the_evaluation_s_own_first_sample(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses steps and a text length that differ from every pipeline's defaults."""
    changes = {"evaluation.steps": 4, "evaluation.sigmas": "shifted", "sampling.shift": 7.0}
    recipe = override(recipe_of(family, tmp_path), {**changes, "model.text_tokens": 20})
    adapter = tmp_path / "adapter"
    sampler = Sampler(as_evaluated(recipe))
    network = sampler.model.transformer
    tensors = {name: torch.full_like(one, 0.05) for name, one in trained_tensors(network).items()}
    export_adapter(adapter, tensors, recipe)
    load_weights(network, tensors)
    [wanted] = sampler.sample([PROMPT], num_each=1, seed=recipe.evaluation.seed)
    code = block(card(recipe, adapter), "python")
    assert json.dumps(PROMPT) in code and 'from_pretrained("model"' in code

    monkeypatch.chdir(adapter)
    Path("model").symlink_to(recipe.model.folder)  # which is how it is called on no hub
    seen: dict[str, Any] = {}
    exec(code, seen)
    assert seen["pipeline"].get_active_adapters() == ["default_0"]
    if family in tiny_models.VIDEO:
        drawn = np.asarray(seen["video"]).transpose(0, 3, 1, 2)
        drawn = drawn if drawn.dtype == np.uint8 else drawn * 255
        assert drawn.shape == (recipe.model.frames, 3, HEIGHT, WIDTH)
    else:
        drawn = np.asarray(seen["image"]).transpose(2, 0, 1)
    np.testing.assert_allclose(drawn, wanted, atol=1)  # of 255, which are rounded
    assert np.std(wanted) > 1, "something is to be seen"


@pytest.mark.parametrize(("number", "said"), [(0, "the prompts of training"), (3, "3 held-out")])
def test_table_and_card_say_which_prompts_are_evaluated(
    number: int, said: str, tmp_path: Path
) -> None:
    digits, screen = load_recipe(DIGITS), io.StringIO()
    summary = summary_of(digits).model_copy(update={"num_held_out": number})
    Console(file=screen, width=200).print(make_table(summary, figure_fields(digits)))
    assert f"before and after: 40 samples of {said}" in screen.getvalue()
    (tmp_path / "curve.png").write_bytes(PICTURE)
    (tmp_path / "adapter").mkdir()
    path = write_card(tmp_path / "adapter", digits, summary, tmp_path / "curve.png", {})
    assert f"40 samples of {said}" in path.read_text()


@pytest.mark.parametrize("averaged", [False, True])
def test_the_table_shows_the_weights_themselves_beside_their_average(averaged: bool) -> None:
    digits, screen = load_recipe(DIGITS), io.StringIO()
    itself = AFTER.model_copy(update={"gold_accuracy": 0.875}) if averaged else None
    summary = summary_of(digits).model_copy(update={"after_not_averaged": itself})
    Console(file=screen, width=200).print(make_table(summary, figure_fields(digits)))
    [row] = [line for line in screen.getvalue().splitlines() if "held-out MLP" in line]
    figures = ["0.500", "0.938", "+0.438", *(["0.875"] if averaged else [])]
    assert re.findall(r"[+\d.]{5,}", row) == figures
    assert ("not averaged" in screen.getvalue()) == averaged


LABEL = "training reward: jpeg-incompressibility + 10 x temporal-consistency, of some other videos"
FIGURES = ["0.500", "0.938", "+0.438", "0.875"]


@pytest.mark.parametrize("width", [80, 60])
def test_a_table_on_a_terminal_keeps_its_numbers_whatever_the_labels_are(width: int) -> None:
    """The label is wrapped; of counts and shares as well, nothing is cut."""
    counts = {0: 123456, 1: 123456}
    raw = AFTER.model_copy(update={"gold_accuracy": 0.875})
    summary = summary_of(load_recipe(DIGITS)).model_copy(update={"after_not_averaged": raw})
    assert summary.schedule is not None
    schedule = summary.schedule.model_copy(update={"staleness": counts, "utilisation": 0.5})
    screen = io.StringIO()
    table = make_table(summary.model_copy(update={"schedule": schedule}), {LABEL: "gold_accuracy"})
    Console(file=screen, width=width, force_terminal=True, color_system=None).print(table)
    text = screen.getvalue()
    assert re.findall(r"[+\d.]{5,}", text)[:4] == FIGURES
    assert len(re.findall(r"\b123456\b", text)) == 2 and "50%" in text and "…" not in text
    labels = "".join(line.split("│")[1].strip() for line in text.splitlines() if "│" in line)
    assert LABEL.replace(" ", "") in labels.replace(" ", "")
    assert max(map(len, text.splitlines())) <= width


def test_in_a_pipe_each_row_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    make_console().print(make_table(summary_of(load_recipe(DIGITS)), {LABEL: "gold_accuracy"}))
    [row] = [line for line in capsys.readouterr().out.splitlines() if LABEL in line]
    assert re.findall(r"[+\d.]{5,}", row) == FIGURES[:3]


def test_a_summary_has_figures_of_the_digits_where_they_were_measured_alone() -> None:
    plain = json.loads(summary_of(load_recipe(DIGITS)).model_dump_json())
    assert (plain["gold_accuracy_before"], plain["after"]["gold_accuracy"]) == (0.5, 0.9375)
    names = (*plain, *plain["before"])
    assert not [name for name in names if re.search("svm|digit|proxy|_nn", name)]
