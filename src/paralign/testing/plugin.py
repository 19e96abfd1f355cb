"""The pytest plugin: the fixture ``ranks``, markers that skip, kept traces, expected failures.

pytest loads it in every suite of an environment that paralign is installed in, so it imports
nothing but pytest until one of its features is used.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from paralign.testing.comparisons import TestLog
    from paralign.testing.known import Known

_MARKERS = (
    "needs_ranks(n): skip where n local ranks are too many for this machine",
    "needs_device(kind, count=1): skip where there are fewer devices of this kind",
)
_FEW_RANKS = 8  # what any machine starts, however few its cores

_LOG: pytest.StashKey[TestLog] = pytest.StashKey()
_KNOWN: pytest.StashKey[list[Known]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the group paralign."""
    group = parser.getgroup("paralign", "paralign: parallel runs held against one device")
    group.addoption(
        "--paralign-keep-traces",
        metavar="DIR",
        help="Copy the traces of every failing assert_aligned into DIR.",
    )
    group.addoption(
        "--paralign-known",
        metavar="FILE",
        help="Expected failures (YAML); also the ini option paralign_known.",
    )
    group.addoption(
        "--paralign-max-ranks",
        metavar="N",
        type=int,
        help="How many local ranks needs_ranks allows; default: the cores, and at least "
        f"{_FEW_RANKS}.",
    )
    parser.addini("paralign_known", "Expected failures (YAML), from the folder of the ini file.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and read the expected failures."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    path = _known_file(config)
    if path is None:
        config.stash[_KNOWN] = []
        return
    from paralign.errors import ConfigError
    from paralign.testing.known import read_known

    try:
        config.stash[_KNOWN] = read_known(path)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


def _known_file(config: pytest.Config) -> Path | None:
    given = config.getoption("--paralign-known")
    if given:
        return Path(str(config.invocation_params.dir), given)
    named = str(config.getini("paralign_known") or "")
    base = config.inipath.parent if config.inipath else config.rootpath
    return base / named if named else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip where a marker asks for what is not there."""
    for marker in item.iter_markers("needs_ranks"):
        wanted = _argument(item, marker, "n", int)
        allowed = item.config.getoption("--paralign-max-ranks")
        allowed = max(_FEW_RANKS, os.cpu_count() or 1) if allowed is None else allowed
        if wanted > allowed:
            pytest.skip(
                f"needs {wanted} ranks, and {allowed} are allowed on this machine "
                "(--paralign-max-ranks)"
            )
    for marker in item.iter_markers("needs_device"):
        kind = _argument(item, marker, "kind", str)
        count = marker.kwargs.get("count", marker.args[1] if len(marker.args) > 1 else 1)
        from paralign.errors import ConfigError
        from paralign.launch.device import describe_available, num_devices

        try:
            found = num_devices(kind)
        except ConfigError as error:
            if kind != "npu":
                raise pytest.UsageError(f"{item.nodeid}: needs_device: {error}") from error
            pytest.skip(f"needs {kind}: {error}")
        if kind != "cpu" and found < count:
            pytest.skip(f"needs {count} {kind}, found {found}; available: {describe_available()}")


def _argument(item: pytest.Item, marker: pytest.Mark, name: str, kind: type) -> Any:
    value = marker.kwargs.get(name, marker.args[0] if marker.args else None)
    if type(value) is not kind:
        raise pytest.UsageError(
            f"{item.nodeid}: {marker.name} got {name}={value!r}. Give {name} as {kind.__name__}."
        )
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Listen to the comparisons of a test, and hold them against the expected failures."""
    from paralign.testing.comparisons import TestLog, listening

    log = item.stash[_LOG] = TestLog(_keep_folder(item))
    with listening(log):
        try:
            result = yield
        except AssertionError as error:
            reason = _expected(item, log)
            if reason is None or not _is_alignment(error):
                raise
            pytest.xfail(reason)
            raise  # with --runxfail
    _fail_if_it_passes_now(item, log)
    return result


def _is_alignment(error: AssertionError) -> bool:
    from paralign.errors import AlignError

    return isinstance(error, AlignError)


def _keep_folder(item: pytest.Item) -> Path | None:
    chosen = item.config.getoption("--paralign-keep-traces")
    if not chosen:
        return None
    name = re.sub(r"[^\w.-]+", "_", item.nodeid).strip("_")
    return Path(str(item.config.invocation_params.dir), chosen, name)


def _expected(item: pytest.Item, log: TestLog) -> str | None:
    """Return why the failure is expected: every failing comparison has an entry for it."""
    failing = [comparison for comparison in log.comparisons if not comparison.is_aligned]
    reasons: dict[str, None] = {}
    for comparison in failing:
        for known in item.config.stash[_KNOWN]:
            if known.concerns(item.nodeid, comparison) and known.explains(comparison):
                reasons[f"{known.reason} ({known.place})"] = None
                break
        else:
            return None
    return "; ".join(reasons) or None


def _fail_if_it_passes_now(item: pytest.Item, log: TestLog) -> None:
    for known in item.config.stash[_KNOWN]:
        concerned = [c for c in log.comparisons if known.concerns(item.nodeid, c)]
        if concerned and all(comparison.is_aligned for comparison in concerned):
            pytest.fail(
                f"{known.place} expects this to fail ({known.reason}), but it is aligned now. "
                "Remove the entry.",
                pytrace=False,
            )


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """Run a function on real ranks: ``ranks(fn, 4, *args, device="cpu", timeout=60)``.

    As ``paralign.testing.run_on_ranks``; besides, what ``assert_aligned`` finds on the ranks counts
    for expected failures and kept traces. The function lives at the top level of a module.
    """
    from paralign.testing.comparisons import FolderLog
    from paralign.testing.rank_call import RankCall
    from paralign.testing.ranks import run_on_ranks

    log = request.node.stash.get(_LOG, None)

    def run(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
        mine = request.node.stash.get(_LOG, log)
        with tempfile.TemporaryDirectory(prefix="paralign-") as name:
            there = FolderLog(Path(name), None if mine is None else mine.keep)
            try:
                return run_on_ranks(RankCall(fn, there), world_size, *args, **options)
            finally:
                if mine is not None:
                    mine.comparisons += there.read()

    yield run
