"""Desired state under loss, repetition, overtaking and silence."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.devices.loan import Loan, apply, may_generate, tick
from shared.messages.contracts import SetDevice
from shared.messages.workers import DeviceMode


def told(
    loan_number: int, mode: DeviceMode, max_seconds: float = 10.0, keep: bool = True
) -> SetDevice:
    """Return a command without validation, so that it may hold what a message cannot."""
    return SetDevice.model_construct(
        worker="trainer-0", loan_number=loan_number, mode=mode, max_seconds=max_seconds, keep=keep
    )


def test_a_fresh_device_trains() -> None:
    assert Loan().mode == "train"
    assert not may_generate(Loan(), now=0.0)


def test_a_device_is_borrowed_and_returned() -> None:
    lent = apply(Loan(), told(1, "generate"), now=100.0)
    assert may_generate(lent, now=100.0)
    assert may_generate(lent, now=109.9)
    returned = apply(lent, told(2, "train", keep=False), now=103.0)
    assert not may_generate(returned, now=103.0)
    assert returned == Loan(loan_number=2, mode="train", keep=False)


def test_the_message_of_the_bus_is_a_command() -> None:
    message = SetDevice(worker="trainer-0", loan_number=1, mode="generate", max_seconds=5.0)
    assert apply(Loan(), message, now=1.0).deadline == 6.0


@pytest.mark.parametrize("loan_number", [1, 2])
def test_what_was_followed_or_overtaken_has_no_effect(loan_number: int) -> None:
    returned = apply(Loan(), told(2, "train"), now=0.0)
    assert apply(returned, told(loan_number, "generate"), now=1.0) is returned


def test_a_repeated_borrow_does_not_move_the_deadline() -> None:
    lent = apply(Loan(), told(1, "generate"), now=0.0)
    assert apply(lent, told(1, "generate"), now=9.0) is lent


def test_a_device_nobody_calls_back_returns_and_is_not_lent_again_by_the_same_command() -> None:
    lent = apply(Loan(), told(1, "generate"), now=0.0)
    assert tick(lent, now=9.9) is lent
    expired = tick(lent, now=10.0)
    assert (expired.mode, expired.loan_number, expired.expired) == ("train", 1, True)
    late = apply(expired, told(1, "generate"), now=11.0)
    assert not may_generate(late, now=11.0)
    again = apply(late, told(2, "generate"), now=12.0)
    assert may_generate(again, now=12.0)
    assert not again.expired


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_loan_of_no_time_never_generates(seconds: float) -> None:
    lent = apply(Loan(), told(1, "generate", max_seconds=seconds), now=5.0)
    assert not may_generate(lent, now=5.0)
    assert tick(lent, now=5.0).mode == "train"


@pytest.mark.parametrize("seed", range(3))
def test_ten_thousand_commands_over_a_bad_network(seed: int) -> None:
    """Dropped, doubled, overtaken by hundreds, and delivered from long ago."""
    chance = random.Random(seed)
    sent = [
        told(number, chance.choice(["train", "generate"]), chance.uniform(0.1, 20.0))
        for number in range(1, 10_001)
    ]
    sent[-1] = told(10_000, chance.choice(["train", "generate"]), max_seconds=30_000.0)
    network = [
        (command.loan_number + chance.expovariate(1 / 50), command)
        for command in sent
        for _ in range(chance.choice([0, 1, 1, 2, 3]))
    ]
    network += [(c.loan_number + chance.uniform(0, 10_000), c) for c in chance.sample(sent, 500)]
    network.append((20_000.0, sent[-1]))  # desired state is told until it is seen

    loan, first_seen, generated = Loan(), dict[int, float](), 0
    for now, command in sorted(network, key=lambda item: item[0]):
        before = loan
        loan = apply(tick(loan, now), command, now)
        assert loan.loan_number == max(before.loan_number, command.loan_number)
        if loan.loan_number > before.loan_number:
            first_seen[loan.loan_number] = now
        followed = sent[loan.loan_number - 1]
        age = now - first_seen[loan.loan_number]
        lent = followed.mode == "generate" and age < followed.max_seconds
        assert may_generate(loan, now) == lent
        generated += lent
    assert (loan.loan_number, loan.mode) == (10_000, sent[-1].mode)
    assert generated > 1000


class Agent(RuleBasedStateMachine):
    """Any order of commands, repeats and time; what is true is kept beside the loan."""

    def __init__(self) -> None:
        super().__init__()
        self.loan = Loan()
        self.now = 0.0
        self.sent: list[SetDevice] = []
        self.followed: SetDevice | None = None
        self.since = 0.0

    @rule(
        mode=st.sampled_from(["train", "generate"]), seconds=st.integers(0, 5), keep=st.booleans()
    )
    def send(self, mode: DeviceMode, seconds: int, keep: bool) -> None:
        self.sent.append(told(len(self.sent) + 1, mode, float(seconds), keep))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        command = data.draw(st.sampled_from(self.sent))
        self.loan = apply(self.loan, command, self.now)
        if self.followed is None or command.loan_number > self.followed.loan_number:
            self.followed, self.since = command, self.now

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def look(self) -> None:
        lent = may_generate(self.loan, self.now)
        self.loan = tick(self.loan, self.now)
        assert may_generate(self.loan, self.now) == lent == (self.loan.mode == "generate")

    @invariant()
    def follows_the_highest_number_it_has_seen(self) -> None:
        told = self.followed
        assert self.loan.loan_number == (told.loan_number if told else 0)
        assert told is None or self.loan.keep == told.keep

    @invariant()
    def generates_only_while_it_is_on_loan(self) -> None:
        told = self.followed
        lent = told is not None and told.mode == "generate"
        in_time = told is not None and self.now < self.since + told.max_seconds
        assert may_generate(self.loan, self.now) == (lent and in_time)

    @invariant()
    def says_so_when_it_has_returned_by_itself(self) -> None:
        told = self.followed
        by_itself = told is not None and told.mode == "generate" and self.loan.mode == "train"
        assert self.loan.expired == by_itself


TestAgent = Agent.TestCase
