"""CPU platform for vLLM-Omni 0.28, which knows only accelerators.

Step-wise, request-level and serial execution, the `uni` and `mp` executors, LoRA, later weight loads and sleep/wake all
work on it; use fp32. torch.compile and offloading do not apply. vLLM-Omni imports this module when it resolves its
platform, and not before that is anything of the engine touched.
"""

import resource
from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_memory_node_info
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform, with what vLLM-Omni asks of one on top."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "verl_omni.platforms.vllm_omni_cpu_worker.CpuDiffusionWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        """Torch SDPA. Raises ValueError where the configuration asks for another backend."""
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
        from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

        backend = DiffusionAttentionBackendEnum.TORCH_SDPA
        if selected_backend is not None and selected_backend.upper() != backend.name:
            raise ValueError(
                f"attention backend {selected_backend!r} does not run on CPU; write {backend.name}, or leave it unset"
            )
        # AttentionImpl.forward (attention/backends/abstract.py) dispatches by platform and has no branch for one out of
        # tree. A backend of our own would not do: Attention (attention/layer.py) sends all fp32 to SDPAImpl by name.
        # Its CUDA branch is plain torch SDPA.
        SDPAImpl.forward = SDPAImpl.forward_cuda
        return backend.get_path()

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_cpu_offload(cls) -> bool:
        return False

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Bytes. Counted as vLLM counts the total: of the first memory node, within the limits of a container."""
        return get_memory_node_info().available_memory

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """Free and total bytes."""
        memory = get_memory_node_info()
        return memory.available_memory, memory.total_memory

    # vLLM's Platform looks up what it lacks in torch.<device type>, and torch.cpu has none of the following.

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def memory_allocated(cls, device: Any = None) -> int:
        """Bytes this process holds now."""
        return int(psutil.Process().memory_info().rss)

    memory_reserved = memory_allocated

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        """The most bytes this process ever held: the system keeps no peak that could be reset."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        return None
