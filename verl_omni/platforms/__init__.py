"""Platforms that the libraries lack: plain CPU for vLLM-Omni and for verl, so that all of it runs on a laptop."""


def register_vllm_omni_cpu() -> str | None:
    """Entry point of the group `vllm_omni.platform_plugins`: the class to use on this machine, or None.

    None where torch sees an accelerator, and where vLLM itself would not run on the CPU (a build for GPUs): vLLM-Omni
    then picks one of its own platforms.
    """
    import torch

    if torch.accelerator.is_available():
        return None
    from vllm.platforms import current_platform

    return "verl_omni.platforms.vllm_omni_cpu.CpuOmniPlatform" if current_platform.is_cpu() else None


def verl_cpu_environment() -> dict[str, str]:
    """Environment of a process in which verl is to run on the CPU; to be set before that imports verl."""
    return {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_omni.platforms.verl_cpu"}
