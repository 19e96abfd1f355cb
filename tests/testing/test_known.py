from __future__ import annotations

import pytest

from paralign.errors import ConfigError
from paralign.testing.comparisons import Comparison
from paralign.testing.known import read_known

ENTRY = """
- test: "tests/test_a.py::test_b[*"
  mesh: {cp: 2}
  finding: {component: reduction, cause: missing_reduction, axes: [tp, cp]}
  reason: "not summed yet"
"""
FINDING = {
    "component": "reduction",
    "cause": "missing_reduction",
    "axes": ["cp", "tp"],
    "tensor": "norm.weight",
}


def read(tmp_path, text):
    path = tmp_path / "known.yaml"
    path.write_text(text)
    return read_known(path)


def bad(*findings, **mesh):
    return Comparison({"pp": 1, "cp": 2, **mesh}, "misaligned", list(findings))


def test_an_entry_speaks_of_its_test_and_mesh_only(tmp_path):
    [known] = read(tmp_path, ENTRY)
    assert known.concerns("tests/test_a.py::test_b[cp2]", bad(FINDING))
    assert not known.concerns("tests/test_a.py::test_bb", bad(FINDING))
    assert not known.concerns("tests/test_a.py::test_b[cp4]", bad(FINDING, cp=4))


def test_an_axis_of_size_one_may_be_absent(tmp_path):
    [known] = read(tmp_path, ENTRY.replace("cp: 2", "dp: 1"))
    assert known.concerns("tests/test_a.py::test_b[x]", bad(FINDING))


def test_every_finding_has_to_be_the_expected_one(tmp_path):
    [known] = read(tmp_path, ENTRY)
    assert known.explains(bad(FINDING))
    assert not known.explains(bad(FINDING, {**FINDING, "axes": ["cp"]}))
    assert not known.explains(bad({**FINDING, "cause": "constant_factor"}))
    assert not known.explains(bad())


def test_an_entry_without_a_finding_takes_any(tmp_path):
    [known] = read(tmp_path, "- {test: '*', reason: r}")
    assert known.explains(bad())
    assert known.concerns("anything", bad())


def test_an_empty_file_expects_nothing(tmp_path):
    assert read(tmp_path, "# none\n") == []


def test_all_problems_are_told_at_once(tmp_path):
    text = """
- {test: "x"}
- {test: "x", reason: "r", mehs: {cp: 2}}
- {test: "x", reason: "r", mesh: {cp: two}, finding: {axis: [cp]}}
- 3
"""
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    lines = str(caught.value).splitlines()[1:]
    assert [line.strip(" -") for line in lines] == [
        "known.yaml entry 1 needs reason, a text",
        "known.yaml entry 2 has the unknown key 'mehs'. Did you mean mesh?",
        "known.yaml entry 3: mesh={'cp': 'two'} is no mapping from axes to degrees",
        "known.yaml entry 3, finding has the unknown key 'axis'. Did you mean axes?",
        "known.yaml entry 4 is no mapping. Give it test and reason",
    ]


@pytest.mark.parametrize("text", ["test: x", "[1, 2", "- !!python/object:os.system x"])
def test_what_is_no_list_of_entries_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"known\.yaml: it "):
        read(tmp_path, text)
