from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paralign.config.load import load_config
from paralign.config.model_choice import build_model
from paralign.config.run import RunConfig
from paralign.errors import ConfigError, LayoutError
from paralign.prove.check import describe_plan
from tests import parity
from tests.parity import make_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def show(config: RunConfig, *, width: int = 80, verbose: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, color_system=None)
    console.print(describe_plan(config, verbose=verbose))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


LLAMA = {**parity.BASE["model"], "bias": False}


def test_a_whole_plan_at_eighty_columns():
    config = make_config(
        model=LLAMA,
        mesh={"pp": 2, "dp_shard": 2, "cp": 2},
        pipeline={"schedule": "GPipe", "num_microbatches": 4},
    )
    # One layer: 2 norms of 32, wq and wo 32x32, wk and wv 16x32, three of 48x32: 7744.
    # Ranks hold 2 of them and 256x32, the last one a norm more: 23680 and 23712. State is four
    # tensors over four shards, and 1 / 4 of all weights does not leave a rank.
    # Work: 6 for each weight but the embedding's 8192, for 256 tokens, and for 16 rows of 136 pairs
    # and 4 layers of 4 heads 6 * (8 + 8).
    picture = """\
plan     llama, 47.4 k parameters, on 8 ranks: pp=2 dp_shard=2 cp=2, GPipe
         with 4 micro-batches
work     63.6 MFLOP a global batch, 248 kFLOP a token
support  the plan runs as asked

memory per rank: shards, in float32

 pp   layers   parameters    weights   gradients   optimizer   together
 ---
 0    0-1          23.7 k   23.1 KiB    23.1 KiB    46.2 KiB   92.5 KiB
 1    2-3          23.7 k   23.2 KiB    23.2 KiB    46.3 KiB   92.6 KiB

 parameters  of its stages, whole

memory per rank beside these, at most

 pp   gathered   gradients   activations   with shards
 ---
 0    92.5 KiB    92.5 KiB       268 KiB       545 KiB
 1    92.6 KiB    92.6 KiB       356 KiB       634 KiB

 gathered     whole weights: freed after the last backward pass
 gradients    whole gradients: they wait for the last micro-batch
 activations  of all micro-batches that wait for their backward pass; about

communication per rank and step

 pp   what              collective       over            calls       sent
 ---
 0    weights, kept     all-gather       dp_shard x cp       1     24 KiB
      weights, freed    all-gather       dp_shard x cp      10    227 KiB
      gradients         reduce-scatter   dp_shard x cp       3   69.4 KiB
      activations       send             pp                  4      8 KiB
      q, k, v, output   all-to-all       cp                 32     48 KiB
      loss, norm        all-reduce       world               2       98 B

 1    weights, kept     all-gather       dp_shard x cp       1   24.1 KiB
      weights, freed    all-gather       dp_shard x cp      10    227 KiB
      gradients         reduce-scatter   dp_shard x cp       3   69.5 KiB
      activations       send             pp                  4      8 KiB
      q, k, v, output   all-to-all       cp                 32     48 KiB
      loss, norm        all-reduce       world               2       98 B

 sent  leaves the rank; an all-reduce counts as reduce-scatter and all-gather

communication by axis, of the rank that sends most

 over            pp       sent
 ---
 dp_shard x cp   1     320 KiB
 pp              0-1     8 KiB
 cp              0-1    48 KiB
 world           0-1      98 B


every gradient: what it is a sum of, reduced once a step
 placement  one stage of pp, shard(0) over dp_shard x cp
 gradient   summed over dp_shard x cp

 parameter                        shape    stage   unit
 ---
 embedding.weight                 256x32   0       root
 layers.*.attention_norm.weight   32       0-1     layers.*
 layers.*.attention.wq.weight     32x32    0-1     layers.*
 layers.*.attention.wk.weight     16x32    0-1     layers.*
 layers.*.attention.wv.weight     16x32    0-1     layers.*
 layers.*.attention.wo.weight     32x32    0-1     layers.*
 layers.*.ffn_norm.weight         32       0-1     layers.*
 layers.*.ffn.gate.weight         48x32    0-1     layers.*
 layers.*.ffn.up.weight           48x32    0-1     layers.*
 layers.*.ffn.down.weight         32x48    0-1     layers.*
 norm.weight                      32       1       root
 head.weight                      256x32   1       root
"""
    assert re.sub("\u2500+", "---", show(config)).strip() == picture.strip()


