"""A gradient transaction in chunks that are measured while it goes on, until the best is known."""

from functools import partial

from shared.diffusion.memory import fits
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import TrainingGroup
from shared.diffusion.training.measure import device_bytes, measured
from shared.errors import OutOfMemory
from shared.models.chunks import Chunk, make_tuner
from shared.recipe.recipe import Recipe

REMEDY = (
    "make trainer.micro_batch or schedule.tsp_steps smaller, set trainer.gradient_checkpointing, "
    "or give trainer.memory_gib what the trainer may take"
)


class AutoChunkedGradient:
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
        """Add the gradient of a group, or of a part of one.

        Raises:
            OutOfMemory: if it does not fit; then the batch has to be begun again, of which a part
                may be added up. Smaller chunks are next, if there are any.
        """
        chunk = self.chunk
        what = f"training {chunk.samples} samples x {chunk.steps} steps in one pass"
        try:
            with fits(self._loaded.device, what, REMEDY):
                self._accumulate(group, chunk)
        except OutOfMemory as error:
            before, self._tuner = self._tuner, self._tuner.without(chunk)
            raise OutOfMemory(str(error), smaller=self._tuner is not before) from None

    def _accumulate(self, group: TrainingGroup, chunk: Chunk) -> None:
        train = partial(self.inner.accumulate, group, chunk)
        usual = group.shape == (self._num_samples, self._num_steps)
        if self._tuner.settled or not usual:
            train()
            return
        network, device = self._loaded.model.transformer, self._loaded.device
        self._tuner = self._tuner.observe(measured(train, chunk, network, device))
