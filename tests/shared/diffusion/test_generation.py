"""Generation step by step, beside training, and under new weights."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared.devices.protocols import GeneratedFragment
from shared.diffusion.generation import Generator
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.sampling.tensors import pack, unpack, unpack_trajectory
from shared.diffusion.weights.trained_weights import (
    StagedTensors,
    trained_parameters,
    trained_tensors,
    weights_digest,
)
from shared.errors import ContractError, IntegrityError
from tests.shared.diffusion.digits import PROMPT, RECIPE, accumulate, adapter, gradient, same, task


def content(generated: GeneratedFragment) -> tuple[bytes, bytes, str]:
    return generated.trajectory, generated.media, generated.weights_digest


def test_a_fragment_is_a_trajectory_and_images_of_the_weights_in_use(generator: Generator) -> None:
    made = generator.generate(task())
    assert unpack_trajectory(made.trajectory).latents.shape[0] == 4
    assert unpack(made.media)["images"].dtype == torch.uint8
    assert made.weights_digest == generator.weights_digest()
    assert content(generator.generate(task())) == content(made)
    assert content(generator.generate(task(1))) != content(made)


def test_a_paused_fragment_goes_on_as_if_nothing_had_been(
    policy: LoadedPolicy, generator: Generator
) -> None:
    whole = generator.generate(task())
    conditions = generator.conditions(PROMPT)
    work, other = generator.begin(task()), generator.begin(task(1, num_samples=3))
    while not work.done:
        generator.advance(work)
        accumulate(policy, conditions, seed=work.denoising.num_steps_done)
        generator.generate(task(2, num_samples=2))
        generator.advance(other)
    assert content(generator.finish(work)) == content(whole)
    assert other.done


def test_generation_leaves_no_trace_in_training(policy: LoadedPolicy, generator: Generator) -> None:
    transformer = policy.model.transformer
    conditions = generator.conditions(PROMPT)
    accumulate(policy, conditions, seed=0)
    accumulate(policy, conditions, seed=1)
    straight = gradient(policy)
    transformer.zero_grad(set_to_none=True)

    def state() -> object:
        return (
            [module.training for module in transformer.modules()],
            [(p.requires_grad, p._version) for p in transformer.parameters()],
            [layer.disable_adapters for layer in transformer.modules() if hasattr(layer, "lora_A")],
            torch.get_rng_state().tolist(),
        )

    before = state()
    accumulate(policy, conditions, seed=0)
    half = gradient(policy)
    with torch.enable_grad():
        generator.generate(task())
    assert same(gradient(policy), half)
    accumulate(policy, conditions, seed=1)
    assert same(gradient(policy), straight)
    assert state() == before


def test_samples_carry_no_gradient(generator: Generator) -> None:
    with torch.enable_grad():
        work = generator.begin(task())
        generator.advance(work)
    assert not work.denoising.latents.requires_grad


def test_a_fragment_is_not_finished_by_other_weights(
    policy: LoadedPolicy, generator: Generator
) -> None:
    begun, decoded = generator.begin(task()), generator.begin(task())
    generator.advance(begun)
    while not decoded.done:
        generator.advance(decoded)
    old = pack(trained_tensors(policy.model.transformer))
    generator.load(adapter(policy, 2))
    with pytest.raises(IntegrityError, match="no longer in use"):
        generator.advance(begun)
    with pytest.raises(IntegrityError, match="no longer in use"):
        generator.finish(decoded)
    assert begun.denoising.num_steps_done == 1
    generator.load(old)
    generator.advance(begun)
    with torch.no_grad():  # as an optimizer's step does it
        next(iter(trained_parameters(policy.model.transformer).values())).add_(1e-3)
    with pytest.raises(IntegrityError, match="no longer in use"):
        generator.advance(begun)


def test_a_fragment_with_steps_left_cannot_be_finished(generator: Generator) -> None:
    work = generator.begin(task())
    for _ in range(RECIPE.sampling.steps - 1):
        generator.advance(work)
    with pytest.raises(ValueError, match="steps left"):
        generator.finish(work)


@pytest.mark.clock
def test_the_seconds_of_a_fragment_leave_out_its_pauses(generator: Generator) -> None:
    began = time.monotonic()
    work = generator.begin(task())
    while not work.done:
        generator.advance(work)
        time.sleep(0.02)
    pauses = RECIPE.sampling.steps * 0.02
    denoising = work.seconds
    seconds = generator.finish(work).seconds
    assert 0 < denoising < seconds <= time.monotonic() - began - pauses


def test_adopted_weights_are_those_that_were_staged(
    policy: LoadedPolicy, generator: Generator
) -> None:
    data = adapter(policy, 3)
    parameters = trained_parameters(policy.model.transformer)
    identities = [id(parameter) for parameter in parameters.values()]
    before = generator.weights_digest()
    staged = generator.stage(data)
    assert generator.weights_digest() == before != staged.digest
    assert generator.adopt(staged) == weights_digest(unpack(data)) == weights_digest(parameters)
    assert generator.weights_digest() == staged.digest
    assert [id(p) for p in trained_parameters(policy.model.transformer).values()] == identities
    with pytest.raises(ValueError, match="only once"):
        generator.adopt(staged)


def test_a_change_in_place_after_adoption_is_seen(
    policy: LoadedPolicy, generator: Generator
) -> None:
    digest = generator.load(adapter(policy, 3))
    parameters = trained_parameters(policy.model.transformer)
    with torch.no_grad():
        next(iter(parameters.values())).mul_(2)
    assert generator.weights_digest() == weights_digest(parameters) != digest


def test_adoption_is_seen_by_whoever_else_watches_the_network(
    policy: LoadedPolicy, generator: Generator
) -> None:
    other = Generator(RECIPE, policy)
    assert other.weights_digest() == generator.weights_digest()
    memory = {n: p.data for n, p in trained_parameters(policy.model.transformer).items()}
    generator.load(adapter(policy, 3))
    newest = unpack(adapter(policy, 4))  # in the memory of the first, as an allocator may have it
    for name, tensor in memory.items():
        tensor.copy_(newest[name])
    generator.adopt(StagedTensors(digest=weights_digest(memory), tensors=memory))
    assert other.weights_digest() == weights_digest(newest)


def test_staged_weights_are_nobody_elses(policy: LoadedPolicy, generator: Generator) -> None:
    data = adapter(policy, 3)
    digest = generator.load(data)
    for parameter in trained_parameters(policy.model.transformer).values():
        parameter.data.zero_()
    assert digest == weights_digest(unpack(data)) == generator.load(data)


@pytest.mark.parametrize("change", ["name", "shape", "type"])
def test_weights_of_another_adapter_are_not_staged(
    policy: LoadedPolicy, generator: Generator, change: str
) -> None:
    tensors = unpack(adapter(policy, 3))
    name = next(iter(tensors))
    if change == "name":
        tensors["other"] = tensors.pop(name)
    else:
        tensors[name] = torch.zeros(1) if change == "shape" else tensors[name].double()
    before = generator.weights_digest()
    with pytest.raises(IntegrityError, match="another adapter"):
        generator.stage(pack(tensors))
    with pytest.raises(ContractError):
        generator.stage(b"no tensors")
    assert generator.weights_digest() == before


def test_staging_beside_generation_changes_no_sample(
    policy: LoadedPolicy, generator: Generator
) -> None:
    straight = [content(generator.generate(task(group))) for group in range(5)]
    data = adapter(policy, 3)
    stop = threading.Event()

    def stage() -> int:
        count = 0
        while not stop.is_set():
            generator.stage(data)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        staging = pool.submit(stage)
        beside = [content(generator.generate(task(group))) for group in range(5)]
        stop.set()
        assert staging.result() >= 5
    assert beside == straight


@pytest.mark.clock
def test_adoption_interrupts_generation_for_milliseconds(
    policy: LoadedPolicy, generator: Generator
) -> None:
    versions = [adapter(policy, seed) for seed in (1, 2)]
    pauses = []
    for number in range(200):
        staged = generator.stage(versions[number % 2])
        began = time.monotonic()
        generator.adopt(staged)
        generator.weights_digest()
        pauses.append(time.monotonic() - began)
    assert sorted(pauses)[197] < 0.020  # measured: 0.1 ms
