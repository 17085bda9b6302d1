"""Parts that ranks hold of a shared tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def full_tensor(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor in its full shape, which all ranks have to do together; returns
    others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, whose shape is smaller; others as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def flat_range(tensor: Tensor) -> tuple[int, int]:
    """Returns where this rank's rows of a tensor begin among all its numbers, and how many numbers
    they have: rows are what ranks share (FSDP2)."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel()
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    each = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return offset[0] * each, shape[0] * each
