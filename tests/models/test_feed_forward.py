"""The gated feed-forward block against its formula."""

from __future__ import annotations

import pytest
import torch

from paralign.models.feed_forward import SwiGLU
from tests.models.helpers import fill_everything, swiglu


@pytest.mark.parametrize("bias", [False, True])
def test_block_matches_the_formula(bias):
    block = SwiGLU(6, 10, bias=bias).double()
    fill_everything(block)
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = {f"f.{name}": tensor for name, tensor in block.named_parameters()}
    assert len(parameters) == (6 if bias else 3)
    torch.testing.assert_close(block(x), swiglu(x, parameters, "f"), rtol=1e-13, atol=1e-15)
