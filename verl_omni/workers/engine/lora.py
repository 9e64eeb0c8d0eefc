"""The LoRA that is trained: how it is made, switched off, named and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl_omni.workers.config.lora import LORA_CONFIG, LORA_WEIGHTS

if TYPE_CHECKING:
    from peft import PeftModel

_ADAPTER = "default"
_PEFT_PREFIX, _DIFFUSERS_PREFIX = "base_model.model.", "transformer."
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
"""The file that diffusers' ``load_lora_weights`` looks for in a folder."""


def add_lora(transformer: nn.Module, *, rank: int, alpha: int, target_modules: list[str] | str, seed: int) -> PeftModel:
    """`transformer` with a new LoRA in float32, which alone is to be trained.

    A is drawn from N(0, 1 / rank²) as in Flow-GRPO's public code, B is zero: the policy starts as the base model.
    `seed` decides A, and torch's generators stay as they are. Raises ValueError if no module has such a name.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_modules, init_lora_weights="gaussian")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(transformer, config, adapter_name=_ADAPTER)


@contextmanager
def lora_off(module: nn.Module) -> Iterator[None]:
    """The base model within.

    PEFT's own ``disable_adapter`` clears ``requires_grad`` meanwhile. FSDP2 looks at that in its first forward, to
    settle in which dtype gradients are reduced; were this the one without LoRA, float32 would not be asked for.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_lora_weight(name: str) -> bool:
    """Whether a name of the module's ``state_dict`` is a weight of the LoRA."""
    return ".lora_" in name


def saved_name(name: str) -> str:
    """What PEFT calls the LoRA weight `name` of the module's ``state_dict`` in files."""
    return name.replace(f".{_ADAPTER}.", ".")


def adapter_config(module: PeftModel, base_model: str) -> dict[str, Any]:
    """What ``adapter_config.json`` holds, in JSON's types. `base_model`: where the model was loaded from."""
    config = module.peft_config[_ADAPTER].to_dict() | {"inference_mode": True, "base_model_name_or_path": base_model}
    plain: dict[str, Any] = json.loads(json.dumps(config, default=sorted))  # sets, such as target_modules
    return plain


def write_lora(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """An adapter folder for PEFT, for the rollout engine and for ``load_lora_weights`` of diffusers' pipelines.

    `config` and `tensors` (on the host) are as PEFT has them. diffusers wants other names, so there are two files of
    weights.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LORA_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(dict(tensors), folder / LORA_WEIGHTS, metadata={"format": "pt"})
    # rank and alpha are in the header, by which diffusers need not guess them
    header = json.dumps({_DIFFUSERS_PREFIX + key: value for key, value in config.items()})
    renamed = {_DIFFUSERS_PREFIX + name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / DIFFUSERS_WEIGHTS, metadata={"format": "pt", "lora_adapter_metadata": header})
