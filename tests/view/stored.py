"""A run with evaluations, use of devices and timelines, in a folder of objects."""

import asyncio
import io
from pathlib import Path

from PIL import Image

from digenrl.evaluation.records import EvaluationRecord, Evaluations, KeptSample, Quality
from shared.run.layout import timeline_key, usage_key
from shared.run.log_entries import Work
from shared.run.usage import BatchUsage, Timeline
from tests import examples
from tests.follow.runs import RUN, Run
from tests.run_log import append, letter

VERSIONS = (0, 4)
DEVICES = ("rollout-0", "rollout-1", "trainer-0", "reward-0")


def stored_run(
    folder: Path, timelines: bool = True, gold: float = 0.0, *, video: bytes = b""
) -> Run:
    """Return a run of four steps, each of which adds ``gold`` to the gold reward; with ``video``
    all its samples are this mp4."""
    run = Run(folder / "objects").begin()
    run.commit(4)
    asyncio.run(_fill(run, timelines, gold, video))
    return run


async def _fill(run: Run, timelines: bool, gold: float, video: bytes) -> None:
    for version in VERSIONS:
        await evaluate(run, version, 0.5 + gold * version, video)
    for batch in range(4):
        uses = {"generating": 3.0, "waiting_for_trainer": 1.0}
        usage = {"batch": batch, "seconds": 4.0, "devices": dict.fromkeys(DEVICES, uses)}
        data = BatchUsage.model_validate(usage).model_dump_json().encode()
        await run.store.create(usage_key(RUN, batch), data)
        if timelines:
            changes = [(0.0, "generating"), (3.0, "waiting_for_trainer")]
            line = {"batch": batch, "seconds": 4.0, "devices": dict.fromkeys(DEVICES, changes)}
            encoded = Timeline.model_validate(line).encode()
            await run.store.create(timeline_key(RUN, batch), encoded)
    failed = letter(1, reason="the scorer said NaN", work=Work(batch=3, group=5))
    await append(run.store, RUN, failed)


async def evaluate(run: Run, version: int, gold: float = 0.5, video: bytes = b"") -> None:
    """Store an evaluation of six samples."""
    folder = Evaluations(run.store, RUN, "a" * 64)
    film = video and await run.store.put(folder.media_folder, video, suffix=".mp4")
    samples = []
    for digit in range(6):
        still = await run.store.put(folder.media_folder, _picture(digit, version), suffix=".png")
        prompt, right = f"the digit {digit}", bool(version or digit % 2)
        score = (digit if version else 5 - digit) / 10
        scores: dict[str, float | None] = {"proxy": score, "gold other": score / 2, "reward": score}
        samples.append(
            KeptSample(prompt=prompt, media=film or still, still=still, right=right, scores=scores)
        )
    record = EvaluationRecord(
        run=RUN, policy=examples.policy(version), settings="a" * 64, worker="report", seconds=1.0,
        quality=Quality(reward=0.25 + version / 10, num_samples=6, gold={"other": gold}),
        samples=tuple(samples),
    )  # fmt: skip
    await folder.add(record)


def _picture(digit: int, version: int) -> bytes:
    image = Image.new("L", (32, 32), 40 * digit)
    image.paste(200, (8, 8, 16 + 2 * version, 24))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
