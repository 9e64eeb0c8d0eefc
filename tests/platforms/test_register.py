"""When the CPU platform offers itself, and that it touches nothing before it is used."""

import subprocess
import sys

import pytest

from verl_omni.platforms import register_vllm_omni_cpu


def test_offered_on_a_machine_without_accelerator() -> None:
    assert register_vllm_omni_cpu() == "verl_omni.platforms.vllm_omni_cpu.CpuOmniPlatform"


def test_not_offered_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    assert register_vllm_omni_cpu() is None


def test_not_offered_where_vllm_would_not_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert register_vllm_omni_cpu() is None


def test_the_engine_finds_it() -> None:
    from vllm_omni.platforms import current_omni_platform as platform

    assert type(platform).__name__ == "CpuOmniPlatform"
    assert platform.is_cpu()
    assert platform.is_out_of_tree()


def test_an_attention_backend_of_other_hardware_is_refused() -> None:
    from vllm_omni.platforms import current_omni_platform as platform

    with pytest.raises(ValueError, match="'FLASH_ATTN' does not run on CPU; write TORCH_SDPA"):
        platform.get_diffusion_attn_backend_cls("FLASH_ATTN", head_size=16)
    assert platform.get_diffusion_attn_backend_cls("torch_sdpa", head_size=16).endswith(".SDPABackend")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, verl_omni, verl_omni.platforms; print(*{'torch', 'vllm', 'vllm_omni'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
