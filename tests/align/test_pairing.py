from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.errors import ConfigError
from tests.align.foreign import Weights, both, decoder, gradients_of, write_ranks


def renamed(weights: Weights, layer: int = 0) -> Weights:
    """Return the same tensors under the names of another library, norms and biases too."""
    table = {
        "embed.": "wte.",
        "layers.": "h.",
        "attention_norm": "ln_1",
        "ffn_norm": "ln_2",
        "attn.wo": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "attn.wq": "attn.query",
        "attn.wk": "attn.key",
        "attn.wv": "attn.value",
        "head.": "lm_head.",
    }
    found = {}
    for name, weight in weights.items():
        for old, new in table.items():
            name = name.replace(old, new)
        found["ln_f.weight" if name == "norm.weight" else name] = weight
    return found


def test_foreign_names_are_paired_by_content_and_position(tmp_path: Path) -> None:
    weights = decoder()
    report = both(tmp_path, [(renamed(weights), renamed(gradients_of(weights)))], weights)
    assert report.verdict == "aligned", report.why
    assert report.coverage.parameters == report.coverage.compared == len(weights)
    constant = [name for name in weights if "norm" in name or "bias" in name]
    assert report.coverage.paired == {
        "placement": 0,
        "content": len(weights) - len(constant),
        "position": len(constant),
        "rule": 0,
    }
    assert {row.paired_by for row in report.tensors if row.name in constant} == {"position"}


def test_a_gradient_under_a_foreign_name_is_still_found_wrong(tmp_path: Path) -> None:
    weights = decoder()
    gradients = renamed(gradients_of(weights))
    gradients["h.2.ln_2.weight"] = 2 * gradients["h.2.ln_2.weight"]
    report = both(tmp_path, [(renamed(weights), gradients)], weights)
    assert report.verdict == "misaligned"
    assert [row.name for row in report.tensors if not row.ok] == ["layers.2.ffn_norm.weight"]


