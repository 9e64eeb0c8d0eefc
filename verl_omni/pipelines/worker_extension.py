"""What the rollout worker adds to the engine's: statistics, checked LoRA and weight loading, an honest sleep.

Both ways of changing the policy are checked before anything changes, because the engine does not: Qwen-Image's loader
skips a weight it does not know, a LoRA module that exists nowhere in the model is accepted when its last name is known,
and one that is too narrow is bound in part. All end as the old policy, or half of the new one, under a new name.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.diffusion.worker.utils import StepRequestState
from vllm_omni.platforms import current_omni_platform

from verl_omni.pipelines.fused.layers import fuse_loras
from verl_omni.pipelines.host_syncs import HostSyncs
from verl_omni.pipelines.merged_lora import LoraSlot, MergedLora, check_mergeable, read_parts
from verl_omni.pipelines.rendezvous import join_on_loopback
from verl_omni.pipelines.rescore import rescore

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

TRANSFORMER = "transformer."
_LORA_SLOTS = 2
"""The old adapter stays loaded until the new one is known to work; with one slot the engine evicts it first."""


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into the engine's diffusion worker (``worker_extension_cls``); methods are called by collective RPC."""

    if TYPE_CHECKING:
        device: torch.device
        od_config: OmniDiffusionConfig
        model_runner: Any
        lora_manager: DiffusionLoRAManager | None
        _host_syncs: HostSyncs

    def __init__(self, *, rank: int, od_config: OmniDiffusionConfig, **further: Any) -> None:
        assert od_config.master_port is not None  # the engine has chosen it
        if multiprocessing.parent_process() is not None:
            gc.freeze()  # modules stay to the process's end; collecting them there and as it starts takes seconds
        current_omni_platform.set_device(current_omni_platform.get_torch_device(rank))  # first, as in the engine
        join_on_loopback(
            rank=rank,
            world_size=od_config.num_gpus,
            port=od_config.master_port,
            backend=current_omni_platform.dist_backend,
        )
        super().__init__(rank=rank, od_config=od_config, **further)

    def rollout_stats(self, reset: bool = False) -> dict[str, Any]:
        """The adapter's :class:`~verl_omni.pipelines.stats.RolloutStats` as plain data; `reset` zeroes them after."""
        result: dict[str, Any] = self.model_runner.pipeline.read_stats(reset=reset).as_dict()
        return result

    def load_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter and bind it once, so that it is known to fit.

        Raises ValueError if it does not: the adapters loaded before are still there then.
        """
        manager = self._manager()
        if lora_request.lora_int_id in manager.list_adapters():
            raise ValueError(f"LoRA id {lora_request.lora_int_id} is loaded already; the engine would skip this one")
        check_lora(lora_request.lora_path, lora_layers(self.model_runner.pipeline, manager))
        manager.max_cached_adapters = max(_LORA_SLOTS, manager.max_cached_adapters)
        try:
            manager.set_active_adapter(lora_request)
        except Exception as error:
            manager.remove_adapter(lora_request.lora_int_id)
            raise ValueError(f"the LoRA does not fit the model: {error}") from error
        finally:
            fuse_loras(manager._lora_modules.values())

    def check_merging(self) -> None:
        """Raises ValueError if no LoRA can be merged into the weights of this model."""
        check_mergeable(lora_layers(self.model_runner.pipeline, self._manager()))

    def merge_lora(self, path: str, scale: float) -> None:
        """Add the PEFT adapter in folder `path` to the weights, in place of the one that was merged before.

        Raises ValueError if it does not fit: the one before is still there then.
        """
        layers = lora_layers(self.model_runner.pipeline, self._manager())
        check_lora(path, layers)
        self._merged_lora.merge(read_parts(path, layers, scale))

    def unmerge_lora(self) -> None:
        """Put the weights back as they are without a LoRA, bit for bit."""
        self._merged_lora.merge([])

    @cached_property
    def _merged_lora(self) -> MergedLora:
        return MergedLora()

    def _manager(self) -> DiffusionLoRAManager:
        if self.lora_manager is None:
            raise ValueError("this pipeline takes no LoRA adapters")
        return self.lora_manager

    @torch.no_grad()
    def load_weights_file(self, path: str) -> int:
        """Replace all weights of the transformer by those of a safetensors file; returns how many tensors were loaded.

        Names are those of the diffusers checkpoint after ``transformer.``. Names and shapes are checked in a dry run
        first: ValueError names the first unknown, missing or misshapen one, and nothing has changed then. A merged LoRA
        is merged into the new weights.
        """
        pipeline = self.model_runner.pipeline
        with safe_open(path, framework="pt") as file, without_lora_wrappers(pipeline, self.lora_manager):
            names = list(file.keys())
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            check_weights(pipeline, shapes)
            with self._merged_lora.unmerged():
                pipeline.load_weights((name, file.get_tensor(name)) for name in names)
        return len(names)

    def check_sleep(self) -> None:
        """Raises ValueError if going to sleep would free nothing."""
        check_sleep_mode(self.device, self.od_config.enable_sleep_mode)

    def release_caches(self) -> None:
        """Drop what the adapter keeps on the device between requests."""
        self.model_runner.pipeline.release()

    def count_host_syncs(self, on: bool) -> dict[str, int]:
        """Start to count the waits for the device; or stop, and tell. Requests are served more slowly meanwhile."""
        if on:
            self._host_syncs = HostSyncs(self)
            self._host_syncs.start()
            return {}
        return self._host_syncs.stop()

    @torch.inference_mode()
    def rescore(
        self, requests: Sequence[tuple[Any, OmniDiffusionSamplingParams]], latents: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Log-probs of recorded trajectories, see :func:`~verl_omni.pipelines.rescore.rescore`.

        `requests`: prompt and sampling parameters as the engine takes them. Raises ValueError if they do not agree in
        the LoRA that runs beside the weights, which is theirs here too, or none.
        """
        runner, loras = self.model_runner, [(s.lora_request, s.lora_scale) for _, s in requests]
        if any(lora != loras[0] for lora in loras):
            raise ValueError("the requests name several LoRAs, or scales: rescore those of each by themselves")
        if self.lora_manager is not None:
            self.lora_manager.set_active_adapter(*loras[0])
        states = []
        for i, (prompt, sampling) in enumerate(requests):
            # The engine's request resolves guidance in its sampling parameters.
            asked = OmniDiffusionRequest(prompt=prompt, sampling_params=copy.copy(sampling), request_id=str(i))
            states.append(StepRequestState(request_id=str(i), prompt=prompt, sampling=asked.sampling_params))
        with set_forward_context(vllm_config=runner.vllm_config, omni_diffusion_config=runner.od_config):
            return rescore(runner.pipeline, states, latents, rows=rows)


