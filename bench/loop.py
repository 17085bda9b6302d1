"""`python -m bench loop`: our rollout and trainer beside a plain loop.

The plain loop does as reference implementations do: a few samples at a time, with one call per
denoising step, and one forward and backward pass per trained step, by peft's layers. Ours generates
what a group has, packs it for the store, reads it back, and trains it in chunks of samples x steps
that it has found to be fastest (TSP). Same network, same process, by turns; neither has anything
else to do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from peft.tuners.lora.layer import Linear
from rich.console import Console
from rich.table import Table

from digenrl.trace.device_profile.ladder import timed
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.loading.models import repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy, sampling_plan
from shared.diffusion.sampling.decoding import to_uint8
from shared.diffusion.sampling.sampler import Denoising, Trajectory, denoise
from shared.diffusion.sampling.transition import transition
from shared.diffusion.training.loss import clipped_surrogate
from shared.diffusion.weights.adapted_layer import AdaptedLinear
from shared.learning.prompts import read_prompts
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.recipe.recipe import Recipe

WARM_UP, OURS_WARM_UP = 2, 8
"""Groups of the plain trainer, and of ours, which finds its chunk in the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Samples per second, of each round."""

    plain_rollout: tuple[float, ...]
    rollout: tuple[float, ...]
    plain_trainer: tuple[float, ...]
    trainer: tuple[float, ...]

    @property
    def rollout_ratio(self) -> float:
        """Our rate over the plain one: the median of rounds, each beside the other."""
        return _ratio(self.rollout, self.plain_rollout)

    @property
    def trainer_ratio(self) -> float:
        return _ratio(self.trainer, self.plain_trainer)


def compare(recipe: Recipe, rounds: int, groups: int, plain_rows: int) -> Iterator[Compared]:
    """Runs so many groups per round: plain, ``plain_rows`` samples at a time, then ours. Yields
    after each round what there is of all."""
    torch.set_num_threads(recipe.trainer.threads)
    loaded = load_policy(recipe, {"transformer", "text", "decoder"})
    prompt = read_prompts(recipe.data.prompts)[0].text
    plain = _Plain(recipe, loaded, prompt, plain_rows)
    ours = Ours(recipe, loaded, prompt)
    size = recipe.batch.group_size
    found: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[[int], object]) -> None:
        seconds = timed(loaded.device, lambda: [work(group) for group in range(groups)])
        found.setdefault(name, []).append(groups * size / seconds)

    path, data = plain.generate(0), ours.generate(0)
    for group in range(OURS_WARM_UP):
        if group < WARM_UP:
            plain.train(plain.generate(group))
            ours.generate(group)
        ours.train(data)
    for _ in range(rounds):
        measure("plain_rollout", plain.generate)
        measure("rollout", ours.generate)
        measure("plain_trainer", lambda _: plain.train(path))
        measure("trainer", lambda _: ours.train(data))
        yield Compared(**{name: tuple(rates) for name, rates in found.items()})


class _Plain:
    def __init__(self, recipe: Recipe, loaded: LoadedPolicy, prompt: str, rows: int) -> None:
        self._recipe, self._loaded = recipe, loaded
        self._plan = sampling_plan(recipe, window_start=0)
        self._conditions = loaded.model.encode(prompt, guidance=recipe.model.guidance)
        size = recipe.batch.group_size
        self._advantage = torch.linspace(-1.0, 1.0, size, device=loaded.device)
        self._parts = [range(first, min(first + rows, size)) for first in range(0, size, rows)]
        modules = loaded.model.transformer.modules()
        self._layers = [each for each in modules if isinstance(each, AdaptedLinear)]

    @contextmanager
    def _by_peft(self) -> Iterator[None]:
        """Has layers with an adapter computed as peft does, meanwhile."""
        for each in self._layers:
            each.__class__ = Linear
        try:
            yield
        finally:
            for each in self._layers:
                each.__class__ = AdaptedLinear

    def generate(self, group: int) -> list[Trajectory]:
        """Returns the trajectories of each part of the group."""
        with self._by_peft():
            return [self._generate(group, part) for part in self._parts]

    def _generate(self, group: int, part: range) -> Trajectory:
        table, model = self._recipe.model, self._loaded.model
        size = self._recipe.batch.group_size
        denoising = Denoising(
            self._plan,
            seeds=[group * size + sample for sample in part],
            shape=model.latent_shape(height=table.height, width=table.width, frames=table.frames),
            device=self._loaded.device,
        )
        latents = denoise(self._velocity, denoising)
        with torch.no_grad():
            to_uint8(model.decode(latents))
        return denoising.trajectory()

    def train(self, paths: list[Trajectory]) -> None:
        """Computes the gradient of one group, part by part and step by step."""
        with self._by_peft():
            for part, path in zip(self._parts, paths, strict=True):
                self._train(part, path)
        self._loaded.model.transformer.zero_grad(set_to_none=True)

    def _train(self, part: range, path: Trajectory) -> None:
        device, algorithm = self._loaded.device, self._recipe.algorithm
        latents, log_probs = path.latents.to(device), path.log_probs.to(device)
        steps = log_probs.shape[1]
        advantage = self._advantage[part.start : part.stop]
        num_rows = len(self._advantage) * steps
        for number in range(steps):
            before, arrived = latents[:, number], latents[:, number + 1]
            step = self._plan.step(path.step_indices[number].repeat(len(before)))
            sigma, sigma_next = step.sigma.to(device), step.sigma_next.to(device)
            step = replace(step, sigma=sigma, sigma_next=sigma_next)
            velocity = self._velocity(before, step.sigma)
            taken = transition(velocity, before, step, arrived=arrived)
            surrogate = clipped_surrogate(
                taken.log_prob, log_probs[:, number], advantage,
                clip_range=algorithm.clip_range, advantage_clip=algorithm.advantage_clip,
            )  # fmt: skip
            (surrogate.per_row.sum() / num_rows).backward()

    def _velocity(self, latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        rows = repeat_rows(self._conditions, len(latents))
        guidance = self._recipe.model.guidance
        return self._loaded.model.velocity(latents, sigma, rows, guidance=guidance)


class Ours:
    def __init__(self, recipe: Recipe, loaded: LoadedPolicy, prompt: str) -> None:
        self._recipe, self._prompt = recipe, prompt
        self._generator = Generator(recipe, loaded)
        self._engine = TrainerEngine(recipe, loaded)
        self._policy = Policy(version=0, weights_digest=loaded.in_use.digest())

    def generate(self, group: int) -> GroupData:
        size = self._recipe.batch.group_size
        first, last = self._recipe.sampling.first_window_starts
        made = self._generator.generate(
            GenerateFragment(
                fragment=Fragment(
                    batch=0, group=group, first_sample=0, num_samples=size, attempt=0
                ),
                policy=self._policy,
                prompt=Prompt(text=self._prompt),
                window_start=first + group % (last - first + 1),
                worker="loop",
            )
        )
        return GroupData(
            trajectories=(made.trajectory,),
            conditions=self._generator.conditions(self._prompt),
            advantages=tuple(torch.linspace(-1.0, 1.0, size).tolist()),
        )

    def train(self, data: GroupData) -> None:
        self._engine.begin()
        self._engine.train(self._engine.read(data))


def as_plain(found: Compared) -> dict[str, object]:
    """Returns figures for JSON."""
    ratios = {"rollout_ratio": found.rollout_ratio, "trainer_ratio": found.trainer_ratio}
    return {**ratios, **asdict(found)}


def show(found: Compared, console: Console) -> None:
    table = Table("samples per second", "plain loop", "ours", "ratio")
    for name, plain, ours, ratio in (
        ("rollout", found.plain_rollout, found.rollout, found.rollout_ratio),
        ("trainer", found.plain_trainer, found.trainer, found.trainer_ratio),
    ):
        table.add_row(name, f"{median(plain):.0f}", f"{median(ours):.0f}", f"{ratio:.2f}")
    console.print(table)


def _ratio(ours: Sequence[float], plain: Sequence[float]) -> float:
    return median(a / b for a, b in zip(ours, plain, strict=True))
