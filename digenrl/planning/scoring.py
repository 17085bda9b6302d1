"""Share of scoring in a step, by the location of the reward workers."""

from dataclasses import dataclass

from digenrl.planning.ledger import Ledger
from services.reward.kinds import scorer_network
from services.scheduler.costs.profile import Profile
from shared.errors import UserError
from shared.recipe.recipe import Recipe

GPU_TFLOPS = 25.0
"""Operations of a second of an H100 in float32, in 1e12: assumed, of at most 67."""
THREAD_TFLOPS = 0.095
"""The same of a CPU's core: 3.5 s were measured for an image of CLIP-H."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Location of the rewards' networks, and their seconds."""

    seconds: float
    """Seconds of a step in which the reward worker scores that has most to do."""
    place: str
    device_seconds: float
    """Seconds per sample that they take of the devices which generate; 0 if they share none."""


def image_tflop(recipe: Recipe, *, on_gpu: bool) -> float:
    """Return the operations for a sample of the networks that score it, in 1e12 of float32: of a
    video, for each frame."""
    networks = [scorer_network(each.type, each.folder) for each in recipe.reward.scorers]
    gflop = sum(
        each.image_gflop / (each.gpu_speed if on_gpu else 1.0)
        for each in networks
        if each is not None
    )
    return gflop * recipe.model.frames / 1e3


def score_costs(recipe: Recipe, profile: Profile, ledger: Ledger) -> Scoring | None:
    """Return the costs of the rewards' networks; None if they are unknown, or there are no
    networks."""
    on_gpu, on_thread = (image_tflop(recipe, on_gpu=each) for each in (True, False))
    table = recipe.reward
    if not on_thread:
        return None
    places = [ledger.places[f"reward-{number}"] for number in range(table.workers)]
    samples = profile.shape.samples / table.workers
    threads = table.threads * THREAD_TFLOPS
    rates = {card.kind: _rate(profile, card.kind) for each in places for card in each.cards}
    each = [
        on_gpu / GPU_TFLOPS / rates[place.cards[0].kind] if place.cards else on_thread / threads
        for place in places
    ]
    on_cpu = sum(not place.cards for place in places)
    shared = sum(bool(place.policies_on_card) for place in places)
    words = [
        (on_cpu, f"on {on_cpu * table.threads} CPU threads"),
        (shared, f"on {shared} GPUs of members and rollout workers"),
        (len(places) - on_cpu - shared, "on GPUs of their own"),
    ]
    return Scoring(
        seconds=max(samples * seconds for seconds in each),
        place=" and ".join(text for count, text in words if count),
        device_seconds=shared / len(places) * max(each) if shared else 0.0,
    )


def check_scoring(recipe: Recipe, scoring: Scoring, step_seconds: float) -> None:
    """Raises UserError if scoring takes more of a step than the recipe allows."""
    if scoring.seconds > recipe.reward.max_share * step_seconds:
        raise UserError(
            f"reward.workers: the networks of the rewards take {scoring.seconds:.0f} of "
            f"{step_seconds:.0f} s per step {scoring.place}; leave a GPU or room on one for them, "
            "raise reward.workers and reward.threads, or allow it with reward.max_share"
        )


def _rate(profile: Profile, kind: str) -> float:
    return profile.devices[kind].generation_speed if kind in profile.devices else 1.0
