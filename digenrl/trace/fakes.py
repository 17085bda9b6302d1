"""Builds a model of configuration files alone: network and decoder of fake tensors, with the
project's own adapter of the family and its own policy."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from shared.diffusion.families.base import NEGATIVE, Family, decoder_dtype, quiet_diffusers
from shared.diffusion.loading.host_memory import HostMemory
from shared.diffusion.loading.models import IMAGE, Conditions
from shared.diffusion.loading.quantisation import quantise_blocks, quantised_layers
from shared.diffusion.policy import LoadedPolicy, make_policy
from shared.diffusion.weights.master_weights import TrainedWeights
from shared.diffusion.weights.sharding import shard
from shared.diffusion.weights.trained_weights import (
    WeightsInUse,
    is_adapter,
    is_half,
    trained_parameters,
)
from shared.diffusion.weights.weight_sets import WeightSets
from shared.errors import UserError
from shared.models.catalogue import PartConfig, boundary, check_family, network_folders, text_tokens
from shared.models.memory import ITEM_BYTES, Form, is_block_matrix
from shared.recipe.recipe import Recipe

CPU = torch.device("cpu")
"""Device of the fake tensors: a torch without CUDA takes no others."""
DIGEST = "0" * 64


class UnreadWeights(WeightsInUse):
    """Gives weights without values a digest."""

    def digest(self) -> str:
        return DIGEST


class Unencoded(Family):
    """A family without text encoders: conditions have shapes only. It comes before the family's own
    class among the bases (`unencoded_class`)."""

    tokens: int
    """Length of a prompt."""
    size: Mapping[str, int]
    """Height, width and frames of a sample."""

    @property
    def image_channels(self) -> int | None:
        return None  # nothing is encoded, no image either

    def encode(
        self,
        prompt: str,
        *,
        guidance: float,
        image: Tensor | None = None,
        frames: int = 1,
        negative_prompt: str = "",
    ) -> Conditions:
        """Returns tensors (1, ...) of zeros; nothing is read. If texts have their own lengths, the
        two prompts differ by one token, as in a run, so that peaks are those for two prompts of
        full length."""
        tensors = self.zeros(self.tokens, self.size)
        if self.spec.forwards(guidance) == 2:
            shorter = self.tokens - (not self.pads_text)
            empty = self.zeros(shorter, self.size).items()
            tensors |= {NEGATIVE + name: each for name, each in empty if not name.startswith(IMAGE)}
        return tensors

    def zeros(self, tokens: int, size: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the conditions (1, ...) of a prompt of this many tokens for a sample of that
        size."""
        shapes = {**self.spec.condition_shapes(self.config, tokens)}
        if self.spec.image_shapes is not None:
            shapes |= self.spec.image_shapes(self.config, self.latent_shape(**size))
        return {name: torch.zeros(1, *each, dtype=self.dtype) for name, each in shapes.items()}


def unencoded_class(family: type[Family]) -> type[Unencoded]:
    return type("Unencoded", (Unencoded, family), {})


