"""Tiny models whose samples of a group begin at one noise, and what is asked of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.diffusion.generation import Generator
from shared.diffusion.loading.models import Conditions
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import PathGroup, read_paths
from shared.diffusion.weights.trained_weights import (
    load_weights,
    trained_parameters,
    trained_tensors,
)
from shared.messages.contracts import Prompt
from shared.recipe.recipe import Recipe, load_recipe, override
from tests import examples, tiny_models
from tests.tiny_models import PROMPT

SAMPLES, START, WINDOW, STEPS = 4, 1, 2, 5
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
SEED_OF_UNLIKE = 4
"""Some of its samples draw the first step, and others do not."""
ADVANTAGES = (1.5, -0.5, 0.0, -1.25)


@dataclass(frozen=True)
class Tiny:
    recipe: Recipe
    policy: LoadedPolicy

    def fragment(self, first: int = 0, size: int = SAMPLES, **changes: Any) -> bytes:
        """A fragment of the group 3 as rollout stores it."""
        task = examples.task(
            batch=2, group=3, first_sample=first, num_samples=size, prompt=Prompt(text=PROMPT),
            window_start=START,
        )  # fmt: skip
        return Generator(override(self.recipe, changes), self.policy).generate(task).trajectory

    def group(self, *fragments: bytes, staleness: int = 0) -> PathGroup:
        data = GroupData(
            trajectories=fragments,
            conditions=Generator(self.recipe, self.policy).conditions(PROMPT),
            advantages=ADVANTAGES,
            staleness=staleness,
        )
        return read_paths(self.recipe, data)

    def gradient(
        self, group: PathGroup, chunk: Chunk
    ) -> tuple[dict[str, Tensor], dict[str, float], list[int]]:
        """The group's gradient, its metrics, and the rows of the network's passes."""
        transaction = GradientTransaction.from_recipe(self.recipe, self.policy.model)
        transaction.begin()
        is_wide = self.recipe.model.dtype == "float64"
        with passes(self.policy) as rows, Wide() if is_wide else nullcontext():
            transaction.accumulate(group, chunk)
        parameters = trained_parameters(self.policy.model.transformer)
        found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        return found, transaction.metrics(), rows


class Wide(TorchFunctionMode):
    """Keeps float64 where a network's layers go over to float32: some of all families do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (Tensor.float, Tensor.to) or found.dtype is not torch.float32:
            return found
        return args[0] if args[0].dtype is torch.float64 else found


@contextmanager
def passes(policy: LoadedPolicy) -> Iterator[list[int]]:
    """Notes the rows of each call of a model, with its gradient or without."""
    rows: list[int] = []
    model: Any = policy.model
    velocity = model.velocity

    def noted(latents: Tensor, sigma: Tensor, conditions: Conditions, **given: Any) -> Tensor:
        assert {len(each) for each in conditions.values()} == {len(latents)} == {len(sigma)}
        rows.append(len(latents))
        found: Tensor = velocity(latents, sigma, conditions, **given)
        return found

    model.velocity = noted
    try:
        yield rows
    finally:
        del model.velocity


def load(family: str, folder: Path, dtype: str, guidance: float) -> Tiny:
    """A model whose adapter changes what it computes."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT, "metadata": {}}))
    path = folder / "recipe.json"
    path.write_text(json.dumps({
        "run": {"name": "shared", "steps": 1},
        "model": {
            "folder": str(folder), "height": 32, "width": 32, "guidance": guidance,
            "frames": 5 if family in tiny_models.VIDEO else 1, "dtype": dtype,
            "lora": {"rank": 2, "alpha": 4.0},
        },
        "data": {"prompts": str(prompts)},
        "sampling": {
            "steps": STEPS, "window": WINDOW, "first_window_starts": [0, START],
            "shared_noise": True,
        },
        "batch": {"groups": 1, "group_size": SAMPLES},
        "algorithm": {"kl_beta": 0.1, "clip_range": 1e-3},
        "trainer": {"learning_rate": 1e-3},
        "reward": {"scorers": [{"name": "size", "type": "jpeg-incompressibility"}]},
    }))  # fmt: skip
    recipe = load_recipe(path)
    policy = load_policy(recipe, {"transformer", "text", "decoder"})
    policy.model.transformer.to(getattr(torch, dtype))  # Wan's keeps some layers in float32
    move(policy, 0.03)
    return Tiny(recipe, policy)


def move(policy: LoadedPolicy, far: float) -> None:
    """Gives it an adapter that changes what is computed."""
    generator = torch.Generator().manual_seed(3)
    tensors = trained_tensors(policy.model.transformer)
    moved = {
        n: far * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for n, t in tensors.items()
    }
    load_weights(policy.model.transformer, moved)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Relative, over the whole gradient."""
    assert found.keys() == wanted.keys() and wanted
    difference = sum(float((found[n] - wanted[n]).double().square().sum()) for n in wanted)
    return float(
        (difference / sum(float(w.double().square().sum()) for w in wanted.values())) ** 0.5
    )


def unmerged(group: PathGroup) -> PathGroup:
    """The same group as if every sample had a state of its own."""
    assert group.starts is not None and group.start_of is not None
    own = group.starts[group.start_of][:, None]
    return replace(group, latents=torch.cat([own, group.latents], 1), starts=None, start_of=None)
