"""Checks an adapter on a small model: samples, replays, gradients and cost."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bench.family_check.inputs import Size, arguments, called, encoded
from bench.family_check.parity import compare
from bench.family_check.probe import apart, has_own_pass, networks_of, sample
from shared.diffusion.families.base import Family
from shared.diffusion.loading.models import Conditions, load_model, repeat_rows
from shared.diffusion.policy import LoraSpec, attach_lora
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, denoise
from shared.diffusion.sampling.transition import transition
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import UserError
from shared.models.catalogue import check_family, pipeline_sigmas, pixels_per_token

CPU = torch.device("cpu")
PLAN = SamplingPlan(sigmas=(1.0, 0.8, 0.5, 0.2, 0.0), window=range(3), noise_level=0.7)
SEEDS, ROWS = (1, 2, 3), (1, 2, 3)
RATIO, SIGMAS, COST = 1e-6, 2e-6, 1e-3
"""Largest difference of a ratio from 1, of a sigma, and of a step's arithmetic, relatively."""


class Report(BaseModel):
    """Is what `python -m bench check-family --json` prints."""

    family: str
    figures: dict[str, float] = {}
    mistakes: list[str] = []

    @property
    def lines(self) -> list[str]:
        said = [f"{name}: {figure:.3g}" for name, figure in self.figures.items()]
        return [*said, *(f"mistake: {each}" for each in self.mistakes)] + (
            [] if self.mistakes else [f"{self.family}: no mistake was found"]
        )


def check_model(name: str, folder: Path) -> Report:
    """Compare the adapter with the pipeline, on the model in a folder.

    Raises:
        UserError: if the folder holds another family, or is no model of it.
    """
    spec = check_family(folder)
    if spec.pipeline != name:
        raise UserError(f"--model: {folder} holds a {spec.pipeline}, not a {name}")
    report, checks = Report(family=name), _Checks(folder)
    for each in (checks.parity, checks.sigmas, checks.ratio, checks.gradient, checks.cost):
        if any(mistake.startswith("latent shape") for mistake in report.mistakes):
            break  # states of another shape take another time, and other arithmetic
        try:
            for figure, value, mistake in each():
                report.figures[figure] = value
                report.mistakes += [mistake] if mistake else []
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            if not report.mistakes:  # otherwise it follows from what is named already
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                report.mistakes.append(f"{each.__name__}: could not be compared: {reason}")
    return report


Finding = tuple[str, float, str | None]
"""A figure, its value, and the mistake that it shows, if any."""


class _Checks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        model = load_model(
            folder, {"transformer", "text", "decoder"}, device=CPU, dtype=torch.float32
        )
        assert isinstance(model, Family)
        self._model, self._spec = model, model.spec
        self._pipeline = _own_pipeline(model, folder)
        self._size = self._chosen_size(pixels_per_token(folder))
        self._guidances = (3.5,) if self._spec.embeds_guidance else (1.0, 4.0)

    def _chosen_size(self, multiple: int) -> Size:
        """Return a small size that the pipeline takes as well, if the spec is mistaken."""
        names = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
        factors = [getattr(self._pipeline, name, None) for name in names]
        side = math.lcm(multiple, 2 * next((factor for factor in factors if factor), 8))
        factor = self._spec.frame_factor
        frames = 1 + factor(self._model.pipeline.vae.config) if factor is not None else 1
        return Size(height=2 * side, width=3 * side, frames=frames)

    def sigmas(self) -> Iterator[Finding]:
        size = self._size
        ours = pipeline_sigmas(
            self._folder, size.steps, height=size.height, width=size.width, frames=size.frames
        )
        call = arguments(self._model, self._pipeline, self._guidances[0], size, "latent")
        theirs = sample(self._pipeline, call).sigmas
        error = apart(torch.tensor(ours), torch.tensor(theirs))
        mistake = None
        if error > SIGMAS:
            shown = [", ".join(f"{each:.4f}" for each in sigmas) for sigmas in (ours, theirs)]
            mistake = f"sigma rule: it gives {shown[0]}, and the pipeline has {shown[1]}"
        yield "sigmas, largest difference", error, mistake

    def parity(self) -> Iterator[Finding]:
        for guidance in self._guidances:
            found = compare(self._model, self._pipeline, guidance, self._size)
            yield f"states at guidance {guidance:g}, largest difference", found.error, found.mistake
            if found.mistake:
                return

    def ratio(self) -> Iterator[Finding]:
        """Replay samples in batches of several sizes, as a trainer does."""
        guidance, size = self._guidances[-1], self._size
        model = _with_lora(self._folder)
        conditions = encoded(model, guidance, size)
        shape = model.latent_shape(height=size.height, width=size.width, frames=size.frames)
        denoising = Denoising(PLAN, seeds=list(SEEDS), shape=shape, device=CPU)
        denoise(partial(_velocity, model, repeat_rows(conditions, len(SEEDS)), guidance), denoising)
        path, worst = denoising.trajectory(), 0.0
        for rows in ROWS:
            for step in PLAN.window:
                where = PLAN.step(torch.full((rows,), step))
                before, arrived = path.latents[:rows, step], path.latents[:rows, step + 1]
                velocity = _velocity(
                    model, repeat_rows(conditions, rows), guidance, before, where.sigma
                )
                again = transition(velocity, before, where, arrived=arrived).log_prob.detach()
                ratio = torch.exp(again - path.log_probs[:rows, step])
                worst = max(worst, float((ratio - 1).abs().max()))
        said = f"ratio: of a replay it is up to {worst:.1g} from 1; rows of a batch are not alike"
        yield "ratio of a replay, largest distance from 1", worst, said if worst > RATIO else None

    def gradient(self) -> Iterator[Finding]:
        """Compare which adapted layers have a gradient through the adapter, and through the network
        itself, called with the same inputs."""
        guidance, size = self._guidances[-1], self._size
        model = _with_lora(self._folder)
        conditions = encoded(model, guidance, size)
        shape = model.latent_shape(height=size.height, width=size.width, frames=size.frames)
        latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
        calls: list[tuple[nn.Module, Any, Any]] = []
        hooks = [
            each.register_forward_pre_hook(
                lambda module, args, kwargs: calls.append((module, args, kwargs)), with_kwargs=True
            )
            for each in networks_of(model.pipeline)
        ]
        velocity = model.velocity(latents, torch.tensor([0.7]), conditions, guidance=guidance)
        for hook in hooks:
            hook.remove()
        through = _layers_with_gradient(model, velocity)
        with torch.enable_grad():
            outputs = [_flat(module(*args, **kwargs)) for module, args, kwargs in calls]
            direct = _layers_with_gradient(model, torch.cat(outputs))
        missing = sorted(direct - through)
        mistake = None
        if missing or not direct:
            mistake = (
                f"missing gradient: {len(missing)} of {len(direct)} adapted layers have none "
                f"through the adapter, the first is {missing[0] if missing else 'unknown'}"
            )
        yield "adapted layers with a gradient", float(len(through)), mistake

    def cost(self) -> Iterator[Finding]:
        """Compare the arithmetic of a step."""
        guidance, size = self._guidances[-1], self._size
        shape = self._model.latent_shape(height=size.height, width=size.width, frames=size.frames)
        conditions = encoded(self._model, guidance, size)
        latents, sigma = torch.randn(1, *shape), torch.tensor([0.7])
        with FlopCounterMode(display=False) as ours, torch.no_grad():
            self._model.velocity(latents, sigma, conditions, guidance=guidance)
        theirs = _step_flops(self._pipeline, self._model, guidance, size)
        mine, wanted = float(ours.get_total_flops()), float(theirs)
        said = f"cost: a step takes {mine:.4g} operations, and {wanted:.4g} in the pipeline"
        # A pass of the adapter's own leaves out what is masked in the pipeline.
        less = 0.0 if has_own_pass(self._model.pipeline) else wanted - mine
        wrong = max(mine - wanted, less) > COST * wanted
        yield "operations of a step", mine, said if wrong else None


