"""Write docs/drill.md: every fault on the example configs, and what was found.

    python -m bench.drill docs/drill.md

It takes minutes on two cores; nothing in the page is typed by hand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paralign.align.verdict import Finding
from paralign.commands.drill_page import render_page
from paralign.commands.files import write_atomically
from paralign.config.load import load_config
from paralign.prove.drill import drill

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "drill"


def main() -> None:
    """Drill every example and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--only", action="append", default=[], help="beginnings of fault names")
    parser.add_argument("--trace", type=Path, help="keep the runs here, and go on from those there")
    arguments = parser.parse_args()
    reports = {}
    for path in sorted(EXAMPLES.glob("*.yaml")):
        name = f"examples/drill/{path.name}"
        trace = None if arguments.trace is None else arguments.trace / path.stem
        reports[name] = drill(load_config(path), only=arguments.only, trace=trace, progress=print)
        for outcome in reports[name].outcomes:
            if outcome.word != "right":
                print(outcome.word, outcome.fault.name, *map(_told, outcome.findings[:2]))
        print(name, reports[name].clean.verdict, reports[name].summary)
        write_atomically(arguments.page, render_page(reports))


def _told(finding: Finding) -> str:
    return f"| {finding.component}/{finding.cause} {finding.axes} {finding.tensor}: {finding.fix}"


if __name__ == "__main__":
    main()
