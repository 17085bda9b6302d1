"""Trains a member's pieces, and takes the step of a total that all members hold."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from services.trainer.engine.checkpoint import AVERAGE, MASTER, OLD, STEP
from services.trainer.engine.snapshot import EngineCopy
from services.trainer.engine.trainer_engine import TrainerEngine
from services.trainer.fluid.sums import SumLayout, Term
from shared.devices.protocols import Snapshot
from shared.diffusion.checksum import Checksum, checksum
from shared.diffusion.masters import TrainedWeights
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.tally import Tally
from shared.diffusion.weight_sets import Tensors
from shared.recipe.recipe import Recipe
from shared.run.manifest import StoredTensors


@dataclass(frozen=True, slots=True)
class StepScale:
    """What all members step by, as the committer has measured it once."""

    norm: float
    """Norm of the total; not finite if the step is passed over."""
    scale: float
    """Factor on the total, by which it is clipped and rows without advantage are dropped."""


class FluidEngine(TrainerEngine):
    def __init__(self, recipe: Recipe, loaded: LoadedPolicy) -> None:
        super().__init__(recipe, loaded)
        first = next(iter(self._parameters.values()))
        size = sum(each.numel() for each in self._parameters.values())
        self.layout = SumLayout(size, first.dtype, first.device)
        self._given = StepScale(0.0, 1.0)
        self._num_taken = 0
        """Updates of the batch that were taken."""
        self._counted: list[Mapping[str, float]] = []
        """Tallies of their totals: metrics are of all rows of the batch."""
        self._decay: float | None = None
        """How the old policy follows the update that is being taken, if it does."""
        self.steps_beside = recipe.schedule.staleness_limit > 0
        self._sets.settle()

    def newest_digest(self) -> str:
        """Return the digest of what samples the newest version, in use or not yet."""
        if not self.steps_beside:
            return self.sampling_digest()
        return self._digest(self._sets.newest.sampling)

    def _digest(self, tensors: Tensors) -> str:
        return self._loaded.in_use.digest_of(tensors, None)

    def take_ahead(self) -> None:
        """Use what `take_beside` has made."""
        self._sets.take()

    def before(self) -> AbstractContextManager[None]:
        """Have the version before be what samples meanwhile."""
        return self._sets.before()

    def begin(self) -> None:
        """Empty the sum; what is trained next is of weights that this many updates have moved."""
        super().begin()
        self.num_steps = self._num_taken

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
        types, newest, kept = self._trained.types, self._sets.newest, self._kept
        digest, sampling = self.newest_digest(), None
        if newest.are_distinct:
            sampling = kept.sampling.copy(newest.sampling, types, is_first=True)
        return EngineCopy(
            weights=kept.weights.copy(newest.trained, types, is_first=True),
            checkpoint=kept.states.copy(self._states(), {}, is_first=True),
            sampling=sampling,
            digest=self._digest(newest.trained) if newest.are_distinct else digest,
            sampling_digest=digest,
        ).snapshot()

    def term(self) -> Term:
        """Copy what was summed since `begin`, flat."""
        grads = [each.grad for each in self._parameters.values()]
        tally = self._transaction.whole_tally
        if all(each is None for each in grads):
            return Term(None, tally.as_dict())
        with torch.no_grad():
            parts = [
                torch.zeros_like(parameter) if each is None else each
                for parameter, each in zip(self._parameters.values(), grads, strict=True)
            ]
            flat = torch.cat([each.reshape(-1) for each in parts])
        return Term(flat, tally.as_dict())

    def skip_rows(self, num_rows: int) -> None:
        """Count rows whose gradient is zero."""
        self._transaction.skip(num_rows)

    def measured(self, total: Term) -> StepScale:
        """Return norm and scale of a total of the rows that are kept: it is clipped by its norm."""
        assert total.gradient is not None
        kept = self._transaction.kept_factor(total.tally["num_zero_advantage"])
        norm = kept * get_total_norm(list(self._parts(total.gradient).values()))
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
        self._transaction.tally = _tally(*self._counted)
        for name, gradient in self._parts(total.gradient).items():
            self._parameters[name].grad = gradient
        self._given = given
        metrics = self.step(batch, kept=1.0)  # the scale has it
        self._num_taken = (self._num_taken + 1) % self._recipe.trainer.updates
        if not self._num_taken:
            self._counted = []
        return metrics

    def take_beside(self, batch: int, total: Term, given: StepScale) -> dict[str, float]:
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
        if self.steps_beside:
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
        kept, self._transaction.tally = self._transaction.tally, _tally(total.tally)
        try:
            self.check_rows()
        finally:
            self._transaction.tally = kept

    def checksum(self) -> Checksum:
        """Return the checksum of the trained weights, the moments, the average and the old
        policy."""
        weights = checksum(self._sets.newest.trained)
        states, steps = {}, []
        for name, parameter in self._parameters.items():
            for state, value in self._optimizer.state[parameter].items():
                if state == STEP:
                    steps.append(float(value))
                else:
                    states[f"{state}/{name}"] = value
        states |= {f"{AVERAGE}{name}": each for name, each in self._averages.items()}
        states |= {f"{MASTER}{name}": each for name, each in self._trained.masters.items()}
        states |= {f"{OLD}{name}": each for name, each in self._sets.newest_old.items()}
        return weights.beside(checksum(states), about=str(steps))

    def _clipped(self) -> float:
        """Scale the gradient as all members do; return the norm that it had."""
        if math.isfinite(self._given.norm):
            for parameter in self._parameters.values():
                assert parameter.grad is not None
                parameter.grad.mul_(self._given.scale)
        return self._given.norm

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the gradient of each parameter, in place."""
        sizes = [each.numel() for each in self._parameters.values()]
        return dict(self._shaped(flat.split(sizes)))

    def _shaped(self, parts: tuple[Tensor, ...]) -> Iterator[tuple[str, Tensor]]:
        for (name, parameter), part in zip(self._parameters.items(), parts, strict=True):
            yield name, part.view_as(parameter)


def _tally(*each: Mapping[str, float]) -> Tally:
    """Return one tally of several."""
    tally = Tally()
    for fields in each:
        tally.merge(fields)
    return tally
