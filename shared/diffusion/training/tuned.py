"""A gradient transaction in chunks that are measured while it goes on, until the best is known."""

from functools import partial

from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.chunks import Chunk, make_tuner
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import TrainingGroup
from shared.diffusion.training.measure import device_bytes, measured
from shared.recipe import Recipe


class TunedTransaction:
    """On one device. What is learned there holds for the batches that follow."""

    def __init__(
        self, recipe: Recipe, loaded: LoadedPolicy, num_samples: int | None = None
    ) -> None:
        """``num_samples`` of a group are accumulated at a time; by default all of them."""
        self.inner = GradientTransaction.of(recipe, loaded.model)
        self._loaded = loaded
        self._num_samples = num_samples or recipe.batch.group_size
        self._num_steps = recipe.sampling.window
        self._tuner = make_tuner(recipe, device_bytes(loaded.device), self._num_samples)

    @property
    def chunk(self) -> Chunk:
        """In which the next group is trained."""
        return self._tuner.chunk

    def accumulate(self, group: TrainingGroup) -> None:
        """Add the gradient of a group, or of a part of one."""
        chunk = self.chunk
        train = partial(self.inner.accumulate, group, chunk)
        usual = group.shape == (self._num_samples, self._num_steps)
        if self._tuner.settled or not usual:
            train()
            return
        network, device = self._loaded.model.transformer, self._loaded.device
        self._tuner = self._tuner.observe(measured(train, chunk, network, device))
