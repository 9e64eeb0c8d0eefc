"""Policies on their way to the workers."""

import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_omni.workers.config.lora import LORA_CONFIG, LORA_WEIGHTS
from verl_omni.workers.rollout.staging import LoraAdapter, staged_lora, staged_weights


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


def test_a_lora_in_memory_is_staged_as_its_folder_is(tmp_path):
    both = torch.randn(8, 16)
    tensors = {"a.to_q.lora_A.weight": both[:4], "a.to_q.lora_B.weight": both[4:].T}  # views, one of them strided
    config = {"r": 4, "lora_alpha": 8}
    folder = tmp_path / "lora"
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / LORA_WEIGHTS)
    (folder / LORA_CONFIG).write_text(json.dumps(config))
    staged = []
    for source in (folder, LoraAdapter(config=config, tensors=tensors)):
        with staged_lora(source, {"to_q": "to_query"}) as path:
            staged.append((load_file(path / LORA_WEIGHTS), json.loads((path / LORA_CONFIG).read_text())))
    (weights, settings), (weights_too, settings_too) = staged
    assert settings == settings_too == {**config, "target_modules": ["to_query"]}
    assert weights.keys() == weights_too.keys() == {"a.to_query.lora_A.weight", "a.to_query.lora_B.weight"}
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)
    assert "target_modules" not in config


def test_a_lora_in_memory_is_checked_as_its_folder_is():
    tensors = {"a.lora_A.weight": torch.ones(1)}
    for config, names, message in (({"rank_pattern": {"a": 2}}, tensors, "rank_pattern"), ({}, {}, "no weights")):
        with pytest.raises(ValueError, match=message), staged_lora(LoraAdapter(config=config, tensors=names), {}):
            pass
