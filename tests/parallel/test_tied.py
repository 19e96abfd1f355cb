from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.errors import ConfigError, LayoutError
from paralign.mesh import Degrees, build_mesh
from paralign.parallel.data import FSDP, Precision
from paralign.parallel.pipeline import Pipeline
from paralign.parallel.stage import Stage
from paralign.parallel.tied import (
    TiedPair,
    check_pairs,
    check_units_of_pairs,
    find_tied,
    sum_pair,
    untie,
)
from paralign.planning import check_sharding, resolve_plan
from paralign.testing import run_on_ranks
from paralign.train.build import build_pieces
from tests import parity
from tests.parity import make_config

PAIR = TiedPair(canonical="embedding.weight", alias="head.weight", stages=(0, 1), ranks=(0, 1))


def model(*, tied: bool = True) -> nn.Module:
    config = make_config(model={**parity.BASE["model"], "tie_embeddings": tied})
    return build_pieces(config, torch.float32)[0]


def test_tied_parameters_are_found_by_identity_under_their_first_name():
    assert find_tied(model()) == {"head.weight": "embedding.weight"}
    assert find_tied(model(tied=False)) == {}


def test_a_third_use_is_refused_and_every_one_is_listed():
    aliases = {"b": "a", "c": "a", "y": "x", "z": "x", "q": "p"}
    owners = {"a": 0, "b": 1, "c": 2, "x": 0, "y": 0, "z": 1, "p": 0, "q": 1}
    with pytest.raises(ConfigError) as caught:
        check_pairs(aliases, owners)
    assert str(caught.value) == (
        "a tied parameter has at most two names, such as embedding and head:\n"
        "  - a, b, c are one parameter on 3 stages\n"
        "  - x, y, z are one parameter used 3 times"
    )
    check_pairs({"q": "p"}, {"p": 0, "q": 1})


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (
            [["embedding"], ["norm", "head"]],
            "embedding.weight and head.weight are one parameter on stage 0, in two units: "
            "'embedding' and 'norm+head'. List both modules in one unit, or leave both to the root",
        ),
        (
            [["embedding"]],
            "embedding.weight and head.weight are one parameter on stage 0, in two units: "
            "'embedding' and the root. List both modules in one unit, or leave both to the root",
        ),
    ],
)
def test_two_units_never_share_a_parameter(units, expected):
    aliases = {"head.weight": "embedding.weight"}
    owners = {"embedding.weight": 0, "head.weight": 0}
    with pytest.raises(LayoutError) as caught:
        check_units_of_pairs(aliases, owners, {0: units})
    assert str(caught.value) == f"a tied parameter belongs to one fsdp unit: {expected}"


def test_one_unit_or_two_stages_may_share_a_parameter():
    aliases = {"head.weight": "embedding.weight"}
    together = {"embedding.weight": 0, "head.weight": 0}
    check_units_of_pairs(aliases, together, {0: [["embedding", "head"], ["norm"]]})
    check_units_of_pairs(aliases, together, {0: [["norm"]]})
    apart = {"embedding.weight": 0, "head.weight": 1}
    check_units_of_pairs(aliases, apart, {0: [["embedding"]], 1: [["head"]]})


def check_llama(wrap, pp: int) -> None:
    config = make_config(model={**parity.BASE["model"], "tie_embeddings": True})
    model, blueprint = build_pieces(config, torch.float32)
    fsdp = FSDP(wrap=wrap)
    plan = resolve_plan(
        model,
        Degrees(pp=pp),
        blueprint,
        pipeline=Pipeline("GPipe"),
        fsdp=fsdp,
        precision=Precision(),
    )
    check_sharding(model, blueprint, plan, fsdp)


def test_a_tied_model_is_refused_where_one_stage_has_both_ends_in_two_units():
    with pytest.raises(LayoutError, match="a tied parameter belongs to one fsdp unit"):
        check_llama([["embedding"]], pp=1)
    check_llama([["embedding"]], pp=2)
    for wrap in ("root", "blocks", "first_block", [["embedding", "head"]], [["layers.0"]]):
        check_llama(wrap, pp=1)


