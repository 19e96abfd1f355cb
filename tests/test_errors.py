from __future__ import annotations

import pytest

from paralign import errors
from paralign.errors import (
    AlignError,
    ConfigError,
    DataError,
    LayoutError,
    MeshError,
    ParalignError,
    RankError,
    RankTimeout,
    ScheduleError,
    TraceError,
    TrainingError,
)

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, ParalignError)
]

# Class -> what a caller who knows nothing of paralign may catch, and the exit status.
EXPECTED = {
    ParalignError: (Exception, 1),
    ConfigError: (ValueError, 2),
    MeshError: (ValueError, 2),
    ScheduleError: (ValueError, 2),
    LayoutError: (ValueError, 2),
    DataError: (ValueError, 2),
    TraceError: (ValueError, 2),
    AlignError: (AssertionError, 1),
    TrainingError: (RuntimeError, 3),
    RankError: (RuntimeError, 3),
    RankTimeout: (RuntimeError, 3),
}


def test_every_error_is_listed_here():
    assert set(ALL) == set(EXPECTED)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_an_error_has_its_builtin_kind_and_its_exit_status(error):
    kind, status = EXPECTED[error]
    assert issubclass(error, kind)
    assert error.exit_status == status


def test_the_module_draws_every_error():
    assert errors.__doc__ is not None
    assert [e.__name__ for e in ALL if e.__name__ not in errors.__doc__] == []


def test_one_problem_is_one_line():
    assert str(MeshError.from_problems("cannot build a mesh", ["pp=0"])) == (
        "cannot build a mesh: pp=0"
    )


def test_several_problems_are_bullets():
    error = DataError.from_problems("the batch is wrong", ["no rows", "no labels"])
    assert str(error) == "the batch is wrong:\n  - no rows\n  - no labels"


def test_from_problems_keeps_the_class():
    for error in ALL:
        if issubclass(error, ConfigError):
            assert type(error.from_problems("title", ["problem"])) is error


def test_an_error_belongs_to_no_rank_until_it_is_said_which():
    error = RankError("gone")
    assert (error.rank, error.cause_type, error.traceback) == (-1, "", "")
