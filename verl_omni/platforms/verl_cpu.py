"""CPU platform for verl 0.9, which knows only accelerators.

verl finds it where the environment says so (:func:`verl_omni.platforms.verl_cpu_environment`): it imports this module,
which registers the platform, and picks it by name. It is never picked without that name: the driver of a GPU cluster
may well sit on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuModule:
    """What verl asks of ``torch.<device>`` and ``torch.cpu`` lacks; the rest is looked up there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None:
        """utils/fsdp_utils.py, offload_fsdp2_model_to_cpu."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """utils/checkpoint/checkpoint_manager.py, load_rng_state: it restores the device's state after the host's."""
        torch.set_rng_state(state)

    # utils/profiler/performance.py, log_gpu_memory_usage

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes this process holds now."""
        return int(psutil.Process().memory_info().rss)

    memory_reserved = memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total


@PlatformRegistry.register(platform="cpu")
class CpuVerlPlatform(PlatformBase):
    """One device, the host; collectives over gloo. FSDP2 works on it, FSDP1 does not."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return cast(ModuleType, _CpuModule())

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Not by itself, see above."""
        return False

    def current_device(self) -> Any:
        """No index: torch takes a bare 0 for an accelerator (utils/fsdp_utils.py, ``Tensor.to(get_device_id())``)."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """verl reads and sets it in each worker (single_controller/base/worker.py); on the CPU it means nothing."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