def _own_pipeline(model: Family, folder: Path) -> Any:
    """Load the family's own pipeline, with components of the adapter's if one cannot be loaded for
    want of a package."""
    made = type(model).class_named(model.spec.pipeline)
    try:
        pipeline = made.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError):
        own = {name: getattr(model.pipeline, name) for name in type(model).leaves_out}
        without = dict.fromkeys(name for name, part in own.items() if part is not None)
        if not without:
            raise
        pipeline = made.from_pretrained(folder, local_files_only=True, **without)
        for name in without:
            setattr(pipeline, name, own[name])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _flat(output: Any) -> Tensor:
    """Return all numbers of a network's output: a tensor, or a tuple or a list of outputs."""
    if isinstance(output, Tensor):
        return output.flatten()
    return torch.cat([_flat(each) for each in output])


def _step_flops(pipeline: Any, model: Family, guidance: float, size: Size) -> int:
    """Count the operations of the network in one step of the pipeline."""
    total = 0
    counter = FlopCounterMode(display=False)

    def before(*_: Any) -> None:
        counter.__enter__()

    def after(*_: Any) -> None:
        nonlocal total
        counter.__exit__(None, None, None)
        total += counter.get_total_flops()

    hooks = [each.register_forward_pre_hook(before) for each in networks_of(pipeline)]
    hooks += [each.register_forward_hook(after) for each in networks_of(pipeline)]
    try:
        called(pipeline, arguments(model, pipeline, guidance, size, "latent"))
    finally:
        for hook in hooks:
            hook.remove()
    return total // size.steps


def _with_lora(folder: Path) -> Family:
    """Load the model with an adapter whose weights are not those of the beginning."""
    model = load_model(folder, {"transformer", "text", "decoder"}, device=CPU, dtype=torch.float32)
    assert isinstance(model, Family)
    targets, excluded = tuple(model.lora_targets), tuple(model.lora_excluded)
    spec = LoraSpec(rank=2, alpha=4.0, targets=targets, excluded=excluded, seed=0)
    attach_lora(model.transformer, spec)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trained_parameters(model.transformer).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def _velocity(
    model: Family, conditions: Conditions, guidance: float, latents: Tensor, sigma: Tensor
) -> Tensor:
    return model.velocity(latents, sigma, conditions, guidance=guidance)


def _layers_with_gradient(model: Family, output: Tensor) -> set[str]:
    """Return the adapted layers that have a gradient of the output's squares."""
    parameters = trained_parameters(model.transformer)
    for parameter in parameters.values():
        parameter.grad = None
    if output.requires_grad:
        output.square().sum().backward()
    return {
        name.split(".lora_")[0]
        for name, parameter in parameters.items()
        if parameter.grad is not None and bool(parameter.grad.any())
    }
