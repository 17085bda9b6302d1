"""The size of fragments on fluid devices a step ahead: none is longer than a batch by far."""

import pytest

from services.scheduler.core.sizing import chosen_size
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.seconds import fragment_seconds
from services.scheduler.costs.split import Split
from services.scheduler.sim.forecast import forecast
from services.scheduler.sim.profiled import simulate
from shared.recipe.schedule import RunSchedule

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("members", "size"), [({"H100": 32}, 16), ({"H100": 64}, 8), ({"H100": 16, "H20": 16}, 8)]
)
def test_long_fragments_are_not_chosen_where_others_would_wait(
    members: dict[str, int], size: int
) -> None:
    profile = load_profile("qwen-image")
    schedule = RunSchedule(mode="fluid", max_staleness=1)
    seconds = {n: forecast(profile, Split({}, members), n, schedule).seconds for n in SIZES}
    assert chosen_size(seconds, profile.shape.group_size) == size
    slowest = max(fragment_seconds(profile, kind, size, "trainer") for kind in members)
    assert slowest <= seconds[size]


def test_a_slow_device_takes_no_group_that_others_finish_first_a_step_ahead_too() -> None:
    """A batch is not longer one step ahead than on-policy, because H20 leave whole groups to H100
    that train at that moment and would still finish them first."""
    profile = load_profile("qwen-image")
    shape = profile.shape.model_copy(update={"groups": 8})
    seconds = [
        simulate(
            profile.model_copy(update={"shape": shape}), rollout={},
            trainer={"H100": 4, "H20": 4},
            schedule=RunSchedule(mode="fluid", max_staleness=ahead, fragment_size=16),
        ).step_seconds
        for ahead in (0, 1)
    ]  # fmt: skip
    assert seconds[1] < seconds[0]
