"""Neither a training pass nor a denoising step waits for the device."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.loading.models import ModelAdapter, repeat_rows
from shared.diffusion.policy import LoadedPolicy, sampling_plan
from shared.diffusion.sampling.sampler import Denoising, denoise
from shared.diffusion.sampling.tensors import pack
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import PathGroup
from shared.diffusion.training.rows import TrainingGroup, read_group, row_kind
from shared.diffusion.weights.weight_sets import WeightSets
from shared.recipe.recipe import Recipe, override
from tests import tiny_models
from tests.shared.diffusion.digits import PROMPT, RECIPE, task
from tests.shared.diffusion.training.host_reads import HostReads

SAMPLES = 4
SIZE = 32


def of(name: str, **changes: object) -> Recipe:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    plain = override(
        RECIPE,
        {"batch.group_size": SAMPLES, "batch.groups": 2, "trainer.micro_batch": "auto",
         "schedule.fragment_size": "auto", "algorithm.kl_beta": 0.02, "trainer.updates": 1},
    ).model_dump()  # fmt: skip
    plain["algorithm"] = {"name": name, "kl_beta": 0.02}
    for key in ("variant", "noise_level", "windows", "window_stride", "roll_back"):
        plain["sampling"].pop(key, None)
    plain["sampling"] |= {
        "steps": 8, "sigmas": "shifted", "window": 3, "first_window_starts": (0, 0),
        "windows": "group", "shared_noise": False, "stochastic": "trained", "trained": "window",
    }  # fmt: skip
    return override(Recipe.model_validate(plain), keys)


RECIPES = {
    "flow-grpo": of("flow-grpo"),
    "guard": of("grpo-guard"),
    "nft": of("diffusion-nft", algorithm__nft_decay=0),
    "awm": of("awm"),
    "dpo": of("dpo"),
}


def group_of(
    recipe: Recipe, model: ModelAdapter, shape: tuple[int, ...], *, staleness: int = 0
) -> TrainingGroup:
    """A group of samples that a network which answers zeros has made."""
    seeds = list(range(SAMPLES))
    window = 0 if row_kind(recipe) is row_kind(RECIPES["flow-grpo"]) else None
    denoising = Denoising(
        sampling_plan(recipe, window_start=window), seeds=seeds, shape=shape,
        device=torch.device("cpu"), shared_seed=5 if recipe.sampling.shared_noise else None,
    )  # fmt: skip
    denoise(lambda latents, sigma: torch.zeros_like(latents), denoising)
    data = GroupData(
        trajectories=(row_kind(recipe).pack(denoising, seeds),),
        conditions=pack(model.encode(PROMPT, guidance=recipe.model.guidance)),
        advantages=(1.0, -1.0, 0.0, 0.5),
        staleness=staleness,
    )
    return read_group(recipe, data)


def transaction_of(recipe: Recipe, model: ModelAdapter) -> GradientTransaction:
    made = GradientTransaction(
        model=model, algorithm=recipe.algorithm, num_rows=SAMPLES * 3,
        guidance=recipe.model.guidance, sets=WeightSets(model.transformer),
    )  # fmt: skip
    made.begin()
    return made


def reads_of_training(
    transaction: GradientTransaction, group: TrainingGroup, chunk: Chunk
) -> list[str]:
    reads = HostReads()
    with reads:
        transaction.accumulate(group, chunk)
    return reads.found


@pytest.mark.parametrize(
    ("name", "staleness"),
    [
        ("flow-grpo", 1),
        ("flow-grpo", 0),
        ("nft", 0),
        *(pytest.param(name, 0, marks=pytest.mark.slow) for name in ("guard", "awm", "dpo")),
    ],
)
def test_a_training_pass_reads_no_number(name: str, staleness: int, policy: LoadedPolicy) -> None:
    recipe, model = RECIPES[name], policy.model
    group = group_of(recipe, model, (1, 8, 8), staleness=staleness)
    transaction = transaction_of(recipe, model)
    assert reads_of_training(transaction, group, Chunk(SAMPLES, 2)) == []
    assert reads_of_training(transaction, group, Chunk(2, 2)) == []
    with HostReads() as reads:
        tally = transaction.tally.metrics()
    assert reads.found == [], "one list of numbers, after the last pass"
    assert transaction.tally.num_rows > 0 and tally["ratio_max"] >= tally["ratio_min"] > 0


def test_a_denoising_step_reads_no_number(policy: LoadedPolicy) -> None:
    generator = Generator(RECIPE, policy)
    work = generator.begin(task())
    generator.advance(work)  # the digest of the weights is taken once
    while not work.done:
        with HostReads() as reads:
            generator.advance(work)
        assert reads.found == []


@pytest.fixture(scope="module", params=tiny_models.but_slow(["sd3"], tiny_models.FAMILIES))
def elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelAdapter, Recipe, TrainingGroup]]:
    """A model whose network is on a device that cannot be read, and a group for it."""
    family = request.param
    folder = tiny_models.save(family, tmp_path_factory.mktemp(family))
    model = tiny_models.load(folder)
    tiny_models.add_lora(model)
    recipe = of("flow-grpo", model__guidance=4.0, sampling__shared_noise=True)
    frames = 5 if family in tiny_models.VIDEO else 1
    shape = model.latent_shape(height=SIZE, width=SIZE, frames=frames)
    group = group_of(recipe, model, shape)
    model.transformer.to("meta")
    yield model, recipe, group


def test_no_family_waits_for_its_device_in_a_training_pass(
    elsewhere: tuple[ModelAdapter, Recipe, TrainingGroup],
) -> None:
    model, recipe, group = elsewhere
    transaction = transaction_of(recipe, model)
    reads_of_training(transaction, group, Chunk(2, 2))  # networks keep tables of positions
    found = reads_of_training(transaction, group, Chunk(2, 2))
    # Which samples are trained at the step that they share, the host asks tensors of its own.
    assert {each.split()[0] for each in found} <= {
        "aten.index.Tensor", "aten._local_scalar_dense.default"
    } and not [each for each in found if "meta" in each]  # fmt: skip
    with pytest.raises(NotImplementedError, match="meta"):
        _ = transaction.tally


def test_no_family_waits_for_its_device_in_a_denoising_step(
    elsewhere: tuple[ModelAdapter, Recipe, TrainingGroup],
) -> None:
    model, recipe, group = elsewhere
    device = torch.device("meta")
    assert isinstance(group, PathGroup)
    told = {name: each.to(device) for name, each in group.conditions.items()}
    shape = group.latents.shape[2:]
    denoising = Denoising(
        sampling_plan(recipe, window_start=0), seeds=[1, 2], shape=shape, device=device
    )

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        rows = repeat_rows(told, len(latents))
        return model.velocity(latents, sigma, rows, guidance=recipe.model.guidance)

    advance = partial(denoising.advance, velocity)
    advance()
    while not denoising.done:
        with HostReads() as reads:
            advance()
        assert reads.found == []


def test_the_count_would_see_what_waits() -> None:
    here, there = torch.tensor([1.0, 0.0]), torch.zeros(2, device="meta")
    with HostReads() as reads:
        float(here.sum())
        here[here > 0]
        here.nonzero()
        here.to("meta")
        here.to("meta", non_blocking=True)
        assert torch.equal(here, here)
    assert len(reads.found) == 5, reads.found
    with pytest.raises(RuntimeError, match="meta"):
        float(there.sum())
