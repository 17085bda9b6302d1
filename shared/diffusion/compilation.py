"""Compiles the blocks that a network repeats, each kind once (`model.compile`).

Compilation begins with the first call of a shape and is no part of a result: where it fails, the
blocks run as they are from then on, and the log says why. `model.compile = "auto"` compiles one
block first, and the others only if that one is faster.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from shared.diffusion.device import is_out_of_memory
from shared.diffusion.experts import networks_of

MAX_REASON = 300
"""Characters quoted of a compiler's message."""

SHAPES = 64
"""Number of times that a block is compiled anew, for shapes and with and without gradients."""

TIMINGS = 5
"""Calls of a trial in a row, of which the first warms up, or compiles."""
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
        """Has one block compiled, and the others if it is faster, by seconds of ``clock``."""
        block = self.blocks[0]
        compiled = self._compiled(block, backend)
        block._compiled_call_impl = _Trial(
            self, block, compiled, clock, partial(self.compile, backend)
        )

    def _compiled(self, block: nn.Module, backend: str) -> "_Compiled":
        # Of its own code, not of what all modules share: torch compiles each so often only.
        return _Compiled(self, block, torch.compile(block.forward, backend=backend))

    def give_up(self, reason: str) -> None:
        """Runs the blocks as they are from now on."""
        if self.reason is None:
            self.reason = reason
            log.warning("not_compiled", reason=reason, remedy="leave model.compile out")
        for block in self.blocks:
            block._compiled_call_impl = None


@dataclass(eq=False)
class _Compiled:
    """Stands for a block's call."""

    of: CompiledBlocks
    block: nn.Module
    whole: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.whole(*args, **kwargs)
        except Exception as error:
            if not _is_of_the_compiler(error):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        self.of.give_up(reason)
        return self.block._call_impl(*args, **kwargs)


@dataclass(eq=False)
class _Trial:
    """Stands for a block's call until it is known whether the compiled one is faster."""

    of: CompiledBlocks
    block: nn.Module
    compiled: _Compiled
    clock: Callable[[], float]
    compile_all: Callable[[], None]
    _work: object = None
    """Shapes that are timed; those of another call begin the trial anew."""
    _seconds: list[float] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = tree_iter((args, kwargs))
        shapes = [each.shape for each in given if isinstance(each, Tensor)]
        work = (torch.is_grad_enabled(), shapes)
        if work != self._work:
            self._work, self._seconds = work, []
        call: Any = self.block._call_impl if len(self._seconds) < TIMINGS else self.compiled
        began = self.clock()
        found = call(*args, **kwargs)
        self._seconds.append(self.clock() - began)
        if len(self._seconds) == 2 * TIMINGS and self.of.reason is None:
            self._decide()
        return found

    def _decide(self) -> None:
        plain, compiled = (
            median(self._seconds[first + 1 : first + TIMINGS]) for first in (0, TIMINGS)
        )
        seconds = {"plain_s": round(plain, 6), "compiled_s": round(compiled, 6)}
        log.info("compilation_tried", **seconds)
        if plain >= MIN_GAIN * compiled:
            self.compile_all()
        else:
            self.of.give_up(f"a block takes {compiled:.2g} s compiled, and {plain:.2g} s as it is")


def gpu_seconds() -> float:
    """Returns the time when the GPU has done all that it was told."""
    torch.cuda.synchronize()
    return time.perf_counter()


def compile_blocks(
    network: nn.Module, backend: str = "inductor", trial_by: Callable[[], float] | None = None
) -> CompiledBlocks:
    """Compiles the blocks of a network, or of both of an `Experts`, in place; with the clock of a
    trial, only if that makes them faster."""
    import torch._dynamo.config as limits

    limits.recompile_limit = max(limits.recompile_limit, SHAPES)
    made = CompiledBlocks([block for each in networks_of(network).values() for block in _of(each)])
    if not made.blocks:
        made.give_up(f"{type(network).__name__} names no blocks that it repeats")
    elif any(each._forward_hooks or each._forward_pre_hooks for each in made.blocks):
        made.give_up("something is called before or after each block")
    elif trial_by is None:
        made.compile(backend)
    else:
        made.try_out(backend, trial_by)
    return made


def _of(network: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks that diffusers says are repeated, or are not to be split."""
    names = getattr(network, "_repeated_blocks", None) or ()
    names = names or getattr(network, "_no_split_modules", None) or ()
    yield from (each for each in network.modules() if type(each).__name__ in names)


def _is_of_the_compiler(error: Exception) -> bool:
    """Says whether an error is a compiler's, and not the block's own or for lack of memory."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return isinstance(error, TorchDynamoException | InductorError) and not is_out_of_memory(error)
