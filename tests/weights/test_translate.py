from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
import torch
from torch import Tensor

from paralign.align.weights import Weights, whole_box
from paralign.layout import Box
from paralign.models.registry import MODELS
from paralign.weights.translate import Translated
from tests.weights.published import build, deepseek, mixtral, tensors_of, theirs_of


class Held:
    """Tensors in memory."""

    where = "memory"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.num_read = 0

    def choose(self, names: Collection[str]) -> Weights:
        return self

    def read(self, name: str, box: Box) -> Tensor:
        assert all(a + n <= size for a, n, size in zip(box.start, box.shape, self.shapes[name],
                                                       strict=True))  # fmt: skip
        slices = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        self.num_read += box.numel
        return self.tensors[name][slices]

    def close(self) -> None:
        self.tensors = {}


def random_box(shape: tuple[int, ...], generator: torch.Generator) -> Box:
    start, sizes = [], []
    for size in shape:
        first = int(torch.randint(size, (), generator=generator))
        start.append(first)
        sizes.append(1 + int(torch.randint(size - first, (), generator=generator)))
    return Box(tuple(0 for _ in shape), tuple(start), tuple(sizes))


@pytest.mark.parametrize("family", [mixtral(), deepseek()], ids=["mixtral", "deepseek"])
@pytest.mark.parametrize("is_stacked", [False, True], ids=["each", "stacked"])
@pytest.mark.parametrize("to", ["ours", "theirs"])
def test_any_box_of_either_side_is_read_from_the_other(family, is_stacked, to) -> None:
    name, config = family
    names = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(3)]
    layout = MODELS[name].published.layout(config, names if is_stacked else (), {})
    ours = tensors_of(build(family))
    if is_stacked:
        theirs = {n: Translated(Held(ours), layout, to="theirs").read(n, whole_box(shape))
                  for n, shape in layout.theirs.items()}  # fmt: skip
    else:
        theirs = theirs_of(family, build(family), {})
    source, expected = (theirs, ours) if to == "ours" else (ours, theirs)
    held = Held(source)
    weights = Translated(held, layout, to=to)
    assert weights.shapes == Held(expected).shapes
    generator = torch.Generator().manual_seed(0)
    for key, tensor in expected.items():
        assert torch.equal(weights.read(key, whole_box(tensor.shape)), tensor), key
        for _ in range(5):
            box = random_box(tuple(tensor.shape), generator)
            slices = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            assert torch.equal(weights.read(key, box), tensor[slices]), (key, box)


def test_no_more_is_read_than_is_asked_for() -> None:
    family = mixtral()
    held = Held(theirs_of(family, build(family), {}))
    layout = MODELS[family[0]].published.layout(family[1], (), {})
    weights = Translated(held, layout, to="ours")
    weights.read("layers.0.ffn.experts.gate", Box((0, 0, 0), (1, 3, 2), (2, 5, 7)))
    assert held.num_read == 2 * 5 * 7


def test_parts_of_different_dtypes_become_the_wider_one() -> None:
    family = mixtral()
    tensors = theirs_of(family, build(family), {})
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    tensors = {n: t if n == name else t.bfloat16() for n, t in tensors.items()}
    layout = MODELS[family[0]].published.layout(family[1], (), {})
    weights = Translated(Held(tensors), layout, to="ours")
    found = weights.read("layers.0.ffn.experts.gate", whole_box((4, 40, 48)))
    assert found.dtype == torch.float64
    assert torch.equal(found[2], tensors[name])
    up = weights.read("layers.0.ffn.experts.up", whole_box((4, 40, 48)))
    assert up.dtype == torch.bfloat16
