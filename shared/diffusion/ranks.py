"""What ranks hold of a tensor that they share."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor in its full shape, which all ranks have to do together; returns
    others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, whose shape is smaller; others as they are."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
