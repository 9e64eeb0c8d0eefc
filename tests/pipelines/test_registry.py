"""Adapters by architecture and algorithm."""

from __future__ import annotations

import pytest

from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.pipelines.registry import AdapterRegistry


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    monkeypatch.setattr(AdapterRegistry, "_adapters", dict(AdapterRegistry._adapters))


def test_a_registered_class_is_found_by_name_and_path():
    @VllmOmniPipelineBase.register("SomePipeline", algorithm="own")
    class Some:
        pass

    assert VllmOmniPipelineBase.get_class("SomePipeline", "own") is Some
    assert VllmOmniPipelineBase.get_pipeline_path("SomePipeline", "own") == f"{__name__}.{Some.__qualname__}"
    with pytest.raises(ValueError, match=r"already; register .*Other under another algorithm name"):

        @VllmOmniPipelineBase.register("SomePipeline", algorithm="own")
        class Other:
            pass


def test_what_is_not_registered_names_what_is():
    with pytest.raises(
        ValueError, match=r"'NoPipeline'.*QwenImagePipeline/flow_grpo.*StableDiffusion3Pipeline/flow_grpo"
    ):
        VllmOmniPipelineBase.get_class("NoPipeline")


def test_a_user_s_adapter_may_take_a_built_in_place():
    AdapterRegistry._adapters.clear()

    @VllmOmniPipelineBase.register("QwenImagePipeline")
    class Mine:
        pass

    built_in = type("QwenImageRollout", (), {"__module__": "verl_omni.pipelines.qwen_image.rollout"})
    assert VllmOmniPipelineBase.register("QwenImagePipeline")(built_in) is built_in
    assert VllmOmniPipelineBase.get_class("QwenImagePipeline") is Mine