class FakeHostMemory(HostMemory):
    """Keeps shapes in place of tensors, so that nothing is left of these on the device."""

    def __init__(self) -> None:
        self.stored_bytes = 0

    def store(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.stored_bytes += num_bytes([tensor])
        return tensor.shape, tensor.dtype

    def fetch(self, stored: tuple[torch.Size, torch.dtype]) -> Tensor:
        shape, dtype = stored
        return torch.empty(shape, dtype=dtype, device=CPU)


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Holds a model that is ready to generate and to train, but for values."""

    policy: LoadedPolicy
    host: "FakeHostMemory"
    network: nn.Module
    decoder: nn.Module
    tokens: int
    """Length of a prompt."""
    forwards: Literal[1, 2]
    """Rows of the network per sample: 2 with classifier-free guidance."""


def fake_model(
    recipe: Recipe,
    fakes: FakeTensorMode,
    *,
    decodes_in: torch.dtype | None = None,
    tokens: int | None = None,
) -> FakeModel:
    """Builds the recipe's model of the configuration files in its folder.

    Args:
        decodes_in: type of the decoder, in place of the one that it is loaded in.
        tokens: length of the prompts, in place of the recipe's.

    Raises:
        UserError: if files are missing, or the model's family is unknown.
    """
    table = recipe.model
    spec, dtype = check_family(table.folder), getattr(torch, table.dtype)
    tokens = tokens or text_tokens(table.folder, table.text_tokens)
    with fakes:
        decodes_in = decodes_in or decoder_dtype(dtype)
        pipeline = _pipeline(table.folder, dtype, decodes_in, table.weights)
    model = unencoded_class(resolve_name(spec.adapter))(
        pipeline, spec, device=CPU, dtype=dtype, text_tokens=tokens, guidance_2=table.guidance_2
    )
    model.tokens = tokens
    model.size = {"height": table.height, "width": table.width, "frames": table.frames}
    network, decoder, host = model.transformer, pipeline.vae, FakeHostMemory()
    forwards: Literal[1, 2] = 2 if spec.forwards(table.guidance) == 2 else 1
    with torch.device("meta"):  # peft does not move what is there
        policy = make_policy(recipe, model, CPU, memory=host)
    with fakes:
        _materialise(network)
        trained = TrainedWeights(network, _masters(recipe, network))
    sets = WeightSets(network)
    policy = replace(policy, in_use=UnreadWeights(network), trained=trained, sets=sets)
    return FakeModel(policy, host, network, decoder, tokens, forwards)


def _masters(recipe: Recipe, network: nn.Module) -> dict[str, nn.Parameter]:
    """Make float32 masters of weights that are trained in half precision, if they are separate
    tensors."""
    if recipe.model.trained == "lora" or recipe.trainer.is_sharded:
        return {}
    return {
        name: nn.Parameter(torch.empty_like(each, dtype=torch.float32))
        for name, each in trained_parameters(network).items()
        if is_half(each)
    }


def shard_fakes(recipe: Recipe, model: FakeModel, mesh: DeviceMesh) -> FakeModel:
    """Shard a fake network by the recipe; if all weights are trained, the shards are float32
    masters."""
    network, dtype = model.network, getattr(torch, recipe.model.dtype)
    is_rounded = recipe.model.trained == "full" and dtype.itemsize < torch.float32.itemsize
    types = {name: each.dtype for name, each in trained_parameters(network).items()}
    shard(network, mesh, passes_in=dtype if is_rounded else None)
    trained = TrainedWeights(network, types=types if is_rounded else None)
    sets = WeightSets(network)
    policy = replace(model.policy, in_use=UnreadWeights(network), trained=trained, sets=sets)
    return replace(model, policy=policy)


def text_bytes(folder: Path, dtype: str) -> dict[str, int]:
    """Returns the bytes of each text encoder's weights, held as ``dtype``."""
    sizes = {}
    quiet_diffusers()
    for name, entry in PartConfig(folder / "model_index.json").items():
        is_text = name.startswith("text_encoder") or name in ("connectors", "image_encoder")
        if is_text and isinstance(entry, list) and all(entry):
            sizes[name] = _num_weights(folder / name, *entry) * ITEM_BYTES[dtype]
    return sizes


def linear_bytes(network: nn.Module, dtype: str) -> int:
    """Returns the bytes of the matrices of a network's blocks, held as ``dtype``."""
    counts = (math.prod(size) for each, size in base_shapes(network) if is_block_matrix(each, size))
    return sum(counts) * ITEM_BYTES[dtype]


def saved_bytes(network: nn.Module) -> int:
    """Returns the bytes that quantised matrices take less than they would as they compute."""
    return sum(
        math.prod(each.size) * each.compute_dtype.itemsize
        - num_bytes([each.weight, each.scale, *each.buffers()])
        for each in quantised_layers(network).values()
    )


def base_shapes(network: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Returns names and shapes of a network's weights, without its adapter and as if none were
    quantised."""
    trained = set(trained_parameters(network).values()) if is_adapter(network) else set()
    shapes = {name: each.shape for name, each in network.named_parameters() if each not in trained}
    for name, layer in quantised_layers(network).items():
        del shapes[f"{name}.scale"]
        shapes[f"{name}.weight"] = torch.Size(layer.size)
    return [(name.replace(".base_layer.", "."), tuple(shape)) for name, shape in shapes.items()]


def num_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors; for sharded ones, of this rank's part."""
    return sum(_local(each).numel() * each.element_size() for each in tensors)


def _local(tensor: Any) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _num_weights(folder: Path, library: str, class_name: str) -> int:
    import transformers

    if library != "transformers":  # a part of a pipeline, whose module diffusers names
        build = resolve_name(f"diffusers.pipelines.{library}:{class_name}")
        with torch.device("meta"):
            part = build.from_config(dict(PartConfig(folder / "config.json")))
        return sum(each.numel() for each in part.parameters())
    build = getattr(transformers, class_name)
    try:
        config = build.config_class.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.folder: cannot read {folder}/config.json: {reason}") from error
    with torch.device("meta"):
        return sum(each.numel() for each in build(config).parameters())


def _pipeline(
    folder: Path, dtype: torch.dtype, decodes_in: torch.dtype, form: Form | None
) -> SimpleNamespace:
    """Builds networks and decoder of a folder, under the names that a pipeline has for them."""
    networks = {
        each.name: as_loaded(_build_part(folder, each.name), dtype)
        for each in network_folders(folder)
    }
    for network in networks.values():
        network.requires_grad_(False).eval()
        quantise_blocks(network, form)
    return SimpleNamespace(
        **networks,
        vae=as_loaded(_build_part(folder, "vae"), decodes_in).eval(),
        config=SimpleNamespace(boundary_ratio=boundary(folder)),
    )


def _build_part(folder: Path, part: str) -> Any:
    """Builds a part of a diffusers folder, with values or not, as the mode is."""
    quiet_diffusers()  # a configuration may have keys that no network takes
    import diffusers

    class_name = PartConfig(folder / "model_index.json")[part][1]
    return getattr(diffusers, class_name).from_config(
        dict(PartConfig(folder / part / "config.json"))
    )


def as_loaded(module: Any, dtype: torch.dtype) -> Any:
    """Gives weights and buffers of a new module the types that loading gives them."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for path, owner in module.named_modules():
        for name, tensor in _stored(owner):
            words = {*path.split("."), name}
            wanted = torch.float32 if kept & words else dtype
            if tensor.is_floating_point() and tensor.dtype != wanted:
                _put(owner, name, torch.empty_like(tensor, dtype=wanted, requires_grad=False))
    return module


def _stored(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from list(owner.named_parameters(recurse=False))
    for name, tensor in list(owner.named_buffers(recurse=False)):
        if name not in owner._non_persistent_buffers_set:
            yield name, tensor


def _put(owner: nn.Module, name: str, tensor: Tensor) -> None:
    former = owner._parameters.get(name)
    if former is not None:
        owner._parameters[name] = nn.Parameter(tensor, former.requires_grad)
    else:
        owner._buffers[name] = tensor


def _materialise(network: nn.Module) -> None:
    """Makes fake tensors of those on the meta device."""
    for owner in network.modules():
        for name, tensor in _stored(owner):
            if tensor.device.type == "meta":
                _put(owner, name, torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU))
