"""Commit and restore: what a resumed trainer does is what it would have done."""

import asyncio
import math
from functools import partial

import pytest
import torch

from services.trainer.engine.checkpoint import AVERAGE
from services.trainer.engine.trainer_engine import TrainerEngine, average_decay, learning_rate
from shared.devices.chunks import Chunk
from shared.devices.protocols import Snapshot
from shared.diffusion.policy import load_policy
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.training.measurement import measured
from shared.diffusion.weights.trained_weights import WeightsInUse
from shared.errors import ContractError, IntegrityError
from shared.learning.metrics import STEP_METRICS
from shared.recipe.recipe import Recipe, override
from tests.stored import as_bytes, one_object, packed, read_back
from tests.trainer.batches import Group, make_batch, train_group


@pytest.fixture(scope="module")
def groups(recipe: Recipe) -> list[Group]:
    return make_batch(recipe)


def train(engine: TrainerEngine, groups: list[Group], batch: int) -> dict[str, float]:
    engine.begin()
    for group in groups:
        train_group(engine, group.cut([4]), group.conditions, group.advantages)
    return engine.step(batch)


def restore(engine: TrainerEngine, saved: Snapshot) -> None:
    asyncio.run(engine.restore(read_back(saved.weights), read_back(saved.checkpoint)))


def test_a_restored_trainer_goes_on_to_the_last_bit(recipe: Recipe, groups: list[Group]) -> None:
    straight = TrainerEngine(recipe)
    for batch in range(3):
        train(straight, groups, batch)
        if batch == 1:
            saved = straight.weights()

    resumed = TrainerEngine(recipe)
    train(resumed, groups[:1], 0)  # something else was in its memory
    restore(resumed, saved)
    assert resumed.weights_digest() == saved.digest
    train(resumed, groups, 2)
    assert as_bytes(resumed.weights()) == as_bytes(straight.weights())


def test_steps_are_the_same_to_the_last_bit_with_weights_and_inputs_of_blocks_on_the_host(
    recipe: Recipe, groups: list[Group]
) -> None:
    """On a CPU: through the hooks."""
    resident = TrainerEngine(recipe)
    on_host = {"trainer.memory": "streamed", "trainer.gradient_checkpointing": "offloaded"}
    streamed = TrainerEngine(override(recipe, on_host))
    for batch in range(2):
        train(resident, groups, batch)
        train(streamed, groups, batch)
    assert as_bytes(streamed.weights()) == as_bytes(resident.weights())


def test_a_step_changes_the_digest_of_the_weights_in_use(
    recipe: Recipe, groups: list[Group]
) -> None:
    engine = TrainerEngine(recipe)
    before = engine.weights_digest()
    train(engine, groups, 0)
    assert engine.weights_digest() != before


