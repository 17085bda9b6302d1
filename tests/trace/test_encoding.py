"""What encoding a prompt takes."""

import pytest

from digenrl.trace.encoding import encoding_seconds, thread_seconds
from services.scheduler.costs.profile import load_profile

QWEN = load_profile("qwen-image")


def test_prompts_are_encoded_in_the_time_that_their_encoders_take() -> None:
    """8.3e9 weights, which an H100 reads in 5 ms; a prompt of 64 tokens is 1.1e12 operations."""
    assert encoding_seconds(QWEN) == pytest.approx(0.005, rel=0.1)
    assert thread_seconds(QWEN) == pytest.approx(11.8, rel=0.05)
    assert encoding_seconds(QWEN.model_copy(update={"memory": None})) == 0
