"""How often a pipeline is compiled: rows that join or leave and texts of other lengths need no new graph."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.harness import AdapterEngine, Arrival
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest


def pipeline(**parts):
    """What ``setup_compile`` looks at."""
    config = SimpleNamespace(diffusion_compile_dynamic=True, diffusion_compile_granularity="full")
    common = {"device": torch.device("cpu"), "od_config": config, "decode_rows": 4, "compiled_beside": lambda: ()}
    return SimpleNamespace(**common | parts)


@pytest.mark.parametrize(
    ("declared", "compiled"),
    [(None, ["transformer", "transformer_2"]), (["transformer"], ["transformer"]), (["unet", "absent"], ["unet"])],
)
def test_the_modules_that_the_engine_would_compile_are_compiled(declared, compiled):
    modules = {name: nn.Linear(2, 2) for name in ("transformer", "transformer_2", "unet")}
    VllmOmniPipelineBase.setup_compile(pipeline(**modules, _dit_modules=declared))
    assert [name for name, module in modules.items() if module._compiled_call_impl is not None] == compiled


def test_a_compilation_that_fails_is_logged_here_as_the_engine_only_warns(caplog):
    def fuse():
        raise RuntimeError("no such kernel")

    broken = pipeline(device=torch.device("cuda"), transformer=nn.Linear(2, 2), fuse=fuse)
    with pytest.raises(RuntimeError, match="no such kernel"):
        VllmOmniPipelineBase.setup_compile(broken)
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "runs eagerly" in record.message and "no such kernel" in caplog.text


@pytest.mark.engine
@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen", "QwenImagePipeline"), ("sd3", "StableDiffusion3Pipeline")]
)
def test_after_a_warm_up_nothing_is_compiled_again(request, monkeypatch, family, architecture):
    adapter, model = AdapterRegistry.get_class(architecture), request.getfixturevalue(f"tiny_{family}")
    # Which graphs are made is the same with every backend; this one makes them at once.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))

    def ask(name, words, **knobs):
        prompt = "a red circle " + "and another " * words
        knobs = {"height": 64, "width": 64, "num_inference_steps": 3, "max_sequence_length": 128, **knobs}
        return RolloutRequest(request_id=name, prompt=prompt, seed=len(name) + words, **knobs)

    with AdapterEngine(adapter, model, RolloutMode.STEP_WISE, torch.bfloat16) as engine:
        engine.pipeline.decode_rows = 4
        engine.pipeline.fuse()
        engine.pipeline.setup_compile()
        engine.run(ask("alone", 0))
        engine.run(*(ask(f"whole {i}", 0) for i in range(4)))
        engine.run(*(ask(f"mixed {i}", i) for i in range(6)))
        assert engine.pipeline.read_stats(reset=True).compiled_graphs > 0
        outputs = engine.run(
            *(ask(f"more {i}", 2 * i) for i in range(5)),
            *(Arrival(request=ask(f"late {i}", 3 + i), after=i) for i in range(3)),
        )
        assert not any(isinstance(output, Exception) for output in outputs)
        assert engine.pipeline.read_stats().compiled_graphs == 0
