"""Two networks that share a noise schedule (Wan2.2): which one runs, and what of them trains."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule

from digenrl.local.checking.preflight import versions_bytes
from digenrl.report.export import export_adapter
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.diffusion.loading.device import held_bytes
from shared.diffusion.loading.models import Conditions, ModelAdapter, repeat_rows
from shared.diffusion.loading.ranks import full_tensor
from shared.diffusion.policy import LoadedPolicy, load_policy, sampling_plan
from shared.diffusion.sampling.sampler import Denoising, denoise
from shared.diffusion.sampling.tensors import pack, pack_trajectory, unpack
from shared.diffusion.weights.master_weights import TrainedWeights
from shared.diffusion.weights.sharding import shard
from shared.diffusion.weights.trained_weights import (
    WeightsInUse,
    trained_parameters,
    trained_tensors,
)
from shared.errors import UserError
from shared.models.lora_files import FILES
from shared.models.lora_names import HIGH, LOW
from shared.models.memory import weight_bytes
from shared.recipe.networks import check_networks
from shared.recipe.recipe import Recipe, load_recipe, override
from tests import tiny_models
from tests.stored import packed
from tests.tiny_models import PROMPT
from tests.tiny_pipelines import BOUNDARY

CPU = torch.device("cpu")
SIGMAS = (1.0, 0.95, 0.9, 0.8, 0.5, 0.0)
"""Three steps begin at high noise, two at low."""
SAMPLES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("wan22", tmp_path_factory.mktemp("wan22"))


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Recipe:
    return recipe_for(folder)


def recipe_for(folder: Path) -> Recipe:
    path = folder / "recipe.json"
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT, "metadata": {}}))
    path.write_text(json.dumps({
        "run": {"name": "experts", "steps": 1},
        "model": {
            "folder": str(folder), "height": 32, "width": 32, "guidance": 4.0, "frames": 5,
            "lora": {"rank": 2, "alpha": 4.0},
        },
        "data": {"prompts": str(prompts)},
        "sampling": {
            "steps": 5, "sigmas": SIGMAS, "window": 2, "first_window_starts": [0, 2],
        },
        "batch": {"groups": 1, "group_size": SAMPLES},
        "algorithm": {"clip_range": 1e-3},
        "trainer": {"learning_rate": 1e-3},
        "reward": {"scorers": [{"name": "size", "type": "jpeg-incompressibility"}]},
    }))  # fmt: skip
    return load_recipe(path)


def trains(recipe: Recipe, experts: str) -> Recipe:
    return override(recipe, {"model.lora": {"rank": 2, "alpha": 4.0, "experts": experts}})


@pytest.fixture(scope="module")
def loaded(recipe: Recipe) -> LoadedPolicy:
    return load(recipe)


def load(recipe: Recipe) -> LoadedPolicy:
    """Load the policy with an adapter that changes what is made."""
    loaded = load_policy(recipe, {"transformer", "text", "decoder"})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained_parameters(loaded.model.transformer).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return loaded


def rows_at(loaded: LoadedPolicy, sigmas: list[float]) -> tuple[torch.Tensor, Conditions]:
    model, size = loaded.model, len(sigmas)
    latents = torch.randn(size, *shape(model), generator=torch.Generator().manual_seed(0))
    return latents, repeat_rows(model.encode(PROMPT, guidance=4.0), size)


def shape(model: ModelAdapter) -> tuple[int, ...]:
    return model.latent_shape(height=32, width=32, frames=5)


def group_at(recipe: Recipe, loaded: LoadedPolicy, window_start: int) -> GroupData:
    """A group of samples as rollout stores it."""
    conditions = loaded.model.encode(PROMPT, guidance=4.0)
    rows = repeat_rows(conditions, SAMPLES)
    denoising = Denoising(
        sampling_plan(recipe, window_start=window_start),
        seeds=range(SAMPLES), shape=shape(loaded.model), device=CPU,
    )  # fmt: skip
    denoise(lambda x, s: loaded.model.velocity(x, s, rows, guidance=4.0), denoising)
    return GroupData(
        trajectories=(pack_trajectory(denoising.trajectory()),), conditions=pack(conditions),
        advantages=(1.0, -1.0, 0.5, -0.5),
    )  # fmt: skip


@torch.no_grad()
def test_every_row_of_a_batch_goes_through_the_expert_for_its_noise(loaded: LoadedPolicy) -> None:
    sigmas = [0.3, 1.0, BOUNDARY, BOUNDARY - 1e-4, 0.9]
    latents, conditions = rows_at(loaded, sigmas)
    together = loaded.model.velocity(latents, torch.tensor(sigmas), conditions, guidance=4.0)
    networks = loaded.model.transformer
    for row, name in enumerate((LOW, HIGH, HIGH, LOW, HIGH)):
        one = {key: tensor[:1] for key, tensor in conditions.items()}
        both = [
            networks.get_submodule(name)(
                hidden_states=latents[row : row + 1], encoder_hidden_states=one[text],
                timestep=torch.tensor([sigmas[row] * 1000]), return_dict=False,
            )[0]
            for text in ("negative_text", "text")
        ]  # fmt: skip
        alone = both[0] + 4.0 * (both[1] - both[0])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("guidance_2", [None, 2.5])
def test_each_side_of_the_boundary_has_its_guidance(
    guidance_2: float | None, recipe: Recipe, folder: Path
) -> None:
    changed = override(recipe, {"model.guidance_2": guidance_2})
    model = load_policy(changed, {"transformer", "text", "decoder"}).model
    pipeline = tiny_models.build("wan22")
    start = torch.randn(2, *shape(model), generator=torch.Generator().manual_seed(1))
    theirs = tiny_models.run(
        "wan22", pipeline, start, guidance=4.0, guidance_2=guidance_2, output="latent",
        height=32, width=32, frames=5, steps=4,
    )  # fmt: skip
    sigmas = pipeline.scheduler.sigmas.tolist()
    assert sigmas[1] >= BOUNDARY > sigmas[2] > 0
    plan = replace(sampling_plan(changed, window_start=None), sigmas=tuple(sigmas))
    denoising = Denoising(plan, seeds=[0, 1], shape=shape(model), device=CPU)
    denoising.latents = start
    rows = repeat_rows(model.encode(PROMPT, guidance=4.0), 2)
    with torch.no_grad():
        ours = denoise(lambda x, s: model.velocity(x, s, rows, guidance=4.0), denoising)
    assert float((ours - theirs).abs().max()) <= 2e-6


@pytest.mark.parametrize(("experts", "trained"), [("both", 2), ("high", 1), ("low", 1)])
def test_memory_and_disk_count_both_networks_and_the_adapters_there_are(
    experts: str, trained: int, recipe: Recipe, folder: Path
) -> None:
    changed = trains(recipe, experts)
    network = load_policy(changed, {"transformer"}).model.transformer
    prefixes = {name.split(".")[0] for name in trained_parameters(network)}
    assert len(prefixes) == trained and prefixes <= {HIGH, LOW}
    adapter = 4 * sum(each.numel() for each in trained_parameters(network).values())
    frozen = 4 * sum(p.numel() for p in network.parameters() if not p.requires_grad)
    assert weight_bytes(folder, "float32", ["transformer"]) == frozen
    beside = 6 * adapter  # with gradients, their copy and total, and two moments
    assert held_bytes(changed, ["transformer"], trains=True) == frozen + beside
    assert versions_bytes(changed) >= 3 * adapter


@pytest.mark.parametrize("experts", ["both", "high", "low"])
@pytest.mark.parametrize("window_start", [0, 2])
def test_a_batch_trains_the_experts_that_its_steps_ask(
    experts: str, window_start: int, recipe: Recipe
) -> None:
    """Steps 0 and 1 are of high noise; 2 is the last, and 3 the first of low noise."""
    changed = trains(recipe, experts)
    loaded = load(changed)
    engine = TrainerEngine(changed, loaded)
    before = unpack(packed(engine.weights().weights))
    engine.begin()
    engine.train(engine.read(group_at(changed, loaded, window_start)))
    metrics = engine.step(0)
    assert metrics["onpolicy_ratio_error"] <= 1e-6
    asked = {HIGH} if window_start == 0 else {HIGH, LOW}
    adapted = {"both": {HIGH, LOW}, "high": {HIGH}, "low": {LOW}}[experts]
    assert (metrics["grad_norm"] > 0) == bool(asked & adapted)
    decay = 1 - changed.trainer.learning_rate * changed.trainer.weight_decay
    for name, tensor in unpack(packed(engine.weights().weights)).items():
        is_still = torch.allclose(tensor, decay * before[name], rtol=0, atol=1e-7)
        assert is_still != (name.split(".")[0] in asked), name


def test_each_expert_s_adapter_is_a_file_with_the_names_of_one_network(
    recipe: Recipe, loaded: LoadedPolicy, tmp_path: Path
) -> None:
    tensors = trained_tensors(loaded.model.transformer)
    export_adapter(tmp_path, tensors, recipe)
    high, low = (load_file(tmp_path / FILES[name]) for name in (HIGH, LOW))
    assert high.keys() == low.keys()
    assert all(name.startswith("transformer.blocks.0.attn") for name in high)
    for name, tensor in low.items():
        assert torch.equal(tensor, tensors[name.replace("transformer.", f"{LOW}.", 1)])


@pytest.mark.parametrize(
    ("key", "value"),
    [("model.guidance_2", 3.0), ("model.lora", {"rank": 2, "alpha": 4.0, "experts": "low"})],
)
def test_what_is_for_two_networks_is_refused_for_one(
    key: str, value: object, tmp_path: Path
) -> None:
    recipe = override(recipe_for(tiny_models.save("wan", tmp_path)), {key: value})
    with pytest.raises(UserError, match=rf"{key}.* has one network; leave it out"):
        check_networks(recipe)


def test_ranks_that_share_weights_are_not_to_ask_unlike_networks(recipe: Recipe) -> None:
    sharded = override(
        recipe, {"schedule.mode": "fluid", "trainer.devices": 2, "trainer.shard_devices": 2}
    )
    check_networks(sharded)
    plain = sharded.model_dump()
    plain["algorithm"] |= {"name": "diffusion-nft"}
    with pytest.raises(
        UserError, match=r"trainer\.shard_devices: diffusion-nft trains every sample"
    ):
        check_networks(Recipe.model_validate(plain))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    ("trained", "window_start"),
    [
        ("lora", 0),
        ("full", 2),
        pytest.param("lora", 2, marks=pytest.mark.slow),
        pytest.param("full", 0, marks=pytest.mark.slow),
    ],
)
def test_sharded_networks_have_the_same_gradient(
    trained: str, window_start: int, recipe: Recipe
) -> None:
    changed = override(recipe, {"model.trained": trained})
    group = group_at(changed, load(changed), window_start)

    def gradient(*, sharded: bool) -> dict[str, torch.Tensor]:
        loaded = load(changed)
        network = loaded.model.transformer
        if sharded:
            shard(network)
            blocks = [network.get_submodule(f"{name}.blocks.0") for name in (HIGH, LOW)]
            assert all(isinstance(each, FSDPModule) for each in (network, *blocks))
            loaded = replace(loaded, in_use=WeightsInUse(network), trained=TrainedWeights(network))
        engine = TrainerEngine(changed, loaded)
        engine.begin()
        engine.train(engine.read(group))
        return {name: full_tensor(tensor) for name, tensor in engine.gradient().items()}

    alone = gradient(sharded=False)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        together = gradient(sharded=True)
    finally:
        dist.destroy_process_group()
    assert alone.keys() == together.keys() and alone
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-5, atol=1e-8)
