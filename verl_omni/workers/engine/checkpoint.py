"""Checkpoints of the training workers: trained weights, optimizer, learning rate, random numbers.

torch's distributed checkpoint holds the sharded part, so a run may go on with another number of processes. Frozen
weights are not in it; they come from the model's folder. (verl's FSDPCheckpointManager writes them, and asks the model
for the config and the generation settings of a language model.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from verl_omni.workers.engine.saved_state import METADATA, SafePlanner, SafeReader, read_own

_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class TrainedStateCheckpoint(BaseCheckpointManager):
    """Called by all ranks at once."""

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Into the folder `local_path`, which is made; verl's other arguments are not needed."""
        dcp.save(self._state(), checkpoint_id=local_path)
        own = {"lr_scheduler": self.lr_scheduler.state_dict(), "rng": self.get_rng_state()}
        torch.save(own, _own_file(local_path, self.rank))
        torch.distributed.barrier()

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """What :meth:`save_checkpoint` wrote. Raises ValueError if the folder holds none."""
        if not (Path(local_path) / METADATA).is_file():
            raise ValueError(f"{local_path} holds no checkpoint of the training workers")
        state = self._state()
        dcp.load({"model": state["model"]}, storage_reader=SafeReader(local_path), planner=SafePlanner())
        # the file lacks the optimizer's state of weights that never had a gradient: a fresh one is right for them
        partly = SafePlanner(allow_partial_load=True)
        dcp.load({"optimizer": state["optimizer"]}, storage_reader=SafeReader(local_path), planner=partly)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )
        file = _own_file(local_path, self.rank)
        own = read_own(file if file.is_file() else _own_file(local_path, 0))
        self.lr_scheduler.load_state_dict(own["lr_scheduler"])
        self.load_rng_state(own["rng"])

    def _state(self) -> dict[str, dict[str, Any]]:
        """The sharded part. Buffers are left out: they are constants, and those of SD3.5 as large as many layers."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_OPTIONS)
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        return {
            "model": {name: value for name, value in model.items() if name in trained},
            "optimizer": optimizer,
        }


def _own_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank_{rank}.pt"
