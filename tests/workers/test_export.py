"""A transformer whose weights are all trained, as diffusers loads it."""

from __future__ import annotations

from pathlib import Path

import diffusers
import pytest
import torch
from torch import Tensor

from verl_omni.pipelines.training import DiffusionModelBase
from verl_omni.workers.engine.export import write_transformer

ARCHITECTURES = {"tiny_qwen": "QwenImagePipeline", "tiny_sd3": "StableDiffusion3Pipeline"}


@pytest.fixture(params=ARCHITECTURES)
def rules(request) -> DiffusionModelBase:
    return DiffusionModelBase.get_class(ARCHITECTURES[request.param])(request.getfixturevalue(request.param))


@pytest.fixture
def trained(rules) -> dict[str, Tensor]:
    """All weights, other than the checkpoint's, under the names of a policy."""
    state = rules.load_transformer(torch.bfloat16).state_dict()
    return {f"transformer.{name}": tensor + 1 for name, tensor in state.items()}


@pytest.mark.parametrize(("size", "sharded"), [("10GB", False), ("100KB", True)])
def test_diffusers_loads_what_was_written(rules, trained, tmp_path, size, sharded):
    folder = tmp_path / "transformer"
    write_transformer(folder, rules, trained, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == sharded
    cls = getattr(diffusers, rules.transformer_class)
    loaded = cls.from_pretrained(folder, torch_dtype=torch.bfloat16)
    found = {f"transformer.{name}": tensor for name, tensor in loaded.state_dict().items()}
    assert found.keys() == trained.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    assert {**rules.transformer_config}.items() <= {**loaded.config}.items()


def test_a_weight_that_is_missing_or_of_another_shape_is_named(rules, trained, tmp_path: Path):
    name = next(name for name in trained if name.endswith("to_q.weight"))
    without = {key: tensor for key, tensor in trained.items() if key != name}
    for tensors in (without, trained | {name: trained[name][:-1]}):
        with pytest.raises(RuntimeError, match=name.removeprefix("transformer.")):
            write_transformer(tmp_path / "transformer", rules, tensors)
    assert not (tmp_path / "transformer").exists()
