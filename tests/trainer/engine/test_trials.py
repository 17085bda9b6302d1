"""A chunk that is tried and does not fit is a measurement: the batch goes on in smaller ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.diffusion.loading.models import Conditions
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import OutOfMemory
from shared.recipe.recipe import Recipe, override
from tests.trainer.batches import make_batch

AUTO = {"trainer.micro_batch": "auto", "schedule.tsp_steps": "auto"}
Lack = Callable[[int], None]


@pytest.fixture(scope="module")
def groups(recipe: Recipe, loaded: LoadedPolicy) -> list[GroupData]:
    return [
        GroupData(
            trajectories=tuple(group.cut((2, 2))),
            conditions=group.conditions,
            advantages=tuple(group.advantages),
        )
        for group in make_batch(recipe, loaded=loaded)
    ]


@pytest.fixture(scope="module")
def wanted(recipe: Recipe, loaded: LoadedPolicy, groups: list[GroupData]) -> dict[str, Tensor]:
    """The gradient of all groups twice, where everything fits."""
    engine = engine_of(recipe, loaded)
    for group in groups * 2:
        engine.train(engine.read(group))
    return engine.gradient()


@pytest.fixture(params=["forward", "backward"])
def lack(
    request: pytest.FixtureRequest, loaded: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> Lack:
    """``lack(k)``: pass k finds no memory; backward, when a part of its gradient is added."""
    whole, seen, wanted = loaded.model.velocity, [0], [0]

    def short() -> bool:
        seen[0] += 1
        return seen[0] == wanted[0]

    def velocity(x: Tensor, sigma: Tensor, told: Conditions, *, guidance: float) -> Tensor:
        if request.param == "forward" and torch.is_grad_enabled() and short():
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return whole(x, sigma, told, guidance=guidance)

    def added(_: Tensor) -> None:
        if short():
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(loaded.model, "velocity", velocity)
    parameters = list(trained_parameters(loaded.model.transformer).values())
    middle = parameters[len(parameters) // 2]
    if request.param == "backward":
        hook = middle.register_post_accumulate_grad_hook(added)
        request.addfinalizer(hook.remove)

    def set_to(number: int) -> None:
        seen[0], wanted[0] = 0, number

    return set_to


def engine_of(recipe: Recipe, loaded: LoadedPolicy) -> TrainerEngine:
    engine = TrainerEngine(recipe, loaded)
    engine.begin()
    return engine


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-7)


FEW = (25,)
"""The first pass of the second size."""
ALL = range(1, 49)


@pytest.mark.parametrize(
    "number", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ALL]
)
def test_at_whatever_pass_it_is_short_the_gradient_is_the_same_and_no_batch_is_lost(
    recipe: Recipe,
    loaded: LoadedPolicy,
    groups: list[GroupData],
    wanted: dict[str, Tensor],
    lack: Lack,
    number: int,
) -> None:
    engine = engine_of(override(recipe, AUTO), loaded)
    lack(number)
    told = []
    before = engine._tuned._tuner.candidates
    for group in groups * 2:
        shortage = engine.train(engine.read(group))
        told += [shortage] if shortage else []
    close(engine.gradient(), wanted)
    assert engine.tally["num_rows"] == 2 * 3 * 12, "each row was counted once"
    [shortage] = told
    assert shortage.what.startswith("training ") and shortage.since.startswith("passes of ")
    assert "trainer.micro_batch" in shortage.remedy
    was_smallest = f"{before[0].samples} samples x {before[0].steps} steps" in shortage.what
    assert (engine._tuned._tuner.candidates == before) == was_smallest, "tried no more"


def test_a_pass_that_the_smallest_size_has_no_memory_for_ends_after_two_attempts(
    recipe: Recipe, loaded: LoadedPolicy, groups: list[GroupData], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()

    def velocity(x: Tensor, sigma: Tensor, told: Conditions, *, guidance: float) -> Tensor:
        tried.append(len(x))
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(loaded.model, "velocity", velocity)
    engine = engine_of(override(recipe, AUTO), loaded)
    with pytest.raises(OutOfMemory) as told:
        engine.train(engine.read(groups[0]))
    assert not told.value.smaller and tried == [1, 1]


def test_a_size_that_never_fits_is_tried_once_and_every_batch_after_it_is_whole(
    recipe: Recipe, loaded: LoadedPolicy, groups: list[GroupData], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, tried = loaded.model.velocity, list[int]()

    def velocity(x: Tensor, sigma: Tensor, told: Conditions, *, guidance: float) -> Tensor:
        if torch.is_grad_enabled():
            tried.append(len(x))
            if len(x) > 3:
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        return whole(x, sigma, told, guidance=guidance)

    monkeypatch.setattr(loaded.model, "velocity", velocity)
    engine = engine_of(override(recipe, AUTO), loaded)
    told = [engine.train(engine.read(group)) for _ in range(4) for group in groups]
    assert [rows for rows in tried if rows > 3] == [6]
    [shortage] = [each for each in told if each]
    assert shortage.what == "training 2 samples x 3 steps in one pass"
    assert engine.tally["num_rows"] == 4 * 3 * 12
