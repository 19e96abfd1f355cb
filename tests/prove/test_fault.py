from __future__ import annotations

import pytest

import paralign as pa
from paralign.errors import ConfigError
from paralign.prove.fault import Fault, fault, load_faults, only_fitting, unique
from tests.parity import make_config


def declared(**changes) -> Fault:
    arguments = {"component": "data", "cause": "label_shift", **changes}

    @fault(**arguments)
    def something(run):
        """One thing is broken.

        More words.
        """

    return something


def test_a_fault_knows_its_name_and_its_first_line():
    one = declared(needs={"cp"}, axes={"cp"})
    assert pa.fault is fault
    assert (one.name, one.description) == ("something", "One thing is broken.")
    assert (one.component, one.axes, one.cause) == ("data", frozenset({"cp"}), "label_shift")


def test_every_wrong_word_is_named_with_the_nearest_one():
    with pytest.raises(ConfigError) as caught:
        declared(needs={"paddding"}, component="dta", axes={"dp_shards"}, cause="label_shft")
    text = str(caught.value)
    for wrong, right in [
        ("needs='paddding'", "padding"),
        ("component='dta'", "data"),
        ("axes='dp_shards'", "dp_shard"),
        ("cause='label_shft'", "label_shift"),
    ]:
        assert wrong in text
        assert f"Did you mean {right}?" in text


@pytest.mark.parametrize(
    ("need", "sections", "fits"),
    [
        ("cp", {"mesh": {"cp": 2}}, True),
        ("cp", {"mesh": {"dp_shard": 2}}, False),
        ("accumulation", {"pipeline": {"num_microbatches": 1}}, False),
        ("padding", {"data": {"padding": 0.0}}, False),
        ("padding", {"data": {"padding": 0.5}}, True),
        ("steps", {"align": {"steps": 2}}, True),
        ("steps", {"align": {"steps": 1}}, False),
        ("clip", {"optimizer": {"clip": None}}, False),
        ("tied", {"model": {"tie_embeddings": True}}, True),
        ("tied", {"model": {}}, False),
        ("gathered_kv", {"mesh": {"cp": 2}, "context": {"ulysses_degree": 1}}, True),
        ("ulysses", {"mesh": {"cp": 2}, "context": {"ulysses_degree": 1}}, False),
    ],
)
def test_what_a_config_lacks(need, sections, fits):
    one = declared(needs={need})
    config = make_config(**sections)
    assert one.lacks(config) == ([] if fits else [need])
    fitting, others = only_fitting([one], config)
    assert (fitting == [one], others == [(one, [need])]) == (fits, not fits)


def test_a_users_program_only_gets_faults_that_fit_any():
    config = make_config().model_copy(update={"program": "somebody.elses:build"})
    assert declared().lacks(config) == ["paralign's own parallel code"]
    assert declared(any_program=True).lacks(config) == []


def test_faults_are_loaded_from_a_file_and_fit_any_program(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import paralign as pa\n"
        "@pa.fault(component='data', cause='different_data')\n"
        "def mine(run):\n    '''Mine.'''\n"
    )
    (one,) = load_faults(path)
    assert (one.name, one.any_program) == ("mine", True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no such file"),
        ("x = 1\n", "declares no fault"),
        ("import nothing_of_that_name\n", "failed with ModuleNotFoundError"),
        ("import paralign as pa\npa.fault(component='dat', cause='rng')\n", "component='dat'"),
    ],
)
def test_a_file_without_faults_is_refused(tmp_path, text, told):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"--faults=.*mine\.py") as caught:
        load_faults(path)
    assert told in str(caught.value)


def test_two_faults_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two faults are called 'something'"):
        list(unique([declared(), declared()]))
