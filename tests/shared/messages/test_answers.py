"""Answers to commands: no field that names the command can be left out."""

import ast
import inspect
import textwrap
from typing import get_args

import pytest

from shared.messages import contracts
from shared.messages.fluid import Piece, PieceTrained, TrainPiece
from shared.messages.records import Record
from shared.messages.workers import Holds
from tests import examples

REQUESTS = (
    contracts.OperatorRequest, contracts.TagRequest, contracts.WorkerRequest,
    contracts.GroupRequest,
)  # fmt: skip
"""Events that answer no command."""
ANSWERS = [kind for kind in get_args(contracts.Event) if kind not in REQUESTS]


def defaults(kind: type[Record]) -> list[str]:
    """Return the fields that mypy lets a caller leave out."""
    found = []
    for each in kind.__mro__[: kind.__mro__.index(Record)]:
        [source] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(source, ast.ClassDef)
        for line in source.body:
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                assert isinstance(line.target, ast.Name)
                found.append(line.target.id)
    return found


@pytest.mark.parametrize("kind", ANSWERS, ids=lambda kind: kind.__name__)
def test_an_answer_has_no_field_that_can_be_left_out(kind: type[Record]) -> None:
    assert set(defaults(kind)) == {"kind"}


@pytest.mark.parametrize("kind", [contracts.Fragment, Holds])
def test_neither_has_what_answers_are_made_of(kind: type[Record]) -> None:
    assert set(defaults(kind)) <= {"host", "site"}


def test_an_answer_repeats_all_that_names_its_command() -> None:
    piece = Piece(
        group=1, attempt=2, number=3, first_sample=0, num_samples=4, first_step=0, num_steps=5
    )
    command = TrainPiece(
        batch=6, attempt=7, update=8, worker="a-1", piece=piece, sum_number=9,
        policy=examples.policy(6),
    )  # fmt: skip
    assert PieceTrained(**command.answer_fields, seconds=0.5, pass_rows=3) == PieceTrained(
        batch=6, attempt=7, update=8, worker="a-1", piece=piece, sum_number=9, seconds=0.5,
        pass_rows=3,
    )  # fmt: skip
