"""Several ranks exchange their gradients once per batch, in its last backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def exchanging_gradients(network: nn.Module, now: bool) -> Iterator[None]:
    """Around one forward and backward pass of a network that may be wrapped for several ranks.

    Left alone, DDP and FSDP reduce the gradients of every backward pass. They give the ranks'
    mean: with the same number of rows on each rank, the mean over all rows of the batch.
    """
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(now)
        yield
    elif isinstance(network, DistributedDataParallel) and not now:
        with network.no_sync():
            yield
    else:
        yield