def check_sleep_mode(device: torch.device, enabled: bool) -> None:
    """Raises ValueError on an accelerator where sleep mode is off: the engine frees nothing then, and reports success.

    On a CPU there is nothing to free, with or without it.
    """
    if device.type != "cpu" and not enabled:
        raise ValueError(
            "the engine was started without sleep mode and would free nothing; "
            "start it with engine_kwargs.vllm_omni.enable_sleep_mode=true"
        )


def lora_layers(pipeline: Any, manager: DiffusionLoRAManager) -> dict[str, LoraSlot]:
    """Every layer that can carry a LoRA, by module name; the parts of a packed layer too."""
    layers: dict[str, LoraSlot] = {}
    for name, layer in pipeline.transformer.named_modules():
        if isinstance(layer, LinearBase):
            name = name.removesuffix(".base_layer")
            layers[name] = LoraSlot(layer, 0, layer.output_size)
            parent, _, leaf = name.rpartition(".")
            parts = manager._packed_modules_mapping.get(leaf, ())
            start = 0
            for part, width in zip(parts, getattr(layer, "output_sizes", ()), strict=False):
                layers[f"{parent}.{part}"] = LoraSlot(layer, start, width)
                start += width
    return layers


def check_lora(path: str, layers: Mapping[str, LoraSlot]) -> None:
    """Raises ValueError naming modules of the LoRA at `path` that the model lacks, or the first that does not fit."""
    shapes: dict[str, dict[str, list[int]]] = {}
    with safe_open(os.path.join(path, "adapter_model.safetensors"), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            module, _, half = key.removeprefix("base_model.model.").removeprefix(TRANSFORMER).partition(".lora_")
            shapes.setdefault(module, {})[half] = file.get_slice(key).get_shape()
    if unknown := [module for module in shapes if module not in layers]:
        more = f" (and {len(unknown) - 5} more)" if len(unknown) > 5 else ""
        raise ValueError(f"the model has no layers for these LoRA modules: {', '.join(unknown[:5])}{more}")
    for module, halves in shapes.items():
        width_in, width_out = layers[module].layer.input_size, layers[module].width
        rank = halves.get("A.weight", [0])[0]
        if halves != {"A.weight": [rank, width_in], "B.weight": [width_out, rank]}:
            raise ValueError(
                f"LoRA module {module} has {halves}, which does not fit a layer from {width_in} to {width_out}"
            )


@contextmanager
def without_lora_wrappers(pipeline: nn.Module, manager: DiffusionLoRAManager | None) -> Iterator[None]:
    """The module tree as the weight loader knows it: LoRA wrappers taken out and put back after."""
    wrapped = {} if manager is None else dict(manager._lora_modules)
    try:
        for name, layer in wrapped.items():
            _replace(pipeline, name, layer.base_layer)
        yield
    finally:
        for name, layer in wrapped.items():
            _replace(pipeline, name, layer)


def check_weights(pipeline: Any, shapes: dict[str, list[int]]) -> None:
    """Run the pipeline's own loader on tensors without storage. Raises ValueError naming what does not fit.

    `shapes`: tensor name, with its ``transformer.`` prefix, → full (unsharded) shape.
    """
    current = ""
    taken: dict[str, int] = {}
    used: set[str] = set()

    def offered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for current, shape in shapes.items():
            if not current.startswith(TRANSFORMER):
                raise ValueError(f"unknown weight {current!r}: names start with {TRANSFORMER!r}")
            yield current, torch.empty(shape, device="meta")

    def watch(name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        def loader(parameter: nn.Parameter, weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            load(parameter, weight, *args, **kwargs)
            taken[name] = taken.get(name, 0) + weight.numel()
            used.add(current)

        return loader

    with _without_storage(pipeline.transformer, watch):
        sizes = {name: parameter.numel() for name, parameter in pipeline.transformer.named_parameters()}
        try:
            pipeline.load_weights(offered())
        except KeyError as error:
            raise ValueError(f"unknown weight {current!r}: the transformer has no parameter for it") from error
        except (AssertionError, RuntimeError) as error:
            raise ValueError(f"weight {current!r} of shape {shapes[current]} does not fit: {error}") from error
    if unknown := [name for name in shapes if name not in used]:
        raise ValueError(f"unknown weight {unknown[0]!r}: the transformer has no parameter for it")
    if missing := [name for name, size in sizes.items() if taken.get(name, 0) < size]:
        raise ValueError(f"no weight, or only a part, was given for parameter {TRANSFORMER + missing[0]!r}")


@contextmanager
def _without_storage(
    module: nn.Module, watch: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Stand-ins on the meta device for all parameters and buffers of `module`, with watched weight loaders."""
    stores = [
        (name, part, store) for name, part in module.named_modules() for store in (part._parameters, part._buffers)
    ]
    kept = [(store, dict(store)) for _, _, store in stores]
    try:
        for name, _, store in stores:
            for key, tensor in store.items():
                if tensor is not None:
                    full_name = f"{name}.{key}".lstrip(".")
                    load = getattr(tensor, "weight_loader", default_weight_loader)
                    twin = torch.Tensor._make_subclass(type(tensor), torch.empty_like(tensor, device="meta"))
                    twin.__dict__.update(tensor.__dict__)
                    twin.weight_loader = watch(full_name, load)
                    store[key] = twin
        yield
    finally:
        for store, tensors in kept:
            store.update(tensors)


def _replace(pipeline: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(pipeline.get_submodule(parent), leaf, module)
