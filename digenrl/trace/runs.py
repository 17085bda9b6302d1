"""Traces a recipe: the project's own generator and trainer, on a model of fake tensors.

It runs each part of a run once: a denoising step of the last fragment's size, the decoding of a
sample, a training pass of the smallest chunk and of one twice as large, an optimizer step. Steps
between are taken by a network that answers zeros, so that states are kept as they would be. On a
trainer, gradients of an earlier pass are there, as they are from the second pass on.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from digenrl.trace.fakes import (
    CPU,
    DIGEST,
    FakeModel,
    base_shapes,
    fake_model,
    linear_bytes,
    num_bytes,
    saved_bytes,
    shard_fakes,
    text_bytes,
)
from digenrl.trace.meter import Meter, Section
from digenrl.trace.record import (
    MeasuredPass,
    RankMemory,
    Shape,
    StoredBytes,
    Trace,
    Training,
    TrainingPass,
    Weights,
)
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.chunks import Chunk, make_tuner
from shared.devices.protocols import GroupData
from shared.diffusion.generation import GenerationInProgress, Generator
from shared.diffusion.policy import LoadedPolicy, sampling_plan
from shared.diffusion.sampling.decoding import to_uint8
from shared.diffusion.sampling.sampler import Denoising, denoise
from shared.diffusion.sampling.tensors import pack
from shared.diffusion.training.rows import TrainingGroup, read_group, row_kind
from shared.diffusion.weights.trained_weights import is_adapter, trained_parameters
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.models.memory import WeightsHolding, network_bytes
from shared.recipe.recipe import Recipe

ShowLine = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSetting:
    """How a recipe is traced, beyond the recipe itself."""

    fragment: int
    """Samples that a device generates at a time."""
    chunks: tuple[Chunk, ...]
    """Training passes to trace, by ascending rows."""
    decoded: int = 1
    """Samples that are decoded at a time."""
    decodes_in: torch.dtype | None = None
    """Type of the decoder, in place of the one that it is loaded in."""
    tokens: int | None = None
    """Length of the prompts, in place of the recipe's."""
    keeps_gradients: bool = True
    """Whether gradients of an earlier pass are there."""


