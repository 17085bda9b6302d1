"""Lends a member's device to generation (TAG): its newest command, and the deadline.

The scheduler does not ask and wait; it states what a device is to do, under a loan number that only
grows. The device's agent follows the highest number it has seen, so that a command may be lost,
repeated or overtaken. A loan ends by a deadline on the device's own clock as well: a scheduler that
has died cannot keep a device from training.

    train --- generate, higher number ---> generate
    train <-- train, higher number ------- generate
    train <-- deadline ------------------- generate      the same number does not lend it again

Between two denoising steps the agent asks `may_generate`, so that it is back within one step.
"""

from dataclasses import dataclass, replace

from shared.messages.contracts import SetDevice
from shared.messages.workers import DeviceMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """Use of a device, and the command for it. A fresh one trains, and has seen none."""

    loan_number: int = 0
    """Number of the last command that was followed."""
    mode: DeviceMode = "train"
    deadline: float | None = None
    """When generation ends by itself, in seconds of the device's own monotonic clock."""
    keep: bool = True
    """Whether unfinished fragments are kept for the next loan while the device trains."""
    expired: bool = False
    """Whether it trains because the deadline has passed, not because of a command."""


def apply(loan: Loan, command: SetDevice, now: float) -> Loan:
    """Follow ``command``, unless one with its number or a higher one was followed before."""
    if command.loan_number <= loan.loan_number:
        return loan
    return Loan(
        loan_number=command.loan_number,
        mode=command.mode,
        deadline=now + command.max_seconds if command.mode == "generate" else None,
        keep=command.keep,
    )


def tick(loan: Loan, now: float) -> Loan:
    """Return the loan as it is now: past its deadline a device trains."""
    if loan.mode == "train" or may_generate(loan, now):
        return loan
    return replace(loan, mode="train", deadline=None, expired=True)


def may_generate(loan: Loan, now: float) -> bool:
    """Whether one more denoising step may begin."""
    return loan.mode == "generate" and loan.deadline is not None and now < loan.deadline
