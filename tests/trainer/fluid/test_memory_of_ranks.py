"""Ranks that share a network load it in memory in which no rank could hold all of it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.trainer.fluid.process import as_whole
from shared.diffusion.loading.network import build_network
from shared.diffusion.policy import load_policy
from shared.recipe.recipe import Recipe, override
from tests import tiny_models
from tests.trainer.fluid.ranks import RANKS, Ranks

SHARD = "diffusion_pytorch_model-{:05}.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
HEAD = 64
SHARED = {
    "schedule.mode": "disaggregated", "schedule.tag": "off", "rollout.workers": 1,
    "trainer.devices": RANKS, "trainer.shard_devices": RANKS,
}  # fmt: skip


@dataclass(frozen=True)
class Width:
    """Width of a network whose weights are mostly those of its blocks."""

    heads: int
    blocks: int
    shards: int
    """Number of its files."""


LARGE = Width(heads=16, blocks=33, shards=9)
SMALL = Width(heads=4, blocks=16, shards=3)


def write_wan(folder: Path, width: Width) -> int:
    """Write a pipeline with a random Wan network of this width; return the network's bytes."""
    tiny_models.save("wan", folder)
    network = folder / "transformer"
    config = json.loads((network / "config.json").read_text())
    config |= {
        "num_attention_heads": width.heads, "attention_head_dim": HEAD,
        "num_layers": width.blocks, "ffn_dim": 4 * width.heads * HEAD,
    }  # fmt: skip
    for file in network.glob("*"):
        file.unlink()
    (network / "config.json").write_text(json.dumps(config))
    shapes = {
        name: each.shape
        for name, each in build_network(network, torch.float32).state_dict().items()
    }
    values = 0.02 * torch.randn(max(shape.numel() for shape in shapes.values()))
    files: dict[str, str] = {}
    names = list(shapes)
    each = math.ceil(len(names) / width.shards)
    for number in range(width.shards):
        part = names[number * each : (number + 1) * each]
        tensors = {n: values[: shapes[n].numel()].reshape(shapes[n]).clone() for n in part}
        save_file(tensors, network / SHARD.format(number), metadata={"format": "pt"})
        files |= dict.fromkeys(part, SHARD.format(number))
    (network / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(4 * int(shape.numel()) for shape in shapes.values())


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_ranks_load_in_less_memory_than_a_whole_copy(
    ranks: Ranks, recipe: Recipe, tmp_path: Path, trained: str
) -> None:
    whole = write_wan(tmp_path / "wan", SMALL)
    one = override(
        recipe,
        {
            "model.folder": str(tmp_path / "wan"), "model.trained": trained,
            "model.height": 16, "model.width": 16, "algorithm.kl_beta": 0.0,
        },
    )  # fmt: skip
    two = override(one, SHARED)
    (tmp_path / "recipe.json").write_text(two.model_dump_json())
    (tmp_path / "limit").write_text(str(int(0.9 * whole)))
    ranks.do("load_in", tmp_path)
    wanted = load_policy(as_whole(two), {"transformer"}).in_use.digest()
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"loaded-{rank}.json").read_text())
        assert found["digest"] == wanted


@pytest.mark.night
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_train_2_gb_of_weights_in_their_shares_of_them(
    ranks: Ranks, recipe: Recipe, tmp_path: Path, dtype: str
) -> None:
    """Each holds its share of weights, gradient, sum and optimizer, and a fifth more at most;
    loading alone takes less than a whole copy of the weights."""
    whole = write_wan(tmp_path / "wan", LARGE)
    assert whole >= 2 * 10**9
    allowed = int(1.2 * 5 * whole / RANKS)
    two = override(
        recipe,
        {
            "model.folder": str(tmp_path / "wan"), "model.trained": "full", "model.dtype": dtype,
            "model.height": 16, "model.width": 16, "algorithm.kl_beta": 0.0,
            "batch.groups": 1, "batch.group_size": RANKS, "schedule.fragment_size": 1,
            "sampling.steps": 2, "sampling.window": 1, "sampling.first_window_starts": [0, 0],
            "trainer.micro_batch": 1, "schedule.tsp_steps": 1, "trainer.learning_rate": 1e-3,
            **SHARED,
        },
    )  # fmt: skip
    (tmp_path / "recipe.json").write_text(two.model_dump_json())
    limits = {"loads_in": int(0.9 * whole), "trains_in": allowed}
    (tmp_path / "limits").write_text(json.dumps(limits))
    ranks.do("train_in", tmp_path)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"trained-{rank}.json").read_text())
        assert found["loaded"] < 0.9 * whole
        assert found["peak"] <= allowed
        assert found["onpolicy_ratio_error"] == 0
        assert found["grad_norm"] > 0
        assert found["moved"]
