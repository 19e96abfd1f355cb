from __future__ import annotations

from pathlib import Path

from paralign.config.load import load_config
from paralign.prove.fault import only_fitting
from paralign.prove.fault_list import FAMILIES, all_faults, built_in_faults

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "drill").glob("*.yaml"))


def test_there_are_many_and_each_says_what_it_breaks():
    faults = built_in_faults()
    assert len(faults) >= 40
    assert len({fault.name for fault in faults}) == len(faults)
    assert all(fault.description.endswith(".") for fault in faults)
    assert {fault.family for fault in faults} == {
        family.__name__.rpartition(".")[2] for family in FAMILIES
    }


def test_a_fault_names_only_axes_that_it_needs():
    # An axis of one rank cannot be at fault.
    assert [f.name for f in built_in_faults() if not f.axes <= f.needs] == []


def test_every_fault_fits_one_of_the_examples():
    assert len(EXAMPLES) == 6
    shown = {
        fault.name
        for path in EXAMPLES
        for fault in only_fitting(built_in_faults(), load_config(path))[0]
    }
    assert {fault.name for fault in built_in_faults()} - shown == set()


def test_a_users_faults_come_last(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import paralign as pa\n"
        "@pa.fault(component='state', cause='stale')\n"
        "def mine(run):\n    '''Mine.'''\n"
    )
    assert [fault.name for fault in all_faults(path)][-1] == "mine"
