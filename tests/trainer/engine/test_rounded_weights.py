"""With `exchange.down` versions are rounded changes of one another, and masters are stepped."""

import asyncio
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import unpack
from shared.diffusion.weights.trained_weights import Staging
from shared.messages.records import Level
from shared.recipe.recipe import Recipe, override
from shared.run.manifest import FetchedObject
from tests.stored import as_bytes, packed, read_back
from tests.trainer.batches import fresh_groups


def rounded(recipe: Recipe, level: Level, updates: int = 1) -> Recipe:
    """Passes take as many rows as were generated at once, so that the kernels are equal."""
    return override(
        recipe,
        {
            "exchange.down": level, "trainer.micro_batch": 2, "schedule.tsp_steps": 1,
            "trainer.updates": updates, "algorithm.kl_beta": 0.0, "trainer.learning_rate": 1e-3,
        },
    )  # fmt: skip


@dataclass
class Run:
    """A trainer, and a device that generates by what it publishes."""

    recipe: Recipe
    by_change: bool = True
    """Whether the device reads changes, or all weights."""
    training: TrainerEngine = field(init=False)
    generating: LoadedPolicy = field(init=False)
    ratio_errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.training = TrainerEngine(self.recipe)
        self.generating = load_policy(self.recipe, {"transformer", "text", "decoder"})

    def step(self, batch: int, *, at_masters: bool = False) -> None:
        groups = fresh_groups(self.recipe, self.generating)
        self.training.begin()
        masters = {n: each.data for n, each in self.training._trained.masters.items()}
        part = len(groups) // self.recipe.trainer.updates
        for update in range(self.recipe.trainer.updates):
            with self.training._sets.using(masters if at_masters else {}):
                for group in groups[update * part : (update + 1) * part]:
                    self.training.train(self.training.read(group))
            metrics = self.training.step(batch)
            if not update:
                self.ratio_errors.append(metrics["onpolicy_ratio_error"])
        self.publish()

    def publish(self) -> None:
        snapshot = self.training.weights()
        change = snapshot.change if self.by_change else None
        staging = Staging(self.generating.model.transformer, is_change=change is not None)
        staging.add(FetchedObject(change or packed(snapshot.weights), None))
        assert self.generating.in_use.adopt(staging.finish()) == snapshot.digest


@pytest.mark.parametrize("level", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_a_ratio_on_policy_is_as_exact_as_without_rounding(recipe: Recipe, level: Level) -> None:
    exact, run = Run(rounded(recipe, "exact")), Run(rounded(recipe, level))
    for batch in range(3):
        exact.step(batch)
        run.step(batch)
    assert max(run.ratio_errors) <= max(exact.ratio_errors)
    control = Run(rounded(recipe, level))
    for batch in range(3):
        control.step(batch, at_masters=True)
    assert max(control.ratio_errors) > max(run.ratio_errors)


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("level", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_readers_of_changes_and_of_all_weights_hold_the_same_bits(
    recipe: Recipe, level: Level, updates: int
) -> None:
    both = [Run(rounded(recipe, level, updates), by_change=each) for each in (True, False)]
    for batch in range(2):
        for run in both:
            run.step(batch)
    by_change, by_all = (as_bytes(run.training.weights()) for run in both)
    assert by_change == by_all


def test_what_rounding_leaves_out_stays_in_the_masters(recipe: Recipe) -> None:
    """After many steps the published weights are within one step of rounding of the masters."""
    run = Run(rounded(recipe, "int4"))
    for batch in range(4):
        run.step(batch)
    trained = run.training._trained
    largest = max(float((m.data - trained.held[n]).abs().max()) for n, m in trained.masters.items())
    rate = run.recipe.trainer.learning_rate
    assert 0 < largest < 2 * rate


@pytest.mark.parametrize("updates", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_restored_trainer_goes_on_from_version_and_masters_to_the_last_bit(
    recipe: Recipe, updates: int
) -> None:
    straight, resumed = (Run(rounded(recipe, "int4", updates)) for _ in range(2))
    straight.step(0)
    saved = straight.training.weights()
    resumed.step(5)  # something else was in its memory
    kept = read_back(saved.weights), read_back(saved.checkpoint)
    asyncio.run(resumed.training.restore(*kept))
    resumed.by_change = False
    resumed.publish()
    assert as_bytes(resumed.training.weights()) == as_bytes(saved)
    straight.step(1)
    resumed.step(1)
    assert as_bytes(resumed.training.weights()) == as_bytes(straight.training.weights())


def test_a_step_that_is_not_finite_leaves_the_masters(recipe: Recipe) -> None:
    run = Run(rounded(recipe, "int8"))
    run.step(0)
    before = masters(run.training)
    for parameter in run.training._parameters.values():
        parameter.grad = torch.full_like(parameter, torch.nan)
    assert run.training.step(1)["skipped_not_finite"] == 1
    after = masters(run.training)
    assert all(torch.equal(each, after[name]) for name, each in before.items())
    run.publish()


def masters(training: TrainerEngine) -> dict[str, Tensor]:
    states = unpack(packed(training.weights().checkpoint))
    return {name: each for name, each in states.items() if name.startswith("master/")}
