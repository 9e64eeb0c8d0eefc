"""Policies on their way to the workers."""

import gc
import weakref

import torch
from safetensors.torch import load_file

from verl_omni.workers.rollout.staging import staged_weights


class OnDevice(torch.Tensor):
    """A tensor that has to be copied to reach the host, as one on a GPU has."""

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


def test_weights_leave_the_device_one_by_one():
    alive: weakref.WeakSet[OnDevice] = weakref.WeakSet()
    most = 0

    def gathered():
        nonlocal most
        for i in range(4):
            gc.collect()
            most = max(most, len(alive))
            tensor = torch.full((2, 3), float(i)).as_subclass(OnDevice)
            alive.add(tensor)
            yield f"w{i}", tensor
            del tensor

    with staged_weights(gathered()) as path:
        loaded = load_file(path)
    assert most == 0  # each had gone when the next was made
    assert all(torch.equal(loaded[f"w{i}"], torch.full((2, 3), float(i))) for i in range(4))
