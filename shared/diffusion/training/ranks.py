"""Several ranks exchange their gradients once per batch, in its last backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def may_leave_out(network: nn.Module, is_last: bool) -> bool:
    """Whether one rank may leave out a forward and backward pass that another takes.

    Sharded ranks gather the weights for every pass; replicated ranks meet in the last one alone.
    """
    if isinstance(network, FSDPModule):
        return False
    return not (is_last and isinstance(network, DistributedDataParallel))


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
