"""A device whose memory does not suffice: less at a time, and then a failure that says so."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.devices.protocols import GeneratedFragment
from shared.diffusion.generation import Generator
from shared.diffusion.loading.device import (
    choose_kernels,
    fits,
    is_out_of_memory,
    retry_after_release,
)
from shared.diffusion.loading.models import Conditions
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import unpack, unpack_trajectory
from shared.errors import OutOfMemory
from shared.recipe.recipe import override
from tests.shared.diffusion.digits import RECIPE, load_digits, task


@pytest.fixture
def generator(policy: LoadedPolicy) -> Generator:
    return Generator(RECIPE, policy)


def limit(policy: LoadedPolicy, patch: pytest.MonkeyPatch, *, rows: int, calls: int) -> None:
    """Let the network take at most ``rows`` samples at a time from call number ``calls`` on."""
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


PARTS = ("encode", "velocity", "decode")


def no_memory_at(policy: LoadedPolicy, patch: pytest.MonkeyPatch, *, call: int) -> list[int]:
    """One call of the model's parts, of that number, finds no memory. Returns the rows of those of
    the network, as they are made."""
    seen, rows = [0], list[int]()

    def watched(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def part(first: Tensor, *rest: object, **named: object) -> Tensor:
            seen[0] += 1
            if seen[0] == call:
                raise torch.OutOfMemoryError("tried to allocate 20 GiB")
            if whole.__name__ == "velocity":
                rows.append(len(first))
            return whole(first, *rest, **named)

        return part

    for name in PARTS:
        patch.setattr(policy.model, name, watched(getattr(policy.model, name)))
    return rows


@pytest.fixture(scope="module")
def whole(policy: LoadedPolicy) -> GeneratedFragment:
    return Generator(RECIPE, policy).generate(task(num_samples=8))


FEW = (1, 2, 11, 12)
"""The prompt, the first and the last step, and decoding."""


@pytest.mark.parametrize(
    "call", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 13)]
)
def test_wherever_memory_is_short_the_samples_have_the_same_bytes_and_half_is_generated_from_then(
    policy: LoadedPolicy, whole: GeneratedFragment, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    generator = Generator(RECIPE, policy)
    rows = no_memory_at(policy, monkeypatch, call=call)
    made = generator.generate(task(num_samples=8))
    assert (made.trajectory, made.media) == (whole.trajectory, whole.media)
    in_a_step = 1 < call < 12  # the prompt comes before, and decoding after ten steps
    before = call - 2 if in_a_step else 10
    assert rows == [8] * before + [4, 4] * (10 - before)
    rows.clear()
    following = generator.generate(task(1, num_samples=8))
    assert max(rows) == (4 if in_a_step else 8)
    assert following.shortage is None, "it was said before"
    if in_a_step:
        assert made.shortage is not None
        assert made.shortage.what == "a denoising step of 8 samples of 8 x 8 x 1"
        assert made.shortage.since == "4 at a time, which takes longer"
        assert made.shortage.remedy == "schedule.fragment_size of at most 4"


def test_what_the_work_held_is_free_when_the_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[Tensor]] = []

    def work() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    freed: list[bool] = []
    monkeypatch.setattr(
        "shared.diffusion.loading.device.release", lambda _: freed.append(held[-1]() is None)
    )
    with pytest.raises(OutOfMemory), fits(torch.device("cpu"), "work", "remedy"):
        work()
    with pytest.raises(torch.OutOfMemoryError):
        retry_after_release(torch.device("cpu"), work)
    assert freed == [True, True]


def test_a_video_that_cannot_be_decoded_names_tiles_as_the_remedy(
    policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(latents: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 60 GiB")

    monkeypatch.setattr(policy.model, "decode", none_left)
    video = RECIPE.model_copy(update={"model": RECIPE.model.model_copy(update={"frames": 53})})
    with pytest.raises(OutOfMemory, match=r"decoding one sample of 8 x 8 x 53.*vae_tiling = true"):
        Generator(video, policy).generate(task())
    tiled = override(RECIPE, {"model.vae_tiling": True})
    with pytest.raises(OutOfMemory) as told:
        Generator(tiled, policy).generate(task())
    assert "vae_tiling" not in str(told.value)


@pytest.mark.parametrize(("numbers", "together"), [(None, [3]), (128, [2, 1]), (63, [1, 1, 1])])
def test_decoding_takes_one_sample_at_a_time_but_for_the_tiniest(
    policy: LoadedPolicy,
    generator: Generator,
    monkeypatch: pytest.MonkeyPatch,
    numbers: int | None,
    together: list[int],
) -> None:
    if numbers is not None:
        monkeypatch.setattr("shared.diffusion.sampling.decoding.MAX_DECODED_LATENTS", numbers)
    decode, sizes = policy.model.decode, []

    def noted(latents: Tensor) -> Tensor:
        sizes.append(len(latents))
        return decode(latents)

    monkeypatch.setattr(policy.model, "decode", noted)
    generator.generate(task(num_samples=3))
    assert sizes == together


def test_matrices_are_rounded_on_a_gpu_if_the_recipe_does_not_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    choose_kernels(torch.device("cpu"), RECIPE.model.matmul_precision)
    assert said == [], "equal runs give equal bytes on any CPU"
    for recipe in (RECIPE, override(RECIPE, {"model.matmul_precision": "highest"})):
        choose_kernels(torch.device("cuda"), recipe.model.matmul_precision)
    assert said == ["high", "highest"]


def test_torch_does_not_choose_cudnns_attention_of_its_own_accord() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_digits()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


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
