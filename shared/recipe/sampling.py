"""The tables of a recipe about sampling and learning."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.learning.algorithms import ALGORITHMS, DEFAULT, DecayKind, Variant
from shared.learning.windows import WindowRule, Windows
from shared.models.sigmas import Sigmas, default_sigmas, linear_sigmas, single_shift_sigmas
from shared.recipe.fields import NonNegative, Positive, Rate, Sigma, Table

SigmaGrid = Literal["linear", "shifted", "default", "model"] | tuple[Sigma, ...]
"""Names of noise schedules, or numbers; `Sampling.sigmas` explains them."""


MatchingWeight = Literal["uniform", "sigma", "ghuber"]

CfgGradient = Literal["both", "conditional"]

MIN_FIRST_SIGMA = 0.9
MAX_STEP = 10.0
"""Largest ratio of the second step to the distance of its start from 1: the standard deviation of
its noise is the noise level times the square root of that. The grids in use have 1 to 3."""


class Sampling(Table):
    steps: Annotated[int, Field(ge=2, le=1000)] = 10
    """Number of denoising steps."""
    sigmas: SigmaGrid = "linear"
    """Noise schedule. `linear`: from 1 to 0; `shifted`: shifted once by `sampling.shift`;
    `default`: the grid of diffusers for that shift; `model`: the schedule of the model's own
    pipeline, from its scheduler's configuration (Euler, UniPC of Wan), of which settings that are
    not followed are refused; or numbers from 1 to 0, one more than `sampling.steps`."""
    shift: Annotated[float, Field(gt=0)] = 3.0
    """Static time shift of the `shifted` and `default` schedules."""
    variant: Variant = "flow"
    """Form of the stochastic steps: `flow`, `dance` or `cps`. Default: the algorithm's."""
    noise_level: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Noise of the stochastic steps: a of `flow` and `cps`, eta of `dance`. Default: set by the
    algorithm."""
    window: Positive
    """Number of denoising steps that are trained and, by default, stochastic. For `diffusion-nft`:
    number of sigmas at which each sample is trained."""
    shared_noise: bool = False
    """Whether all samples of a group start from one noise. The steps before the first stochastic
    step, its network call and its gradient are then computed once per group."""
    stochastic: Literal["trained", "all"] = "trained"
    """Stochastic steps: the `trained` ones, or `all` except the last."""
    trained: Literal["window", "random"] = "window"
    """Trained steps. `window`: the steps of the group's window; `random`: as many steps, drawn for
    each sample among all stochastic steps. `random` excludes the other keys of windows."""
    first_window_starts: tuple[NonNegative, NonNegative] = (0, 0)
    """First and last step at which a window may start."""
    windows: WindowRule = "group"
    """Position of the window. `group`: drawn for each group; `random`: drawn every
    `sampling.window_batches` batches; `progressive`: moves from first to last; `decay`: moves
    faster and faster."""
    window_stride: Positive | None = None
    """Steps by which a moving window moves; default: its length, 1 for `mix-grpo`."""
    roll_back: bool = False
    """Whether a moving window returns to its first position after the last one instead of staying
    there. Default for `mix-grpo`: true."""
    window_batches: Positive = 25
    """Batches that a window stays at one position. Default for `random` windows: 1."""
    window_batches_last: Positive = 1
    """Batches at the last position of a `decay` window; positions between are interpolated."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which trajectories are stored. `bfloat16` halves the bytes: states are rounded before
    their log-probs are taken, so that a replay has the same log-probs."""

    @property
    def moving_window(self) -> Windows:
        first, last = self.first_window_starts
        return Windows(
            first=first,
            last=last,
            rule=self.windows,
            stride=self.window_stride or self.window,
            batches=self.window_batches,
            batches_at_last=self.window_batches_last,
            rolls_back=self.roll_back,
        )

    @property
    def shared_steps(self) -> float:
        """The mean number of denoising steps that a fragment computes once for all its samples."""
        if not self.shared_noise:
            return 0.0
        return 1.0 if self.stochastic == "all" else sum(self.first_window_starts) / 2 + 1

    @property
    def merged_steps(self) -> int:
        """The number of trained steps that a group computes once for all samples: 1 where every
        window begins at the first stochastic step of a shared noise."""
        begins_there = self.stochastic == "trained" or self.first_window_starts == (0, 0)
        return int(self.shared_noise and begins_there)

    @model_validator(mode="after")
    def _sigmas_descend(self) -> Self:
        if not isinstance(self.sigmas, str):
            check_sigmas("sigmas", self.sigmas, self.steps)
        return self

    @model_validator(mode="after")
    def _window_fits(self) -> Self:
        first, last = self.first_window_starts
        if first > last:
            raise ValueError(f"first_window_starts: {first} is after {last}")
        # A window may not reach the last step: its noise would stay in the sample.
        if last + self.window > self.steps - 1:
            fits = self.steps - 1 - self.window
            remedy = f"start at {fits} at the latest" if fits >= 0 else "use a smaller window"
            raise ValueError(
                f"window: {self.window} steps from step {last} reach past step {self.steps - 2}, "
                f"the last that may be stochastic of {self.steps}; {remedy}"
            )
        return self

    @model_validator(mode="after")
    def _drawn_steps_have_no_window(self) -> Self:
        if self.trained == "window":
            return self
        if self.stochastic != "all":
            raise ValueError(
                'trained: "random" draws among the stochastic steps, which have to be more; set '
                'stochastic to "all"'
            )
        for key in sorted(WINDOW_KEYS):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f'{key}: places windows, and trained = "random" has no windows; '
                    'leave it out, or set trained to "window"'
                )
        return self


WINDOW_KEYS = frozenset({
    "first_window_starts", "windows", "window_stride", "roll_back", "window_batches",
    "window_batches_last",
})  # fmt: skip
"""Keys of `Sampling` that place windows."""


def check_sigmas(field: str, sigmas: tuple[float, ...], steps: int) -> None:
    """Raise ValueError, which names the field, unless the sigmas have this many steps from noise to
    0."""
    if len(sigmas) != steps + 1:
        raise ValueError(f"{field}: {len(sigmas)} numbers; {steps} steps need {steps + 1}")
    if any(after >= before for before, after in pairwise(sigmas)):
        raise ValueError(f"{field}: every number must be smaller than the one before")
    if sigmas[-1] != 0:
        raise ValueError(f"{field}: the last number must be 0, not {sigmas[-1]}")
    if sigmas[0] < MIN_FIRST_SIGMA:
        raise ValueError(
            f"{field}: samples begin as noise, so the first number must be 1, or nearly; "
            f"not {sigmas[0]}"
        )
    if steps > 2 and sigmas[1] - sigmas[2] > MAX_STEP * (1 - sigmas[1]):
        raise ValueError(
            f"{field}: only the first number may be as good as 1, and {sigmas[1]} is as well: the "
            "noise of the step from there would drown the sample; leave it out"
        )


class Algorithm(Table):
    name: str = DEFAULT
    """Name of the algorithm. It sets the defaults of `sampling.variant`, windows,
    `sampling.noise_level` and `algorithm.clip_range`."""
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Clip range of the ratio. Default: the algorithm's."""
    advantage_clip: Annotated[float, Field(gt=0)] = 5.0
    """Limit at which advantages are clipped."""
    kl_beta: Rate = 0.0
    """Weight of the KL divergence to the reference policy. 0 does not compute it."""
    reference: Literal["base", "adapter"] | None = None
    """Reference policy of the KL divergence and of `dpo`: `base`, the model without an adapter, or
    `adapter`, the model with `model.adapter`. Default: `adapter` where `model.adapter` is given."""
    nft_beta: Annotated[float, Field(gt=0, le=100)] = 1.0
    """`diffusion-nft`: distance of both branches from the old policy, relative to the trained
    policy's distance. Published: 1, and 0.1 for text."""
    nft_decay: DecayKind = 0
    """`diffusion-nft`: update of the old policy, which generates. 0 copies the trained policy after
    each batch; 1 averages with decay min(0.001 k, 0.5) after k optimizer steps; 2 copies for 75
    optimizer steps, then averages with decay min(0.0075 (k - 75), 0.999)."""
    stale_loss: Literal["bypass", "decoupled"] = "bypass"
    """Loss of samples that are one version old. `bypass`: the ratio is to the version that
    generated them; `decoupled`: the ratio is to the version at the start of the batch, and a
    truncated importance weight corrects the rest."""
    weight_cap: Annotated[float, Field(gt=0)] = 5.0
    """`decoupled`: maximum importance weight is 1 + `algorithm.weight_cap` x
    `algorithm.clip_range`; with `rollout.weights` it is `rollout.weight_cap`."""
    advantage_std: Literal["group", "batch"] = "group"
    """Standard deviation that advantages are divided by: of the rewards of the group, or of the
    whole batch."""
    zero_advantages: Literal["kept", "dropped"] = "kept"
    """Samples with advantage 0: `kept` in the mean over samples, and with their KL, or `dropped`
    from both. Default: the algorithm's."""
    best_of: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Even number of samples of each group that are trained: half with the highest and half with
    the lowest advantages. Default: all samples."""
    awm_weight: MatchingWeight = "ghuber"
    """`awm`: weight of a sample's error e at sigma s. `uniform`: e; `sigma`: s e; `ghuber`: about 4
    s e^(1/4)."""
    dpo_beta: Annotated[float, Field(gt=0)] = 2000.0
    """`dpo`: strength of the preference within a pair."""
    cfg_gradient: CfgGradient = "both"
    """Halves of classifier-free guidance that have a gradient. `conditional` leaves out the half of
    the negative prompt: training is faster and the objective differs. Refused without
    classifier-free guidance."""
    rewards: Literal["sum", "normalised"] = "sum"
    """Combination of several scorers. `sum`: weighted sum of scores; `normalised`: each score is
    normalised to advantages, which are then averaged by weight."""

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.name not in ALGORITHMS:
            *others, last = map(repr, ALGORITHMS)
            raise ValueError(
                f"name: input should be {', '.join(others)} or {last}, not {self.name!r}"
            )
        method = ALGORITHMS[self.name]
        if self.stale_loss == "decoupled" and not method.corrects_staleness:
            raise ValueError(
                f'stale_loss: "decoupled" is not defined for {self.name}; use "bypass"'
            )
        if not method.has_old_policy:
            self._check_no_old_policy()
        return self

    def _check_no_old_policy(self) -> None:
        for key in ("nft_beta", "nft_decay"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key}: {self.name} is trained on its own samples, without an old policy; "
                    'leave it out, or set name to "diffusion-nft"'
                )


def make_sigmas(sampling: Sampling) -> Sigmas:
    """Returns the noise schedule of a recipe's samples: `Sampling.steps` + 1 sigmas.

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