def shared_layers() -> tuple[nn.Module, dict[str, int]]:
    layers = model(tied=False)
    first, second = layers.get_submodule("layers.0.ffn.up"), layers.get_submodule("layers.1.ffn.up")
    second.register_parameter("weight", first.get_parameter("weight"))
    return layers, dict.fromkeys((n for n, _ in layers.named_parameters(remove_duplicate=False)), 0)


def test_layers_that_share_a_parameter_need_one_unit():
    layers, owners = shared_layers()
    units = {0: [["layers.0"], ["layers.1"]]}
    with pytest.raises(LayoutError, match=r"'layers.0' and 'layers.1'"):
        check_units_of_pairs(find_tied(layers), owners, units)
    check_units_of_pairs(find_tied(layers), owners, {0: [["layers.0", "layers.1"]]})


def whole_stage(*, tied: bool = True) -> Stage:
    config = make_config(model={**parity.BASE["model"], "tie_embeddings": tied})
    whole, blueprint = build_pieces(config, torch.float32)
    return Stage(whole, blueprint, layers=range(4), is_first=True, is_last=True)


def test_untying_gives_the_alias_equal_values_of_its_own():
    stage = whole_stage().to_empty(device="cpu")
    torch.nn.init.normal_(stage.get_parameter("embedding.weight"))
    head = stage.get_submodule("head")
    head.register_parameter("weight", stage.get_parameter("embedding.weight"))
    stage.get_parameter("embedding.weight").requires_grad_(False)
    untie({1: stage}, [PAIR])
    canonical, alias = (stage.get_parameter(n) for n in (PAIR.canonical, PAIR.alias))
    assert alias is not canonical
    assert alias.data_ptr() != canonical.data_ptr()
    assert torch.equal(alias, canonical)
    assert not alias.requires_grad  # frozen, as its other copy


def test_untying_leaves_a_stage_without_the_alias_alone():
    stage = whole_stage()
    untie({0: stage}, [PAIR])
    assert find_tied(stage) == {"head.weight": "embedding.weight"}


def with_grad(value: float) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(3))
    made.grad = torch.full((3,), value)
    return made


def place(pair: TiedPair, mine: nn.Parameter, mesh: DeviceMesh) -> None:
    """Sum a pair of which each of two ranks has one copy."""
    if mesh.get_rank() == 0:
        sum_pair(pair, mine, None, mesh)
    else:
        sum_pair(pair, None, mine, mesh)


def grad_of(parameter: nn.Parameter) -> list[float]:
    assert parameter.grad is not None
    values: list[float] = parameter.grad.tolist()
    return values


def summed() -> dict[str, list[float]]:
    mesh = build_mesh(Degrees(pp=2))
    rank = mesh.get_rank()
    # On two ranks: each has one copy.
    mine = with_grad(1.0 if rank == 0 else 10.0)
    place(PAIR, mine, mesh)
    # On one rank, as with a V: the other has none.
    pair = TiedPair(canonical="a", alias="b", stages=(0, 3), ranks=(0, 0))
    copies = (with_grad(2.0), with_grad(20.0)) if rank == 0 else (None, None)
    sum_pair(pair, copies[0], copies[1], mesh)
    # Frozen: nobody has a gradient, nothing is sent.
    frozen = nn.Parameter(torch.zeros(3))
    place(PAIR, frozen, mesh)
    assert frozen.grad is None
    return {
        "two": grad_of(mine),
        "one": [grad_of(copy)[0] for copy in copies if copy is not None],
    }


@pytest.mark.ranks
def test_both_copies_get_the_sum_of_both_gradients():
    first, second = run_on_ranks(summed, 2)
    assert first == {"two": [11.0] * 3, "one": [22.0, 22.0]}
    assert second == {"two": [11.0] * 3, "one": []}
