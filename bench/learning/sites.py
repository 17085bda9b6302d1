"""Two sites that train half of the groups each, and round the sums that they send."""

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from services.trainer.engine.trainer_engine import TrainerEngine
from shared.diffusion.weights.rounding import add_flat, rounded
from shared.messages.records import Level
from shared.recipe.recipe import Recipe

SITES = 2


class Sites:
    """Rounds the gradients of one trainer as if each half were another site's."""

    def __init__(self, recipe: Recipe) -> None:
        self._level: Level = "exact" if recipe.exchange.up == "auto" else recipe.exchange.up
        self._left: list[Tensor | None] = [None] * SITES
        """Rounding residual of each site's sum."""
        self._sent: list[Tensor] = []

    def begin(self) -> None:
        self._sent = []

    @torch.no_grad()
    def send(self, trainer: TrainerEngine) -> None:
        """Replace what was summed since the last site's sum by what a reader finds of it."""
        if self._level == "exact":
            return
        gradients = [p.grad for p in trainer._parameters.values() if p.grad is not None]
        total = parameters_to_vector(gradients)
        own, left = total - sum(self._sent), self._left[len(self._sent)]
        own = own if left is None else own + left
        sent = rounded(own, self._level)
        self._left[len(self._sent)] = own - sent
        self._sent.append(sent)
        for gradient in gradients:
            gradient.zero_()
        add_flat(gradients, sum(self._sent[1:], self._sent[0]))
