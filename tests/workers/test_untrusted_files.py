"""No file that comes from elsewhere is run as code, unless the configuration says so."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_omni.diffusion.data import OmniDiffusionConfig

import verl_omni
from verl_omni.pipelines.training import DiffusionModelBase
from verl_omni.workers.config import ConfigError, DiffusionModelConfig
from verl_omni.workers.rollout.launch import engine_arguments
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan

SOURCES = sorted(Path(verl_omni.__file__).parent.rglob("*.py"))
PLAN = RolloutPlan(
    mode=RolloutMode.SERIAL, max_num_seqs=1, request_batch_max_wait_ms=0.0, rows_per_forward=None, reason="test"
)


def calls(file: Path) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    """What is called, as it is written, and its keyword arguments."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {str(item.arg): item.value for item in node.keywords}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_nothing_of_ours_unpickles_or_trusts_code_by_itself(file):
    for name, keywords in calls(file):
        assert "trust_remote_code" not in keywords, name
        assert name not in ("pickle.load", "pickle.loads", "eval", "exec", "joblib.load"), name
        if name == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True"
        if name.endswith("np.load"):
            assert "allow_pickle" not in keywords


def test_a_models_own_code_is_run_only_if_the_configuration_says_so():
    def arguments(**engine_kwargs):
        return engine_arguments(
            PLAN, adapter="a.B", dtype="float32", executor=None, engine_kwargs=engine_kwargs, masks_text=True
        )

    assert "trust_remote_code" not in arguments() and OmniDiffusionConfig.trust_remote_code is False
    assert arguments(trust_remote_code=True)["trust_remote_code"] is True


def test_a_lora_has_to_be_safetensors(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        DiffusionModelConfig(path="a", lora_path=str(tmp_path))


def test_a_transformer_has_to_be_safetensors(tiny_qwen, tmp_path):
    import torch
    from diffusers import QwenImageTransformer2DModel

    whole = QwenImageTransformer2DModel.from_pretrained(tiny_qwen, subfolder="transformer")
    copy = shutil.copytree(tiny_qwen, tmp_path / "model")
    shutil.rmtree(copy / "transformer")
    whole.save_pretrained(copy / "transformer", safe_serialization=False)
    model = DiffusionModelBase.get_class("QwenImagePipeline", "flow_grpo")(copy)
    with pytest.raises(OSError, match="safetensors"):
        model.load_transformer(torch.float32)
