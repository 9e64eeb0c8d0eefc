"""A transformer is read from disk by the first rank alone; the others build it empty, to be filled when it is sharded.

So one process of all holds the whole model in host memory, whatever their number is.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from verl_omni.pipelines.training import DiffusionModelBase


def load_on_first_rank(rules: DiffusionModelBase, dtype: torch.dtype) -> nn.Module:
    """The checkpoint's transformer: on rank 0 as ``rules.load_transformer(dtype)`` gives it.

    On the others its parameters are on the meta device, and its buffers hold what the model computes, not what the
    checkpoint does; all have the dtypes that they have on rank 0. Called by all ranks.
    """
    first = dist.get_rank() == 0
    module = rules.load_transformer(dtype) if first else empty_transformer(rules, dtype)
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    told = [{name: tensor.dtype for name, tensor in tensors.items()} if first else {}]
    dist.broadcast_object_list(told, src=0)
    for name, own_dtype in told[0].items():  # some models keep parts in float32
        tensors[name].data = tensors[name].data.to(own_dtype)
    return module


def empty_transformer(rules: DiffusionModelBase, dtype: torch.dtype) -> nn.Module:
    """The checkpoint's transformer before its weights are read: parameters in `dtype` on the meta device.

    What is no parameter, such as a rotary table, is there, as the model computes it.
    """
    import diffusers
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            module: nn.Module = getattr(diffusers, rules.transformer_class).from_config(rules.transformer_config)
    finally:
        torch.set_default_dtype(before)
    return module.eval()
