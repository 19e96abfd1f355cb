"""Random configs: each trains aligned or is refused with its fix. Writes docs/random_configs.md.

    python -m tests.equivalence.random_configs docs/random_configs.md --number 200

Sizes, mesh and options are drawn without looking whether they fit each other; every fourth config
has one plain mistake besides. ``paralign align`` runs each for two steps. Allowed are only:
aligned, exit status 0; or exit status 2 and a message that says what to do, without a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paralign.cli import main as paralign
from paralign.commands.files import write_atomically
from paralign.parallel.stages import SCHEDULES

LARGEST_WORLD = 8
STEPS = 2
# Imperatives that a message tells its reader what to do with.
FIXES = """Use Set Give Choose Remove Leave Did Write Known Lower Raise Take Make Pass Add Keep Drop
Change List""".split()

Sections = dict[str, dict[str, Any]]


def draw(numbers: random.Random) -> tuple[Sections, str | None]:
    """Return the sections of a config, and the mistake made on purpose if any."""
    sections: Sections = {
        "mesh": _mesh(numbers),
        "pipeline": {
            "schedule": numbers.choice((*sorted(SCHEDULES), "GPipe", "1F1B", "1F1B")),
            "num_microbatches": numbers.choice((1, 2, 2, 4, 4, 3)),
        },
        "batch": {
            "global_batch": numbers.choice((12, 16, 24, 48, 48)),
            "seq_len": numbers.choice((12, 16, 24, 24)),
        },
        "data": {"padding": numbers.choice((0.0, 0.25, 0.6))},
        "fsdp": {"wrap": numbers.choice(("blocks", "root", [["layers.0", "layers.1"], ["head"]]))},
        "optimizer": {
            "name": numbers.choice(("adamw", "adamw", "sgd")),
            "lr": 1e-3,
            "clip": numbers.choice((None, 0.1, 1.0)),
            "decay": numbers.choice(("all", "matrices")),
        },
        "align": {"steps": STEPS, "seed": numbers.randrange(100)},
        "model": numbers.choice((_llama, _mixtral, _pangu))(numbers),
    }
    if numbers.random() < 0.3:
        sections["context"] = {
            "ulysses_degree": numbers.choice((1, 2)),
            "load_balance": numbers.random() < 0.5,
        }
    if numbers.random() < 0.3:
        sections["tensor"] = {
            "sequence_parallel": numbers.random() < 0.5,
            "overlap": numbers.choice(("none", "chunks")),
        }
    if numbers.random() < 0.3:
        sections["loss"] = {"chunks": numbers.choice((1, 2, 3))}
    if numbers.random() < 0.3:
        sections["recompute"] = {"parts": numbers.choice(("block", ["ffn"], ["*_norm"]))}
    if numbers.random() < 0.2:
        sections["pipeline"]["stages_per_rank"] = numbers.choice((1, 2))
    if numbers.random() < 0.2:
        sections["model"]["dropout"] = 0.1
    if numbers.random() < 0.2:
        sections["optimizer"]["freeze"] = [numbers.choice(("layers.0.*", "*norm*", "embedding.*"))]
    if numbers.random() < 0.1:
        sections["compile"] = {"backend": numbers.choice(("eager", "aot_eager"))}
    mistake = numbers.choice(MISTAKES)(sections, numbers) if numbers.random() < 0.25 else None
    return sections, mistake


def _mesh(numbers: random.Random) -> dict[str, int]:
    """Return degrees of at most ``LARGEST_WORLD`` ranks; ep is drawn without a look at them."""
    left, mesh = LARGEST_WORLD, {}
    axes = ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    numbers.shuffle(axes)
    for axis in axes:
        degree = numbers.choice((1, 1, 1, 2, 2, 2, 3, 4))
        if degree <= left:
            mesh[axis] = degree
            left //= degree
    if numbers.random() < 0.15:
        mesh["ep"] = numbers.choice((2, 2, 4))
    return mesh


def _common(numbers: random.Random) -> dict[str, Any]:
    return {
        "num_layers": numbers.choice((3, 4, 4, 8, 8)),
        "hidden_size": numbers.choice((24, 32, 48)),
        "ffn_hidden_size": numbers.choice((24, 32, 48)),
        "bias": numbers.random() < 0.3,
        "tie_embeddings": numbers.random() < 0.2,
        "init_std": 0.2,
    }


def _llama(numbers: random.Random) -> dict[str, Any]:
    heads = numbers.choice((4, 4, 8, 6))
    kv_heads = numbers.choice((1, 2, heads))
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads}
    return {"name": "llama", "preset": "tiny", **_common(numbers), **sizes}


def _mixtral(numbers: random.Random) -> dict[str, Any]:
    return {**_llama(numbers), **_experts(numbers)}


def _pangu(numbers: random.Random) -> dict[str, Any]:
    narrow = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8}
    narrow |= {"qk_rope_head_dim": 4, "v_head_dim": 8, "num_heads": numbers.choice((4, 8))}
    experts = {**_experts(numbers), "shared_hidden_size": numbers.choice((8, 16))}
    return {"name": "pangu_moe", "preset": "tiny", **_common(numbers), **narrow, **experts}


def _experts(numbers: random.Random) -> dict[str, Any]:
    return {
        "num_experts": numbers.choice((4, 6, 8)),
        "top_k": numbers.choice((1, 2, 3)),
        "expert_hidden_size": numbers.choice((8, 12)),
        "balance_loss": numbers.choice((0.0, 0.02)),
        "bias_update_speed": numbers.choice((0.0, 0.01)),
    }


def _a_key_with_a_slip(sections: Sections, numbers: random.Random) -> str:
    section = numbers.choice(sorted(sections))
    key = numbers.choice(sorted(sections[section]))
    sections[section][key[:-1] + key[-1] * 2] = sections[section].pop(key)
    return f"{section}.{key} has a slip"


def _a_word_for_a_number(sections: Sections, numbers: random.Random) -> str:
    section, key = numbers.choice((("batch", "seq_len"), ("mesh", "pp"), ("optimizer", "lr")))
    sections[section][key] = numbers.choice(("many", "2x", [2]))
    return f"{section}.{key}={sections[section][key]!r}"


def _a_number_out_of_range(sections: Sections, numbers: random.Random) -> str:
    section, key, value = numbers.choice(
        (
            ("mesh", "cp", 0),
            ("data", "padding", 1.5),
            ("optimizer", "clip", -1.0),
            ("pipeline", "num_microbatches", 0),
            ("model", "num_layers", -2),
        )
    )
    sections[section][key] = value
    return f"{section}.{key}={value}"


def _a_name_that_is_none(sections: Sections, numbers: random.Random) -> str:
    section, key, value = numbers.choice(
        (
            ("pipeline", "schedule", "1F2B"),
            ("model", "name", "lama"),
            ("optimizer", "name", "adamv"),
            ("model", "preset", "teeny"),
            ("data", "source", "no/such/folder"),
        )
    )
    sections[section][key] = value
    return f"{section}.{key}={value}"


def _a_section_that_is_none(sections: Sections, numbers: random.Random) -> str:
    name = numbers.choice(("meshes", "optimiser", "trainer"))
    sections[name] = {"lr": 1}
    return f"section {name}"


MISTAKES: Sequence[Callable[[Sections, random.Random], str]] = (
    _a_key_with_a_slip,
    _a_word_for_a_number,
    _a_number_out_of_range,
    _a_name_that_is_none,
    _a_section_that_is_none,
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What ``paralign align`` did with a config.

    Attributes:
        number: Of the config.
        text: The config as YAML.
        mistake: What is wrong with it on purpose.
        status: Exit status.
        said: Its message if it was refused, else the first line of its verdict.
        ranks: How many it ran on; 0: it was refused.
        worst_eps: Worst gradient of the first step.
        seconds: How long it took.
        problem: Why this is not allowed; None: it is.
    """

    number: int
    text: str
    mistake: str | None
    status: int
    said: str
    ranks: int
    worst_eps: float
    seconds: float
    problem: str | None


