"""Noise schedules: the sigmas a sample passes on its way from noise (1) to data (0).

Sigmas are computed once per run, pinned, and travel with every trajectory; no other place may
recompute them. Formulas: docs/algorithms/flow-grpo.md; the conventions follow diffusers 0.42.

Two grids with a static shift exist in the field and are not interchangeable: diffusers' default
shifts its end point twice (`default_sigmas`), DanceGRPO and others shift once down to 0
(`single_shift_sigmas`). A `SigmaRule` defines the grid of a family's own pipeline.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Sigmas = tuple[float, ...]
"""T + 1 values, strictly decreasing from at most 1 to exactly 0."""

Config = Mapping[str, Any]
"""Configuration of one part of a model: of the network, the decoder or the noise schedule."""

SigmaRule = Callable[[Config, int, Callable[[], int]], Sigmas]
"""Return the sigmas of this many steps from the scheduler's configuration and the number of tokens
of a sample, which is computed on demand."""

TRAIN_TIMESTEPS = 1000


def shift(sigma: float, factor: float) -> float:
    """Applies a static time shift (Esser et al. 2024, eq. 23).

    >>> shift(0.5, 3.0)
    0.75
    """
    return factor * sigma / (1 + (factor - 1) * sigma)


def linear_sigmas(num_steps: int) -> Sigmas:
    """Returns evenly spaced sigmas from 1 to 0.

    >>> linear_sigmas(4)
    (1.0, 0.75, 0.5, 0.25, 0.0)
    """
    return tuple(1 - step / num_steps for step in range(num_steps + 1))


def single_shift_sigmas(num_steps: int, factor: float) -> Sigmas:
    """Shifts the linear grid once (DanceGRPO, MixGRPO, UniRL)."""
    return tuple(shift(sigma, factor) for sigma in linear_sigmas(num_steps))


def default_sigmas(num_steps: int, factor: float) -> Sigmas:
    """Returns diffusers' own grid for a static shift: its smallest sigma is shifted twice."""
    smallest = shift(1 / TRAIN_TIMESTEPS, factor)
    return (*(shift(sigma, factor) for sigma in _descend(1.0, smallest, num_steps)), 0.0)


def by_config(config: Config, grid: Iterable[float], mu: Callable[[], float]) -> Sigmas:
    """Shift a grid by the configuration of diffusers' scheduler, and end it with 0: by ``mu``,
    exponentially or linearly, if it is dynamic (FLUX, Qwen-Image), or else statically.

    `shift_terminal` stretches the grid so that its last sigma before 0 is that (Qwen: 0.02).
    """
    if config.get("use_dynamic_shifting"):
        factor = mu() if config.get("time_shift_type") == "linear" else math.exp(mu())
        sigmas = [_by(factor, sigma) for sigma in grid]
    else:
        sigmas = [shift(sigma, _static(config)) for sigma in grid]
    if terminal := config.get("shift_terminal"):
        scale = (1 - sigmas[-1]) / (1 - terminal)
        sigmas = [1 - (1 - sigma) / scale for sigma in sigmas]
    return (*sigmas, 0.0)


def static_shift(config: Config, num_steps: int, num_tokens: Callable[[], int]) -> Sigmas:
    """Follows pipelines that leave the grid to diffusers' scheduler (SD3)."""
    last = 1 / TRAIN_TIMESTEPS
    if not config.get("use_dynamic_shifting"):
        last = shift(last, _static(config))
    return by_config(config, _descend(1.0, last, num_steps), lambda: _mu(config, num_tokens()))


def solver_shift(config: Config, num_steps: int, num_tokens: Callable[[], int]) -> Sigmas:
    """Follows pipelines that leave the grid to an Euler scheduler, or to UniPC (Wan). UniPC's first
    sigma, one millionth below 1 for the sake of its logarithms, is 1 here."""
    if not config.get("use_flow_sigmas"):
        return static_shift(config, num_steps, num_tokens)
    return by_config(config, _descend(1.0, 1 / TRAIN_TIMESTEPS, num_steps + 1)[:-1], lambda: 0.0)


def single_static_shift(config: Config, num_steps: int, num_tokens: Callable[[], int]) -> Sigmas:
    """Follows pipelines that give the scheduler the grid from 1 to 0 (HunyuanVideo)."""
    return by_config(config, linear_sigmas(num_steps)[:-1], lambda: 0.0)


