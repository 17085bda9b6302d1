import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.recipe.recipe import Recipe, load_recipe, override
from tests import tiny_models
from tests.paths import DIGITS
from tests.trainer.fluid.ranks import Ranks

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
BLOCKS = "transformer_blocks."
BLOCK = BLOCKS + "{}."


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from a second one, and lose much on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Two blocks of the demo's network, with three groups of four samples and three trained
    steps."""
    plain = load_recipe(DIGITS)
    changes = {
        "model.folder": ends_of(plain.model.folder, tmp_path_factory.mktemp("model") / "digits"),
        "batch.groups": 3,
        "batch.group_size": 4,
        "schedule.fragment_size": 2,
        "trainer.micro_batch": 2,
        "schedule.tsp_steps": 3,
        "sampling.window": 3,
        "algorithm.kl_beta": 0.02,
        "rollout.media": "raw",  # devices without torch make none
    }
    return override(plain, changes)


@pytest.fixture(scope="module")
def loaded(recipe: Recipe) -> LoadedPolicy:
    return load_policy(recipe, {"transformer", "text", "decoder"})


@pytest.fixture(scope="session")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Wan, which keeps some of its weights in float32."""
    return tiny_models.save("wan", tmp_path_factory.mktemp("models") / "wan")


def ends_of(model: Path, folder: Path) -> Path:
    """Write a model whose network has the first and the last of its blocks, which are all kinds
    that there are."""
    shutil.copytree(model, folder)
    config, weights = (folder / "transformer" / name for name in (CONFIG, WEIGHTS))
    told = json.loads(config.read_text())
    config.write_text(json.dumps(told | {"num_layers": 2}))
    first, last, end = (BLOCK.format(number) for number in (0, told["num_layers"] - 1, 1))
    tensors = {
        name.replace(last, end): tensor
        for name, tensor in load_file(weights).items()
        if name.startswith((first, last)) or not name.startswith(BLOCKS)
    }
    save_file(tensors, weights)
    return folder


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("pipes"))
    yield started
    started.end()
