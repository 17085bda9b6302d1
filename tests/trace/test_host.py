"""The seconds in which a host launches a kernel."""

import torch

from digenrl.trace.host import measured_host


def test_a_launch_takes_microseconds_in_a_step_and_in_training() -> None:
    found = measured_host(torch.device("cpu"))
    for seconds in (found.step_launch_seconds, found.training_launch_seconds):
        assert 1e-7 < seconds < 1e-2
