"""A run whose hosts keep its model in different places, or keep another model."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.errors import UserError
from shared.models.hub import ROOT
from shared.recipe.recipe import Recipe, load_recipe, override
from shared.run.files import check_files, file_digest
from shared.run.rights import WRITES
from shared.run.run_recipe import FILES, check_same_run, read_recipe
from shared.store import ObjectStore
from tests.stored_recipe import store_recipe

RECIPE = """
[run]
name = "hosts"
steps = 2
[model]
folder = "{model}"
height = 32
width = 32
[data]
prompts = "../prompts.txt"
[sampling]
steps = 4
window = 2
sigmas = "model"
[batch]
groups = 2
group_size = 2
[trainer]
learning_rate = 1e-4
[[reward.scorers]]
name = "ocr"
type = "ocr"
folder = "../models/reward"
"""


def a_host(folder: Path, *, model: str = "../models/sd3", seed: int = 0) -> Path:
    """A checkout with a recipe, a model and a reward; gives the recipe."""
    sd3 = folder / "models" / "sd3"
    for part in ("transformer", "scheduler", "vae"):
        (sd3 / part).mkdir(parents=True)
    parts = {part: ["diffusers", "Part"] for part in ("transformer", "scheduler", "vae")}
    index = {"_class_name": "StableDiffusion3Pipeline", **parts, "safety_checker": [None, None]}
    (sd3 / "model_index.json").write_text(json.dumps(index))
    (sd3 / "scheduler" / "scheduler_config.json").write_text('{"shift": 3.0}')
    weights = np.random.default_rng(seed).normal(size=(1 << 21,)).astype(np.float32)  # 8 MiB
    save_file({"weight": weights}, sd3 / "transformer" / "diffusion_pytorch_model.safetensors")
    (folder / "models" / "reward").mkdir()
    (folder / "models" / "reward" / "judge.bin").write_bytes(b"judge")
    (folder / "prompts.txt").write_text("a five\n")
    (folder / "recipes").mkdir()
    (folder / "recipes" / "r.toml").write_text(RECIPE.format(model=model))
    return folder / "recipes" / "r.toml"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return a_host(tmp_path / "a")


@pytest.fixture(autouse=True)
def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT, raising=False)


async def test_a_worker_finds_the_model_below_its_own_root(
    here: Path, tmp_path: Path, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path / "a" / "models"))
    await store_recipe(folder_store, load_recipe(here))
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    monkeypatch.setenv(ROOT, str(tmp_path / "elsewhere" / "models"))
    recipe = await read_recipe(folder_store, "hosts")
    assert recipe is not None
    assert recipe.model.folder == tmp_path / "elsewhere" / "models" / "sd3"
    assert recipe.reward.scorers[0].folder == tmp_path / "elsewhere" / "models" / "reward"
    await check_files(folder_store, recipe, ("model.folder", "reward.scorers."), needed=True)


async def test_on_one_host_nothing_has_to_be_set_and_paths_stay_as_they_are(
    here: Path, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(here)
    monkeypatch.setenv(ROOT, str(here.parents[1]))
    await store_recipe(folder_store, recipe)
    monkeypatch.delenv(ROOT)  # as of `digenrl report`, later
    assert await read_recipe(folder_store, "hosts") == recipe


async def test_a_path_below_the_recipes_folder_is_found_below_another_hosts_root(
    tmp_path: Path, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = a_host(tmp_path / "a", model="sd3")
    shutil.move(tmp_path / "a" / "models" / "sd3", here.parent / "sd3")
    await store_recipe(folder_store, load_recipe(here), here.parent)
    shutil.move(here.parent / "sd3", tmp_path / "sd3")
    monkeypatch.setenv(ROOT, str(tmp_path))
    recipe = await read_recipe(folder_store, "hosts")
    assert recipe is not None and recipe.model.folder == tmp_path / "sd3"


def test_a_recipe_names_folders_below_this_hosts_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = a_host(tmp_path / "a", model="sd3")
    monkeypatch.setenv(ROOT, str(tmp_path / "a" / "models"))
    assert load_recipe(here).model.folder == tmp_path / "a" / "models" / "sd3"
    (here.parent / "sd3").mkdir()
    (here.parent / "sd3" / "model_index.json").write_text("{")
    with pytest.raises(UserError, match=r"recipes/sd3"):  # beside the recipe comes first
        load_recipe(here)


async def test_another_model_under_the_same_name_is_refused_in_one_line_with_both_digests(
    here: Path, tmp_path: Path, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path / "a" / "models"))
    await store_recipe(folder_store, load_recipe(here))
    a_host(tmp_path / "b", seed=1)
    monkeypatch.setenv(ROOT, str(tmp_path / "b" / "models"))
    recipe = await read_recipe(folder_store, "hosts")
    assert recipe is not None
    with pytest.raises(UserError) as refused:
        await check_files(folder_store, recipe, ("model.folder",), needed=True)
    said = str(refused.value)
    for host in ("a", "b"):
        folder = tmp_path / host / "models" / "sd3"
        assert str(folder) in said and file_digest(folder)[:12] in said
    assert said.startswith("model.folder: ") and "\n" not in said and ROOT in said


async def test_a_model_that_is_not_on_the_host_is_named_with_the_remedy(
    here: Path, folder_store: ObjectStore
) -> None:
    recipe = load_recipe(here)
    shutil.rmtree(recipe.model.folder)
    with pytest.raises(UserError, match=r"model\.folder: .*sd3 is not on this host.*set DIGENRL"):
        await check_files(folder_store, recipe, ("model.folder",), needed=True)
    await check_files(folder_store, recipe, ("model.folder",), needed=False)


async def test_the_first_host_that_has_the_model_says_which_it_is(
    here: Path, tmp_path: Path, folder_store: ObjectStore
) -> None:
    """A scheduler without models, as in its container, and two workers that differ."""
    recipe = override(load_recipe(here), {"model.folder": tmp_path / "nowhere"})
    await store_recipe(folder_store, recipe)
    first = override(recipe, {"model.folder": tmp_path / "a" / "models" / "sd3"})
    await check_files(folder_store, first, ("model.folder",), needed=True)
    a_host(tmp_path / "b", seed=1)
    second = override(recipe, {"model.folder": tmp_path / "b" / "models" / "sd3"})
    with pytest.raises(UserError, match=r"model\.folder"):
        await check_files(folder_store, second, ("model.folder",), needed=True)


async def test_a_role_that_may_not_say_which_model_a_run_has_waits_for_one_that_may(
    folder_store: ObjectStore, tmp_path: Path
) -> None:
    recipe, key = load_recipe(a_host(tmp_path / "a")), "model.folder"
    await check_files(folder_store, recipe, (key,), needed=False, stores=False)
    checking = check_files(folder_store, recipe, (key,), needed=True, stores=False)
    waiting = asyncio.create_task(checking)
    await asyncio.sleep(0.1)
    assert await folder_store.keys("hosts/files") == [] and not waiting.done()
    await check_files(folder_store, recipe, (key,), needed=True)
    await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize("key", ["model.folder", "model.adapter", "data.prompts"])
def test_the_scheduler_and_trainers_alone_say_which_model_and_prompts_a_run_has(key: str) -> None:
    for name in (f"files/{key}.json", f"copies/files/{key}/{'0' * 64}.z"):
        may = {role for role, places in WRITES.items() if name.startswith(places)}
        assert may == {"scheduler", "trainer"}


async def test_a_scheduler_goes_on_from_another_checkout_with_the_same_files(
    here: Path, tmp_path: Path, folder_store: ObjectStore
) -> None:
    await store_recipe(folder_store, load_recipe(here))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    there = load_recipe(tmp_path / "b" / "recipes" / "r.toml")
    assert await store_recipe(folder_store, there) == there
    shutil.rmtree(tmp_path / "a")  # digests are enough
    assert await store_recipe(folder_store, there) == there
    assert await read_recipe(folder_store, "hosts") == there


async def test_a_scheduler_with_another_model_is_refused_and_changes_nothing(
    here: Path, tmp_path: Path, folder_store: ObjectStore
) -> None:
    recipe = load_recipe(here)
    await store_recipe(folder_store, recipe)
    there = load_recipe(a_host(tmp_path / "b", seed=1))
    with pytest.raises(UserError, match=r"model\.folder: .*digest"):
        await store_recipe(folder_store, there)
    unknown = override(there, {"model.folder": tmp_path / "unknown"})
    with pytest.raises(UserError, match=r"model\.folder: the run 'hosts' was started with"):
        await store_recipe(folder_store, unknown)
    assert await read_recipe(folder_store, "hosts") == recipe


async def test_the_models_own_sigmas_are_stored_and_needed_once(
    here: Path, tmp_path: Path, folder_store: ObjectStore
) -> None:
    first = await store_recipe(folder_store, load_recipe(here))
    numbers = first.sampling.sigmas
    assert len(numbers) == 5 and first.evaluation.sigmas == numbers
    shutil.rmtree(tmp_path / "a" / "models" / "sd3")
    again = load_recipe(here)
    assert again.sampling.sigmas == "model"
    assert await store_recipe(folder_store, again) == first
    longer = override(again, {"evaluation.steps": 9})
    with pytest.raises(UserError, match=r'evaluation\.sigmas: "model" needs .*sd3'):
        await store_recipe(folder_store, longer)


async def test_without_the_model_its_sigmas_are_asked_for_when_a_run_begins(
    here: Path, tmp_path: Path, folder_store: ObjectStore
) -> None:
    shutil.rmtree(tmp_path / "a" / "models" / "sd3")
    with pytest.raises(UserError, match=r'sampling\.sigmas, .*"model" needs .*sd3'):
        await store_recipe(folder_store, load_recipe(here))
    assert await read_recipe(folder_store, "hosts") is None


async def test_a_run_of_the_release_before_is_read_and_resumed(
    here: Path, folder_store: ObjectStore
) -> None:
    """It has no portable names and no digests."""
    recipe = load_recipe(here)
    await folder_store.write("hosts/recipe.json", recipe.model_dump_json(indent=1).encode())
    assert await read_recipe(folder_store, "hosts") == recipe
    assert await store_recipe(folder_store, recipe) == recipe


def test_a_key_file_may_be_elsewhere_and_is_not_read(tmp_path: Path, here: Path) -> None:
    def with_key(path: str) -> Recipe:
        scorer = {
            "name": "judge",
            "type": "judge",
            "url": "http://host",
            "judge": {"model": "m", "key_file": path},
        }
        plain = load_recipe(here).model_dump(mode="json")
        plain["reward"]["scorers"] = [scorer]
        return Recipe.model_validate(plain)

    check_same_run(with_key("/a/key"), with_key("/b/key"))
    assert set(FILES) == {"model.folder", "model.adapter", "data.prompts", "reward.scorers."}


def test_a_digest_tells_trainings_of_one_network_apart_and_ignores_what_is_not_read(
    here: Path, tmp_path: Path
) -> None:
    sd3 = tmp_path / "a" / "models" / "sd3"
    weights = sd3 / "transformer" / "diffusion_pytorch_model.safetensors"
    before = file_digest(sd3)
    (sd3 / "sd3_medium.safetensors").write_bytes(b"everything once more, in a single file")
    (sd3 / "README.md").write_text("read me")
    (sd3 / ".cache").mkdir()
    (sd3 / ".cache" / "x.json").write_text("{}")
    assert file_digest(sd3) == before
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\0\0\0\0")
    assert file_digest(sd3) != before
    weights.write_bytes(whole)
    assert file_digest(sd3) == before
    (sd3 / "scheduler" / "scheduler_config.json").write_text('{"shift": 5.0}')
    assert file_digest(sd3) != before


async def test_a_reward_file_of_another_digest_is_refused_and_found_below_another_root(
    tmp_path: Path, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [tmp_path / "one", tmp_path / "two"]
    for host in hosts:
        recipe = a_host(host)
        text = recipe.read_text().replace('type = "ocr"\nfolder = "../models/reward"', OWN)
        recipe.write_text(text)
        (host / "models" / "mine.py").write_text("def of(image): return 1.0\n")
    first = load_recipe(hosts[0] / "recipes" / "r.toml")
    assert first.reward.scorers[0].source == hosts[0] / "models" / "mine.py"
    assert first.reward.scorers[0].function == "of"
    await store_recipe(folder_store, first, hosts[0])
    shutil.rmtree(hosts[0])
    monkeypatch.setenv(ROOT, str(hosts[1]))
    there = await read_recipe(folder_store, "hosts")
    assert there is not None and there.reward.scorers[0].source == hosts[1] / "models" / "mine.py"
    await check_files(folder_store, there, ("reward.scorers.",), needed=True)
    (hosts[1] / "models" / "mine.py").write_text("def of(image): return 2.0\n")
    with pytest.raises(UserError, match=r"^reward\.scorers\.ocr\.source: .* has the digest \w{12}"):
        await check_files(folder_store, there, ("reward.scorers.",), needed=True)


OWN = 'type = "python"\nsource = "../models/mine.py:of"'


def test_a_base_names_a_reward_file_beside_itself(tmp_path: Path) -> None:
    recipe = a_host(tmp_path / "project")
    recipe.write_text(recipe.read_text().replace('type = "ocr"\nfolder = "../models/reward"', OWN))
    child = tmp_path / "own" / "child.toml"
    child.parent.mkdir()
    child.write_text('base = "../project/recipes/r.toml"\n')
    [scorer] = load_recipe(child).reward.scorers
    assert scorer.source == tmp_path / "project" / "models" / "mine.py"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('scores = "groups"', "set schedule.fragment_size to batch.group_size, 2"),
        ("[schedule]\nslot_deadline_s = 60", "patience: calls that hang may take 720 s .* to 10"),
    ],
)
def test_what_a_reward_of_ones_own_asks_of_other_keys_is_said_in_one_line(
    tmp_path: Path, more: str, said: str
) -> None:
    recipe = a_host(tmp_path / "project")
    text = recipe.read_text().replace('type = "ocr"\nfolder = "../models/reward"', OWN)
    recipe.write_text(f"{text}{more}\n")
    with pytest.raises(UserError, match=said):
        load_recipe(recipe)
