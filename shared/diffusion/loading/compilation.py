"""Compiles the blocks that a network repeats, each kind once (`model.compile`).

Compilation begins with the first call of a shape and never changes whether a result exists: if it
fails, the blocks run uncompiled from then on, and the log has the reason. `model.compile = "auto"`
times one block at its first call, as it is and compiled, and compiles all if that is faster.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import structlog
import torch
from torch import nn

from shared.diffusion.loading.device import is_out_of_memory
from shared.diffusion.loading.experts import named_networks

MAX_REASON = 300
"""Characters quoted of a compiler's message."""

SHAPES = 64
"""Maximum number of compilations of a block, for shapes and with and without gradients."""

TIMINGS = 4
"""Calls of a trial in a row, after one that warms up, or compiles."""
MIN_GAIN = 1.05
"""Smallest factor by which a compiled block has to be faster."""

log = structlog.get_logger()


@dataclass(eq=False)
class CompiledBlocks:
    """Compiles the blocks of a network until one cannot be."""

    blocks: list[nn.Module] = field(default_factory=list)
    reason: str | None = None
    """Reason why they run as they are, if they do."""

    def compile(self, backend: str) -> None:
        """Has every block compiled at its first call."""
        for block in self.blocks:
            block._compiled_call_impl = self._compiled(block, backend)

    def try_out(self, backend: str, clock: Callable[[], float]) -> None:
        """Has all blocks compiled if the first of them is faster then, by seconds of ``clock``."""
        block = self.blocks[0]
        compiled = self._compiled(block, backend)

        def tried(*args: Any, **kwargs: Any) -> Any:
            as_it_is, faster = (
                _seconds(partial(call, *args, **kwargs), clock)
                for call in (block._call_impl, compiled)
            )
            seconds = {"plain_s": round(as_it_is, 6), "compiled_s": round(faster, 6)}
            log.info("compilation_tried", **seconds)
            if as_it_is >= MIN_GAIN * faster and self.reason is None:
                self.compile(backend)
            else:
                self.give_up(f"a block takes {faster:.2g} s compiled, {as_it_is:.2g} s as it is")
            return block(*args, **kwargs)

        block._compiled_call_impl = tried

    def _compiled(self, block: nn.Module, backend: str) -> Callable[..., Any]:
        # Of its own code, not of what all modules share: torch compiles each so often only.
        whole = torch.compile(block.forward, backend=backend)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.reason is None:
                try:
                    return whole(*args, **kwargs)
                except Exception as error:
                    if not _is_compiler_error(error):
                        raise
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
                self.give_up(reason)
            return block._call_impl(*args, **kwargs)

        return call

    def give_up(self, reason: str) -> None:
        """Runs the blocks as they are from now on."""
        if self.reason is None:
            self.reason = reason
            log.warning("not_compiled", reason=reason, remedy="leave model.compile out")
        for block in self.blocks:
            block._compiled_call_impl = None


@torch.no_grad()
def _seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Returns the median seconds of a call once it has warmed up. No gradient is kept: a checkpoint
    counts what a block keeps."""
    call()
    times = [clock()]
    for _ in range(TIMINGS):
        call()
        times.append(clock())
    return median(after - before for before, after in pairwise(times))


def gpu_seconds() -> float:
    """Return the time at which the GPU finishes all queued work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def compile_blocks(
    network: nn.Module, backend: str = "inductor", trial_by: Callable[[], float] | None = None
) -> CompiledBlocks:
    """Compiles the blocks of a network, or of both of an `Experts`, in place; with the clock of a
    trial, only if that makes them faster."""
    import torch._dynamo.config as limits

    limits.recompile_limit = max(limits.recompile_limit, SHAPES)
    blocks = CompiledBlocks(
        [block for each in named_networks(network).values() for block in _find_blocks(each)]
    )
    if not blocks.blocks:
        blocks.give_up(f"{type(network).__name__} names no blocks that it repeats")
    elif any(each._forward_hooks or each._forward_pre_hooks for each in blocks.blocks):
        blocks.give_up("something is called before or after each block")
    elif trial_by is None:
        blocks.compile(backend)
    else:
        blocks.try_out(backend, trial_by)
    return blocks


def _find_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that diffusers lists as repeated, or as not to be split."""
    names = getattr(network, "_repeated_blocks", None) or ()
    names = names or getattr(network, "_no_split_modules", None) or ()
    yield from (each for each in network.modules() if type(each).__name__ in names)


def _is_compiler_error(error: Exception) -> bool:
    """Whether an error comes from a compiler, and not from the block itself or a lack of memory."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return isinstance(error, TorchDynamoException | InductorError) and not is_out_of_memory(error)
