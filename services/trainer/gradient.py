"""One batch's gradient as a transaction: begin, accumulate groups in any order, then step or abort.

TSP: samples and denoising steps are flattened into rows, sample by sample, so that one forward and
backward pass trains several steps of several samples. Fragment boundaries are gone before rows are
cut. The last chunk may be smaller, in samples and in steps: rows carry the batch's denominator.

Between two groups others may use the network, under the same weights and without gradients: what
a pass needs of its state is set before each group.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from services.trainer.chunks import Chunk
from services.trainer.group import Rows, TrainingGroup, cut
from services.trainer.loss import (
    Surrogate,
    clipped_surrogate,
    decoupled_surrogate,
    reference_kl,
)
from services.trainer.ranks import exchanging_gradients
from services.trainer.tally import Tally
from shared.diffusion.lora import adapter_parameters
from shared.diffusion.models import ModelAdapter
from shared.diffusion.transition import transition
from shared.recipe import Algorithm


@dataclass(slots=True)
class GradientTransaction:
    """The gradient of one batch, summed in the adapter's ``grad`` fields."""

    model: ModelAdapter
    algorithm: Algorithm
    num_rows: int
    """Of the whole batch: the one denominator of every row's loss."""
    guidance: float
    tally: Tally = field(default_factory=Tally)

    def begin(self) -> None:
        for parameter in adapter_parameters(self.model.transformer).values():
            parameter.grad = None
        self.tally = Tally()

    def accumulate(self, group: TrainingGroup, chunk: Chunk) -> None:
        """Add the gradient of one group, a chunk at a time."""
        network = self.model.transformer
        network.eval()  # as it samples: a replay equals its sample
        self._enable_adapter(True)
        device = next(iter(adapter_parameters(network).values())).device
        for rows in cut(group, chunk, device):
            is_last = self.tally.num_rows + len(rows.before) == self.num_rows
            with torch.enable_grad(), exchanging_gradients(network, now=is_last):
                self._accumulate_rows(rows, group.staleness)

    def _accumulate_rows(self, rows: Rows, staleness: int) -> None:
        velocity = self._velocity(rows)
        taken = transition(velocity, rows.before, rows.step, arrived=rows.arrived)
        advantage = rows.advantage.to(taken.log_prob)
        surrogate = self._surrogate(
            taken.log_prob, rows.behaviour_log_prob.to(taken.log_prob), advantage
        )
        per_row = surrogate.per_row
        if self.algorithm.kl_beta > 0:
            mean = transition(
                self._reference_velocity(rows), rows.before, rows.step, arrived=rows.arrived
            ).mean
            divergence = reference_kl(taken, mean)
            per_row = per_row + self.algorithm.kl_beta * divergence
            self.tally.kl += float(divergence.detach().sum())
        loss = per_row.sum() / self.num_rows
        loss.backward()
        self.tally.loss += float(loss.detach())
        self.tally.note(
            surrogate, advantage, clip_range=self.algorithm.clip_range, staleness=staleness
        )

    def _surrogate(self, log_prob: Tensor, behaviour: Tensor, advantage: Tensor) -> Surrogate:
        algorithm = self.algorithm
        surrogate = clipped_surrogate
        if algorithm.stale_loss == "decoupled":
            surrogate = partial(decoupled_surrogate, weight_cap=algorithm.weight_cap)
        return surrogate(
            log_prob,
            behaviour,
            advantage,
            clip_range=algorithm.clip_range,
            advantage_clip=algorithm.advantage_clip,
        )

    def _velocity(self, rows: Rows) -> Tensor:
        sigma = rows.step.sigma.to(rows.before.device)
        return self.model.velocity(rows.before, sigma, rows.conditions, guidance=self.guidance)

    @torch.no_grad()
    def _reference_velocity(self, rows: Rows) -> Tensor:
        """Of the base model: the same network without its adapter."""
        self._enable_adapter(False)
        try:
            return self._velocity(rows)
        finally:
            self._enable_adapter(True)

    def _enable_adapter(self, enabled: bool) -> None:
        """With it, its parameters require gradients; without it, they do not."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for module in self.model.transformer.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(enabled)
