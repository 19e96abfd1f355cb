"""Expected failures, from a file: which comparison of which test fails, how, and why.

    - test: "tests/test_parity.py::test_parity[*"     # a glob over test ids
      mesh: {pp: 2, cp: 2}                            # only on meshes that have these degrees
      finding: {component: reduction, cause: missing_reduction, axes: [cp]}
      reason: "the norm's gradient is not summed over cp yet, see issue 12"

An entry holds for a failing comparison whose findings all are of this kind. When the comparison
passes, the test fails, so that the entry is removed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from typing import Any

from paralign.errors import ConfigError
from paralign.testing.comparisons import Comparison

_KEYS = ("test", "mesh", "finding", "reason")
_FINDING_KEYS = ("component", "cause", "axes", "tensor")


@dataclass(frozen=True)
class Known:
    """One expected failure."""

    place: str
    """Where it is written, for messages."""
    test: str
    reason: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    finding: Mapping[str, Any] = field(default_factory=dict)

    def concerns(self, test: str, comparison: Comparison) -> bool:
        """Whether it speaks of this comparison of this test."""
        # Brackets belong to ids of parametrized tests, so only * and ? are wild.
        pattern = translate(self.test.replace("[", "[[]"))
        return bool(re.match(pattern, test)) and all(
            comparison.mesh.get(axis, 1) == degree for axis, degree in self.mesh.items()
        )

    def explains(self, comparison: Comparison) -> bool:
        """Whether every finding of a failing comparison is the expected one."""
        if not self.finding:
            return True
        return bool(comparison.findings) and all(map(self._is_it, comparison.findings))

    def _is_it(self, finding: Mapping[str, Any]) -> bool:
        return all(
            sorted(finding["axes"]) == sorted(value) if key == "axes" else finding[key] == value
            for key, value in self.finding.items()
        )


def read_known(path: Path) -> list[Known]:
    """Read a file of expected failures.

    Raises:
        ConfigError: It cannot be read or breaks a rule; all problems are listed.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: it cannot be read as YAML: {error}") from error
    if content is None:
        return []
    if not isinstance(content, list):
        raise ConfigError(f"{path}: it is no list. Write one entry a dash, each with test, reason.")
    problems: list[str] = []
    found = [
        entry
        for number, item in enumerate(content, start=1)
        if (entry := _entry(f"{path.name} entry {number}", item, problems)) is not None
    ]
    if problems:
        raise ConfigError.from_problems(f"{path}: wrong expected failures", problems)
    return found


def _entry(place: str, item: Any, problems: list[str]) -> Known | None:
    before = len(problems)
    if not isinstance(item, dict):
        problems.append(f"{place} is no mapping. Give it test and reason")
        return None
    problems += _unknown(place, item, _KEYS)
    for key in ("test", "reason"):
        if not isinstance(item.get(key), str) or not item[key].strip():
            problems.append(f"{place} needs {key}, a text")
    mesh, finding = item.get("mesh", {}), item.get("finding", {})
    if not isinstance(mesh, dict) or not all(
        isinstance(axis, str) and type(degree) is int and degree >= 1
        for axis, degree in mesh.items()
    ):
        problems.append(f"{place}: mesh={mesh!r} is no mapping from axes to degrees")
    if not isinstance(finding, dict):
        problems.append(f"{place}: finding={finding!r} is no mapping")
    else:
        problems += _unknown(f"{place}, finding", finding, _FINDING_KEYS)
        if not isinstance(finding.get("axes", []), list):
            problems.append(f"{place}: axes={finding['axes']!r} is no list")
    if len(problems) > before:
        return None
    return Known(place, item["test"], item["reason"], mesh, finding)


def _unknown(place: str, item: Mapping[Any, Any], keys: Sequence[str]) -> list[str]:
    problems = []
    for key in item:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Use {', '.join(keys)}."
            problems.append(f"{place} has the unknown key {key!r}.{hint}")
    return problems
