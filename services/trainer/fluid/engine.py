"""Trains a member's pieces, and takes the step of a total that all members hold."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from services.trainer.engine.checkpoint import AVERAGE, MASTER, OLD_POLICY_PREFIX, STEP
from services.trainer.engine.snapshot import SnapshotBuffers
from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.engine.world import num_ranks, this_rank
from services.trainer.fluid.flat_gradient import FlatGradient
from services.trainer.fluid.sums import Term
from shared.devices.protocols import Snapshot
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights.checksum import Checksum, checksum, flat_checksum
from shared.diffusion.weights.master_weights import TrainedWeights
from shared.diffusion.weights.trained_weights import weights_digest
from shared.diffusion.weights.weight_sets import Tensors
from shared.messages.records import Level
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors


@dataclass(frozen=True, slots=True)
class StepScale:
    """Scale of the step for all members, measured once by the committer."""

    norm: float
    """Norm of the total; not finite if the step is passed over."""
    scale: float
    """Factor on the total, by which it is clipped and rows without advantage are dropped."""
    level: Level = "exact"


class FluidEngine(TrainerEngine):
    def __init__(
        self, recipe: Recipe, loaded: LoadedPolicy, *, num_samples: int | None = None
    ) -> None:
        super().__init__(recipe, loaded, num_samples=num_samples)
        self._kept = SnapshotBuffers(recipe.run.shard_bytes)
        self._flat = FlatGradient(self._parameters)
        self.layout = self._flat.layout
        self._given = StepScale(0.0, 1.0)
        self._num_taken = 0
        """Updates of the batch that were taken."""
        self._counted: list[Mapping[str, float]] = []
        """Tallies of their totals: metrics cover all rows of the batch."""
        self._decay: float | None = None
        """How the old policy follows the update that is being taken, if it does."""
        self.steps_concurrently = recipe.schedule.staleness_limit > 0 and num_ranks() == 1
        self._sets.settle()

    @property
    def is_sharded(self) -> bool:
        """Whether the trained weights lie on several ranks."""
        return any(isinstance(each, DTensor) for each in self._parameters.values())

    def newest_digest(self) -> str:
        """Return the digest of what samples the newest version, in use or not yet."""
        if not self.steps_concurrently:
            return self.sampling_digest()
        return self._digest(self._sets.newest.sampling)

    def _digest(self, tensors: Tensors) -> str:
        return weights_digest(tensors)

    def take_ahead(self) -> None:
        """Use what `take_concurrently` has made."""
        self._sets.take()

    def before(self) -> AbstractContextManager[None]:
        """Have the version before be what samples meanwhile."""
        return self._sets.before()

    def begin(self) -> None:
        """Empty the sum; the next gradient belongs to weights after this many updates."""
        super().begin()
        self._transaction.num_steps = self._num_taken

    def in_training(self) -> AbstractContextManager[None]:
        """Have the network use the weights that the next update goes from, with gradients."""
        return self._sets.training() if self._num_taken else contextlib.nullcontext()

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        self._num_taken, self._counted = 0, []
        self._sets.settle()
        await super().restore(weights, checkpoint)

    def weights(self) -> Snapshot:
        """Copy the newest weights and the optimizer as they stand to kept buffers; the checksum
        names them."""
        newest, digest = self._sets.newest, self.newest_digest()
        trained, sampling = (newest.trained, digest), None
        if newest.sampling is not newest.trained:
            trained = newest.trained, self._digest(newest.trained)
            sampling = newest.sampling, digest
        states, types = self._states(), self._trained.types
        kept = self._kept.take(trained, sampling, states, types, is_first=this_rank() == 0)
        return replace(kept, change=self._packed_change())

    def term(self) -> Term:
        """Copy what was summed since `begin`, flat."""
        tally = self._transaction.whole_tally
        return Term(self._flat.taken(), tally.as_dict())

    @contextlib.contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Surrounds passes that other ranks take: without ``counts`` their gradient is zero."""
        self._transaction.counts = counts
        try:
            yield
        finally:
            self._transaction.counts = True

    def skip_rows(self, num_rows: int) -> None:
        """Count rows whose gradient is zero."""
        self._transaction.skip(num_rows)

    def sum_id(self, total: Term) -> str:
        """Return the digest that names a total; all ranks that hold parts of one take it
        together."""
        assert total.gradient is not None
        return flat_checksum(total.gradient, self.layout.held, self.layout.size).digest

    def measured(self, total: Term) -> StepScale:
        """Return norm and scale of a total of the rows that are kept: it is clipped by its norm."""
        assert total.gradient is not None
        kept = self._transaction.kept_factor(total.tally["num_zero_advantage"])
        norm = kept * self._flat.norm(total.gradient)
        limit = self._recipe.trainer.max_grad_norm
        scale = kept * torch.clamp(limit / (norm + 1e-6), max=1.0)
        if not math.isfinite(norm):
            return StepScale(math.nan, 1.0)
        return StepScale(float(norm), float(scale))

    def take(self, batch: int, total: Term, given: StepScale) -> dict[str, float]:
        """Take the step of a total, elementwise, and return its metrics."""
        assert total.gradient is not None
        self.begin()
        self._counted.append(total.tally)
        self._transaction.tally = merged(*self._counted)
        gradients = self._flat.parts(total.gradient)
        self._flat.spread(gradients)
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient
        self._given = given
        metrics = self.step(batch, kept=1.0, level=given.level)  # the scale has it
        self._num_taken = (self._num_taken + 1) % self._recipe.trainer.updates
        if not self._num_taken:
            self._counted = []
        return metrics

    def take_concurrently(self, batch: int, total: Term, given: StepScale) -> dict[str, float]:
        """Take the step of a total in a set of weights ahead of those in use, which stay as they
        are; return its metrics."""
        own, ahead = self._trained, self._trained.ahead_of(self._sets.newest.trained)
        self._step_at(ahead)
        try:
            metrics = self.take(batch, total, given)
        finally:
            self._step_at(own)
        self._sets.make(ahead.held, self._decay)
        return metrics

    def _move_old_policy(self, batch: int) -> None:
        if self.steps_concurrently:
            self._decay = self._old_decay(batch)
        else:
            super()._move_old_policy(batch)

    def _step_at(self, trained: TrainedWeights) -> None:
        """Have the optimizer step another set of the same weights, with the states that it has."""
        source, self._trained = self._trained, trained
        [group] = self._optimizer.param_groups
        group["params"] = list(self._parameters.values())
        states = self._optimizer.state
        for name, parameter in source.parameters.items():
            if parameter in states:
                states[self._parameters[name]] = states.pop(parameter)

    def check(self, total: Term) -> None:
        """Raises BatchFailed if these weights cannot be trained on the rows of a total."""
        kept, self._transaction.tally = self._transaction.tally, merged(total.tally)
        try:
            self.check_rows()
        finally:
            self._transaction.tally = kept

    def checksum(self) -> Checksum:
        """Return the checksum of the trained weights, as they are published, the moments, the
        average and the old policy; all ranks of a group take it together."""
        types = self._trained.types
        trained = self._sets.newest.trained.items()
        weights = checksum({name: each.to(types[name]) for name, each in trained})
        states, steps = {}, []
        for name, parameter in self._parameters.items():
            for state, value in self._optimizer.state[parameter].items():
                if state == STEP:
                    steps.append(float(value))
                else:
                    states[f"{state}/{name}"] = value
        states |= {f"{AVERAGE}{name}": each for name, each in self._averages.items()}
        states |= {f"{MASTER}{name}": each for name, each in self._trained.masters.items()}
        states |= {
            f"{OLD_POLICY_PREFIX}{name}": each for name, each in self._sets.newest_old.items()
        }
        return weights.beside(checksum(states), about=str(steps))

    def _clipped(self) -> float:
        """Scale the gradient as all members do; return the norm that it had."""
        if math.isfinite(self._given.norm):
            for parameter in self._parameters.values():
                assert parameter.grad is not None
                parameter.grad.mul_(self._given.scale)
        return self._given.norm


def merged(*each: Mapping[str, float]) -> Tally:
    """Return one tally of several."""
    tally = Tally()
    for fields in each:
        tally.merge(fields)
    return tally
