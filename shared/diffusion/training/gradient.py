"""One batch's gradient as a transaction: begin, accumulate groups in any order, then step or abort.

TSP: samples and denoising steps are flattened into rows, sample by sample, so that one forward and
backward pass trains several steps of several samples from any fragments. The last chunk may be
smaller, in samples and in steps: rows carry the batch's denominator.

A sample without advantage has no gradient unless there is a KL term: it need not be trained. If a
row is dropped, the denominator still counts all rows, and the optimizer step corrects for it.

Between two groups others may use the network, with the same weights and without gradients: the
state that a pass needs is set before each group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.diffusion.loading.models import Conditions, ModelAdapter, taken
from shared.diffusion.training.objective import Behaviour, evaluate
from shared.diffusion.training.row_sums import RowSums
from shared.diffusion.training.rows import MergesRows, Rows, TrainingGroup
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.diffusion.weights.weight_sets import WeightSets
from shared.errors import Untrainable
from shared.learning.metrics import ALARMING_RATIO_ERROR
from shared.recipe.recipe import Recipe
from shared.recipe.sampling import Algorithm

log = structlog.get_logger()


@dataclass(slots=True)
class GradientTransaction:
    """Sums the gradient of one batch in the ``grad`` of the trained parameters."""

    model: ModelAdapter
    algorithm: Algorithm
    num_rows: int
    """Rows of an optimizer step: the one denominator of every row's loss."""
    guidance: float
    largest_weight: float | None = None
    """`Tables.largest_weight`"""
    sets: WeightSets = field(kw_only=True)
    keeps_start: bool = False
    """`Tables.keeps_batch_start`"""
    num_skipped: int = 0
    """Number of rows that were not trained, because their gradient is zero."""
    num_steps: int = 0
    """Number of optimizer steps since the batch began."""
    _num_zero: int = 0
    """Number of their rows without advantage."""
    num_network_rows: int = 0
    """Number of rows that the network has computed with a gradient, ever."""
    _adapter: list[Any] = field(default_factory=list)
    """The adapter's layers."""
    _is_ready: bool = False
    """Whether this batch has set the network as it trains: that takes as long as a small pass."""
    counts: bool = True
    """Whether rows count. Otherwise their gradient is zero: other ranks take these passes."""
    _tally: Tally = field(default_factory=Tally)
    _sums: RowSums = field(default_factory=RowSums)
    """Sums over rows on the device that the tally does not yet include."""

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, model: ModelAdapter, sets: WeightSets | None = None
    ) -> "GradientTransaction":
        """``sets``: by default only what the network holds."""
        rows = recipe.batch.groups * recipe.trained_samples * recipe.sampling.window
        return cls(
            model=model,
            algorithm=recipe.algorithm,
            num_rows=rows // recipe.trainer.updates,
            guidance=recipe.model.guidance,
            largest_weight=recipe.largest_weight,
            sets=sets or WeightSets(model.transformer),
            keeps_start=recipe.keeps_batch_start,
        )

    @property
    def tally(self) -> Tally:
        """Metrics of the rows that were trained: waits until the device has trained them."""
        self._sums.move_to(self._tally)
        return self._tally

    @tally.setter
    def tally(self, tally: Tally) -> None:
        self._tally, self._sums = tally, RowSums()

    def begin(self) -> None:
        for parameter in trained_parameters(self.model.transformer).values():
            parameter.grad = None
        self.tally = Tally()
        self.num_skipped = 0
        self.num_steps = 0
        self._num_zero = 0
        self._is_ready = False

    def skip(self, num_rows: int) -> None:
        """Leave out rows with zero gradient; may run concurrently with `accumulate`."""
        self.num_skipped += num_rows

    def leave_out(self, num_rows: int) -> None:
        """Leaves out rows of a group that is trained, in the tally of which they count."""
        self._tally.skip(num_rows)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all rows, skipped ones included."""
        return self.whole_tally.metrics()

    @property
    def whole_tally(self) -> Tally:
        """The tally with the rows that were skipped."""
        everything = replace(self.tally)
        everything.skip(self.num_skipped)
        return everything

    def take_kept_factor(self) -> float:
        """Returns the `kept_factor` of the rows since the last step."""
        before, self._num_zero = self._num_zero, self.whole_tally.num_zero_advantage
        return self.kept_factor(self._num_zero - before)

    def kept_factor(self, num_zero: float) -> float:
        """Returns the factor from the mean over a step's rows to the mean over those with an
        advantage, where the others are dropped; 1 if no row has one."""
        kept = self.num_rows - num_zero
        drops = self.algorithm.zero_advantages == "dropped"
        return self.num_rows / kept if drops and kept else 1.0

    def check(self) -> None:
        """Raises BatchFailed if the rows so far are not what these weights can be trained on."""
        if self.largest_weight is not None:
            self.tally.check_weights(self.largest_weight)
            return
        self.tally.check_on_policy()
        if (error := self.tally.onpolicy_ratio_error) > ALARMING_RATIO_ERROR:
            log.warning("onpolicy_ratio_alarm", error=error, alarm_above=ALARMING_RATIO_ERROR)

    def accumulate(self, group: TrainingGroup, chunk: Chunk) -> None:
        """Add the gradient of one group, or a part of one, a chunk at a time.

        Raises:
            Untrainable: if the network cannot take its tensors.
        """
        device = self._begin_pass(group)
        for rows in group.rows(chunk, device):
            with torch.enable_grad():
                self._accumulate_rows(rows, group.staleness + self.num_steps)

    def _begin_pass(self, group: TrainingGroup) -> torch.device:
        """Makes the network ready and returns its device."""
        network = self.model.transformer
        self._make_ready()
        if isinstance(group, MergesRows) and self.counts:
            self._tally.note_states(group.num_states)
        return next(each.device for each in network.parameters() if each.requires_grad)

    def _accumulate_rows(self, rows: Rows, staleness: int) -> None:
        with taken(Untrainable):
            behaviour = Behaviour(staleness == 0, self.largest_weight)
            terms = evaluate(self.algorithm, rows, self, behaviour)
        per_row, rest = terms.surrogate.per_row, terms.rest(self.algorithm.kl_beta)
        if rest is not None and self.algorithm.zero_advantages == "dropped":
            rest = rest * (rows.advantage != 0)
        self._backward(per_row if rest is None else per_row + rest)
        num_rows = len(rows.advantage)
        if not num_rows or not self.counts:
            return
        if terms.divergence is not None:
            self._sums.add("kl", terms.divergence.detach().sum())
        self._tally.count(num_rows, staleness=staleness)
        self._sums.record(
            terms.surrogate,
            rows.advantage,
            clip_range=self.algorithm.clip_range,
            staleness=staleness,
        )

    def _backward(self, per_row: Tensor) -> None:
        """Adds the gradient of a loss per row (B,), and the loss to the tally."""
        loss = per_row.sum() / self.num_rows * self.counts
        if loss.requires_grad:  # not where all rows are of a network that is not trained
            loss.backward()
        self._sums.add("loss", loss)

    def velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) from latents (B, ...), sigma (B,), conditions of B rows."""
        self.num_network_rows += len(latents) * torch.is_grad_enabled()
        return self.model.velocity(latents, sigma, conditions, guidance=self.guidance)

    @torch.no_grad()
    def old_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor | None:
        """Returns velocities (B, ...) by the old policy; None if it is the same."""
        if not self.sets.training_differs:
            return None
        with self.sets.using(self.sets.old):
            return self.velocity(latents, sigma, conditions)

    def keep_start(self, weights: Mapping[str, Tensor]) -> None:
        """Copies the weights that the batch's first optimizer step is about to move."""
        if self.keeps_start and not self.num_steps:
            self.sets.start = self.sets.copies(weights)

    @property
    def has_start(self) -> bool:
        """Whether the weights at the start of the batch are kept, and are not the network's."""
        return bool(self.sets.start) and self.num_steps > 0

    @torch.no_grad()
    def start_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns velocities (B, ...) by the weights at the start of the batch."""
        with self.sets.using(self.sets.start):
            return self.velocity(latents, sigma, conditions)

    @torch.no_grad()
    def reference_velocity(self, latents: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
        """Returns the velocities (B, ...) of the reference: a set of its own, or the network
        without its adapter."""
        if self.sets.reference:
            with self.sets.comparing():
                return self.velocity(latents, sigma, conditions)
        self._make_ready()
        self._pass_by_adapter(True)
        try:
            return self.velocity(latents, sigma, conditions)
        finally:
            self._pass_by_adapter(False)

    def _make_ready(self) -> None:
        """Sets the network as it samples, so that a replay equals its sample, its adapter on."""
        network = self.model.transformer
        off = network.training or any(layer.disable_adapters for layer in self._adapter)
        if self._is_ready and not off:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        network.eval()
        self._adapter = [each for each in network.modules() if isinstance(each, BaseTunerLayer)]
        for layer in self._adapter:
            layer.enable_adapters(True)
        self._is_ready = True

    def _pass_by_adapter(self, passed_by: bool) -> None:
        # peft's `enable_adapters` walks every parameter to switch what requires a gradient as well,
        # which no pass without gradients needs, and takes a small network as long as two layers.
        for layer in self._adapter:
            layer._disable_adapters = passed_by
