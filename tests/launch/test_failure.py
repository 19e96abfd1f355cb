from __future__ import annotations

import pytest

from paralign.errors import AlignError, ConfigError, MeshError, RankError
from paralign.launch.failure import Blame, Failure, build_error, build_timeout
from paralign.mesh import Degrees

describe = Degrees(pp=2, cp=2).describe_rank


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1",
        "[gloo/transport/tcp/pair.cc:553] Read error [127.0.0.1]:1: Connection reset by peer",
        "writev [127.0.0.1]:4000: Broken pipe",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_lost_connection_is_a_consequence(text):
    assert Failure.of_exception(0, RuntimeError(text)).blame is Blame.PEER


@pytest.mark.parametrize(
    "error", [ConnectionResetError("Connection reset by peer"), BrokenPipeError(32, "Broken pipe")]
)
def test_so_is_an_os_error_of_a_socket(error):
    assert Failure.of_exception(0, error).blame is Blame.PEER


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the config says: connection closed"),
        ConfigError("socket closed"),
        RuntimeError("shapes differ"),
        KeyError("broken pipe"),
    ],
)
def test_other_errors_are_the_ranks_own(error):
    assert Failure.of_exception(0, error).blame is Blame.OWN


def test_the_cause_wins_over_what_arrived_first():
    failures = [
        Failure.of_exception(0, RuntimeError("Connection closed by peer")),
        Failure.of_exit(1, -6),
        Failure.of_exit(3, -9),
        Failure.of_exception(2, RuntimeError("Connection reset by peer")),
    ]
    error = build_error(failures, 4, describe=describe)
    assert str(error) == (
        "[rank 3: pp=1 cp=1] was ended by SIGKILL (the system may have run out of memory)"
    )
    failures.remove(failures[2])
    assert str(build_error(failures, 4, describe=describe)) == (
        "[rank 1: pp=0 cp=1] was ended by SIGABRT"
    )


def test_lost_connections_alone_are_still_an_error():
    failures = [
        Failure.of_exception(rank, RuntimeError("Connection closed by peer")) for rank in (2, 1)
    ]
    error = build_error(failures, 4, describe=describe)
    assert str(error) == (
        "[rank 1: pp=0 cp=1] RuntimeError: Connection closed by peer\n(the same on ranks 1, 2)"
    )


def test_an_exit_says_its_status_and_place():
    assert Failure.of_exit(0, 7).text == "exited with status 7 before it returned a result"
    failure = Failure.of_exit(0, -11, place="at a.py:1 f", stack="all of it")
    assert (failure.text, failure.traceback) == ("was ended by SIGSEGV at a.py:1 f", "all of it")
    assert Failure.of_exit(0, -250).text == "was ended by signal 250"


def test_only_classes_of_the_exception_tree_are_raised_again():
    class Mine(MeshError):
        def __init__(self) -> None:
            super().__init__("pp=3")

    class ConfigError(Exception):
        """Has the name of one of ours, and is none."""

    mine = Failure.of_exception(1, Mine())
    foreign = Failure.of_exception(1, ConfigError("x"))
    assert type(build_error([mine], 2, describe=describe)) is MeshError
    assert type(build_error([foreign], 2, describe=describe)) is RankError
    assert (
        type(build_error([Failure.of_exception(0, AlignError("a"))], 2, describe=str)) is AlignError
    )


def test_an_error_about_ranks_is_not_wrapped_in_words():
    inner = RankError("[rank 0] ValueError: inner")
    error = build_error([Failure.of_exception(1, inner)], 2, describe=describe)
    assert str(error) == "[rank 1: pp=0 cp=1] [rank 0] ValueError: inner"


def test_details_come_along():
    failure = Failure.of_exception(1, caught(KeyError("name")))
    error = build_error([failure], 2, describe=describe)
    assert vars(error) == {
        "rank": 1,
        "cause_type": "KeyError",
        "traceback": failure.traceback,
    }
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert str(error.__cause__) == "\n" + failure.traceback


def test_an_error_that_cannot_be_printed_still_arrives():
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError("no words")

    class MuteConfig(ConfigError):
        def __str__(self) -> str:
            raise TypeError("no words")

    assert "Mute: <exception str() failed>" in Failure.of_exception(0, Mute()).text
    assert "MuteConfig: <exception str() failed>" in Failure.of_exception(0, MuteConfig()).text


def test_a_timeout_lists_every_rank():
    error = build_timeout(
        "2 of 2 ranks did not finish", ["is at a", "is at b"], rank=0, describe=str, stacks="s"
    )
    assert str(error) == "2 of 2 ranks did not finish:\n  [0] is at a\n  [1] is at b"
    assert vars(error) == {"rank": 0, "cause_type": "timeout", "traceback": "s"}
