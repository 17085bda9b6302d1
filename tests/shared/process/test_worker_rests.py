"""What a worker shows while it has nothing to do."""

from shared.messages.workers import Device
from shared.process.worker import Worker


def test_a_worker_that_rests_shows_what_it_lacks_and_otherwise_what_it_waits_for() -> None:
    worker = Worker("trainer", "trainer-0", "waiting_for_rollout", Device(), address="trainer-0")

    def shown() -> str:
        worker.rest()
        return worker.activity

    with worker.lacking("waiting_for_conditions", "no encoder has stored them"):
        worker.activity = "loading_weights"
        assert shown() == "waiting_for_conditions"
        with worker.doing("training"):
            assert shown() == "training"
        assert shown() == "waiting_for_conditions"
    assert shown() == "waiting_for_rollout"
