"""A network whose blocks come to the device one after the other computes what one on it does.

There is no second device here, so one is emulated: what comes from the host are copies, and between
its calls a block holds nothing that could compute.
"""

import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shared.diffusion.generation import Generator
from shared.diffusion.loading.experts import named_networks
from shared.diffusion.loading.host_memory import HostMemory, PinnedMemory, piece_sizes
from shared.diffusion.loading.models import ModelAdapter
from shared.diffusion.loading.recomputation import checkpoint_blocks
from shared.diffusion.policy import load_policy
from shared.diffusion.weights import streaming
from shared.diffusion.weights.trained_weights import (
    WeightsInUse,
    trained_parameters,
    trained_tensors,
    weights_digest,
)
from shared.models.memory import BLOCK, Form, ModelPart, WeightsHolding
from tests import tiny_models
from tests.shared.diffusion import digits, ratio_error
from tests.shared.diffusion.test_blocks import gradient
from tests.stored import staged

STREAMED = WeightsHolding(memory="streamed")
ALL: set[ModelPart] = {"transformer", "text", "decoder"}
CPU = torch.device("cpu")
ONE_BLOCK = ("wan", "wan22", "wan-i2v", "wan22-i2v")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class CopiedMemory(HostMemory):
    """Stands for the memory of a GPU's host: counts the bytes of what came from it and lives."""

    def __init__(self) -> None:
        self.live = self.peak = self.fetched = 0

    def store(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def fetch(self, stored: Tensor) -> Tensor:
        found = stored.clone()
        self.fetched += found.nbytes
        self.live += found.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(found.untyped_storage(), self._free, found.nbytes)
        return found

    def _free(self, size: int) -> None:
        self.live -= size


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> CopiedMemory:
    memory = CopiedMemory()
    monkeypatch.setattr(streaming, "host_memory", lambda device: memory)
    return memory


def sampled(family: str, model: ModelAdapter) -> Tensor:
    """Samples with an adapter, with one that was staged meanwhile, and with one that is adopted
    while a sample is computed, after the first block."""
    guidance = ratio_error.GUIDANCES[family][-1]
    conditions = ratio_error.encoded(family, model, guidance)
    run = partial(ratio_error.sample, family, model, conditions, guidance)
    first_block = blocks(model.transformer)[0][0]

    staged = [StagedBeside(model.transformer, seed) for seed in (1, 2)]
    found = [run().latents]
    staged[0].adopt()
    found.append(run().latents)
    hook = first_block.register_forward_hook(lambda *_: staged[1].adopt())
    found.append(run().latents)
    hook.remove()
    assert len({each.sum().item() for each in found}) == 3, "each adapter gives other samples"
    return torch.cat(found)


class StagedBeside:
    """Weights that are staged in another thread, and adopted once."""

    def __init__(self, network: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {name: each.shape for name, each in trained_tensors(network).items()}
        tensors = {name: 0.1 * torch.randn(s, generator=generator) for name, s in shapes.items()}
        self._in_use = WeightsInUse(network)
        self._digest = weights_digest(tensors)
        self._staging = ThreadPoolExecutor(1).submit(staged, network, tensors)

    def adopt(self) -> None:
        ready = self._staging.result(timeout=10)
        if ready.tensors:
            assert self._in_use.adopt(ready) == self._digest
        assert self._in_use.digest() == self._digest


@pytest.mark.parametrize("form", [None, "nf4"])
@pytest.mark.parametrize("family", tiny_models.but_slow(["sd3"]))
def test_streamed_samples_are_resident_ones_to_the_last_bit_whichever_version_is_in_use(
    family: str, form: Form | None, tmp_path: Path, host: CopiedMemory
) -> None:
    holdings = WeightsHolding(form), WeightsHolding(form, "streamed")
    resident, streamed = ratio_error.each_held(family, tmp_path, *holdings)
    expected, found = sampled(family, resident), sampled(family, streamed)
    assert torch.equal(found, expected)
    assert host.fetched


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((each, None) for each in ("sd3", "flux")),
        ("sd3", "nf4"),
        *(
            pytest.param(each, form, marks=pytest.mark.slow)
            for each in tiny_models.MODELS
            for form in (None, "int8")
        ),
    ],
)
def test_a_streamed_network_is_trained_to_the_same_bits_with_two_blocks_on_the_device(
    family: str, form: Form | None, tmp_path: Path, host: CopiedMemory
) -> None:
    holdings = WeightsHolding(form), WeightsHolding(form, "streamed")
    resident, streamed = ratio_error.each_held(family, tmp_path, *holdings)
    wanted, inputs = gradient(family, resident), CopiedMemory()
    checkpoint_blocks(streamed.transformer, "offloaded", inputs)
    for _ in range(2):  # at first nothing tells which block follows
        found = gradient(family, streamed)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    blocks = block_bytes(resident.transformer)
    assert 0 < host.peak <= 2 * max(blocks.values())
    assert host.fetched > 2 * blocks.total(), "and again in backward passes"
    assert not inputs.live
    assert inputs.fetched or family in ONE_BLOCK, "all but what goes into the first block"


def block_bytes(network: nn.Module) -> Counter[str]:
    """The bytes of each block without its adapter."""
    trained = {id(each) for each in trained_parameters(network).values()}
    found = Counter[str]()
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        block = BLOCK.match(name)
        if block and id(tensor) not in trained:
            found[block[0]] += tensor.nbytes
    return found


def test_between_two_samples_only_what_is_outside_of_the_blocks_and_the_adapter_are_on_the_device(
    tmp_path: Path, host: CopiedMemory
) -> None:
    network = ratio_error.each_held("sd3", tmp_path, STREAMED)[0].transformer
    trained = {id(each) for each in trained_parameters(network).values()}
    for name, parameter in network.named_parameters():
        is_base = name.startswith("transformer_blocks.") and id(parameter) not in trained
        assert parameter.is_meta == is_base, name


def test_on_a_cpu_a_worker_streams_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the hooks, though there is nowhere to move a block to."""
    calls: list[Tensor] = []

    def fetch(self: HostMemory, stored: Tensor) -> Tensor:
        calls.append(stored)
        return stored

    monkeypatch.setattr(HostMemory, "fetch", fetch)
    resident = Generator(digits.RECIPE, digits.load_digits())
    streamed = Generator(digits.RECIPE, load_policy(digits.RECIPE, ALL, holding=STREAMED))
    found = []
    for generator in (resident, streamed):
        generator.load(digits.adapter(digits.load_digits(), 1))
        made = generator.generate(digits.task())
        found.append((made.trajectory, made.media, made.weights_digest))
    assert found[0] == found[1]
    assert len(calls) >= digits.RECIPE.sampling.steps


def test_pinned_memory_is_taken_in_powers_of_two_and_gives_back_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would round the whole up to one."""
    size = 738 * 2**20 + 5
    sizes = piece_sizes(size)
    assert sum(sizes) == size and len(sizes) < 10
    assert all(each.bit_count() == 1 for each in sizes[:-1])
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    memory = PinnedMemory.__new__(PinnedMemory)
    memory._device = CPU
    monkeypatch.setattr(memory, "_copying", nullcontext)
    for tensor in (torch.randn(3, 400_000).bfloat16(), torch.tensor(2.5), torch.empty(0, 4)):
        found = memory.fetch(memory.store(tensor))
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


def blocks(network: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    """Returns the lists of blocks of a network, or of two, as diffusers streams them: layers that
    merely follow each other are such a list as well."""
    parts = [each for part in named_networks(network).values() for each in part.children()]
    return [each for each in parts if isinstance(each, nn.ModuleList | nn.Sequential)]
