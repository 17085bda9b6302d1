"""Tensors to safetensors bytes and back, with bounds checked before anything is allocated."""

from collections.abc import Collection, Sequence
from dataclasses import fields, replace

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from shared.diffusion.loading.models import Conditions
from shared.diffusion.sampling.sampler import Trajectory
from shared.errors import ContractError
from shared.limits import MAX_CONDITIONS, MAX_LATENT, MAX_LATENT_RMS, MAX_LOG_PROB
from shared.store.tensor_header import check_header


def pack(tensors: dict[str, Tensor]) -> bytes:
    """Writes tensors of any shapes as safetensors."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(contiguous)


def unpack(data: bytes) -> dict[str, Tensor]:
    """Reads tensors of any shapes; raises ContractError unless ``data`` is a complete safetensors
    file of sane size."""
    check_header(data)
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ContractError(f"not a safetensors object: {error}") from error


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


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """Writes a trajectory's tensors by the names of its fields."""
    tensors = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return pack({name: tensor for name, tensor in tensors.items() if tensor is not None})


def joined(parts: Sequence[bytes], shared: Collection[str] = ()) -> bytes:
    """Joins packed tensors (B, ...) of samples that follow one another; those that are ``shared``
    are the same in all parts."""
    if len(parts) == 1:
        return parts[0]
    opened = [unpack(each) for each in parts]
    return pack(
        {
            name: first if name in shared else torch.cat([each[name] for each in opened])
            for name, first in opened[0].items()
        }
    )


def joined_trajectories(parts: Sequence[bytes]) -> bytes:
    """Joins packed trajectories of samples that follow one another, of the same steps."""
    return joined(parts, shared=("step_indices", "sigmas", "start"))


def unpack_trajectory(data: bytes) -> Trajectory:
    """Read a trajectory, with states in float32 at least; raises ContractError if a tensor is
    missing, or shapes or values are invalid."""
    tensors = unpack(data)
    try:
        trajectory = Trajectory(**tensors)
    except TypeError as error:
        raise ContractError(f"not a trajectory: it holds {sorted(tensors)}") from error
    check_trajectory(trajectory)
    # States are kept in bfloat16 where they were rounded to it: every pass begins with float32.
    start = None if trajectory.start is None else _widened(trajectory.start)
    return replace(trajectory, latents=_widened(trajectory.latents), start=start)


def _widened(states: Tensor) -> Tensor:
    return states.float() if states.dtype == torch.bfloat16 else states


def check_trajectory(trajectory: Trajectory) -> None:
    """Raises ContractError unless its tensors fit each other and hold sane values."""
    _check_shapes(trajectory)
    values = {
        "latents": trajectory.latents, "start": trajectory.start, "means": trajectory.means,
    }  # fmt: skip
    for name, tensor in values.items():
        if tensor is not None:
            check_latents(name, tensor)
    log_probs = trajectory.log_probs
    if not bool((log_probs.abs() <= MAX_LOG_PROB).all()):  # false for what is no number
        raise ContractError(f"not a trajectory: a log-prob is not finite, or over {MAX_LOG_PROB:g}")


def check_latents(name: str, latents: Tensor) -> None:
    """Raises ContractError if latents (B, ...) hold values that no working network gives."""
    largest = float(latents.abs().max())
    if not largest <= MAX_LATENT:
        raise ContractError(
            f"not a trajectory: {name} of up to {largest:g}: not finite, or over {MAX_LATENT:g}"
        )
    rms = float(latents.double().square().mean().sqrt())
    if rms > MAX_LATENT_RMS:
        raise ContractError(f"not a trajectory: {name} of rms {rms:g}; at most {MAX_LATENT_RMS:g}")


def _check_shapes(trajectory: Trajectory) -> None:
    latents, log_probs, means = trajectory.latents, trajectory.log_probs, trajectory.means
    indices, sigmas, start = trajectory.step_indices, trajectory.sigmas, trajectory.start
    samples, steps = log_probs.shape if log_probs.dim() == 2 else (0, 0)
    fits = (
        samples * steps > 0
        and latents.dim() >= 4
        and latents.shape[:2] == (samples, steps + (start is None))
        and latents.numel() > 0
        and (start is None or start.shape == (1, *latents.shape[2:]))
        and (start is None or start.dtype == latents.dtype)
        and _are_drawn(trajectory.trained, samples, steps)
        and indices.shape == (steps,)
        and indices.dtype == torch.int64
        and sigmas.dim() == 1
        and (means is None or means.shape == (samples, steps, *latents.shape[2:]))
        and all(t is None or t.is_floating_point() for t in (latents, log_probs, sigmas, means))
    )
    if not fits:
        shapes = {
            field.name: list(tensor.shape)
            for field in fields(trajectory)
            if (tensor := getattr(trajectory, field.name)) is not None
        }
        raise ContractError(f"not a trajectory: these do not fit each other: {shapes}")


def _are_drawn(trained: Tensor | None, samples: int, steps: int) -> bool:
    """Whether each of the samples is trained at some of the steps, in their order."""
    if trained is None:
        return True
    return (
        trained.dtype == torch.int64
        and trained.dim() == 2
        and len(trained) == samples
        and 0 < trained.shape[1] <= steps
        and bool((trained.diff(dim=1) > 0).all())
        and int(trained.min()) >= 0
        and int(trained.max()) < steps
    )
