"""What the fork server imports once, so that no rank has to.

Only imports that neither start threads nor touch an accelerator belong here: the server forks.
"""

from __future__ import annotations

import warnings

# `python -W error` reaches the fork server, which would end at the first warning of an import.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.device_mesh
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

__all__ = ["torch"]
