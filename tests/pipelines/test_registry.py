"""Rollout adapters and training models by architecture and algorithm."""

from __future__ import annotations

import importlib

import pytest

from verl_omni.pipelines.model_base import DiffusionModelBase, VllmOmniPipelineBase
from verl_omni.pipelines.registry import AdapterRegistry, Registry


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    # imported within a test, they would register into its copy, which is gone afterwards
    for module in (*AdapterRegistry._built_in, *DiffusionModelBase._built_in):
        importlib.import_module(module)
    for registry in (AdapterRegistry, DiffusionModelBase):
        monkeypatch.setattr(registry, "_classes", dict(registry._classes))


@pytest.fixture(params=[VllmOmniPipelineBase, DiffusionModelBase])
def registry(request) -> type[Registry]:
    return request.param


def test_a_registered_class_is_found_by_name(registry):
    @registry.register("SomePipeline", algorithm="own")
    class Some:
        pass

    assert registry.get_class("SomePipeline", "own") is Some
    with pytest.raises(ValueError, match=r"already; register .*Other under another algorithm name"):

        @registry.register("SomePipeline", algorithm="own")
        class Other:
            pass


def test_an_adapter_has_an_import_path():
    @VllmOmniPipelineBase.register("SomePipeline", algorithm="own")
    class Some:
        pass

    assert VllmOmniPipelineBase.get_pipeline_path("SomePipeline", "own") == f"{__name__}.{Some.__qualname__}"


def test_adapters_and_training_models_do_not_meet():
    @VllmOmniPipelineBase.register("SomePipeline")
    class Some:
        pass

    with pytest.raises(ValueError, match="no training model for architecture 'SomePipeline'"):
        DiffusionModelBase.get_class("SomePipeline")

    @DiffusionModelBase.register("SomePipeline")
    class Training:
        pass

    assert VllmOmniPipelineBase.get_class("SomePipeline") is Some
    assert DiffusionModelBase.get_class("SomePipeline") is Training


@pytest.mark.parametrize(
    ("base", "kind"), [(VllmOmniPipelineBase, "rollout adapter"), (DiffusionModelBase, "training model")]
)
def test_what_is_not_registered_names_what_is(base, kind):
    known = r"'NoPipeline'.*QwenImagePipeline/flow_grpo.*StableDiffusion3Pipeline/flow_grpo"
    with pytest.raises(ValueError, match=f"no {kind} for architecture {known}"):
        base.get_class("NoPipeline")


def test_a_user_s_class_may_take_a_built_in_place(registry):
    registry._classes.clear()

    @registry.register("QwenImagePipeline")
    class Mine:
        pass

    built_in = type("BuiltIn", (), {"__module__": registry._built_in[0]})
    assert registry.register("QwenImagePipeline")(built_in) is built_in
    assert registry.get_class("QwenImagePipeline") is Mine


def test_both_sides_of_a_model_follow_the_same_rules():
    for architecture in ("QwenImagePipeline", "StableDiffusion3Pipeline"):
        rollout, training = VllmOmniPipelineBase.get_class(architecture), DiffusionModelBase.get_class(architecture)
        for rule in ("schedule", "guide", "image_tokens", "transformer_inputs"):
            assert getattr(rollout, rule) is getattr(training, rule)
        for fact in ("cfg_key", "default_cfg_scale", "masks_text"):
            assert getattr(rollout, fact) == getattr(training, fact)
