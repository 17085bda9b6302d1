"""A network whose blocks come to the device one after the other samples as one that lies on it.

There is no second device here, so one is emulated: what "lies on the device" are copies, made and
thrown away by diffusers' own code for CUDA streams, and a layer that would compute with what lies
on the host fails.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import group_offloading
from torch import Tensor, nn

from shared.diffusion.experts import networks_of
from shared.diffusion.generation import Generator
from shared.diffusion.models import ModelAdapter
from shared.diffusion.policy import load_policy
from shared.diffusion.streaming import offloaded_groups
from shared.diffusion.weights import (
    WeightsInUse,
    trained_parameters,
    trained_tensors,
    weights_digest,
)
from shared.models.memory import Form, Holding, Part
from tests import tiny_models
from tests.shared.diffusion import digits, ratio_error
from tests.stored import staged

STREAMED = Holding(memory="streamed")
ALL: set[Part] = {"transformer", "text", "decoder"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class EmulatedStream:
    """Stands for a CUDA stream, and for the module that has them: everything is done at once."""

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self) -> "EmulatedStream":
        return self

    def synchronize(self) -> None: ...


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_host(tensor: Tensor, low_cpu_mem_usage: bool) -> Tensor:
        return tensor.detach().clone()

    @contextlib.contextmanager
    def pinned(group: Any) -> Iterator[dict[Tensor, Tensor]]:
        yield group.cpu_param_dict

    def transfer(group: Any, tensor: Tensor, source: Tensor, stream: object) -> None:
        if group_offloading._is_torchao_tensor(tensor):
            group_offloading._swap_torchao_tensor(tensor, source.clone())
        else:
            tensor.data = source.clone()

    def apply(module: nn.Module, **options: Any) -> None:
        config = group_offloading.GroupOffloadingConfig(
            onload_device=options["onload_device"],
            offload_device=options["offload_device"],
            offload_type=group_offloading.GroupOffloadingType.BLOCK_LEVEL,
            num_blocks_per_group=options["num_blocks_per_group"],
            non_blocking=False,
            record_stream=False,
            low_cpu_mem_usage=False,
            stream=EmulatedStream(),
        )
        group_offloading._apply_group_offloading(module, config)

    group = group_offloading.ModuleGroup
    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", lambda device: EmulatedStream())
    monkeypatch.setattr(group, "_to_cpu", staticmethod(on_host))
    monkeypatch.setattr(group, "_pinned_memory_tensors", pinned)
    monkeypatch.setattr(group, "_transfer_tensor_to_device", transfer)
    monkeypatch.setattr("diffusers.hooks.apply_group_offloading", apply)


def watch(network: nn.Module) -> list[str]:
    """Has every layer of a block fail that computes with weights on the host; returns the list in
    which each layer that has computed is named."""
    groups = list(offloaded_groups(network))
    hosts = {storage(tensor) for group in groups for tensor in group.cpu_param_dict.values()}
    brought = {id(group.onload_leader) for group in groups}
    # a block that is a single layer is brought within its own call
    computed: list[str] = []

    def check(name: str, module: nn.Module, _: object) -> None:
        assert storage(module.weight) not in hosts, f"{name} computes with weights on the host"
        computed.append(name)

    for name, module in network.named_modules():
        is_layer = isinstance(module, nn.Linear) and ".lora_" not in name
        if is_layer and id(module) not in brought:
            module.register_forward_pre_hook(partial(check, name))
    assert hosts
    return computed


def storage(tensor: Any) -> int:
    return int(getattr(tensor, "qdata", tensor).data_ptr())


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


@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("family", tiny_models.but_slow(["sd3"]))
@pytest.mark.usefixtures("emulated")
def test_streamed_samples_are_resident_ones_to_the_last_bit_whichever_version_is_in_use(
    family: str, form: Form | None, tmp_path: Path
) -> None:
    tiny_models.save(family, tmp_path)
    resident, streamed = (
        ratio_error.load_moved(tmp_path, "lora", torch.float32, Holding(form, memory))
        for memory in ("resident", "streamed")
    )
    computed = watch(streamed.transformer)
    expected, found = sampled(family, resident), sampled(family, streamed)
    assert torch.equal(found, expected)
    streaming = [each for each in offloaded_groups(streamed.transformer) if each.parameters]
    assert len(streaming) == sum(map(len, blocks(streamed.transformer)))
    assert len(set(computed)) >= len(streaming)


@pytest.mark.usefixtures("emulated")
def test_between_two_samples_only_what_is_outside_of_the_blocks_and_the_adapter_are_on_the_device(
    tmp_path: Path,
) -> None:
    tiny_models.save("sd3", tmp_path)
    model = ratio_error.load_moved(tmp_path, "lora", torch.float32, STREAMED)
    network = model.transformer
    on_host = {id(each) for group in offloaded_groups(network) for each in group.parameters}
    trained = {id(each) for each in trained_parameters(network).values()}
    for name, parameter in network.named_parameters():
        is_base = name.startswith("transformer_blocks.") and id(parameter) not in trained
        assert (id(parameter) in on_host) == is_base, name


def test_on_a_cpu_a_worker_streams_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the hooks, though there is nowhere to move a block to."""
    onloaded: list[Any] = []
    group, onload = group_offloading.ModuleGroup, group_offloading.ModuleGroup.onload_

    def counted(self: Any) -> None:
        onloaded.append(self)
        onload(self)

    monkeypatch.setattr(group, "onload_", counted)
    resident = Generator(digits.RECIPE, digits.load_digits())
    streamed = Generator(digits.RECIPE, load_policy(digits.RECIPE, ALL, holding=STREAMED))
    found = []
    for generator in (resident, streamed):
        generator.load(digits.adapter(digits.load_digits(), 1))
        made = generator.generate(digits.task())
        found.append((made.trajectory, made.media, made.weights_digest))
    assert found[0] == found[1]
    assert len(onloaded) >= digits.RECIPE.sampling.steps


def blocks(network: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    """Returns the lists of blocks of a network, or of two, as diffusers streams them: layers that
    merely follow each other are such a list as well."""
    parts = [each for part in networks_of(network).values() for each in part.children()]
    return [each for each in parts if isinstance(each, nn.ModuleList | nn.Sequential)]