def smallest_chunk(recipe: Recipe) -> Chunk:
    """Returns the smallest chunk that the recipe's trainer would choose."""
    samples = max(1, recipe.batch.group_size // recipe.trainer.devices)
    return make_tuner(recipe, math.inf, samples).candidates[0]


def trace_setting(recipe: Recipe, fragment: int) -> TraceSetting:
    """Returns how a run would use its model, with training passes of two sizes."""
    chunk = smallest_chunk(recipe)
    return TraceSetting(
        fragment=fragment, chunks=(chunk, replace(chunk, samples=2 * chunk.samples))
    )


def trace(recipe: Recipe, setting: TraceSetting, *, is_published: bool, say: ShowLine) -> Trace:
    """Traces a recipe whose model's folder has the configuration files.

    Raises:
        UserError: if files are missing, or the model's family is unknown.
    """
    table = recipe.model
    say("sizes of the text encoders")
    text = text_bytes(table.folder, table.dtype)
    traced = FakeRun.from_recipe(recipe, setting)
    say(f"a denoising step of {setting.fragment} samples, and decoding")
    steps, decoded, media = _generation(recipe, setting, traced)
    train, sharded = None, None
    if recipe.trainer.is_sharded:
        say(f"training on one of {recipe.trainer.shard_devices} ranks that share the weights")
        sharded = _sharded(recipe, setting)
    else:
        rows = " and ".join(str(chunk.rows) for chunk in setting.chunks)
        say(f"training passes of {rows} rows")
        train = _training(recipe, setting, traced)
    return Trace(
        model=table.name,
        is_published=is_published,
        shape=_shape(recipe, traced.model),
        weights=_weights(traced.model, table.dtype, text),
        denoise=steps,
        decode=decoded,
        train=train,
        sharded=sharded,
        stored=_stored(recipe, setting, traced, media),
    )


@dataclass(frozen=True, slots=True)
class FakeRun:
    """Holds a fake model, and the modes in which it runs."""

    model: FakeModel
    fakes: FakeTensorMode
    meter: Meter

    @classmethod
    def from_recipe(cls, recipe: Recipe, setting: TraceSetting) -> "FakeRun":
        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        model = fake_model(recipe, fakes, decodes_in=setting.decodes_in, tokens=setting.tokens)
        return cls(model, fakes, Meter(fakes))

    @contextmanager
    def running(self) -> Iterator[Meter]:
        """Surrounds work with the model, whose weights count as nothing."""
        masters = self.model.policy.trained.masters.values()
        for module in (self.model.network, self.model.decoder, nn.ParameterList(masters)):
            self.meter.hold(module)
        with self.fakes, self.meter:
            yield self.meter


def _generation(
    recipe: Recipe, setting: TraceSetting, run: FakeRun
) -> tuple[tuple[MeasuredPass, ...], MeasuredPass, int]:
    """Returns denoising steps, the decoding of samples, and the bytes of a sample's media."""
    model = run.model.policy.model
    generator = Generator(recipe, run.model.policy)
    with run.running() as meter:
        smaller = {1, setting.fragment} - {setting.fragment}
        steps = [_step(recipe, generator, size, meter)[0] for size in smaller]
        base = meter.live
        step, work = _step(recipe, generator, setting.fragment, meter)
        latents = work.denoising.latents[: setting.decoded]
        with meter.section(base) as decoding:
            if setting.decoded == 1:
                images = generator.decoded(latents)
            else:
                images = to_uint8(model.decode(latents))
        media = images.numel() * images.element_size() // len(images)
        return (*steps, step), measured_pass(setting.decoded, decoding), media


def _step(
    recipe: Recipe, generator: Generator, samples: int, meter: Meter
) -> tuple[MeasuredPass, GenerationInProgress]:
    """Takes all steps of a fragment; returns its last one, when all that it keeps is there."""
    base = meter.live
    work = generator.begin(_task(samples))
    for _ in range(len(sampling_plan(recipe, window_start=0).sigmas) - 2):
        work.denoising.advance(_answer)
    with meter.section(base) as section:
        generator.advance(work)
    return measured_pass(samples, section), work


def _answer(latents: Tensor, sigma: Tensor) -> Tensor:
    """Stands in for the network: a velocity (B, ...)."""
    return torch.zeros_like(latents)


def measured_pass(rows: int, section: Section) -> MeasuredPass:
    return MeasuredPass(
        rows=rows,
        peak_bytes=section.peak_bytes,
        flops=section.flops("without_gradient"),
        launches=section.launches,
    )


def _task(samples: int) -> GenerateFragment:
    return GenerateFragment(
        fragment=Fragment(batch=0, group=0, first_sample=0, num_samples=samples, attempt=0),
        policy=Policy(version=0, weights_digest=DIGEST),
        prompt=Prompt(text="a prompt"),
        window_start=0,
        worker="trace",
    )


def _training(recipe: Recipe, setting: TraceSetting, run: FakeRun) -> Training:
    groups = [_group(_narrowed(recipe, chunk), run, chunk) for chunk in setting.chunks]
    policy = run.model.policy
    masters = 0 if recipe.trainer.is_sharded else num_bytes(policy.trained.masters.values())
    with run.running() as meter:
        before = meter.live
        engine = TrainerEngine(recipe, policy)
        base = meter.live
        passes = []
        for chunk, group in zip(setting.chunks, groups, strict=True):
            engine.begin()
            if setting.keeps_gradients:
                _seed(engine, policy)
            stored = run.model.host.stored_bytes
            with meter.section(base) as section:
                engine.train(group, chunk)
            offloaded = run.model.host.stored_bytes - stored
            passes.append(_training_pass(chunk.rows, section, offloaded))
        assert engine.tally["num_rows"]  # once it is read, only gradients are left on the device
        gradients = meter.live - base
        engine.step(0)
        optimizer = meter.live - before
        _seed(engine, policy)
        with meter.section(meter.live) as step:
            engine.step(0)
    return Training(
        passes=tuple(passes),
        gradients=gradients,
        optimizer=optimizer + masters,
        step_peak=max(step.peak_bytes, gradients),  # on a GPU, AdamW takes a root of all at once
    )


def _training_pass(rows: int, section: Section, offloaded: int) -> TrainingPass:
    return TrainingPass(
        rows=rows,
        peak_bytes=section.peak_bytes,
        offloaded_bytes=offloaded,
        forward=section.flops("forward"),
        backward=section.flops("backward"),
        kl=section.flops("without_gradient"),
        launches=section.launches,
    )


def _seed(engine: TrainerEngine, policy: LoadedPolicy) -> None:
    """Gives every trained weight a gradient, as an earlier pass does."""
    parameters = policy.trained.parameters
    for each in parameters.values():
        each.grad = torch.zeros_like(each.detach())


def _narrowed(recipe: Recipe, chunk: Chunk) -> Recipe:
    """Returns the recipe with a window of the chunk's steps, so that a group is one pass, each of
    whose rows is one of the network's."""
    apart = {"shared_noise": False, "stochastic": "trained", "trained": "window"}
    sampling = recipe.sampling.model_copy(update={"window": chunk.steps, **apart})
    return recipe.model_copy(update={"sampling": sampling})


def _group(recipe: Recipe, run: FakeRun, chunk: Chunk) -> TrainingGroup:
    """Makes a group of the chunk's size, as rollout stores it and the trainer reads it."""
    data = GroupData(
        trajectories=(_trajectory(recipe, run, chunk.samples),),
        conditions=_conditions(recipe, run),
        advantages=(1.0,) * chunk.samples,
        staleness=0,
    )
    return read_group(recipe, data)


def _trajectory(recipe: Recipe, run: FakeRun, samples: int) -> bytes:
    """Returns stored samples, noise for the most part."""
    size = recipe.model
    shape = run.model.policy.model.latent_shape(
        height=size.height, width=size.width, frames=size.frames
    )
    plan, seeds = sampling_plan(recipe, window_start=0), list(range(samples))
    denoising = Denoising(
        plan, seeds=seeds, shape=shape, device=CPU,
        shared_seed=0 if recipe.sampling.shared_noise else None,
    )  # fmt: skip
    denoise(_answer, denoising)
    return row_kind(recipe).pack(denoising, seeds)


def _conditions(recipe: Recipe, run: FakeRun) -> bytes:
    return pack(run.model.policy.model.encode("", guidance=recipe.model.guidance))


def _sharded(recipe: Recipe, setting: TraceSetting) -> RankMemory:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = recipe.trainer.shard_devices
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = init_device_mesh(CPU.type, (ranks,))
        run = FakeRun.from_recipe(recipe, setting)
        with run.fakes:
            run = replace(run, model=shard_fakes(recipe, run.model, mesh))
        network = run.model.network
        with warnings.catch_warnings():  # views that no operation changes in place
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            training = _training(recipe, setting, run)
        return RankMemory(
            ranks=ranks,
            network=num_bytes([*network.parameters(), *network.buffers()]),
            training=training,
        )
    finally:
        dist.destroy_process_group()


def _shape(recipe: Recipe, model: FakeModel) -> Shape:
    table = recipe.model
    return Shape(
        height=table.height,
        width=table.width,
        frames=table.frames,
        text_tokens=model.tokens,
        forwards=model.forwards,
        dtype=table.dtype,
        trained=table.trained,
        rank=table.lora.rank if table.trained == "lora" else 0,
        targets=table.lora.targets,
        gradient_checkpointing=recipe.trainer.gradient_checkpointing,
        cfg_gradient=recipe.algorithm.cfg_gradient,
        has_kl=recipe.algorithm.kl_beta > 0,
    )


def _weights(model: FakeModel, dtype: str, text: dict[str, int]) -> Weights:
    network = model.network
    trained = num_bytes(trained_parameters(network).values())
    saved = saved_bytes(network)
    whole = num_bytes([*network.parameters(), *network.buffers()]) + saved
    return Weights(
        network=whole - trained if is_adapter(network) else whole,
        saved=saved,
        streamed=network_bytes(base_shapes(network), dtype, WeightsHolding(memory="streamed")),
        linear=linear_bytes(network, dtype),
        trained=trained,
        text=text,
        decoder=num_bytes([*model.decoder.parameters(), *model.decoder.buffers()]),
    )


def _stored(recipe: Recipe, setting: TraceSetting, run: FakeRun, media: int) -> StoredBytes:
    trained = num_bytes(trained_parameters(run.model.network).values())
    averages = 1 if recipe.trainer.ema is not None else 0
    samples = setting.fragment if recipe.sampling.shared_noise else 1
    return StoredBytes(
        trajectory=-(-len(_trajectory(recipe, run, samples)) // samples),
        media=media,
        conditions=len(_conditions(recipe, run)),
        weights=trained,
        checkpoint=(2 + averages) * trained,
    )
