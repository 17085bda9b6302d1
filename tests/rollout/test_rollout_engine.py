"""A rollout worker's device: the demo's model, which generates and computes gradients by turns."""

import pytest
import torch

from services.rollout.rollout_engine import RolloutEngine
from services.rollout.service import as_here
from shared.devices.protocols import Generated, GroupData, GroupGradient
from shared.diffusion.tensors import pack, unpack
from shared.diffusion.weights import weights_digest
from shared.errors import ContractError, IntegrityError, OutOfMemory, UserError
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.models.memory import Holding
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import override
from tests.shared.diffusion.digits import PROMPT, adapter, load_digits
from tests.shared.diffusion.digits import RECIPE as DIGITS
from tests.stored import one_object

CHANGES = {
    "rollout.can_train": True,
    "batch.group_size": 4,
    "schedule.fragment_size": 2,
    "trainer.micro_batch": 2,
}
RECIPE = override(DIGITS, CHANGES)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return RolloutEngine(RECIPE)


@pytest.fixture(scope="module")
def versions() -> list[bytes]:
    policy = load_digits()
    return [adapter(policy, seed) for seed in (1, 2)]


async def generated(engine: RolloutEngine, first: int = 0, count: int = 4) -> Generated:
    task = GenerateFragment(
        fragment=Fragment(batch=0, group=0, first_sample=first, num_samples=count, attempt=0),
        policy=Policy(version=0, weights_digest=engine.weights_digest()),
        prompt=Prompt(text=PROMPT),
        window_start=1,
        worker="rollout-0",
    )
    work = await engine.begin(task)
    while not work.done:
        await work.advance()
    return await work.finish()


async def whole_group(engine: RolloutEngine) -> tuple[GroupData, GroupGradient]:
    fragments = [await generated(engine, first, 2) for first in (0, 2)]
    data = GroupData(
        trajectories=tuple(fragment.trajectory for fragment in fragments),
        conditions=await engine.conditions(PROMPT),
        advantages=(1.0, -1.0, 0.5, -0.5),
    )
    return data, await engine.gradient(data)


async def test_staged_weights_are_in_use_once_they_are_adopted(
    engine: RolloutEngine, versions: list[bytes]
) -> None:
    data, before = versions[1], engine.weights_digest()
    staged = await engine.stage(one_object(data))
    assert staged.digest == weights_digest(unpack(data)) != before
    assert engine.weights_digest() == before
    await staged.adopt()
    assert engine.weights_digest() == staged.digest
    assert (await generated(engine)).weights_digest == staged.digest
    with pytest.raises(ContractError):
        await engine.stage(one_object(b"no tensors"))
    with pytest.raises(IntegrityError, match="another adapter"):
        await engine.stage(one_object(pack({"other": torch.zeros(1)})))
    assert engine.weights_digest() == staged.digest


async def test_a_gradient_is_that_of_the_weights_in_use_and_leaves_no_trace(
    engine: RolloutEngine, versions: list[bytes]
) -> None:
    await (await engine.stage(one_object(versions[0]))).adopt()
    before, digest = await generated(engine), engine.weights_digest()
    data, first = await whole_group(engine)
    again = await engine.gradient(data)
    assert again.gradient == first.gradient, "one gradient was added to the other"
    assert any(tensor.abs().max() > 0 for tensor in unpack(first.gradient).values())
    after = await generated(engine)
    assert (after.trajectory, after.media) == (before.trajectory, before.media)
    assert engine.weights_digest() == digest
    await (await engine.stage(one_object(versions[1]))).adopt()
    assert (await engine.gradient(data)).gradient != first.gradient


async def test_a_gradient_of_half_a_group_is_refused(engine: RolloutEngine) -> None:
    data, _ = await whole_group(engine)
    half = GroupData(
        trajectories=data.trajectories[:1],
        conditions=data.conditions,
        advantages=data.advantages,
    )
    with pytest.raises(ContractError):
        await engine.gradient(half)


async def test_a_device_without_the_memory_says_so(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_too_much(group: GroupData) -> GroupGradient:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr(engine, "_gradient", needs_too_much)
    with pytest.raises(OutOfMemory, match="can_train"):
        await engine.gradient(GroupData(trajectories=(), conditions=b"", advantages=()))


def test_a_worker_may_stream_what_the_recipe_keeps_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computes no gradients then, whatever the others do."""
    assert as_here(RECIPE, ServiceSettings(run="digits")) == RECIPE
    monkeypatch.setenv("DIGENRL_ROLLOUT_MEMORY", "streamed")
    here = as_here(RECIPE, ServiceSettings(run="digits"))
    assert here.holding == Holding(memory="streamed")
    assert not here.rollout.can_train
    with pytest.raises(UserError, match=r"rollout\.memory"):
        as_here(
            override(DIGITS, {"model.trained": "full", "algorithm.kl_beta": 0.0}),
            ServiceSettings(run="digits"),
        )
    monkeypatch.setenv("DIGENRL_ROLLOUT_MEMORY", "resident")
    streamed = override(DIGITS, {"rollout.memory": "streamed"})
    assert as_here(streamed, ServiceSettings(run="digits")) == DIGITS
