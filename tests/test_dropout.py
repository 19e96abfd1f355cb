"""What is dropped depends on seed, sample, position, module and feature, and on nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import paralign as pa
from paralign import dropout
from paralign.dropout import (
    Dropout,
    foreign_dropouts,
    name_dropouts,
    named_dropouts,
    token_draws,
)
from paralign.errors import ConfigError, DataError, LayoutError

ROWS, SEQ, WIDTH = 24, 32, 52


def draws(rows: int = ROWS, seq: int = SEQ, *, seed: int = 0, first: int = 0) -> Tensor:
    positions = torch.arange(seq).expand(rows, -1)
    return token_draws(seed, torch.arange(first, first + rows), positions)


def module(p: float = 0.25, width: int = WIDTH, name: str = "layers.3.ffn_dropout") -> Dropout:
    made = Dropout(p, width)
    made.called(name)
    return made


def kept(given: Tensor, p: float = 0.25, **options) -> Tensor:
    """Return what is kept of ones, as float64 zeros and ones."""
    made = module(p, **options)
    out: Tensor = made(torch.ones(*given.shape, made.width), given)
    return (out != 0).double()


def correlation(a: Tensor, b: Tensor) -> float:
    """Return the correlation in standard deviations of what independent bits would have."""
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return float((a * b).mean() / (a.std() * b.std()) * math.sqrt(a.numel()))


@pytest.mark.parametrize("p", [0.003, 0.1, 0.25, 0.5, 0.9])
def test_the_share_of_what_is_dropped_and_its_spread_are_those_of_independent_bits(p):
    mask = kept(draws(96, 64), p, width=64)
    deviation = math.sqrt(p * (1 - p) / mask.numel())
    assert abs(mask.mean() - (1 - p)) < 4 * deviation + 2**-17
    # Sums over rows, positions and features spread as sums of independent bits do.
    for dims in ((1, 2), (0, 2), (0, 1), (2,), (0,)):
        sums = mask.sum(dims)
        terms = mask.numel() / sums.numel()
        ratio = float(sums.var() / (terms * p * (1 - p)))
        assert abs(ratio - 1) < 5 * math.sqrt(2 / sums.numel()), dims


def test_no_two_masks_have_anything_to_do_with_each_other():
    base = kept(draws())
    others = {
        "another seed": kept(draws(seed=1)),
        "another step": kept(draws(first=ROWS)),
        "the next row": kept(draws(first=1)),
        "the next layer": kept(draws(), name="layers.4.ffn_dropout"),
        "another module": kept(draws(), name="layers.3.attention_dropout"),
        "the next position": base.roll(1, 1),
        **{f"{lag} features on": base.roll(lag, 2) for lag in (1, 2, 3, 4, 8, 16)},
        "a row on and a position back": base.roll((1, -1), (0, 1)),
    }
    for name, other in others.items():
        assert abs(correlation(base, other)) < 4.5, name


def test_large_numbers_draw_as_well_as_small_ones():
    positions = torch.arange(SEQ).expand(ROWS, -1) + 2**40
    mask = kept(token_draws(2**70, torch.arange(ROWS) + 2**55, positions))
    assert abs(mask.mean() - 0.75) < 4 * math.sqrt(0.25 * 0.75 / mask.numel())


def test_masks_stay_what_they_are_from_version_to_version():
    # A change of these numbers makes a run that goes on drop something else than it would have.
    assert draws(2, 2)[1, 1].item() == PINNED_DRAW
    mask = kept(draws(4, 8), width=12).flatten().long()
    assert "".join(map(str, mask[:48].tolist())) == PINNED_MASK


PINNED_DRAW = 6832899899996591678
PINNED_MASK = "101011101111100111011001111110101101111111111111"


def test_rows_and_positions_may_come_in_any_order_and_number():
    x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64)
    given = draws()
    expected = module()(x, given)
    rows, positions = torch.randperm(ROWS)[:7], torch.randperm(SEQ)[:11]
    part = module()(x[rows][:, positions], given[rows][:, positions])
    assert torch.equal(part, expected[rows][:, positions])


@pytest.mark.parametrize("degree", [2, 4])
def test_a_part_of_the_tokens_or_of_the_features_is_that_part_of_the_whole(degree):
    x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64)
    given = draws()
    expected = module()(x, given)
    for dim in (1, 2):  # 13 features of 52: the parts begin inside of a word
        parts = []
        for rank, part in enumerate(x.chunk(degree, dim)):
            one = module()
            one.spread(rank, degree)
            parts.append(one(part, given))
        assert torch.equal(torch.cat(parts, dim), expected), dim


def test_dims_may_be_in_another_order_if_they_are_in_both():
    x, given = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64), draws()
    expected = module()(x, given).transpose(0, 1)
    assert torch.equal(module()(x.transpose(0, 1), given.T), expected)
    half = module()
    half.spread(1, 2)
    assert torch.equal(half(x.transpose(0, 1)[SEQ // 2 :], given.T), expected[SEQ // 2 :])


def test_dropouts_of_torch_are_found_where_they_would_drop_something():
    model = nn.ModuleDict({"a": nn.Dropout(0.1), "b": nn.Dropout(0.0), "c": nn.Dropout2d(0.2)})
    found = foreign_dropouts(model)
    assert [text.split(",")[0] for text in found] == [
        "a is an nn.Dropout with p=0.1",
        "c is an nn.Dropout2d with p=0.2",
    ]
    assert foreign_dropouts(model.eval()) == []


def test_it_is_drawn_in_pieces_that_do_not_show(monkeypatch):
    expected = kept(draws())
    for words in (1, 40, 1000):
        monkeypatch.setattr(dropout, "_CHUNK", words)
        assert torch.equal(kept(draws()), expected)


def test_what_is_kept_is_scaled_and_its_gradient_alike():
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64, requires_grad=True)
    out = module(0.25)(x, draws(2, 8))
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    mask = kept(draws(2, 8))
    assert torch.equal(out, x * mask * (4 / 3))
    assert x.grad is not None and torch.equal(x.grad, weight * mask * (4 / 3))
    # The scale is that of the share that is dropped indeed, a number of 2**-16.
    tenth = module(0.1)(torch.ones(1, 1, WIDTH, dtype=torch.float64), draws(1, 1)).max()
    assert float(tenth) == 65536 / (65536 - 6554)


def test_nothing_is_dropped_in_evaluation_mode_and_with_p_zero():
    x = torch.randn(2, 8, WIDTH)
    assert module().eval()(x) is x
    assert module(0.0)(x) is x
    assert named_dropouts([module(0.0)]) == {}


def test_names_come_from_the_whole_model():
    a, b = Dropout(0.5, 8), Dropout(0.5, 8)
    model = nn.ModuleDict({"a": a, "b": nn.ModuleList([b])})
    name_dropouts(model)
    x, given = torch.ones(4, 8, 8), draws(4, 8)
    first, second = a(x, given), b(x, given)
    assert not torch.equal(first, second)
    assert torch.equal(second, module(0.5, 8, "b.0")(x, given))
    assert list(named_dropouts([model])) == ["a", "b.0"]


def test_it_has_a_shape_on_the_meta_device():
    out = module()(torch.empty(2, 8, WIDTH, device="meta"), draws(2, 8).to("meta"))
    assert out.is_meta and out.shape == (2, 8, WIDTH)


def test_wrong_arguments_are_refused_with_what_to_do():
    assert pa.Dropout is Dropout
    for p in (-0.1, 1.0, math.nan, 1e-6):
        with pytest.raises(ConfigError, match=r"must be 0, or at least 2\*\*-16 and below 1"):
            Dropout(p, 8)
    with pytest.raises(ConfigError, match="width=0 must be at least 1"):
        Dropout(0.1, 0)
    with pytest.raises(DataError, match=r"Dropout\(p=0.25, width=52\) was not told which tokens"):
        module()(torch.ones(2, 8, WIDTH))
    with pytest.raises(ConfigError, match="does not know its global name"):
        Dropout(0.25, WIDTH)(torch.ones(2, 8, WIDTH), draws(2, 8))
    for shape in ((2, 8, 50), (2, 7, WIDTH), (3, 8, WIDTH), (2, 4, WIDTH), (16, WIDTH)):
        with pytest.raises(LayoutError, match="It takes"):
            module()(torch.ones(shape), draws(2, 8))
    halves = module()
    halves.spread(1, 2)
    with pytest.raises(LayoutError, match="shared by 2 ranks"):
        halves(torch.ones(2, 4, WIDTH // 2), draws(2, 8))  # a half of both


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_an_accelerator_draws_the_same_bits():
    given = draws()
    x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64)
    there = module()(x.cuda(), given.cuda())
    assert torch.equal(there.cpu(), module()(x, given))
    positions = torch.arange(SEQ, device="cuda").expand(ROWS, -1)
    assert torch.equal(token_draws(0, torch.arange(ROWS), positions).cpu(), given)
