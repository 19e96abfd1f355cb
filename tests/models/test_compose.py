"""A blueprint is held against the model's own forward, piece by piece."""

# torch types a call of a module as Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.errors import ConfigError
from paralign.models.compose import check_composition, structure_problems
from tests.models.helpers import batch, fill_everything, tiny

CASES = [
    (name, {"bias": bias, "tie_embeddings": tied})
    for name in ("llama", "pangu_moe")
    for bias in (False, True)
    for tied in (False, True)
]


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_models_of_paralign_compose_bitwise(name, options, dtype):
    model, _, blueprint = tiny(name, **options)
    check_composition(model.to(dtype), blueprint, batch())


class ToyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return x + scale * self.dropout(self.linear(x))


class Toy(nn.Module):
    base: Any
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Module()
        self.base.embedding = nn.Embedding(256, 8)
        self.base.layers = nn.ModuleList(ToyLayer() for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.offset = nn.Parameter(torch.zeros(8))
        self.head = nn.Linear(8, 256)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.base.embedding(tokens)
        for layer in self.base.layers:
            x = layer(x, 0.5)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2) + self.offset)


class ToyBlueprint(Blueprint):
    prologue_names: tuple[str, ...] = ("base.embedding",)
    layers_name = "base.layers"
    epilogue_names: tuple[str, ...] = ("norm", "offset", "head")

    def context(self, batch: Mapping[str, Tensor], *, seq_len: int) -> Any:
        return 0.5

    def prologue(self, pieces: Any, batch: Mapping[str, Tensor], context: Any) -> Tensor:
        return pieces.base.embedding(batch["tokens"])

    def layer(self, layer: nn.Module, x: Tensor, context: Any) -> Tensor:
        return layer(x, context)

    def epilogue(self, pieces: Any, x: Tensor, context: Any) -> Tensor:
        return pieces.head(pieces.norm(x.transpose(1, 2)).transpose(1, 2) + pieces.offset)


def toy(cls: type[nn.Module] = Toy) -> nn.Module:
    model = cls().double()
    fill_everything(model)
    return model


def message(model: nn.Module, blueprint: Blueprint) -> str:
    with pytest.raises(ConfigError) as error:
        check_composition(model, blueprint, batch())
    return str(error.value)


def test_nested_names_parameters_dropout_and_buffers_are_fine_and_unchanged():
    model = toy().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random_state = torch.get_rng_state()
    check_composition(model, ToyBlueprint(), batch())
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {
        n: t.tolist() for n, t in before.items()
    }
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_wrong_prologue_is_named():
    class Scaled(ToyBlueprint):
        def prologue(self, pieces, batch, context):
            return 2 * pieces.base.embedding(batch["tokens"])

    text = message(toy(), Scaled())
    assert text.startswith(
        "Scaled does not describe Toy: prologue gives base.layers.0 another input than forward "
        "does: 256 of 256 elements differ, by at most "
    )


def test_a_wrong_context_shows_at_the_first_layer_that_uses_it():
    class OtherContext(ToyBlueprint):
        def context(self, batch, *, seq_len):
            return 0.25

    text = message(toy(), OtherContext())
    assert text.startswith(
        "OtherContext does not describe Toy: base.layers.0 differs from what it gives inside "
        "forward, on the same input: "
    )
    assert text.endswith("Compare what context and layer pass to it with what forward passes.")


def test_one_wrong_layer_is_named():
    class Skips(ToyBlueprint):
        def layer(self, layer, x, context):
            out = layer(x, context)
            return out if layer is not self.victim else x.clone()

        def __init__(self, victim: nn.Module) -> None:
            self.victim = victim

    model = toy()
    text = message(model, Skips(model.get_submodule("base.layers.1")))
    assert "Skips does not describe Toy: base.layers.1 differs" in text


def test_work_between_layers_that_the_pieces_lack_is_named():
    class Between(Toy):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.base.embedding(tokens)
            for layer in self.base.layers:
                x = layer(x, 0.5) * 1.5
            return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2) + self.offset)

    text = message(toy(Between), ToyBlueprint())
    assert "base.layers.0 gives base.layers.1 another input than forward does" in text


def test_a_wrong_epilogue_is_named():
    class NoOffset(ToyBlueprint):
        def epilogue(self, pieces, x, context):
            return pieces.head(pieces.norm(x.transpose(1, 2)).transpose(1, 2))

    assert (
        "NoOffset does not describe Toy: epilogue gives other logits than forward does: "
        in message(toy(), NoOffset())
    )


def test_a_last_bit_is_a_difference():
    class LastBit(ToyBlueprint):
        def epilogue(self, pieces, x, context):
            return torch.nextafter(super().epilogue(pieces, x, context), torch.tensor(9e9).double())

    assert "epilogue gives other logits" in message(toy(), LastBit())


