from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import paralign.testing.ranks

# In-process runs forget the modules that they import first; torch cannot be imported twice.
from tests.testing import live_runs

pytest_plugins = ["pytester"]

TEST = """
import pytest
from paralign.testing import assert_aligned
from tests.testing import live_runs as runs

@pytest.mark.parametrize("total", [8, 16])
def test_parity(total):
    net = runs.model()
    runs.backward(net, runs.rows(), total)
    assert_aligned(runs.reference(), net)
"""

RANKS_TEST = """
from tests.testing import live_runs as runs

def test_sharded(ranks):
    assert ranks(runs.fsdp_run, 2, None)[0]["verdict"] == "aligned"

def test_wrong(ranks):
    ranks(runs.fsdp_run, 2, "factor")
"""


def test_the_runs_below_are_loaded_before_them():
    assert {live_runs.__name__, "torch", "paralign.testing.aligned"} <= set(sys.modules)
    assert paralign.testing.ranks.__name__ in sys.modules


def outcomes(pytester: pytest.Pytester, *args: str) -> tuple[dict[str, int], str]:
    result = pytester.runpytest_inprocess(*args)
    return result.parseoutcomes(), result.stdout.str()


def test_a_suite_that_does_not_use_it_imports_nothing_heavy():
    code = (
        "import sys, paralign.testing.plugin, paralign.testing.comparisons\n"
        "print([m for m in ('torch', 'numpy', 'yaml', 'pydantic', 'rich') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_pytest_is_no_dependency_of_the_package():
    users = [
        path.name
        for path in sorted(Path(paralign.testing.__file__).parent.glob("*.py"))
        if "import pytest" in path.read_text()
    ]
    assert users == ["plugin.py"]


def test_a_failing_comparison_fails_with_its_finding(pytester):
    pytester.makepyfile(TEST)
    found, output = outcomes(pytester)
    assert found == {"passed": 1, "failed": 1}
    assert "misaligned: first out of budget" in output
    assert "constant_factor" in output


def test_failing_traces_are_kept_where_asked(pytester):
    pytester.makepyfile(TEST)
    found, output = outcomes(pytester, "--paralign-keep-traces=kept")
    assert found == {"passed": 1, "failed": 1}
    [folder] = (pytester.path / "kept").iterdir()
    assert "test_parity_16" in folder.name
    assert (folder / "0/parallel/facts.json").is_file()
    assert (folder / "0/reference/facts.json").is_file()
    assert json.loads((folder / "0/report.json").read_text())["verdict"] == "misaligned"
    assert f"traces kept in {folder}/0" in output


def known(pytester, test="*test_parity?16?", **finding):
    entry = {"test": test, "reason": "known to be halved"}
    if finding:
        entry["finding"] = finding
    (pytester.path / "known.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    return "--paralign-known=known.yaml"


def test_an_expected_failure_is_no_failure(pytester):
    pytester.makepyfile(TEST)
    option = known(pytester, cause="constant_factor")
    found, output = outcomes(pytester, option, "-rx")
    assert found == {"passed": 1, "xfailed": 1}
    assert "known to be halved (known.yaml entry 1)" in output


def test_another_finding_than_the_expected_one_fails(pytester):
    pytester.makepyfile(TEST)
    found, _ = outcomes(pytester, known(pytester, cause="missing_reduction"))
    assert found == {"passed": 1, "failed": 1}


def test_an_expected_failure_that_passes_fails(pytester):
    pytester.makepyfile(TEST)
    found, output = outcomes(pytester, known(pytester, test="*test_parity*"))
    assert found == {"xfailed": 1, "failed": 1}
    assert "known.yaml entry 1 expects this to fail (known to be halved)" in output
    assert "Remove the entry." in output


def test_a_failure_of_another_kind_is_not_excused(pytester):
    pytester.makepyfile(
        """
        from paralign.testing import assert_aligned
        from tests.testing import live_runs as runs

        def test_parity():
            net = runs.model()
            runs.backward(net, runs.rows(), 16)
            try:
                assert_aligned(runs.reference(), net)
            finally:
                assert 1 == 2
        """
    )
    found, _ = outcomes(pytester, known(pytester, test="*"))
    assert found == {"failed": 1}


def test_runxfail_shows_the_failure(pytester):
    pytester.makepyfile(TEST)
    found, _ = outcomes(pytester, known(pytester), "--runxfail")
    assert found == {"passed": 1, "failed": 1}


def test_the_file_may_be_named_in_the_ini_file(pytester):
    pytester.makepyfile(TEST)
    known(pytester)
    pytester.makeini("[pytest]\nparalign_known = known.yaml\n")
    assert outcomes(pytester)[0] == {"passed": 1, "xfailed": 1}


def test_a_wrong_file_stops_the_session(pytester):
    (pytester.path / "known.yaml").write_text("- {test: x}")
    result = pytester.runpytest_inprocess("--paralign-known=known.yaml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*known.yaml entry 1 needs reason, a text*"])


def test_markers_skip_with_a_reason(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.needs_ranks(2)
        def test_few(): pass

        @pytest.mark.needs_ranks(n=4096)
        def test_many(): pass

        @pytest.mark.needs_device("cpu")
        def test_cpu(): pass

        @pytest.mark.needs_device("cuda", 4096)
        def test_cuda(): pass
        """
    )
    result = pytester.runpytest_inprocess("--strict-markers", "-rs", "--paralign-max-ranks=4")
    assert result.parseoutcomes() == {"passed": 2, "skipped": 2}
    output = result.stdout.str()
    assert "needs 4096 ranks, and 4 are allowed on this machine" in output
    assert "needs 4096 cuda, found " in output


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("needs_ranks()", "needs_ranks got n=None. Give n as int."),
        ("needs_ranks('2')", "needs_ranks got n='2'"),
        ("needs_device('gpu')", "device='gpu' is not a device type"),
    ],
)
def test_a_marker_used_wrongly_is_an_error(pytester, marker, words):
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_x(): pass\n")
    result = pytester.runpytest_inprocess()
    assert result.parseoutcomes() == {"errors": 1}
    assert words in result.stdout.str()


@pytest.mark.ranks
def test_the_fixture_runs_a_function_on_ranks(pytester):
    pytester.makepyfile(RANKS_TEST)
    found, output = outcomes(pytester, "--paralign-keep-traces=kept")
    assert found == {"passed": 1, "failed": 1}
    assert "constant_factor over dp" in output
    [folder] = (pytester.path / "kept").iterdir()
    assert (folder / "0/parallel/rank00001.json").is_file()


@pytest.mark.ranks
def test_findings_on_ranks_count_for_expected_failures(pytester):
    pytester.makepyfile(RANKS_TEST)
    entry = {
        "test": "*",
        "mesh": {"dp": 2},
        "finding": {"cause": "constant_factor", "axes": ["dp"]},
        "reason": "halved",
    }
    (pytester.path / "known.yaml").write_text(json.dumps([entry]))
    found, output = outcomes(pytester, "--paralign-known=known.yaml")
    assert found == {"xfailed": 1, "failed": 1}
    assert "but it is aligned now" in output
