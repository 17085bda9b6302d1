"""Checks of what is stored of samples, before it is trained."""

from torch import Tensor

from shared.diffusion.models import Conditions
from shared.diffusion.policy import sampling_plan
from shared.diffusion.sampler import Trajectory
from shared.diffusion.tensors import check_latents, unpack
from shared.errors import ContractError
from shared.recipe.recipe import Recipe

MAX_CONDITIONS = 64


def check_path(recipe: Recipe, path: Trajectory) -> None:
    """Raises ContractError unless a path covers a window of the recipe's noise schedule."""
    plan = sampling_plan(recipe, window_start=0)
    indices = path.step_indices.tolist()
    if len(indices) != recipe.sampling.window:
        raise ContractError("a trajectory does not hold the window that the recipe trains")
    first = indices[0]
    last = len(plan.sigmas) - 2 - len(indices)  # noise of the last step would stay in the sample
    if indices != list(range(first, first + len(indices))) or not 0 <= first <= last:
        raise ContractError(f"steps {indices} are no window of {len(plan.sigmas) - 1} steps")
    sigmas = path.sigmas.new_tensor(plan.sigmas)
    if path.sigmas.shape != sigmas.shape or bool((path.sigmas != sigmas).any()):
        raise ContractError("a trajectory was generated with other sigmas than the recipe's")
    if (path.means is not None) != plan.keeps_means:
        raise ContractError("a trajectory does not hold what the algorithm needs of it: means")


def unpack_conditions(data: bytes) -> Conditions:
    """Reads tensors (1, ...); raises ContractError unless they can be one prompt's conditioning."""
    conditions = unpack(data)
    if not 0 < len(conditions) <= MAX_CONDITIONS:
        raise ContractError(f"not conditions: {len(conditions)} tensors")
    for name, tensor in conditions.items():
        if tensor.dim() < 2 or len(tensor) != 1 or not tensor.numel():
            raise ContractError(f"not conditions: {name} of shape {list(tensor.shape)}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ContractError(f"not conditions: {name} holds values that are not finite")
    return conditions


def unpack_finished(data: bytes) -> tuple[Tensor, list[int]]:
    """Reads finished samples (n, ...) and their n seeds; raises ContractError if they are none."""
    tensors = unpack(data)
    if tensors.keys() != {"samples", "seeds"}:
        raise ContractError(f"not finished samples: it holds {sorted(tensors)[:8]}")
    samples, seeds = tensors["samples"], tensors["seeds"]
    if seeds.dim() != 1 or seeds.is_floating_point() or seeds.shape != samples.shape[:1]:
        raise ContractError("not finished samples: a sample has no seed of its own")
    if samples.dim() < 3 or not samples.numel() or not samples.is_floating_point():
        raise ContractError(f"not finished samples: of shape {list(samples.shape)}")
    check_latents("samples", samples)
    return samples, [int(seed) for seed in seeds]