def try_config(number: int, sections: Sections, mistake: str | None, folder: Path) -> Outcome:
    """Run ``paralign align`` on a config."""
    path, found = folder / f"{number}.yaml", folder / f"{number}.json"
    path.write_text(text := yaml.safe_dump(sections, sort_keys=False, default_flow_style=None))
    out, err = io.StringIO(), io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = paralign(["align", str(path), "--json", str(found), "--timeout", "120"])
    seconds = time.perf_counter() - began
    report = json.loads(found.read_text()) if found.exists() else None
    said = (out.getvalue() if status == 0 else err.getvalue()).strip()
    worst = 0.0
    if report is not None:
        worst = max(
            row["eps"] for row in report["tensors"] if row["kind"] == "grad" and row["step"] == 0
        )
    ranks = 0
    if status == 0:
        ranks = 1
        for axis, degree in sections["mesh"].items():
            ranks *= degree if axis != "ep" else 1
    return Outcome(
        number=number,
        text=text,
        mistake=mistake,
        status=status,
        said=said,
        ranks=ranks,
        worst_eps=worst,
        seconds=seconds,
        problem=_problem(status, said, report, mistake),
    )


def _problem(status: int, said: str, report: Any, mistake: str | None) -> str | None:
    if "Traceback" in said:
        return "a traceback"
    if status == 0:
        if mistake is not None:
            return "the mistake was not noticed"
        if report is None or report["verdict"] != "aligned":
            return "exit status 0 without a verdict"
        return None
    if status != 2:
        return f"exit status {status}"
    return None if any(word in said for word in FIXES) else "the message names no fix"


