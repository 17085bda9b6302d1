"""From a recipe to the network that rollout and trainer both hold, with its LoRA adapter."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch
from torch import nn

from shared.diffusion.loading.compilation import CompiledBlocks, compile_blocks, gpu_seconds
from shared.diffusion.loading.device import choose_kernels, fits, own_device
from shared.diffusion.loading.host_memory import HostMemory, host_memory
from shared.diffusion.loading.models import ModelAdapter, ModelPart, load_model
from shared.diffusion.loading.network import Place, Progress
from shared.diffusion.loading.recomputation import checkpoint_blocks
from shared.diffusion.sampling.encoding import check_encoders
from shared.diffusion.sampling.sampler import SamplingPlan
from shared.diffusion.weights.master_weights import MastersPlace, ShardsPlace, TrainedWeights
from shared.diffusion.weights.starting_adapter import load_adapter
from shared.diffusion.weights.streaming import stream
from shared.diffusion.weights.trained_weights import ADAPTER, WeightsInUse, trained_parameters
from shared.diffusion.weights.weight_sets import WeightSets
from shared.errors import UserError
from shared.learning.algorithms import ALGORITHMS
from shared.learning.seeds import derive
from shared.models.lora_files import LoraFile
from shared.models.memory import WeightsHolding, file_bytes
from shared.recipe.adapter import agreed, check_adapter_here, recipe_adapter
from shared.recipe.networks import check_networks, frozen_layers
from shared.recipe.recipe import Recipe
from shared.recipe.sampling import make_sigmas

PROGRESS_LOG_S = 5.0

log = structlog.get_logger()

REMEDY = (
    'use a GPU with more memory, model.dtype = "bfloat16", model.weights = "int8", trainer.memory '
    'or rollout.memory = "streamed", or see what else is on it'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Suffixes of the names of the linear layers that are adapted."""
    excluded: tuple[str, ...] = ()
    """Prefixes of the names of layers that are left alone."""
    seed: int
    """Seed of the Gaussian initialisation of the A matrices; B starts at zero."""
    layers: tuple[str, ...] = ()
    """Full names of the adapted layers, in place of ``targets``."""


def attach_lora(transformer: nn.Module, spec: LoraSpec) -> None:
    """Add a fresh adapter, in float32 at least and without dropout: a replay equals its sample.

    Raises:
        UserError: if no layer has the name of a target.
    """
    from peft import LoraConfig

    from shared.diffusion.weights.adapted_layer import adapt_in_fewer_calls

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        init_lora_weights="gaussian",
        target_modules=list(spec.layers) or _target_layers(transformer, spec),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        transformer.add_adapter(config, adapter_name=ADAPTER)  # type: ignore[operator]
    adapt_in_fewer_calls(transformer)
    for parameter in trained_parameters(transformer).values():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _target_layers(transformer: nn.Module, spec: LoraSpec) -> list[str]:
    """Returns the full names of the layers to adapt."""
    layers = [name for name, each in transformer.named_modules() if isinstance(each, nn.Linear)]
    for target in spec.targets:
        if not any(_ends_with(name, target) for name in layers):
            raise UserError(f"model.lora.targets: the model has no linear layer named {target}")
    return [
        name
        for name in layers
        if any(_ends_with(name, target) for target in spec.targets)
        and not name.startswith(spec.excluded)
    ]


