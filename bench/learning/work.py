"""Counts what learning costs, where the network is called: forward-equivalents and CPU seconds.

A row that goes forward through the network counts 1, forward and backward 3. Classifier-free
guidance runs two rows per sample, so it counts twice by itself; so does a reference without its
adapter, which is a pass of its own.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

Stage = Literal["rollout", "training"]

FORWARD, WITH_BACKWARD = 1, 3


@dataclass(slots=True)
class Work:
    """Adds up the work of each stage."""

    units: dict[Stage, int] = field(default_factory=lambda: {"rollout": 0, "training": 0})
    """Forward-equivalents."""
    seconds: dict[Stage, float] = field(default_factory=lambda: {"rollout": 0.0, "training": 0.0})
    """CPU seconds of the thread that does it."""
    _stage: Stage | None = None

    def count(self, network: nn.Module) -> None:
        """Counts every call of a network from now on, as long as a stage goes on."""
        network.register_forward_pre_hook(self._called, with_kwargs=True)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Surrounds work of a stage, in the thread that does it."""
        assert self._stage is None, "one stage at a time"
        self._stage, began = stage, time.thread_time()
        try:
            yield
        finally:
            self._stage = None
            self.seconds[stage] += time.thread_time() - began

    def _called(self, network: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        if self._stage is not None:
            rows = len(inputs["hidden_states"] if "hidden_states" in inputs else args[0])
            self.units[self._stage] += rows * (
                WITH_BACKWARD if torch.is_grad_enabled() else FORWARD
            )
