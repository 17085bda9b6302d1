"""The noise schedule by which a recipe's samples are made: the only place that makes it."""

from shared.models.sigmas import (
    Sigmas,
    default_sigmas,
    linear_sigmas,
    single_shift_sigmas,
    with_tail,
)
from shared.recipe.sampling import Sampling


def make_sigmas(sampling: Sampling) -> Sigmas:
    """Returns `Sampling.num_steps` + 1 sigmas, a tail included.

    Raises:
        ValueError: if they are a model's own, which are numbers once the recipe is read.
    """
    whole = _whole_grid(sampling)
    if sampling.tail is None:
        return whole
    return with_tail(whole, sampling.windows_end, sampling.tail)


def _whole_grid(sampling: Sampling) -> Sigmas:
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
