"""Launch overhead of the host: it launches each kernel of a call.

A call takes what its device computes or what its host takes to launch its kernels, whichever is
more: with few rows the host sets the pace. The kernels are counted from a network's configuration
(`digenrl check --trace`) and are as many for any number of rows; the seconds of a launch belong to
the machine (`digenrl doctor` measures them on a GPU).
"""

from services.scheduler.costs.sizes import Positive
from shared.errors import UserError
from shared.messages.records import Record, Seconds


class Launches(Record):
    """Kernels that a host launches, guidance included."""

    step: Positive
    """Launches of a denoising step."""
    training_pass: Positive
    """Launches of a training pass with gradient checkpointing, without a KL term."""


class HostCosts(Record):
    """Seconds in which a host launches a kernel. 0: the device alone sets the pace."""

    step_launch_seconds: Seconds = 0.0
    training_launch_seconds: Seconds = 0.0
    """The same in a training pass, whose backward pass autograd walks."""


UNKNOWN_HOST = HostCosts()


def parse_host_costs(option: str, text: str) -> HostCosts:
    """Parse microseconds of a launch in a denoising step and in a training pass.

    >>> parse_host_costs("--launch-us", "20.8,30").training_launch_seconds
    3e-05

    Raises:
        UserError: names the option.
    """
    try:
        step, training = (float(part) for part in text.split(","))
        return HostCosts(step_launch_seconds=step / 1e6, training_launch_seconds=training / 1e6)
    except ValueError as error:
        raise UserError(
            f"{option}: {text!r} is not two numbers, the microseconds of a launch in a denoising "
            "step and in a training pass, e.g. 20.8,30"
        ) from error
