import heapq

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.tag.list_schedule import Class, generate

CLASSES = st.lists(
    st.builds(
        Class,
        st.sampled_from([1.0, 1.5, 2.0, 3.7]),
        st.integers(1, 5),
        st.sampled_from([1, 1, 2, 3]),
    ),
    min_size=1,
    max_size=4,
)


@given(CLASSES, st.integers(0, 9), st.integers(1, 7))
def test_classes_of_alike_devices_are_scheduled_as_their_devices_are(
    classes: list[Class], groups: int, fragments: int
) -> None:
    """Each device takes as many of the smallest fragments as its own are, or what is left."""
    found = generate(tuple(classes), groups, fragments)
    devices = [(each, place) for place, each in enumerate(classes) for _ in range(each.devices)]
    ends = [(each.seconds, number) for number, (each, _) in enumerate(devices)]
    heapq.heapify(ends)
    free, done = [0.0] * len(devices), list[float]()
    while len(done) < groups * fragments:
        end, number = ends[0]
        each = devices[number][0]
        done += [end] * each.parts
        free[number] = end
        heapq.heapreplace(ends, (end + each.seconds, number))
    assert found.ready == done[fragments - 1 : groups * fragments : fragments]
    told = sorted(time for time, count, _ in found.free for _ in range(count))
    assert told == sorted(free)
    for place, each in enumerate(classes):
        assert sum(number for _, number, at in found.free if at == place) == each.devices
