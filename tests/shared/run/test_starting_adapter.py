"""The LoRA that a run begins from is part of the run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe
from shared.run.files import check_files
from shared.run.run_recipe import FILES, read_recipe
from shared.store import ObjectStore
from tests.report.tiny_recipes import recipe_of
from tests.stored_recipe import store_recipe

LAYER = "transformer.transformer_blocks.0.attn.to_q"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    recipe_of("flux", tmp_path)
    plain = json.loads((tmp_path / "recipe.json").read_text())
    del plain["model"]["lora"]
    plain["model"]["adapter"] = "sft.safetensors"
    (tmp_path / "recipe.json").write_text(json.dumps(plain))
    lora(tmp_path / "sft.safetensors", seed=0)
    return load_recipe(tmp_path / "recipe.json")


def lora(file: Path, *, seed: int, rank: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"A": (rank, 32), "B": (32, rank)}
    save_file(
        {
            f"{LAYER}.lora_{n}.weight": torch.randn(*s, generator=generator)
            for n, s in shapes.items()
        },
        file,
    )


async def test_its_rank_and_layers_are_those_of_the_run(
    recipe: Recipe, folder_store: ObjectStore
) -> None:
    assert (recipe.model.lora.rank, recipe.model.lora.alpha) == (3, 3.0)
    assert recipe.model.lora.targets == ("transformer_blocks.0.attn.to_q",)
    await store_recipe(folder_store, recipe)
    assert await read_recipe(folder_store, recipe.run.name) == recipe


async def test_another_adapter_under_the_same_name_is_refused(
    recipe: Recipe, folder_store: ObjectStore, tmp_path: Path
) -> None:
    await store_recipe(folder_store, recipe)
    await check_files(folder_store, recipe, ("model.adapter",), needed=True)
    lora(tmp_path / "sft.safetensors", seed=1)
    again = load_recipe(tmp_path / "recipe.json")
    with pytest.raises(UserError, match=r"model\.adapter: .*has the digest"):
        await store_recipe(folder_store, again)
    with pytest.raises(UserError, match=r"model\.adapter: .*has the digest"):
        await check_files(folder_store, recipe, ("model.adapter",), needed=True)


async def test_it_may_have_moved(recipe: Recipe, folder_store: ObjectStore, tmp_path: Path) -> None:
    await store_recipe(folder_store, recipe)
    plain = json.loads((tmp_path / "recipe.json").read_text())
    plain["model"]["adapter"] = "moved"
    (tmp_path / "moved").mkdir()
    shutil.move(tmp_path / "sft.safetensors", tmp_path / "moved")
    (tmp_path / "recipe.json").write_text(json.dumps(plain))
    with pytest.raises(UserError, match="digest"):  # a folder is not the file
        await store_recipe(folder_store, load_recipe(tmp_path / "recipe.json"))
    plain["model"]["adapter"] = "moved/sft.safetensors"
    (tmp_path / "recipe.json").write_text(json.dumps(plain))
    moved = load_recipe(tmp_path / "recipe.json")
    assert await store_recipe(folder_store, moved) == moved


async def test_a_run_without_one_is_not_resumed_with_one(
    recipe: Recipe, folder_store: ObjectStore, tmp_path: Path
) -> None:
    model = recipe.model.model_copy(update={"adapter": None})
    await store_recipe(folder_store, recipe.model_copy(update={"model": model}))
    with pytest.raises(UserError, match=r"model\.adapter: the run 'flux' was started with None"):
        await store_recipe(folder_store, recipe)


async def test_it_is_needed_where_a_run_begins_and_not_where_its_scheduler_resumes(
    recipe: Recipe, folder_store: ObjectStore, tmp_path: Path
) -> None:
    file = tmp_path / "sft.safetensors"
    file.rename(tmp_path / "away")
    absent = load_recipe(tmp_path / "recipe.json")
    with pytest.raises(UserError, match=r"model\.adapter: .* have to be on this host"):
        await store_recipe(folder_store, absent)
    (tmp_path / "away").rename(file)
    await store_recipe(folder_store, recipe)
    file.rename(tmp_path / "away")
    assert (await store_recipe(folder_store, absent)).model.lora == recipe.model.lora
    assert "model.adapter" in FILES
