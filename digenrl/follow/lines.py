"""Writes steps and evaluations as lines of JSON to stdout, in the form of `/v1/events`."""

import json

import typer

from digenrl.api.feed import commit_fields, evaluation_fields
from digenrl.follow.panels import FinishedEvaluation, Panel
from shared.run.commits import CommitRecord


class MetricLines:
    """Implements `digenrl.follow.steps.MetricWriter`; begins with step 1 each time it is
    started."""

    def __init__(self) -> None:
        self.next_step = 1

    def write(self, record: CommitRecord) -> None:
        typer.echo(json.dumps({"event": "commit", "data": commit_fields(record)}))
        self.next_step = record.policy.version + 1

    def needs(self, finished: FinishedEvaluation) -> bool:
        """Write the figures of an evaluation; pictures are not for lines."""
        fields = evaluation_fields(finished.entry)
        typer.echo(json.dumps({"event": "evaluation", "data": fields}))
        return False

    def show(self, finished: FinishedEvaluation, panel: Panel) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: each line is written at once."""