def shift_by_tokens(config: Config, num_steps: int, num_tokens: Callable[[], int]) -> Sigmas:
    """Follows pipelines that shift by the size of a sample, if the scheduler's configuration does
    (FLUX, Qwen-Image)."""
    grid = _descend(1.0, 1 / num_steps, num_steps)
    return by_config(config, grid, lambda: _mu(config, num_tokens()))


def shift_by_tokens_and_steps(
    config: Config, num_steps: int, num_tokens: Callable[[], int]
) -> Sigmas:
    """Follows pipelines that shift by the size of a sample and by the number of steps (FLUX.2)."""
    grid = _descend(1.0, 1 / num_steps, num_steps)
    return by_config(config, grid, lambda: empirical_mu(num_tokens(), num_steps))


EULER, UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
_EULER = frozenset({
    "num_train_timesteps", "shift", "shift_terminal", "time_shift_type", "base_shift", "max_shift",
    "base_image_seq_len", "max_image_seq_len",
})  # fmt: skip
_UNIPC = _EULER | {  # with what is left of another scheduler, and what sets no sigma
    "use_flow_sigmas", "flow_shift", "prediction_type", "final_sigmas_type", "beta_end",
    "beta_schedule", "beta_start", "trained_betas", "rescale_betas_zero_snr", "disable_corrector",
    "solver_order", "solver_p", "solver_type", "predict_x0", "lower_order_final", "steps_offset",
    "dynamic_thresholding_ratio", "sample_max_value", "timestep_spacing",
}  # fmt: skip
_DYNAMIC = {EULER: _EULER | {"use_dynamic_shifting"}}
KNOWN_KEYS: Mapping[SigmaRule, Mapping[str, frozenset[str]]] = {
    static_shift: _DYNAMIC,
    solver_shift: {EULER: _EULER, UNIPC: _UNIPC},
    single_static_shift: {EULER: _EULER},
    shift_by_tokens: _DYNAMIC,
    shift_by_tokens_and_steps: _DYNAMIC,
}
"""Keys that each rule knows, by scheduler. Any other key has to be null or false."""
_FIXED: Mapping[str, tuple[object, ...]] = {
    "num_train_timesteps": (TRAIN_TIMESTEPS,), "time_shift_type": ("exponential", "linear"),
    "use_flow_sigmas": (True,), "prediction_type": ("flow_prediction",),
    "final_sigmas_type": ("zero",),
}  # fmt: skip
_DEFAULTS = {UNIPC: {"use_flow_sigmas": False, "prediction_type": "epsilon"}}


def unknown_keys(rule: SigmaRule, config: Config) -> list[str]:
    """Returns what a scheduler's configuration sets that a rule does not follow, as "name = value";
    nothing for a rule that a package brings."""
    name = config.get("_class_name", EULER)
    schedulers = KNOWN_KEYS.get(rule, {name: None})
    if name not in schedulers:
        return [f"_class_name = {json.dumps(name)}"]
    known_keys, given = schedulers[name], {**_DEFAULTS.get(name, {}), **config}
    return [
        f"{key} = {json.dumps(value)}"
        for key, value in given.items()
        if known_keys is not None and not _is_known(known_keys, key, value)
    ]


def _is_known(keys: frozenset[str], key: str, value: object) -> bool:
    if key in keys:
        is_text = isinstance(value, str) and key.endswith("shift")
        return not is_text and value in _FIXED.get(key, (value,))
    return value in (None, False) or key.startswith("_")


def empirical_mu(num_tokens: int, num_steps: int) -> float:
    """Returns the shift that the authors of FLUX.2 have measured: linear in tokens for 200 steps
    and for 10, and linear in the steps between; of many tokens, that for 200."""
    for_200 = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return for_200
    for_10 = 8.73809524e-05 * num_tokens + 1.89833333
    slope = (for_200 - for_10) / 190.0
    return slope * num_steps + for_200 - 200.0 * slope


def _static(config: Config) -> float:
    return float(config.get("flow_shift" if config.get("use_flow_sigmas") else "shift") or 1.0)


def _mu(config: Config, num_tokens: int) -> float:
    """Returns the shift, which is linear in the number of tokens (Esser et al. 2024)."""
    fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return float(low + (num_tokens - fewest) * (high - low) / (most - fewest))


def _by(factor: float, sigma: float) -> float:
    return factor / (factor + (1 / sigma - 1))


def _descend(first: float, last: float, count: int) -> list[float]:
    if count == 1:
        return [first]
    return [first + (last - first) * index / (count - 1) for index in range(count)]
