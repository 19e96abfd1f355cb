"""Makes torch's elementwise functions on the CPU right from their first call on."""

from __future__ import annotations

import torch

# All that torch gives to MKL's vector functions.
_FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)


def settle_vector_math() -> None:
    """Call every function that MKL computes once, on one element, before threads do.

    MKL chooses the code for a function when it is first called. Two threads that call it first at
    the same time may get different code: one share of the result then has a few thousand times the
    rounding error that it should have, once in a process, and in few processes. Starting weights,
    rotary angles and the roots of an optimizer come from such functions.

    Comm:
        none. A fraction of a millisecond, each time.

    Ref:
        pytorch issue 188792.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in _FUNCTIONS:
            function(one)
