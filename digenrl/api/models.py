"""API models of the past (groups, samples, audit log, storage), and of plans."""

from typing import Any, Literal

from pydantic import Field

from services.scheduler.shell.api_models import View, example

EXAMPLE_SAMPLE = {
    "batch": 12, "group": 3, "sample": 5, "prompt": "a handwritten three", "reward": 0.12,
    "advantage": -1.4, "scores": {"proxy": 0.12}, "policy_version": 12, "generated_by": "rollout-0",
    "attempt": 0, "trained": True, "why_not": None, "letters": [4],
    "media": "/v1/batches/12/samples/3/5/media", "media_gone": None, "weights": {"proxy": 1.0},
    "normalised": False,
}  # fmt: skip
EXAMPLE_GROUP_HISTORY = {
    "batch": 12, "group": 3, "prompt": "a handwritten three", "attempt": 0, "policy_version": 12,
    "num_samples": 8, "reward_mean": 0.71, "reward_spread": 0.2, "generated_by": ["rollout-0"],
    "dropped": None, "letters": [4],
}  # fmt: skip
EXAMPLE_REQUEST = {
    "number": 17, "at": 1795447812.4, "caller": "ann", "role": "operator", "on_behalf": "",
    "operation": "POST /v1/run/pause", "client": "10.0.0.9", "status": 202,
}  # fmt: skip
EXAMPLE_CHOICE: dict[str, Any] = {
    "mode": "disaggregated", "rollout": {"A100": 16, "H100": 8}, "trainer": {"H100": 8},
    "fragment_size": 4, "tag_groups": 2, "max_staleness": 0, "step_seconds": 61.2,
    "utilisation": 0.91, "recipe": {"rollout.workers": 24},
    "commands": {"h100-1": "digenrl host --keys KEYS --roles trainer"},
}  # fmt: skip
EXAMPLE_PLAN: dict[str, Any] = {
    "profile": "sd35-medium", "devices": {"A100": 16, "H100": 16}, "bound_seconds": 55.4,
    "forecast": 212, "reasons": [], "left_out": [],
    "choices": [EXAMPLE_CHOICE],
}  # fmt: skip
EXAMPLE_FOLDER = {
    "folder": "weights", "objects": 12, "bytes": 184_000_000,
    "kept": "the 3 newest versions and those that are in use",
}  # fmt: skip


EXAMPLE_UNSCORED_GROUP = {"group": 1, "num_samples": 14, "why": "mine: ValueError: no template"}


class SampleHistory(View):
    """A sample of a committed batch: where it comes from, and what was made of it."""

    model_config = example(**EXAMPLE_SAMPLE)

    batch: int
    """Number of the batch."""
    group: int
    """Group of the batch."""
    sample: int
    """Number of the sample in its group."""
    prompt: str | None
    """The prompt; null if this host has no prompts file."""
    reward: float | None
    """Weighted sum of its scores; null if it could not be scored."""
    advantage: float | None
    """Its reward relative to its group's, in standard deviations of that, for comparison; null if
    it has none."""
    scores: dict[str, float | None]
    """Score by scorer."""
    policy_version: int
    """Version that generated it."""
    generated_by: str
    """Address of the device that generated it."""
    attempt: int
    """Attempt that succeeded: that many before it have failed."""
    trained: bool
    """Whether it was trained on."""
    why_not: str | None
    """Why it was not, if it was not."""
    letters: list[int]
    """Numbers of the dead letters about it: which attempts have failed, and why."""
    media: str | None
    """Location of its picture, or of the middle frame of its video; if `media_gone` explains its
    deletion, of a small preview. Null: there is neither."""
    media_gone: str | None
    """The rule by which its media were deleted; null if they exist, or never did. A preview may be
    left."""
    weights: dict[str, float] | None = None
    """Weight of each score in the reward, by scorer; null if the run's recipe is not known."""
    normalised: bool = False
    """Whether each score becomes an advantage of its own, and these are summed by the weights."""

    @property
    def is_sum(self) -> bool:
        """Whether its reward is known to be the sum of its scores by their weights."""
        return bool(self.weights and self.scores) and not self.normalised

    @property
    def made_of(self) -> str:
        """The parts of its reward as a sum, or only its scores where it is not known to be one."""
        weights = self.weights if self.is_sum else None
        parts = (_part(*each, weights) for each in self.scores.items())
        return (" + " if self.is_sum else ", ").join(parts)


def _part(name: str, score: float | None, weights: dict[str, float] | None) -> str:
    text = f"{name} {'none' if score is None else f'{score:.3f}'}"
    return text if weights is None else f"{weights.get(name, 1.0):g} x {text}"


class UnscoredGroup(View):
    """Samples of a group that have no score."""

    model_config = example(**EXAMPLE_UNSCORED_GROUP)

    group: int
    """Group of the batch."""
    num_samples: int
    """Number of its samples without a score."""
    why: str
    """Why they have none."""


