"""The attention back ends that `model.attention` may name: the back ends of diffusers 0.42.

A network samples and trains with the same one, so that a replay equals its sample: one without a
backward pass cannot be named.
"""

from collections.abc import Iterable

from shared.errors import UserError

ANY_TYPE_BACKENDS = ("native", "_native_math", "flex", "xformers", "_native_efficient")
"""Back ends that take weights of any type."""

HALF_TYPE_BACKENDS = (
    "flash", "flash_hub", "flash_varlen", "flash_varlen_hub", "flash_4_hub",
    "_flash_varlen_3", "_flash_3_hub", "_flash_3_varlen_hub", "aiter_fa2_hub",
    "_native_cudnn", "_native_flash",
)  # fmt: skip
"""Back ends that take bfloat16 and float16 only."""

WITHOUT_BACKWARD = (
    "_flash_3", "sage", "sage_hub", "sage_blackwell_hub", "sage_varlen",
    "_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90",
    "_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton",
)  # fmt: skip

CPU_BACKENDS = ("native", "_native_math", "_native_flash")

HALF_TYPES = ("bfloat16", "float16")


def check_backend(name: str, dtype: str) -> None:
    """Raises ValueError, which begins with the name of the key, unless a network of this type can
    be trained with the back end."""
    if name in WITHOUT_BACKWARD:
        raise ValueError(
            f"attention: {name!r} has no backward pass, and a replay has to equal its sample; use "
            f"{_listed(HALF_TYPE_BACKENDS[:1])} or leave it out"
        )
    if name not in ANY_TYPE_BACKENDS + HALF_TYPE_BACKENDS:
        raise ValueError(
            f"attention: {name!r} is no back end of diffusers; use "
            f"{_listed(ANY_TYPE_BACKENDS + HALF_TYPE_BACKENDS)}, or leave it out"
        )
    if name in HALF_TYPE_BACKENDS and dtype not in HALF_TYPES:
        raise ValueError(
            f"attention: {name!r} takes {' and '.join(HALF_TYPES)}, not {dtype}; set model.dtype, "
            "or leave attention out"
        )


def check_device(name: str | None, *, on_gpu: bool) -> None:
    """Raises UserError if the back end needs a missing GPU."""
    if name is not None and name not in CPU_BACKENDS and not on_gpu:
        raise UserError(
            f"model.attention: {name} needs a GPU, and there is no GPU; use "
            f"{_listed(CPU_BACKENDS)}, or leave it out"
        )


def _listed(names: Iterable[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last
