"""What the fork server imports once, so that no rank has to.

Only imports that neither start threads nor touch an accelerator belong here: the server forks.
"""

from __future__ import annotations

import atexit
import os
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

# Set by server.py. Clearing all that torch has made takes an interpreter seconds, for which the
# fork server would outlive the program; ranks end without it as well.
if os.environ.pop("PARALIGN_FORK_SERVER", None):
    atexit.register(os._exit, 0)

__all__ = ["torch"]
