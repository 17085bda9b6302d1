"""Writes TensorBoard's event files with its own writer, without torch or TensorFlow.

A step is one event with all its values: TensorBoard ignores an event that was cut off while it was
written, and the step is written again.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from digenrl.follow.panels import TAG, FinishedEvaluation, Panel
from shared.run.commits import CommitRecord

EVENT_FILES = "events.out.tfevents.*"


class TensorBoard:
    """Implements `digenrl.follow.steps.MetricWriter` for the folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.next_step = max(_steps(folder), default=0) + 1
        self._shown = set(_panels(folder))
        self._file = EventFileWriter(str(folder))

    def write(self, record: CommitRecord) -> None:
        step, metrics = record.policy.version, record.metrics
        values = [Summary.Value(tag=tag, simple_value=metrics[tag]) for tag in sorted(metrics)]
        self._file.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._file.flush()
        self.next_step = step + 1

    def needs(self, finished: FinishedEvaluation) -> bool:
        return (finished.tag, finished.record.version) not in self._shown

    def show(self, finished: FinishedEvaluation, panel: Panel) -> None:
        """Write the picture of an evaluation, at the step of its version."""
        image = Summary.Image(
            height=panel.height, width=panel.width, colorspace=3, encoded_image_string=panel.png
        )
        summary = Summary(value=[Summary.Value(tag=finished.tag, image=image)])
        version = finished.record.version
        self._file.add_event(Event(wall_time=time.time(), step=version, summary=summary))
        self._file.flush()
        self._shown.add((finished.tag, version))

    def close(self) -> None:
        self._file.close()


def _steps(folder: Path) -> Iterator[int]:
    """Yield the steps that are already written."""
    return (event.step for event in _events(folder) if not _is_panel(event))


def _panels(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the panels that are already written: their tags and versions."""
    return (
        (event.summary.value[0].tag, event.step) for event in _events(folder) if _is_panel(event)
    )


def _is_panel(event: Event) -> bool:
    return any(value.tag.split()[:1] == [TAG] for value in event.summary.value)


def _events(folder: Path) -> Iterator[Event]:
    for path in folder.glob(EVENT_FILES):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("summary"):
                yield event
