"""The tuner of TSP chunks, against devices that are made up."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.devices.chunks import MIN_SPEEDUP, Chunk, Measurement, Tuner, make_tuner
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import DIGITS

AUTO = {"trainer.micro_batch": "auto", "schedule.tsp_steps": "auto"}
GROUP_ROWS = 24 * 10


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """Three groups of four samples and three trained steps."""
    changes = {"batch.groups": 3, "batch.group_size": 4, "schedule.fragment_size": 2}
    window = {"trainer.micro_batch": 2, "schedule.tsp_steps": 3, "sampling.window": 3}
    return override(load_recipe(DIGITS), changes | window)


@dataclass(frozen=True)
class Device:
    """Passes cost a fixed time and some per row; memory is resident or grows with rows."""

    seconds_per_pass: float = 1.0
    seconds_per_row: float = 0.0
    resident: int = 0
    per_row: int = 1

    def train(self, chunk: Chunk) -> Measurement:
        passes = -(-GROUP_ROWS // chunk.rows)
        return Measurement(
            chunk=chunk,
            seconds=passes * self.seconds_per_pass + GROUP_ROWS * self.seconds_per_row,
            peak_bytes=self.resident + self.per_row * chunk.rows,
            resident_bytes=self.resident,
        )

    def settle(self, tuner: Tuner) -> tuple[Chunk, list[Measurement]]:
        """The chunk it ends with, and all that was tried."""
        tried = []
        while not tuner.settled:
            tried.append(self.train(tuner.chunk))
            tuner = tuner.observe(tried[-1])
            assert len(tried) < 100
        assert tuner.observe(self.train(tuner.chunk)) == tuner
        return tuner.chunk, tried


def tuner(budget: float = 1e9) -> Tuner:
    """Candidates of a group of 24 with a window of 10."""
    ladder = [(1, 1), (1, 2), (1, 3), (1, 5), (1, 10), (2, 10), (3, 10), (6, 10), (12, 10)]
    candidates = tuple(Chunk(*sizes) for sizes in [*ladder, (24, 10)])
    return Tuner(candidates=candidates, budget_bytes=budget)


DEVICES = st.builds(
    Device,
    seconds_per_pass=st.floats(0, 1),
    seconds_per_row=st.floats(1e-3, 1),
    resident=st.integers(0, 10**9),
    per_row=st.integers(1, 10**7),
)


@given(device=DEVICES, budget=st.integers(1, 4 * 10**9))
def test_it_ends_within_the_budget_with_the_fastest_that_is_worth_its_memory(
    device: Device, budget: int
) -> None:
    chosen, tried = device.settle(tuner(budget))
    smallest = tuner().candidates[0]
    for measurement in tried:
        assert measurement.peak_bytes <= budget or measurement.chunk == smallest
    seconds = {m.chunk: m.seconds for m in tried}
    assert seconds[chosen] <= min(seconds.values()) * MIN_SPEEDUP
    assert chosen == smallest or seconds[chosen] * MIN_SPEEDUP < seconds[smallest]


def test_where_passes_are_dear_the_whole_group_goes_through_at_once() -> None:
    assert Device(seconds_per_pass=1.0).settle(tuner())[0] == Chunk(24, 10)


def test_where_only_rows_cost_the_smallest_stays_and_the_search_ends_early() -> None:
    chosen, tried = Device(seconds_per_pass=0.0, seconds_per_row=1.0).settle(tuner())
    assert chosen == Chunk(1, 1)
    assert max(m.chunk.rows for m in tried) == 3


def test_what_is_resident_does_not_count_for_every_row() -> None:
    """60 rows take 800 + 60, and 120 would take 920."""
    assert Device(resident=800).settle(tuner(budget=900))[0] == Chunk(6, 10)


def test_a_chunk_that_took_more_than_extrapolated_is_given_up() -> None:
    state = tuner(budget=10)
    for peak in (1, 1, 11):
        measurement = Measurement(chunk=state.chunk, seconds=1 / peak, peak_bytes=peak)
        state = state.observe(measurement)
    assert state.settled
    assert state.chunk == Chunk(1, 1)


def test_the_first_passes_of_a_shape_do_not_count_against_it() -> None:
    state, device, seen = tuner(), Device(), set()
    while not state.settled:
        fair = device.train(state.chunk)
        warming = fair.chunk not in seen
        seen.add(fair.chunk)
        slow = Measurement(chunk=fair.chunk, seconds=9 * fair.seconds, peak_bytes=1)
        state = state.observe(slow if warming else fair)
    assert state.chunk == Chunk(24, 10)


def test_groups_that_begin_at_more_states_are_compared_by_row() -> None:
    """All of one device's groups have 10 rows of the network, all of two unlike devices' 20."""
    state = tuner()
    for rows, seconds in ((10, 1.0), (10, 1.0), (20, 1.2), (20, 1.2), (10, 0.9), (10, 0.9)):
        state = state.observe(
            Measurement(chunk=state.chunk, seconds=seconds, peak_bytes=1, network_rows=rows)
        )
    assert replace(state, candidates=state.candidates[:3]).chunk == Chunk(1, 2)


def test_chunks_are_of_the_steps_that_are_not_merged(recipe: Recipe) -> None:
    shared = {**AUTO, "sampling.shared_noise": True}
    steps = {chunk.steps for chunk in make_tuner(override(recipe, shared), 1.0).candidates}
    assert steps == {1, 2}
    alone = override(recipe, {**shared, "sampling.window": 1})
    assert {chunk.steps for chunk in make_tuner(alone, 1.0).candidates} == {1}


def test_a_measurement_of_another_chunk_changes_nothing() -> None:
    state = tuner()
    assert state.observe(Device().train(Chunk(24, 10))) == state


def test_the_candidates_cover_group_and_window_in_parts_as_even_as_can_be(recipe: Recipe) -> None:
    changes = {**AUTO, "batch.group_size": 6, "schedule.fragment_size": 3, "sampling.window": 5}
    candidates = make_tuner(override(recipe, changes), 1.0).candidates
    assert [(c.samples, c.steps) for c in candidates] == [
        (1, 1), (1, 2), (1, 3), (1, 5), (2, 5), (3, 5), (6, 5),
    ]  # fmt: skip


def test_what_the_recipe_fixes_stays_fixed(recipe: Recipe) -> None:
    both = {"trainer.micro_batch": 2, "schedule.tsp_steps": 2}
    fixed = make_tuner(override(recipe, both), 1.0)
    assert fixed.settled
    assert fixed.chunk == Chunk(2, 2)
    steps = make_tuner(override(recipe, {**both, "schedule.tsp_steps": "auto"}), 1.0)
    assert steps.candidates == (Chunk(2, 1), Chunk(2, 2), Chunk(2, 3))
    samples = make_tuner(override(recipe, {**both, "trainer.micro_batch": "auto"}), 1.0)
    assert samples.candidates == (Chunk(1, 2), Chunk(2, 2), Chunk(4, 2))


def test_in_reproducible_mode_nothing_is_measured(recipe: Recipe) -> None:
    reproducible = override(
        recipe, {**AUTO, "trainer.deterministic": True, "trainer.memory_gib": 1e-9}
    )
    for device_bytes in (1.0, 1e12):
        state = make_tuner(reproducible, device_bytes)
        assert state.settled
        assert state.chunk == Chunk(samples=4, steps=3)


@pytest.mark.parametrize(("given_gib", "expected"), [(None, 92.0), (2.0, 2.0 * 2**30)])
def test_the_budget_is_the_recipes_or_most_of_the_device(
    recipe: Recipe, given_gib: float | None, expected: float
) -> None:
    changes = {**AUTO, "trainer.memory_gib": given_gib}
    assert make_tuner(override(recipe, changes), 100.0).budget_bytes == expected
