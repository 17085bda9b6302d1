"""Tensors to safetensors bytes and back, with bounds checked before anything is allocated."""

import json
from dataclasses import fields

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from shared.diffusion.sampler import Trajectory
from shared.errors import ContractError

MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_TENSORS = 4096


def pack(tensors: dict[str, Tensor]) -> bytes:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(contiguous)


def unpack(data: bytes) -> dict[str, Tensor]:
    """Raises ContractError unless ``data`` is a whole safetensors file of sane size."""
    _check_header(data)
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ContractError(f"not a safetensors object: {error}") from error


def pack_trajectory(trajectory: Trajectory) -> bytes:
    tensors = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    return pack({name: tensor for name, tensor in tensors.items() if tensor is not None})


def unpack_trajectory(data: bytes) -> Trajectory:
    """Raises ContractError if a tensor is missing or the shapes do not fit each other."""
    tensors = unpack(data)
    try:
        trajectory = Trajectory(**tensors)
    except TypeError as error:
        raise ContractError(f"not a trajectory: it holds {sorted(tensors)}") from error
    samples, states = trajectory.latents.shape[:2]
    steps = trajectory.step_indices.shape[0]
    if states != steps + 1 or trajectory.log_probs.shape != (samples, steps):
        raise ContractError(
            f"not a trajectory: {states} states, {steps} steps and log-probs of shape "
            f"{tuple(trajectory.log_probs.shape)} do not fit"
        )
    means = trajectory.means
    if means is not None and means.shape != (samples, steps, *trajectory.latents.shape[2:]):
        raise ContractError(f"not a trajectory: means of shape {tuple(means.shape)} do not fit")
    for values in (trajectory.latents, trajectory.log_probs, means):
        if values is not None and not values.isfinite().all():
            raise ContractError("not a trajectory: it holds values that are not finite")
    return trajectory


def _check_header(data: bytes) -> None:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= size <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise ContractError("not a safetensors object: its header is cut off or too large")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise ContractError("not a safetensors object: its header is not JSON") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise ContractError(f"not a safetensors object: more than {MAX_TENSORS} tensors")
