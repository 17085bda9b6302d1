"""Writes steps as lines of JSON to stdout, each as `/v1/events` tells it."""

import json

import typer

from digenrl.api.feed import commit_fields
from shared.run.commits import CommitRecord


class Lines:
    """Implements `digenrl.follow.steps.Writer`; begins with step 1 each time it is started."""

    def __init__(self) -> None:
        self.next_step = 1

    def write(self, record: CommitRecord) -> None:
        typer.echo(json.dumps({"event": "commit", "data": commit_fields(record)}))
        self.next_step = record.policy.version + 1

    def close(self) -> None:
        """Do nothing: each line is written at once."""
