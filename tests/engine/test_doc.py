"""docs/engine.md and the tests of this folder say the same: same traps, same code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.engine.traps import still_there

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "engine.md").read_text()
SOURCES = [path.read_text() for path in sorted(Path(__file__).parent.glob("test_*_traps.py"))]


def anchor(heading: str) -> str:
    """Turn a heading into its link, the way GitHub does."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def sections() -> dict[str, str]:
    """Return the text of each trap's section by its anchor."""
    parts = re.split(r"^#{2,3} ", DOC, flags=re.MULTILINE)[1:]
    headings = re.findall(r"^(#{2,3}) ", DOC, flags=re.MULTILINE)
    traps = [part for part, level in zip(parts, headings, strict=True) if level == "###"]
    return {anchor(part.splitlines()[0]): part for part in traps}


def named_in_tests() -> list[str]:
    """Return the anchor that each ``still_there`` call names."""
    return [
        ast.literal_eval(node.args[0])
        for source in SOURCES
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "still_there"
    ]


def test_a_mended_trap_fails_and_says_where_to_look():
    still_there("a-trap", broken=True, cured=True, seen=0.5)
    mended = "torch has mended a-trap: see docs/engine.md#a-trap (measured: 0.0)"
    with pytest.raises(pytest.fail.Exception, match=re.escape(mended)):
        still_there("a-trap", broken=False, cured=True, seen=0.0)
    with pytest.raises(pytest.fail.Exception, match="the cure for a-trap no longer works"):
        still_there("a-trap", broken=True, cured=False, seen=0.5)


def test_every_trap_has_one_section_and_one_test():
    assert sorted(named_in_tests()) == sorted(sections())
    assert len(named_in_tests()) > 25


def test_every_section_shows_the_code_that_its_test_runs():
    for name, text in sections().items():
        blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        assert blocks, f"{name} has no reproduction"
        for part in "\n\n\n".join(block.strip() for block in blocks).split("\n\n\n"):
            code = part.split("  #")[0] if part.count("\n") == 0 else part
            assert any(holds(source, code) for source in SOURCES), f"{name}: no test has\n{part}"


def holds(source: str, code: str) -> bool:
    """Tell whether ``code`` stands in ``source`` by its text, or as a call of one of its names."""
    if code.startswith(("def ", "class ", "@")):
        return f"\n{code}\n" in source
    return f"def {code.split('(')[0]}(" in source