def test_other_shapes_and_dtypes_are_described():
    class Transposed(ToyBlueprint):
        def epilogue(self, pieces, x, context):
            return super().epilogue(pieces, x, context).transpose(0, 1)

    class Rounded(ToyBlueprint):
        def epilogue(self, pieces, x, context):
            return super().epilogue(pieces, x, context).float()

    assert (
        "torch.float64 of shape (2, 16, 256) in forward, torch.float64 of shape (16, 2, 256) in "
        "the pieces"
    ) in message(toy(), Transposed())
    assert "torch.float32 of shape (2, 16, 256) in the pieces" in message(toy(), Rounded())


def test_nan_proves_nothing():
    model = toy()
    with torch.no_grad():
        model.get_parameter("base.embedding.weight").fill_(torch.nan)
    assert "forward gives NaN, which equals nothing. Give the model finite weights." in message(
        model, ToyBlueprint()
    )


def test_an_error_in_a_piece_names_the_piece():
    class Absent(ToyBlueprint):
        def epilogue(self, pieces, x, context):
            return pieces.lm_head(x)

    text = message(toy(), Absent())
    assert text == (
        "Absent does not describe Toy: epilogue raised AttributeError: 'Stage' object has no "
        "attribute 'lm_head'"
    )


def test_a_layer_that_forward_runs_twice_is_refused():
    class Twice(Toy):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.base.embedding(tokens)
            for layer in [*self.base.layers, self.base.layers[0]]:
                x = layer(x, 0.5)
            return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2) + self.offset)

    assert message(toy(Twice), ToyBlueprint()) == (
        "ToyBlueprint does not describe Twice: the model's own forward runs base.layers.0 more "
        "than once, but a pipeline runs each layer once. Unroll the loop into layers of their own."
    )


def test_a_parameter_in_no_piece_is_named():
    class Forgets(ToyBlueprint):
        epilogue_names = ("head",)

    assert message(toy(), Forgets()) == (
        "Forgets does not describe Toy: no piece owns offset, norm.weight, norm.bias. Add the "
        "module or the parameter to prologue_names or epilogue_names, or move it into a layer."
    )


def test_a_parameter_in_two_pieces_is_named():
    class Doubles(ToyBlueprint):
        prologue_names = ("base",)

    assert structure_problems(toy(), Doubles()) == [
        "pieces base and base.layers both own base.layers.0.linear.weight, "
        "base.layers.0.linear.bias, base.layers.1.linear.weight, base.layers.1.linear.bias, "
        "base.layers.2.linear.weight, base.layers.2.linear.bias. Leave them in one."
    ]

    class SameTwice(ToyBlueprint):
        prologue_names = ("base.embedding", "head")

    assert structure_problems(toy(), SameTwice()) == [
        "pieces head and head both own head.weight, head.bias. Leave them in one."
    ]


def test_names_that_match_nothing_are_listed_together():
    class Wrong(ToyBlueprint):
        prologue_names = ("base.embedding", "nrom")
        unused_parameters = ("head.*", "haed.bias")

        def attention(self):
            from paralign.parallel.context import ContextParallel

            return {"liner": ContextParallel(layout="BNSD")}

    assert message(toy(), Wrong()) == (
        "Wrong does not describe Toy:\n"
        "  - prologue_names has 'nrom', which is no module or parameter of the model. Did you mean "
        "'norm'?\n"
        "  - unused_parameters has 'haed.bias', which matches no parameter. Did you mean "
        "'head.bias'?\n"
        "  - attention() has 'liner', but base.layers.0, base.layers.1, "
        "base.layers.2 have no such module. Did you mean 'linear'?"
    )


def test_a_layers_name_that_is_no_list_of_layers_is_refused():
    class NoLayers(ToyBlueprint):
        layers_name = "base.layer"

    class NotAList(ToyBlueprint):
        layers_name = "head"

    assert structure_problems(toy(), NoLayers()) == [
        "layers_name='base.layer' is no ModuleList with layers in it. Did you mean 'base.layers'?"
    ]
    assert structure_problems(toy(), NotAList()) == [
        "layers_name='head' is no ModuleList with layers in it. Use one of base.layers."
    ]


def test_structure_is_checked_on_meta_but_composition_is_not():
    with torch.device("meta"):
        model = Toy()
    assert structure_problems(model, ToyBlueprint()) == []
    assert message(model, ToyBlueprint()) == (
        "Toy is on the meta device, so that its composition cannot be run. Give the model real "
        "weights, on the CPU if they fit nowhere else."
    )


def test_tied_parameters_count_once_per_name():
    model, _, blueprint = tiny("llama", tie_embeddings=True)
    assert structure_problems(model, blueprint) == []
