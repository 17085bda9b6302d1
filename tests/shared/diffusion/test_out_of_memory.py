"""A device whose memory does not suffice: less at a time, and then a failure that says so."""

import pytest
import torch
from torch import Tensor

from shared.diffusion.device import fits, is_out_of_memory
from shared.diffusion.generation import Generator
from shared.diffusion.models import Conditions
from shared.diffusion.policy import LoadedPolicy, load_policy, set_matmul_precision
from shared.diffusion.tensors import unpack, unpack_trajectory
from shared.errors import OutOfMemory
from shared.recipe.recipe import override
from tests.shared.diffusion.digits import RECIPE, load_digits, task


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return load_digits()


@pytest.fixture
def generator(policy: LoadedPolicy) -> Generator:
    return Generator(RECIPE, policy)


def limit(policy: LoadedPolicy, patch: pytest.MonkeyPatch, *, rows: int, calls: int) -> None:
    """From the call of that number on, the network takes so many samples at a time at most."""
    whole, seen = policy.model.velocity, [0]

    def velocity(x: Tensor, sigma: Tensor, told: Conditions, *, guidance: float) -> Tensor:
        seen[0] += 1
        if seen[0] > calls and len(x) > rows:
            raise torch.OutOfMemoryError(f"tried to allocate {len(x)} GiB")
        return whole(x, sigma, told, guidance=guidance)

    patch.setattr(policy.model, "velocity", velocity)


def test_a_fragment_that_does_not_fit_is_generated_in_parts_and_is_the_same(
    policy: LoadedPolicy, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generator.generate(task(num_samples=5))
    limit(policy, monkeypatch, rows=1, calls=3)
    made = generator.generate(task(num_samples=5))
    paths = [unpack_trajectory(each.trajectory).latents for each in (whole, made)]
    torch.testing.assert_close(*paths, rtol=1e-4, atol=1e-5)
    assert unpack(made.media)["images"].shape == unpack(whole.media)["images"].shape


def test_a_sample_that_does_not_fit_alone_is_a_failure_with_its_size_and_the_remedy(
    policy: LoadedPolicy, generator: Generator
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        limit(policy, patch, rows=0, calls=3)
        said = "one sample of 8 x 8 x 1 .fragment of 4.*tried to allocate 1 GiB.*model.height"
        with pytest.raises(OutOfMemory, match=said):
            generator.generate(task())
    generator.generate(task(1))


def test_decoding_takes_one_sample_at_a_time(
    policy: LoadedPolicy, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, sizes = policy.model.decode, []

    def noted(latents: Tensor) -> Tensor:
        sizes.append(len(latents))
        return decode(latents)

    monkeypatch.setattr(policy.model, "decode", noted)
    generator.generate(task(num_samples=3))
    assert sizes == [1, 1, 1]


def test_matrices_are_rounded_on_a_gpu_if_the_recipe_does_not_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    set_matmul_precision(RECIPE, torch.device("cpu"))
    assert said == [], "equal runs give equal bytes on any CPU"
    for recipe in (RECIPE, override(RECIPE, {"model.matmul_precision": "highest"})):
        set_matmul_precision(recipe, torch.device("cuda"))
    assert said == ["high", "highest"]


def test_a_model_that_does_not_fit_says_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_too_much(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr("shared.diffusion.policy.load_model", needs_too_much)
    with pytest.raises(OutOfMemory, match=r"loading decoder, transformer of the model.*20\.00 GiB"):
        load_policy(RECIPE, {"transformer", "decoder"})


def test_what_is_no_lack_of_memory_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes"), fits(torch.device("cpu"), "a", "b"):
        raise RuntimeError("shapes cannot be multiplied")
    said = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
    assert is_out_of_memory(RuntimeError(said))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))
