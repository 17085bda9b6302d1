"""Copies tensors of the host to a device, behind the work that is queued there.

A plain copy from the host waits until the device has done all of that, so that the device is idle
until the host has queued more.
"""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host, of any shape, to the device, without waiting for it; on the
    device already, it is returned as it is."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # torch keeps the memory until it has been copied
    return tensor.to(device, non_blocking=True)