def study(number: int, seed: int, folder: Path) -> Iterator[Outcome]:
    """Yield what became of each of ``number`` configs."""
    for each in range(number):
        sections, mistake = draw(random.Random(f"{seed}-{each}"))
        yield try_config(each, sections, mistake, folder)


def page(outcomes: Sequence[Outcome], seed: int) -> str:
    """Return docs/random_configs.md."""
    aligned = [o for o in outcomes if o.status == 0]
    refused = [o for o in outcomes if o.status == 2]
    rules = Counter(_rule(o.said) for o in refused)
    seconds = sum(o.seconds for o in outcomes)
    lines = [
        "# Random configs",
        "",
        "Written by `python -m tests.equivalence.random_configs docs/random_configs.md --number "
        f"{len(outcomes)} --seed {seed}`; not to be edited. {seconds:.0f} s.",
        "",
        "Mesh, schedule, sizes and options were drawn without a look at whether they fit each "
        f"other, and every fourth config got a mistake on purpose. `paralign align` ran each for "
        f"{STEPS} steps in float64.",
        "",
        "| | configs |",
        "|---|---|",
        f"| trained {STEPS} steps, aligned | {len(aligned)} |",
        f"| refused with exit status 2 and a fix | {sum(o.problem is None for o in refused)} |",
        f"| of these with a mistake on purpose | {sum(o.mistake is not None for o in refused)} |",
        f"| anything else | {sum(o.problem is not None for o in outcomes)} |",
        "",
        f"Worst gradient of an aligned run: {max((o.worst_eps for o in aligned), default=0):.1f} "
        f"eps. Ranks: {_counted(Counter(o.ranks for o in aligned))}.",
        "",
        "## What was refused",
        "",
        "| first problem named | configs |",
        "|---|---|",
    ]
    lines += [f"| {_escaped(rule)} | {count} |" for rule, count in rules.most_common()]
    if bad := [o for o in outcomes if o.problem is not None]:
        lines += ["", "## Anything else", ""]
        lines += [f"- {o.number}: {o.problem}: {_escaped(o.said[:200])}" for o in bad]
    return "\n".join(lines) + "\n"


def _rule(said: str) -> str:
    """Return the first problem of a message, numbers left out so that equal rules meet."""
    first = next((line for line in said.splitlines() if line.strip().startswith("-")), said)
    first = first.strip().lstrip("-").split(".yaml:")[-1].strip()
    return "".join("N" if c.isdigit() else c for c in first)[:110]


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _counted(counts: Counter[int]) -> str:
    return ", ".join(f"{ranks} in {counts[ranks]}" for ranks in sorted(counts))


def main() -> int:
    """Try them all and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="paralign-configs-") as folder:
        for outcome in study(options.number, options.seed, Path(folder)):
            outcomes.append(outcome)
            what = outcome.problem or ("aligned" if outcome.status == 0 else "refused")
            sys.stderr.write(f"{outcome.number}: {what}, {outcome.seconds:.1f} s\n")
            if outcome.problem is not None:
                sys.stderr.write(f"{outcome.text}\n{outcome.said[:2000]}\n")
    write_atomically(options.page, page(outcomes, options.seed))
    return int(any(outcome.problem is not None for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