def find(text: str, *words: str) -> str:
    """Return the one line that has all words."""
    (line,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return line


@pytest.mark.parametrize("width", [80, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_no_word_of_an_example_is_cut(path, width, monkeypatch):
    monkeypatch.chdir(path.parents[1])
    config = load_config(path)
    text = show(config, width=width)
    assert max(map(len, text.splitlines())) <= width
    tables = text.split("memory per rank", 1)[1]
    whole = show(config, width=300).split("memory per rank", 1)[1]
    # A folded cell would give a line that the wide picture does not have.
    assert [" ".join(line.split()) for line in tables.splitlines() if "\u2500" not in line] == [
        " ".join(line.split()) for line in whole.splitlines() if "\u2500" not in line
    ]


def test_a_repair_is_explained():
    config = make_config(mesh={"pp": 2}, pipeline={"schedule": "DualPipeV", "num_microbatches": 4})
    text = " ".join(show(config).split())
    assert "support repair: DualPipeV splits the backward pass" in text
    assert "which costs one unsharded copy of the rank's stages." in text


def test_ranks_with_equal_traffic_are_one_row():
    config = make_config(
        model={**LLAMA, "num_layers": 8},
        mesh={"pp": 8},
        pipeline={"schedule": "GPipe", "num_microbatches": 2},
    )
    text = show(config)
    rows = [line for line in text.splitlines() if "activations" in line and "send" in line]
    assert [row.split()[0] for row in rows] == ["0", "1-6", "7"]


def test_one_rank_sends_nothing():
    text = show(make_config(mesh={}, pipeline={"schedule": "GPipe", "num_microbatches": 1}))
    assert "on 1 rank, GPipe with 1 micro-batch\n" in text
    assert find(text, "nothing").split() == ["0", "nothing", "-", "-", "0", "0", "B"]


def test_an_upper_bound_is_marked():
    config = make_config(
        model={**LLAMA, "num_layers": 8},
        mesh={"pp": 2, "dp_shard": 2},
        pipeline={"schedule": "LoopedBFS", "num_microbatches": 2, "stages_per_rank": 4},
    )
    text = show(config)
    assert "<= " in text
    assert "<=    the schedule or the router decides; fewer where less is needed" in text
    assert "<=" not in show(make_config(mesh={"pp": 2, "dp_shard": 2}))


def test_verbose_lists_every_layer():
    config = make_config(model=LLAMA, mesh={"pp": 2})
    assert "layers.*.attention.wq.weight" in show(config)
    text = show(config, verbose=True)
    assert "*" not in text
    assert find(text, "layers.3.attention.wq.weight").split() == [
        "layers.3.attention.wq.weight",
        "32x32",
        "1",
        "layers.3",
    ]


def test_a_frozen_choice_of_units_is_seen_per_parameter():
    config = make_config(model=LLAMA, mesh={"pp": 2}, fsdp={"wrap": "first_block"})
    assert find(show(config), "layers.1,3.attention.wq.weight").endswith("root")


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"fsdp": {"wrap": [["layers.9"]]}}, LayoutError, "'layers.9' matches no module"),
        (
            {"fsdp": {"wrap": [["embedding"]]}, "model": {**LLAMA, "tie_embeddings": True}},
            LayoutError,
            "a tied parameter belongs to one fsdp unit",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_refused(sections, error, message):
    with pytest.raises(error, match=message):
        describe_plan(make_config(**sections))


def test_a_blueprint_that_does_not_fit_is_refused(monkeypatch):
    def build(choice: Any) -> Any:
        model, blueprint = build_model(choice)
        blueprint.epilogue_names = ("norm",)
        return model, blueprint

    monkeypatch.setattr("paralign.prove.check.build_model", build)
    with pytest.raises(ConfigError) as caught:
        describe_plan(make_config(model=LLAMA))
    assert str(caught.value) == (
        "the blueprint does not describe the model: no piece owns head.weight. Add the module or "
        "the parameter to prologue_names or epilogue_names, or move it into a layer."
    )
