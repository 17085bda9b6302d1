"""The noise schedule by which a recipe's samples are made: the only place that makes it."""

from shared.models.sigmas import Sigmas, default_sigmas, linear_sigmas, single_shift_sigmas
from shared.recipe.sampling import Sampling


def make_sigmas(sampling: Sampling) -> Sigmas:
    """Returns `Sampling.steps` + 1 sigmas.

    Raises:
        ValueError: if they are a model's own, which are numbers once the recipe is read.
    """
    match sampling.sigmas:
        case "linear":
            return linear_sigmas(sampling.steps)
        case "shifted":
            return single_shift_sigmas(sampling.steps, sampling.shift)
        case "default":
            return default_sigmas(sampling.steps, sampling.shift)
        case "model":
            raise ValueError("the model's own sigmas are numbers once the recipe is read")
        case numbers:
            return numbers
