"""A transformer, all of whose weights are trained, as a folder that diffusers loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_omni.pipelines.training import DiffusionModelBase
from verl_omni.workers.engine.loading import empty_transformer

_PREFIX = "transformer."


def write_transformer(
    folder: str | Path, rules: DiffusionModelBase, tensors: Mapping[str, Tensor], *, max_shard_size: str = "10GB"
) -> None:
    """Write `folder`, which is made, so that ``from_pretrained`` of the model's transformer class takes it.

    Args:
        rules: of the model that `tensors` are the weights of.
        tensors: as :meth:`DiffusionFSDPEngine.policy_state` gives them: all weights and buffers of the checkpoint, on
            the host, under its names with ``transformer.`` before them. They are written in the dtypes that they have.
        max_shard_size: of one file; more than that is spread over several, with an index.

    Raises RuntimeError naming what is missing, unknown or misshapen among `tensors`.
    """
    module: Any = empty_transformer(rules, torch.float32)
    module.load_state_dict({name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, assign=True)
    module.save_pretrained(folder, max_shard_size=max_shard_size)
