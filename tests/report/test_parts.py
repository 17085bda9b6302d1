"""A report costs no adapter, which is exported first; each other part of it fails alone."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from digenrl.commands.cli import app
from digenrl.report.pictures import draw_gallery
from digenrl.report.stills import SampleSet
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.policy import load_policy
from shared.errors import UserError
from shared.messages.contracts import Policy
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.commits import commit
from shared.run.layout import weights_folder
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe

SCORER = "def score(images):\n    raise RuntimeError('no licence')\n"


async def store_run(store: ObjectStore, recipe: Recipe) -> None:
    """Store a run of two versions: an untrained adapter, and one of random numbers."""
    await store_recipe(store, recipe)
    loaded, run = load_policy(recipe, {"transformer"}, trains=True), recipe.run.name
    group, head = examples.trained_group(rewards=(0.0, 1.0)), None
    for version in (0, 1):
        if version:
            for tensor in loaded.trained.parameters.values():
                tensor.data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
        made = TrainerEngine(recipe, loaded).weights()
        [part] = made.weights
        ref = await store.put(weights_folder(run), bytes(part.pack()), suffix=".safetensors")
        head = examples.record(
            version, head, run=run, policy=Policy(version=version, weights_digest=made.digest),
            weights=ref, checkpoint=ref, trained=(group,) * version,
            metrics={"reward_mean": 0.5, "onpolicy_ratio_error": 0.0} if version else {},
        )  # fmt: skip
        await commit(store, head)


Report = Callable[..., Result]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Types `digenrl report` for a run of the digits with some changes."""

    def typed(**changes: Any) -> Result:
        few = {"run.name": "made", "evaluation.samples_per_prompt": 1, "evaluation.steps": 2}
        recipe = override(load_recipe(DIGITS), few | changes)
        asyncio.run(store_run(ObjectStore(FolderBackend(tmp_path / "objects")), recipe))
        monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path / 'objects'}")
        return CliRunner().invoke(app, ["report", "made", "--out", str(tmp_path / "out")])

    return typed


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    return found


def test_an_evaluation_that_fails_costs_its_figures_alone(report: Report, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCORER)
    mine = {"name": "mine", "type": "python", "source": f"{tmp_path}/mine.py:score"}
    ended = report(**{"evaluation.scorers": [mine]})
    assert ended.exit_code == 3, ended.output
    assert (tmp_path / "out/adapter/pytorch_lora_weights.safetensors").is_file()
    assert "## Results" in (tmp_path / "out/adapter/README.md").read_text()
    assert (tmp_path / "out/curve.png").is_file()
    summary = read(tmp_path)
    [failure] = summary["failures"]
    assert failure.startswith("evaluation: ") and "no licence" in failure
    assert (summary["before"], summary["reward_after"], summary["commits"]) == (None, None, 1)
    assert len(summary["adapter_sha256"]) == 64
    assert f"failed: {failure}" in ended.output.splitlines()
    assert "repeat it: digenrl report made" in ended.output


@pytest.mark.parametrize("names", [{"gallery.png", "curve.png"}, {"adapter"}, {"summary.json"}])
@pytest.mark.slow
def test_a_part_that_cannot_be_written_costs_no_other_part(
    names: set[str], report: Report, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / "out" / name).mkdir(parents=True)
    if names == {"adapter"}:
        (tmp_path / "out/adapter").rmdir()
        (tmp_path / "out/adapter").write_text("a file")
    ended = report()
    assert ended.exit_code == 3, ended.output
    parts = {"gallery.png", "curve.png", "summary.json", "adapter/README.md"}
    whole = {part for part in parts if part.split("/")[0] not in names}
    assert {part for part in parts if (tmp_path / "out" / part).is_file()} == whole
    assert all(f"failed: {name}: " in ended.output for name in names)
    if "summary.json" in whole:
        assert {each.split(":")[0] for each in read(tmp_path)["failures"]} == names
        assert read(tmp_path)["before"]["num_samples"] == 40


@pytest.mark.slow
def test_a_run_is_sampled_at_any_version_without_its_options(
    report: Report, tmp_path: Path
) -> None:
    """Rank, model and steps are the run's; of exported files, the rank is theirs."""
    table = {"rank": 3, "alpha": 6.0}
    assert report(**{"model.lora": table}).exit_code == 0

    def sampled(*words: str, what: str = "made") -> bytes:
        out = tmp_path / "samples"
        typed = ["generate", what, "--prompt", "a handwritten three", "--out", str(out)]
        found = CliRunner().invoke(app, [*typed, *words], catch_exceptions=False)
        assert found.exit_code == 0, found.output
        return (out / "000-0.png").read_bytes()

    newest, adapter = sampled(), str(tmp_path / "out" / "adapter")
    assert newest == sampled("--version", "1") == sampled("--adapter", adapter)
    assert newest == sampled("--adapter", adapter, what=str(DIGITS)), "whose rank is another"
    base = sampled("--version", "base")
    assert base == sampled("--version", "0") == sampled(what=str(DIGITS)) != newest
    assert sampled("--sampling.steps", "12") != newest
    for words, said in (
        (["made", "--version", "7"], "--version: there is no version 7; the newest is 1"),
        (["made", "--version", "1", "--adapter", adapter], "--version: not together with"),
        ([str(DIGITS), "--version", "1"], "--version: a recipe has no versions"),
    ):
        with pytest.raises(UserError, match=said):
            CliRunner().invoke(app, ["generate", *words, "--prompt", "x"], catch_exceptions=False)


@pytest.mark.parametrize(
    "prompt",
    ["", "  ", "$x^$ and {", "a\nb\tc", "画 🐈 " * 400, '<b>"x"</b> \\frac{', "\u202ea\x00b"],
)
@pytest.mark.parametrize("edits", [False, True])
def test_a_gallery_is_drawn_of_any_prompt(prompt: str, edits: bool, tmp_path: Path) -> None:
    stills = np.zeros((4, 3, 16, 16), np.uint8)
    side = SampleSet(stills, [prompt, prompt, "a cat", "a cat"], None, stills if edits else None)
    draw_gallery(tmp_path / "gallery.png", side, side)
    with Image.open(tmp_path / "gallery.png") as picture:
        assert picture.width < 4000 and picture.height < 4000