def test_a_gradient_that_is_not_finite_takes_no_step(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(recipe)
    before = engine.weights_digest()
    engine.begin()
    train_group(engine, groups[0].cut([4]), groups[0].conditions, [float("nan")] * 4)
    assert engine.step(0)["skipped_not_finite"] == 1
    assert engine.weights_digest() == before


def test_a_checkpoint_of_another_adapter_is_refused(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(recipe)
    train(engine, groups, 0)
    saved = engine.weights()
    wider = TrainerEngine(override(recipe, {"model.lora": {"rank": 8, "alpha": 8.0}}))
    with pytest.raises(IntegrityError):
        restore(wider, saved)
    tensors = unpack(packed(saved.checkpoint))
    foreign = {key.replace("lora_A", "lora_X"): value for key, value in tensors.items()}
    with pytest.raises(IntegrityError):
        asyncio.run(engine.restore(read_back(saved.weights), one_object(pack(foreign))))


def test_a_trajectory_of_another_schedule_is_refused(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(override(recipe, {"sampling.sigmas": "shifted"}))
    engine.begin()
    with pytest.raises(ContractError, match="sigmas"):
        train_group(engine, groups[0].cut([4]), groups[0].conditions, groups[0].advantages)


def test_fragments_of_different_windows_are_no_group(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(recipe)
    engine.begin()
    mixed = [groups[0].cut([2, 2])[0], groups[1].cut([2, 2])[1]]
    with pytest.raises(ContractError):
        train_group(engine, mixed, groups[0].conditions, groups[0].advantages)


def test_advantages_of_another_group_are_refused(recipe: Recipe, groups: list[Group]) -> None:
    engine = TrainerEngine(recipe)
    engine.begin()
    with pytest.raises(ContractError, match="advantages"):
        train_group(engine, groups[0].cut([4]), groups[0].conditions, groups[0].advantages[:3])


def test_two_halves_can_share_one_network(recipe: Recipe, groups: list[Group]) -> None:
    loaded = load_policy(recipe, {"transformer"})
    engine = TrainerEngine(recipe, loaded)
    train(engine, groups, 0)
    assert WeightsInUse(loaded.model.transformer).digest() == engine.weights_digest()


def test_auto_chunks_grow_while_groups_are_trained(recipe: Recipe, groups: list[Group]) -> None:
    auto = {"trainer.micro_batch": "auto", "schedule.tsp_steps": "auto"}
    engine = TrainerEngine(override(recipe, auto))
    assert engine.chunk == Chunk(samples=1, steps=1)
    metrics = train(engine, groups, 0)
    assert engine.chunk.rows > 1
    assert (metrics["micro_batch"], metrics["tsp_steps"]) == (
        engine.chunk.samples,
        engine.chunk.steps,
    )

    tight = TrainerEngine(override(recipe, {**auto, "trainer.memory_gib": 1e-5}))
    train(tight, groups, 0)
    assert tight.chunk == Chunk(samples=1, steps=1)


def test_every_metric_of_a_step_is_described(recipe: Recipe, groups: list[Group]) -> None:
    assert train(TrainerEngine(recipe), groups, 0).keys() <= STEP_METRICS.keys()


def test_measuring_changes_no_gradient(recipe: Recipe, groups: list[Group]) -> None:
    """The first group of a tuned run and of one with that chunk fixed."""
    gradients = []
    for micro, steps in (("auto", "auto"), (1, 1)):
        changes = {"trainer.micro_batch": micro, "schedule.tsp_steps": steps}
        engine = TrainerEngine(override(recipe, changes))
        engine.begin()
        train_group(engine, groups[0].cut([4]), groups[0].conditions, groups[0].advantages)
        gradients.append(engine.gradient())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[1])


def test_what_is_kept_for_the_backward_pass_grows_with_rows_and_leaves_out_the_weights(
    recipe: Recipe, groups: list[Group]
) -> None:
    loaded = load_policy(recipe, {"transformer"})

    def peak(chunk: Chunk) -> int:
        changes = {"trainer.micro_batch": chunk.samples, "schedule.tsp_steps": chunk.steps}
        engine = TrainerEngine(override(recipe, changes), loaded)
        engine.begin()
        train = partial(
            train_group, engine, groups[0].cut([4]), groups[0].conditions, groups[0].advantages
        )
        return measured(train, chunk, loaded.model.transformer, loaded.device).peak_bytes

    small, middle, large = peak(Chunk(1, 1)), peak(Chunk(2, 3)), peak(Chunk(4, 3))
    assert large - middle == pytest.approx(6 * (middle - small) / 5, rel=0.1)
    joined = 12 * small - large  # eleven times what does not grow: an adapter's joined matrices
    assert 0 <= joined < 11 * sum(p.nbytes for p in loaded.trained.parameters.values())
    weights = sum(p.numel() * p.element_size() for p in loaded.model.transformer.parameters())
    assert 0 < small < weights


def test_the_learning_rate_depends_on_the_batch_number_alone(recipe: Recipe) -> None:
    table = recipe.trainer.model_copy(update={"learning_rate": 2e-3, "decay_steps": 40})
    rates = [learning_rate(table, batch) for batch in (0, 20, 40, 100)]
    assert rates == pytest.approx([2e-3, 1e-3, 0.0, 0.0])
    constant = table.model_copy(update={"decay_steps": None})
    assert learning_rate(constant, 100) == 2e-3


def test_the_random_state_is_part_of_a_checkpoint(recipe: Recipe) -> None:
    engine = TrainerEngine(recipe)
    saved = engine.weights()
    expected = torch.rand(3)
    torch.manual_seed(12345)
    restore(engine, saved)
    assert torch.equal(torch.rand(3), expected)


def test_the_average_of_a_short_run_has_forgotten_the_untrained_weights(recipe: Recipe) -> None:
    def left_of_the_first(**table: object) -> float:
        trainer = recipe.trainer.model_copy(update={"ema": 0.99, **table})
        return math.prod(average_decay(trainer, step) for step in range(30))

    # (1 x 2 x ... x 30) / (10 x 11 x ... x 39)
    assert left_of_the_first() == pytest.approx(1 / math.comb(39, 9), rel=1e-12)
    assert left_of_the_first(ema_warmup=False) == pytest.approx(0.99**30)
    assert average_decay(recipe.trainer.model_copy(update={"ema": 0.99}), 5000) == 0.99


@pytest.mark.parametrize(
    ("warmup", "decays"), [(True, (1 / 10, 2 / 11, 3 / 12)), (False, (0.75, 0.75, 0.75))]
)
def test_an_average_follows_the_weights_and_survives_a_restart(
    recipe: Recipe, groups: list[Group], warmup: bool, decays: tuple[float, ...]
) -> None:
    averaging = override(recipe, {"trainer.ema": 0.75, "trainer.ema_warmup": warmup})
    engine = TrainerEngine(averaging)
    wanted = unpack(packed(engine.weights().weights))
    for batch, decay in enumerate(decays):
        train(engine, groups, batch)
        saved = engine.weights()
        new = unpack(packed(saved.weights))
        wanted = {name: decay * wanted[name] + (1 - decay) * new[name] for name in new}
        if batch == 1:
            engine = TrainerEngine(averaging)
            restore(engine, saved)
    stored = unpack(packed(saved.checkpoint))
    found = {n.removeprefix(AVERAGE): each for n, each in stored.items() if n.startswith(AVERAGE)}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-8)
    without = unpack(packed(TrainerEngine(recipe).weights().checkpoint))
    assert not any(name.startswith(AVERAGE) for name in without)


def test_every_update_of_a_batch_has_a_denominator_of_its_own(
    recipe: Recipe, groups: list[Group]
) -> None:
    """Only the first one's samples are on-policy."""

    def gradient(num_updates: int) -> dict[str, torch.Tensor]:
        engine = TrainerEngine(override(recipe, {"trainer.updates": num_updates}))
        engine.begin()
        train_group(engine, groups[0].cut([4]), groups[0].conditions, groups[0].advantages)
        return engine.gradient()

    one, three = gradient(1), gradient(3)
    for name, tensor in one.items():
        torch.testing.assert_close(three[name], 3 * tensor)

    engine = TrainerEngine(override(recipe, {"trainer.updates": 3}))
    engine.begin()
    metrics = []
    for group in groups:
        train_group(engine, group.cut([4]), group.conditions, group.advantages)
        metrics.append(engine.step(0))
    assert [each["stale_fraction"] for each in metrics] == pytest.approx([0, 1 / 2, 2 / 3])
    assert metrics[0]["stale_ratio_error"] == 0
    assert metrics[2]["onpolicy_ratio_error"] <= 1e-5 < metrics[2]["stale_ratio_error"]