def fused(weights: Weights, rank: int, degree: int, *, by_head: bool) -> Weights:
    """Return a tp rank's tensors: fused qkv (interleaved or not), row and column shards."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(degree)[rank]

    held: Weights = {"embed.weight": rows(weights["embed.weight"])}
    for layer in range(2):
        prefix, own = f"layers.{layer}.", f"layers.{layer}."
        for leaf in ("weight", "bias"):
            q, k, v = (rows(weights[f"{prefix}attn.w{part}.{leaf}"]) for part in "qkv")
            if by_head:  # one kv head of 1 row with its two query rows
                blocks = [
                    torch.cat([q[2 * i : 2 * i + 2], k[i : i + 1], v[i : i + 1]])
                    for i in range(len(k))
                ]
                held[f"{own}attn.qkv.{leaf}"] = torch.cat(blocks)
            else:
                held[f"{own}attn.qkv.{leaf}"] = torch.cat([q, k, v])
        held[own + "attn.wo.weight"] = weights[prefix + "attn.wo.weight"].chunk(degree, 1)[rank]
        held[own + "mlp.up.weight"] = rows(weights[prefix + "mlp.up.weight"])
        held[own + "mlp.down.weight"] = weights[prefix + "mlp.down.weight"].chunk(degree, 1)[rank]
        for norm in ("attention_norm.weight", "ffn_norm.weight"):
            held[own + norm] = weights[prefix + norm]
    held["norm.weight"] = weights["norm.weight"]
    held["head.weight"] = rows(weights["head.weight"])
    return {name: tensor.clone() for name, tensor in held.items()}


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_fused_and_sharded_weights_need_no_rule(tmp_path: Path, degree: int, by_head: bool) -> None:
    weights = decoder(2)
    gradients = gradients_of(weights)
    ranks = [
        tuple(fused(side, rank, degree, by_head=by_head) for side in (weights, gradients))
        for rank in range(degree)
    ]
    axes = {"tp": [list(range(degree))]}
    report = both(tmp_path, ranks, weights, axes=axes)
    assert report.verdict == "aligned", (report.why, report.coverage.skipped)
    assert report.coverage.compared == len(weights)
    # The rows of k and q swapped in one rank's gradient, as another interleaving would.
    wrong = ranks[-1][1]["layers.1.attn.qkv.weight"]
    wrong[[0, len(wrong) - 1]] = wrong[[len(wrong) - 1, 0]]
    report = both(tmp_path, ranks, weights, axes=axes)
    assert report.verdict == "misaligned"
    failing = [row for row in report.tensors if not row.ok]
    assert {row.name.split(".")[1] for row in failing} == {"1"}
    assert {rank for row in failing for rank in row.ranks_off} == {degree - 1}


def stage(weights: Weights, layers: range, *, first: bool, last: bool) -> Weights:
    """Return a pipeline stage that counts its layers from 0."""
    held = {
        name.replace(f"layers.{layer}.", f"layers.{number}."): tensor
        for number, layer in enumerate(layers)
        for name, tensor in weights.items()
        if name.startswith(f"layers.{layer}.")
    }
    embed = {"embed.weight": weights["embed.weight"]} if first else {}
    end = {name: weights[name] for name in ("norm.weight", "head.weight")} if last else {}
    return embed | held | end


def stages(weights: Weights, where: dict[int, list[int]] | None = None) -> list[Weights]:
    """Return 8 ranks of (pp=2, dp=4): two layers each; ``where`` says which a rank holds."""
    ranks = []
    for rank in range(8):
        layers: Any = (where or {}).get(rank, [0, 1] if rank < 4 else [2, 3])
        ranks.append(stage(weights, layers, first=rank < 4, last=rank >= 4))
    return ranks


AXES = {
    "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "dp": [[0, 1, 2, 3], [4, 5, 6, 7]],
}


@pytest.mark.parametrize("axes", [AXES, None], ids=["axes", "no axes"])
def test_stages_that_count_from_zero_need_no_rule(
    tmp_path: Path, axes: dict[str, Any] | None
) -> None:
    weights = decoder()
    ranks = list(zip(stages(weights), stages(gradients_of(weights)), strict=True))
    report = both(tmp_path, ranks, weights, axes=axes)
    assert report.verdict == "aligned", (report.why, report.coverage.skipped)
    assert report.coverage.compared == len(weights)
    assert report.findings == []
    ranks[5][1]["layers.1.ffn_norm.weight"] = ranks[5][1]["layers.1.ffn_norm.weight"] * 2
    report = both(tmp_path, ranks, weights, axes=axes)
    assert [(row.name, row.ranks_off) for row in report.tensors if not row.ok] == [
        ("layers.3.ffn_norm.weight", [5])
    ]


def test_layers_that_are_copies_of_each_other_are_paired_by_stage(tmp_path: Path) -> None:
    weights = decoder()
    for name in list(weights):
        if name.startswith("layers."):
            weights[name] = weights["layers.0." + name.split(".", 2)[2]]
    ranks = list(zip(stages(weights), stages(gradients_of(weights)), strict=True))
    report = both(tmp_path, ranks, weights, axes=AXES)
    assert report.verdict == "aligned", (report.why, report.coverage.skipped)
    assert report.coverage.paired["position"] > 0
    swapped = list(zip(stages(weights), stages(gradients_of(weights)), strict=True))
    held = swapped[4][1]
    for name in list(held):
        if name.startswith("layers.0."):
            other = name.replace("layers.0.", "layers.1.")
            held[name], held[other] = held[other], held[name]
    report = both(tmp_path, swapped, weights, axes=AXES)
    assert report.verdict == "misaligned"


def test_equal_weights_are_not_paired_by_guess(tmp_path: Path) -> None:
    weights = decoder(1)
    twins = {**weights, "a.weight": weights["head.weight"], "b.weight": weights["head.weight"]}
    foreign = {**weights, "x.weight": weights["head.weight"], "y.weight": weights["head.weight"]}
    del foreign["norm.weight"]  # so that order says nothing either
    ranks = [(foreign, gradients_of(foreign))]
    report = both(tmp_path, ranks, twins)
    assert report.verdict == "inconclusive"
    why = {item["name"]: item["why"] for item in report.coverage.skipped}
    assert "equal to 3 tensors of the reference" in why["x.weight"]
    assert "names=" in why["x.weight"]
    assert not {row.name for row in report.tensors} & {"a.weight", "b.weight"}


def test_a_wrong_remap_names_exactly_the_ranks_and_layers(tmp_path: Path) -> None:
    weights = decoder()
    # layers.0 of rank r gets layer r // 2, and layers.1 keeps its number: the report's remap.
    where = {rank: [rank // 2, 1] for rank in range(8)}
    ranks = list(zip(stages(weights, where), stages(gradients_of(weights), where), strict=True))
    report = both(tmp_path, ranks, weights, axes=AXES)
    assert report.verdict == "inconclusive"
    assert "holds the weights of layers.1" in report.why
    told = [
        (finding.evidence["ranks"], finding.evidence["layer"], finding.evidence["holds"])
        for finding in report.findings
        if (finding.component, finding.cause) == ("weights", "wrong_layer")
    ]
    assert told == [
        ([2, 3], "layers.0", "layers.1"),
        ([4, 5, 6, 7], "layers.3", "layers.1"),
        ([6, 7], "layers.2", "layers.3"),
    ]
    assert {finding.component for finding in report.findings[:3]} == {"weights"}


def test_a_rule_that_renames_wrongly_is_followed_by_content_and_told(tmp_path: Path) -> None:
    weights = decoder()
    gradients = gradients_of(weights)
    swap = {"layers.1.*": "layers.2.*", "layers.2.*": "layers.1.*"}
    report = both(tmp_path, [(weights, gradients)], weights, names=swap)
    assert report.verdict == "misaligned"
    assert all(row.ok for row in report.tensors)
    told = {
        (finding.evidence["layer"], finding.evidence["holds"])
        for finding in report.findings
        if (finding.component, finding.cause) == ("weights", "wrong_layer")
    }
    assert told == {("layers.2", "layers.1"), ("layers.1", "layers.2")}


def test_rules_pair_what_content_cannot(tmp_path: Path) -> None:
    weights = {f"a{i}.weight": torch.zeros(2, dtype=torch.float64) for i in range(3)}
    ranks = [({"x.weight": weights["a0.weight"], "y.weight": weights["a1.weight"]},) * 2]
    report = both(tmp_path, ranks, weights)
    assert report.verdict == "inconclusive"
    report = both(tmp_path, ranks, weights, names={"x.*": "a2.*", "y.weight": "a0.weight"})
    assert report.coverage.paired["rule"] == 2
    assert {row.name for row in report.tensors if row.kind == "param"} == {"a2.weight", "a0.weight"}
    with pytest.raises(ConfigError, match=r"names\['z'\] matches no parameter"):
        both(tmp_path, ranks, weights, names={"z": "a1.weight", "x.weight": "a2.weight"})


def test_stacked_experts_against_separate_ones(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    experts = {
        f"moe.experts.{number}.w": torch.randn(6, 5, generator=generator, dtype=torch.float64)
        for number in range(4)
    }
    gradients = gradients_of(experts)

    def stacked(tensors: Weights, rank: int) -> Weights:
        return {"moe.w": torch.stack(list(tensors.values())[2 * rank : 2 * rank + 2])}

    def turned(tensors: Weights, rank: int) -> Weights:
        held = stacked(tensors, rank)["moe.w"]
        return {"moe.w": held.transpose(1, 2).contiguous()}

    for form in (stacked, turned):
        ranks = [(form(experts, rank), form(gradients, rank)) for rank in range(2)]
        report = both(tmp_path, ranks, experts, axes={"ep": [[0, 1]]})
        assert report.verdict == "aligned", (report.why, report.coverage.skipped)
        assert report.coverage.paired["content"] == 4
    ranks[1][1]["moe.w"][1] *= 0.5
    report = both(tmp_path, ranks, experts, axes={"ep": [[0, 1]]})
    assert [row.name for row in report.tensors if not row.ok] == ["moe.experts.3.w"]


def test_a_padded_vocabulary_is_noted_and_not_compared(tmp_path: Path) -> None:
    weights = decoder(1)
    gradients = gradients_of(weights)

    def padded(tensors: Weights, rank: int) -> Weights:
        table = torch.cat([tensors["embed.weight"], torch.full((1, 8), 0.5, dtype=torch.float64)])
        return {**tensors, "embed.weight": table.chunk(2)[rank]}

    ranks = [(padded(weights, rank), padded(gradients, rank)) for rank in range(2)]
    report = both(tmp_path, ranks, weights, axes={"tp": [[0, 1]]})
    assert report.verdict == "aligned", (report.why, report.coverage.skipped)
    assert any("padding, not compared" in note for note in report.notes)


def test_a_true_shape_needs_no_search(tmp_path: Path) -> None:
    weights = decoder(1)
    pad = torch.zeros(2, 8, dtype=torch.float64)
    padded = {**weights, "embed.weight": torch.cat([weights["embed.weight"], pad])}
    gradients = gradients_of(weights)
    gradients["embed.weight"] = torch.cat([gradients["embed.weight"], pad + 1])
    report = both(
        tmp_path,
        [(padded, gradients)],
        weights,
        entries={(0, "embed.weight"): {"true_shape": (11, 8)}},
    )
    assert report.verdict == "aligned", report.why
    assert report.coverage.paired["placement"] == len(weights)


def test_flat_ranges_of_parameters(tmp_path: Path) -> None:
    weights = decoder(1)
    gradients = gradients_of(weights)
    ranks: list[tuple[Weights, Weights]] = [({}, {}), ({}, {}), ({}, {})]
    entries = {}
    for name, weight in weights.items():
        count = weight.numel()
        edges = [0, count // 3 + 1, count // 3 + 1 + count // 4, count]
        for rank in range(3):
            start, stop = edges[rank], edges[rank + 1]
            for kind, tensors in enumerate((weights, gradients)):
                ranks[rank][kind][name] = tensors[name].reshape(-1)[start:stop].clone()
            shape = tuple(weight.shape)
            entries[rank, name] = {
                "flat": (start, stop),
                "shape": shape,
                "map": tuple((((0, n), (0, n)),) for n in shape),
            }
    report = both(tmp_path, ranks, weights, entries=_spans(entries))
    assert report.verdict == "aligned", (report.why, report.coverage.skipped)
    assert report.coverage.elements == sum(weight.numel() for weight in weights.values())
    ranks[1][1]["head.weight"][0] += 1
    report = both(tmp_path, ranks, weights, entries=_spans(entries))
    assert [(row.name, row.ranks_off) for row in report.tensors if not row.ok] == [
        ("head.weight", [1])
    ]
    del ranks[2][1]["head.weight"]
    report = both(tmp_path, ranks, weights, entries=_spans(entries))
    assert "elements are missing" in str(report.coverage.skipped)


def _spans(entries: dict[tuple[int, str], dict[str, Any]]) -> dict[tuple[int, str], dict[str, Any]]:
    from paralign.layout import whole

    return {key: {**fields, "map": whole(fields["shape"])} for key, fields in entries.items()}


def test_other_weights_are_not_paired_with_anything(tmp_path: Path) -> None:
    weights, others = decoder(1), decoder(1, seed=1)
    report = both(tmp_path, [(others, gradients_of(weights))], weights)
    assert report.verdict == "inconclusive"
    assert "the runs start from different weights" in report.why
    assert report.coverage.paired["content"] == 0
    write_ranks(tmp_path / "x", [(others, others)])
