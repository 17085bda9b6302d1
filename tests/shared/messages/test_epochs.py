"""Which commands hold when schedulers take turns, for every order of what they store."""

from hypothesis import given
from hypothesis import strategies as st

from shared.messages.epochs import Fence, HeldLease, StreamMessage, holds, next_epoch


@st.composite
def turns(draw: st.DrawFn) -> list[StreamMessage]:
    """A stream into which schedulers store: each marks its epoch before its first command, and may
    be stopped for any time, so that its later commands come behind the marks of others."""
    stream, marked = list[StreamMessage](), set[int]()
    newest = 0
    for _ in range(draw(st.integers(0, 30))):
        if draw(st.booleans()):
            newest = draw(st.integers(newest + 1, newest + 3))
            marked.add(newest)
            stream.append(StreamMessage(newest, is_mark=True))
        else:
            stream.append(StreamMessage(draw(st.sampled_from([0, *sorted(marked)]))))
    return stream


@given(turns())
def test_a_command_holds_exactly_if_no_later_epoch_was_marked_before_it(
    stream: list[StreamMessage],
) -> None:
    for place, (message, held) in enumerate(zip(stream, holds(stream), strict=True)):
        marks = [each.epoch for each in stream[:place] if each.is_mark]
        assert held == (not message.is_mark and message.epoch >= max(marks, default=0))


@given(turns(), st.integers(0, 30))
def test_whoever_reads_later_or_goes_on_after_a_break_finds_the_same(
    stream: list[StreamMessage], place: int
) -> None:
    whole = holds(stream)
    assert holds(stream[:place]) == whole[: len(stream[:place])]
    fence = Fence()
    for message in stream[:place]:
        fence = fence.raised(message.epoch)
    rest = stream[place:]
    assert (
        holds([StreamMessage(fence.epoch, is_mark=True), *rest])[1:]
        == whole[len(stream) - len(rest) :]
    )


@given(turns())
def test_only_one_epoch_commands_between_two_marks(stream: list[StreamMessage]) -> None:
    """Commands of releases without epochs hold until the first mark."""
    current = 0
    for message, held in zip(stream, holds(stream), strict=True):
        current = max(current, message.epoch) if message.is_mark else current
        assert not held or message.epoch == current


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20))
def test_epochs_grow_also_when_the_register_counts_anew(taken: list[tuple[int, bool]]) -> None:
    revision, newest = 0, 0
    for more, is_lost in taken:
        revision = 1 if is_lost else revision + more
        epoch = next_epoch(revision, newest)
        assert epoch > newest
        newest = epoch


def test_a_lease_goes_on_only_if_nobody_wrote_in_between() -> None:
    assert HeldLease(3, 9).goes_on(10) == HeldLease(3, 10)
    assert HeldLease(3, 9).goes_on(11) is None
    assert HeldLease(3, 9).goes_on(1) is None
