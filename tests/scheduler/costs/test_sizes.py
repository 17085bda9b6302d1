"""Operations of published networks are those that a trace of them counts."""

import pytest

from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.sizes import NetworkWork, SampleSize, forward_tflop, num_tokens, rho

TRACED = {
    # Size of a sample, TFLOP per guided step and sample, and rho; with a KL term where True.
    "flux1-dev": ((512, 512, 1, 512), 1, 21.5, 3.12, False),
    "sd35-medium": ((512, 512, 1, 128), 2, 4.4, 4.18, True),
    "qwen-image": ((512, 512, 1, 64), 2, 31.4, 3.10, False),
    "wan2.1-14b": ((240, 416, 33, 512), 2, 195.0, 4.15, True),
    "hunyuanvideo": ((480, 480, 53, 256), 1, 297.0, 3.62, False),
}
"""Counted by running the networks as fake tensors (full-size audit of the first release)."""


def work_of(name: str) -> NetworkWork:
    work = load_profile(name).work
    assert work is not None
    return work


def size_of(height: int, width: int, frames: int, text_tokens: int) -> SampleSize:
    return SampleSize(height=height, width=width, frames=frames, text_tokens=text_tokens)


@pytest.mark.parametrize("name", TRACED)
def test_operations_are_those_of_a_trace(name: str) -> None:
    (height, width, frames, text), forwards, step, passes, kl = TRACED[name]
    work, size = work_of(name), size_of(height, width, frames, text)
    assert forwards * forward_tflop(work, size) == pytest.approx(step, rel=0.02)
    assert rho(work, size, full=False, recomputes=True, kl=kl) == pytest.approx(passes, rel=0.02)


def test_a_pass_more_is_a_forward_pass_more() -> None:
    work = work_of("flux1-dev")

    def passes(*, full: bool = False, recomputes: bool = True, kl: bool = False) -> float:
        return rho(work, work.size, full=full, recomputes=recomputes, kl=kl)

    assert passes(kl=True) == passes() + 1
    assert passes(recomputes=False) == passes() - 1
    assert 0.8 < passes(full=True) - passes() < 1, "but for the attention, which has no weights"


def test_a_prompt_counts_with_its_length_only_where_it_is_padded() -> None:
    short, long = (size_of(512, 512, 1, text) for text in (128, 512))
    assert forward_tflop(work_of("flux1-dev"), short) < forward_tflop(work_of("flux1-dev"), long)
    assert forward_tflop(work_of("qwen-image"), short) == forward_tflop(work_of("qwen-image"), long)


def test_the_smallest_sample_has_a_token() -> None:
    assert num_tokens(work_of("flux1-dev"), size_of(8, 8, 1, 1)) == 1
    assert num_tokens(work_of("hunyuanvideo"), size_of(480, 480, 53, 1)) == 14 * 30 * 30