class SamplePage(View):
    """Samples of a batch."""

    model_config = example(samples=[EXAMPLE_SAMPLE], next="8", unscored=[EXAMPLE_UNSCORED_GROUP])

    samples: list[SampleHistory]
    """Samples in the requested order."""
    next: str | None
    """Cursor of the next page; null if this is the last one."""
    unscored: list[UnscoredGroup] = Field(default_factory=list)
    """Groups of the batch with samples that have no score."""

    @property
    def said_of_unscored(self) -> str:
        """How many samples of the batch have no score, and why; empty if all have one."""
        number = sum(each.num_samples for each in self.unscored)
        if not number:
            return ""
        reasons: dict[str, list[str]] = {}
        for each in self.unscored:
            reasons.setdefault(each.why, []).append(str(each.group))
        groups = "; ".join(
            f"group{'s' * (len(places) > 1)} {', '.join(places)} ({why})"
            for why, places in reasons.items()
        )
        return f"{number} sample{'s have' if number > 1 else ' has'} no score: {groups}"

    @property
    def said_of_weights(self) -> str:
        """How the rewards of its samples come about, where they are no plain sum of scores."""
        first = next(iter(self.samples), None)
        if first is None or not first.normalised or first.weights is None:
            return ""
        parts = " + ".join(f"{weight:g} x {name}" for name, weight in first.weights.items())
        return (
            'rewards = "normalised": each score becomes an advantage of its own, and these are '
            f"summed by the weights {parts}"
        )


class GroupHistory(View):
    """A group of a committed batch."""

    model_config = example(**EXAMPLE_GROUP_HISTORY)

    batch: int
    """Number of the batch."""
    group: int
    """Number of the group in its batch."""
    prompt: str | None
    """Its prompt; null if this host has no prompts file."""
    attempt: int
    """How often the group was sent to the trainer without a result."""
    policy_version: int
    """Version that generated it."""
    num_samples: int
    """Number of its samples."""
    reward_mean: float | None
    """Mean reward of its samples; null if none could be scored."""
    reward_spread: float | None
    """Standard deviation of its rewards; at 0 nothing can be learned of it."""
    generated_by: list[str]
    """Addresses of the devices that generated it."""
    dropped: str | None
    """Why it was not trained on, if it was not."""
    letters: list[int]
    """Numbers of the dead letters about it."""


class GroupPage(View):
    """Groups of a batch."""

    model_config = example(groups=[EXAMPLE_GROUP_HISTORY], next="4")

    groups: list[GroupHistory]
    """Groups in order."""
    next: str | None
    """Cursor of the next page; null if this is the last one."""


class PlanChoice(View):
    """One way to use the devices."""

    model_config = example(**EXAMPLE_CHOICE)

    mode: str
    """Mode of the schedule: disaggregated or fluid."""
    rollout: dict[str, int]
    """Devices that generate, by kind."""
    trainer: dict[str, int]
    """Devices that train, by kind; in mode fluid they do both."""
    fragment_size: int
    """Samples that a device generates at once."""
    tag_groups: int | Literal["auto", "off"]
    """Maximum number of groups that lent members generate."""
    max_staleness: int
    """Steps by which samples may be stale."""
    step_seconds: float
    """Simulated seconds of a step."""
    utilisation: float
    """Share of their time that the devices work."""
    recipe: dict[str, Any]
    """Recipe keys for this choice."""
    commands: dict[str, str]
    """The command line for each host, by its name; empty if hosts are unknown."""


class PlanView(View):
    """Forecast of a run's recipe on other devices."""

    model_config = example(**EXAMPLE_PLAN)

    profile: str
    """Cost profile that the seconds come from."""
    devices: dict[str, int]
    """Devices that were planned for, by kind."""
    bound_seconds: float | None
    """No split takes fewer seconds per step."""
    forecast: int
    """Number of ways that were forecast; the best were simulated."""
    reasons: list[str]
    """Why the model is held as it is, in sentences."""
    left_out: list[str]
    """A sentence for each kind of device that takes no part."""
    choices: list[PlanChoice]
    """Simulated choices, fastest first."""


class AuditView(View):
    """A request that changed something, or was to."""

    model_config = example(**EXAMPLE_REQUEST)

    number: int
    """Number of the entry in the run's log."""
    at: float
    """When it was answered, in seconds of the Unix clock."""
    caller: str
    """Name of the token or session."""
    role: str
    """Role of the caller."""
    on_behalf: str
    """Name for whom the caller acted; empty if for itself."""
    operation: str
    """Method and path."""
    client: str
    """Address that the request came from."""
    status: int
    """Status of the answer."""


class AuditPage(View):
    """Requests, newest first."""

    model_config = example(requests=[EXAMPLE_REQUEST], next="17")

    requests: list[AuditView]
    """Requests that changed something, or were to."""
    next: str | None
    """Cursor of the next page; null if this is the last one."""


class FolderView(View):
    """One kind of a run's stored objects."""

    model_config = example(**EXAMPLE_FOLDER)

    folder: str
    """Folder of the run, or object."""
    objects: int
    """Number of objects."""
    bytes: int
    """Their size."""
    kept: str
    """How long they are kept."""


class StorageView(View):
    """Stored objects of a run, and their retention."""

    model_config = example(
        bytes=184_000_000, disk_bytes=241_000_000, objects=12, measured=1795447812.4,
        folders=[EXAMPLE_FOLDER],
    )  # fmt: skip

    bytes: int
    """Size of all objects."""
    disk_bytes: int | None
    """Space of the store on its disk, including deleted objects that are not yet swept; null if the
    store's folder is not on this host."""
    objects: int
    """Number of all objects."""
    measured: float
    """When they were counted, in seconds of the Unix clock; they are counted once a minute."""
    folders: list[FolderView]
    """One entry for each folder, the largest first."""