def _ends_with(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    model: ModelAdapter
    device: torch.device
    in_use: WeightsInUse
    """Trained weights: one object for all who use this network, so that it is digested once."""
    trained: TrainedWeights
    """Its parameters for an optimizer."""
    sets: WeightSets
    """The sets of trained weights that the network can use."""
    compiled: CompiledBlocks | None = None
    """Compiled blocks, if the recipe compiles."""


def load_policy(
    recipe: Recipe,
    parts: set[ModelPart],
    index: int = 0,
    holding: WeightsHolding | None = None,
    *,
    trains: bool = False,
) -> LoadedPolicy:
    """Loads the recipe's base model, with the adapter that the run begins from if one is trained,
    the recipe's own or a fresh one: the same in every process.

    ``index`` is the number of the host's GPU; without any GPU, networks share the CPU. ``holding``:
    how the network is held for generation only; by default as for training. ``trains``: an
    optimizer will train it, with float32 masters for weights in half precision, and with a shard of
    the weights if the recipe shards, so that all ranks have to load at the same time.

    Raises:
        OutOfMemory: if it does not fit.
        UserError: if the adapter is not one of the model's.
    """
    device, holding = own_device(index), holding or recipe.trainer_holding
    choose_kernels(device, recipe.model.matmul_precision)
    with fits(device, f"loading {', '.join(sorted(parts))} of the model", REMEDY):
        place = _place(recipe, device) if trains else None
        return _loaded(recipe, parts, device, holding, place, trains=trains)


def _loaded(
    recipe: Recipe,
    parts: set[ModelPart],
    device: torch.device,
    holding: WeightsHolding,
    place: Place | None,
    *,
    trains: bool,
) -> LoadedPolicy:
    table = recipe.model
    check_networks(recipe)
    with loading(table.folder, parts, device, place) as progress:
        model = load_model(
            table.folder,
            parts,
            device=device,
            dtype=getattr(torch, table.dtype),
            max_text_tokens=table.text_tokens,
            guidance_2=table.guidance_2,
            attention=table.attention,
            holding=holding,
            place=place,
            progress=progress,
        )
    if "text" in parts:
        check_encoders(model, recipe)
    start = _start(recipe)
    policy = make_policy(recipe, model, device, place, start)
    if holding.memory == "streamed":
        stream(model.transformer, device)
    if recipe.keeps_reference and trains:
        policy.sets.keep_reference(on_host=table.trained == "full")
    if table.compile is None or (table.compile == "auto" and device.type == "cpu"):
        return policy
    trial_by = gpu_seconds if table.compile == "auto" else None
    return replace(policy, compiled=compile_blocks(model.transformer, trial_by=trial_by))


@contextmanager
def loading(
    folder: Path, parts: set[ModelPart], device: torch.device, place: Place | None
) -> Iterator[Progress]:
    """Surrounds the loading of a model: logs what is loaded, every few seconds how much of it is
    there, and how long it took. Gives what is to be called with numbers of bytes that are read."""
    total = file_bytes(folder, parts - {"transformer"})
    if "transformer" in parts:
        share = 1.0 if place is None else place.share
        total += int(share * file_bytes(folder, {"transformer"}))
    began = reported_at = time.monotonic()
    done = 0

    def progress(num_bytes: int) -> None:
        nonlocal done, reported_at
        done += num_bytes
        if time.monotonic() >= reported_at + PROGRESS_LOG_S:
            reported_at = time.monotonic()
            log.info("model_loads", percent=min(99, round(100 * done / max(1, total))))

    about = {"model": str(folder), "parts": sorted(parts), "device": str(device)}
    log.info("loading_model", **about, gigabytes=round(total / 1e9, 3))
    yield progress
    seconds = time.monotonic() - began
    log.info("model_loaded", **about, gigabytes=round(done / 1e9, 3), seconds=round(seconds, 2))


def _start(recipe: Recipe) -> LoraFile | None:
    """Reads what the adapter is that the run begins from; raises UserError if it is not here, or
    the recipe has another `model.lora`."""
    check_adapter_here(recipe)
    adapter = recipe_adapter(recipe)
    if adapter is not None:
        agreed(recipe.model.lora, adapter)
    return adapter


def _place(recipe: Recipe, device: torch.device) -> Place:
    """Returns where the trainer's network is put."""
    dtype = getattr(torch, recipe.model.dtype)
    has_masters = recipe.model.trained == "full" and dtype.itemsize < torch.float32.itemsize
    if recipe.trainer.is_sharded:
        return ShardsPlace(device, masters_of=dtype if has_masters else None)
    return MastersPlace(device) if has_masters else Place(device)


def make_policy(
    recipe: Recipe,
    model: ModelAdapter,
    device: torch.device,
    place: Place | None = None,
    start: LoraFile | None = None,
    memory: HostMemory | None = None,
) -> LoadedPolicy:
    """Makes a policy of a base model whose weights ``place`` has put on ``device``, or are fake:
    marks what the recipe trains, attaching an adapter if that is one: ``start``, or a fresh one.
    Inputs of blocks that are offloaded go to ``memory``, by default the host's of ``device``."""
    table, network, place = recipe.model, model.transformer, place or Place(device)
    model.cfg_gradient = recipe.algorithm.cfg_gradient
    if table.vae_tiling:
        model.decode_in_tiles()
    if table.trained == "full":
        network.requires_grad_(True)
    else:
        lora = LoraSpec(
            rank=table.lora.rank,
            alpha=table.lora.alpha,
            targets=table.lora.targets or tuple(model.lora_targets),
            excluded=(*model.lora_excluded, *frozen_layers(recipe)),
            seed=derive(recipe.run.seed, "lora"),
            layers=() if start is None else start.layers,
        )
        attach_lora(network, lora)
        if start is not None:
            load_adapter(network, start)
    if keeping := recipe.trainer.gradient_checkpointing:
        checkpoint_blocks(network, keeping, memory or host_memory(device))
    return LoadedPolicy(
        model,
        device,
        WeightsInUse(network, place.types),
        TrainedWeights(network, place.masters, place.types),
        WeightSets(network),
    )


def sampling_plan(recipe: Recipe, *, window_start: int | None) -> SamplingPlan:
    """Returns how one group is denoised; without a window, deterministically, as for evaluation."""
    sampling, method = recipe.sampling, ALGORITHMS[recipe.algorithm.name]
    grid, window = make_sigmas(sampling), range(0)
    is_drawn = sampling.trained == "random"
    if window_start is not None and method.has_window:
        window = range(window_start, window_start + sampling.window)
        window = range(len(grid) - 2) if is_drawn else window
    return SamplingPlan(
        sigmas=grid,
        window=window,
        all_stochastic=bool(window) and sampling.stochastic == "all",
        num_drawn=sampling.window if window and is_drawn else None,
        noise_level=sampling.noise_level,
        variant=sampling.variant,
        keeps_means=method.keeps_means,
        state_dtype=torch.bfloat16 if sampling.state_dtype == "bfloat16" else None,
    )
