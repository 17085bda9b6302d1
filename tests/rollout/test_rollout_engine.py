"""A rollout worker's device: the demo's model, which generates."""

from dataclasses import replace

import pytest
import torch

from services.rollout.rollout_engine import RolloutEngine
from services.rollout.service import as_here
from shared.devices.protocols import GeneratedFragment
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.weights.rounding import add_flat, decode, encode
from shared.diffusion.weights.trained_weights import weights_digest
from shared.errors import ContractError, IntegrityError, UserError
from shared.messages.contracts import Policy, Prompt
from shared.models.memory import WeightsHolding
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import override
from shared.run.manifest import CHANGE
from tests import examples
from tests.shared.diffusion.digits import PROMPT, adapter, load_digits
from tests.shared.diffusion.digits import RECIPE as DIGITS
from tests.stored import one_object

CHANGES = {"batch.group_size": 4, "schedule.fragment_size": 2, "trainer.micro_batch": 2}
RECIPE = override(DIGITS, CHANGES)


@pytest.fixture(scope="module")
def engine() -> RolloutEngine:
    return RolloutEngine(RECIPE)


@pytest.fixture(scope="module")
def versions() -> list[bytes]:
    policy = load_digits()
    return [adapter(policy, seed) for seed in (1, 2)]


async def generated(engine: RolloutEngine, first: int = 0, count: int = 4) -> GeneratedFragment:
    policy = Policy(version=0, weights_digest=engine.weights_digest())
    task = examples.task(
        first_sample=first, num_samples=count, policy=policy, prompt=Prompt(text=PROMPT),
        window_start=1,
    )  # fmt: skip
    work = await engine.begin(task)
    while not work.done:
        await work.advance()
    return await work.finish()


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


async def test_a_change_is_added_to_the_weights_in_use(
    engine: RolloutEngine, versions: list[bytes]
) -> None:
    await (await engine.stage(one_object(versions[0]))).adopt()
    before = unpack(versions[0])
    change = encode(torch.randn(sum(each.numel() for each in before.values())), "int4")
    after = {name: each.clone() for name, each in before.items()}
    names = sorted(after)
    add_flat([after[name] for name in names], decode(change, sum(map(torch.numel, after.values()))))
    ref = examples.ref(f"weights/1{CHANGE}")
    staged = await engine.stage(replace(one_object(pack(dict(change))), ref=ref))
    assert staged.digest == weights_digest(after) != engine.weights_digest()
    await staged.adopt()
    assert engine.weights_digest() == staged.digest
    with pytest.raises(ContractError, match="not an encoded tensor of"):
        await engine.stage(replace(one_object(versions[0]), ref=ref))


def test_a_worker_may_stream_what_the_recipe_keeps_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert as_here(RECIPE, ServiceSettings(run="digits")) == RECIPE
    monkeypatch.setenv("DIGENRL_ROLLOUT_MEMORY", "streamed")
    here = as_here(RECIPE, ServiceSettings(run="digits"))
    assert here.holding == WeightsHolding(memory="streamed")
    with pytest.raises(UserError, match=r"rollout\.memory"):
        as_here(
            override(DIGITS, {"model.trained": "full", "algorithm.kl_beta": 0.0}),
            ServiceSettings(run="digits"),
        )
    monkeypatch.setenv("DIGENRL_ROLLOUT_MEMORY", "resident")
    streamed = override(DIGITS, {"rollout.memory": "streamed"})
    assert as_here(streamed, ServiceSettings(run="digits")).holding == WeightsHolding()
