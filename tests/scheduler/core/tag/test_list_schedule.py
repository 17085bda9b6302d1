import heapq

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.tag.list_schedule import generate

CLASSES = st.lists(
    st.tuples(st.sampled_from([1.0, 1.5, 2.0, 3.7]), st.integers(1, 5)), min_size=1, max_size=4
)


@given(CLASSES, st.integers(0, 9), st.integers(1, 7))
def test_classes_of_alike_devices_are_scheduled_as_their_devices_are(
    classes: list[tuple[float, int]], groups: int, fragments: int
) -> None:
    found = generate(tuple(classes), groups, fragments)
    devices = [
        (seconds, place) for place, (seconds, count) in enumerate(classes) for _ in range(count)
    ]
    ends = [(seconds, number) for number, (seconds, _) in enumerate(devices)]
    heapq.heapify(ends)
    free, ready, done = [0.0] * len(devices), [], 0.0
    for _ in range(groups):
        for _ in range(fragments):
            done, number = ends[0]
            free[number] = done
            heapq.heapreplace(ends, (done + devices[number][0], number))
        ready.append(done)
    assert found.ready == ready
    told = sorted(time for time, count, _ in found.free for _ in range(count))
    assert told == sorted(free)
    for place, (_, count) in enumerate(classes):
        assert sum(number for _, number, each in found.free if each == place) == count
