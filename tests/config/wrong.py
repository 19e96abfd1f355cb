"""A config with one mistake, and what the message must say about it."""

from __future__ import annotations

from dataclasses import dataclass

GOOD = """\
model: {name: llama, preset: tiny}
mesh: {pp: 2, dp_shard: 2, cp: 2}
pipeline: {schedule: GPipe, num_microbatches: 4}
batch: {global_batch: 8, seq_len: 64}
"""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """One mistake, made by ``--set`` on a good config or by a text of its own."""

    id: str
    sets: tuple[str, ...] = ()
    text: str = GOOD
    value: str
    rule: str
    fix: str
    options: tuple[str, ...] = ()


def wrong_set(id: str, *sets: str, value: str, rule: str, fix: str) -> Wrong:
    return Wrong(id=id, sets=sets, value=value, rule=rule, fix=fix)
