"""How often a pipeline is compiled: rows that join or leave and texts of other lengths need no new graph."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from verl_omni.bench.random_lora import random_lora
from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.harness import AdapterEngine, Arrival
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest
from verl_omni.workers.rollout.staging import staged_lora


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


def ask(name, words=0, **knobs):
    prompt = "a red circle " + "and another " * words
    knobs = {"height": 64, "width": 64, "num_inference_steps": 3, "max_sequence_length": 128, **knobs}
    return RolloutRequest(request_id=name, prompt=prompt, seed=len(name) + words, **knobs)


@pytest.fixture(params=[("qwen", "QwenImagePipeline"), ("sd3", "StableDiffusion3Pipeline")], ids=lambda p: p[0])
def compiled(request, monkeypatch):
    """An engine whose pipeline is compiled as on a GPU, and the folder of its model."""
    # Which graphs are made is the same with every backend; this one makes them at once.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    family, architecture = request.param
    model = request.getfixturevalue(f"tiny_{family}")
    with AdapterEngine(AdapterRegistry.get_class(architecture), model, RolloutMode.STEP_WISE, torch.bfloat16) as engine:
        engine.pipeline.decode_rows = 4
        engine.pipeline.fuse()
        engine.pipeline.setup_compile()
        yield engine, model


@pytest.mark.engine
def test_after_a_warm_up_nothing_is_compiled_again(compiled):
    engine, _ = compiled
    engine.run(ask("alone"))
    engine.run(*(ask(f"mixed {i}", i) for i in range(8)))  # as many as half a head of Qwen-Image is wide
    assert engine.pipeline.read_stats(reset=True).compiled_graphs > 0
    engine.run(*(ask(f"fewer {i}", i) for i in range(5)))
    assert engine.pipeline.read_stats(reset=True).compiled_graphs == 0
    engine.run(*(ask(f"whole {i}") for i in range(6)))
    engine.pipeline.read_stats(reset=True)
    outputs = engine.run(
        *(ask(f"more {i}", 2 * i) for i in range(5)),
        *(Arrival(request=ask(f"late {i}", 3 + i), after=i) for i in range(3)),
    )
    assert not any(isinstance(output, Exception) for output in outputs)
    assert engine.pipeline.read_stats().compiled_graphs == 0


@pytest.mark.engine
def test_blocks_with_a_lora_are_whole_graphs_and_the_next_lora_takes_them_over(compiled, monkeypatch):
    from vllm.lora.request import LoRARequest

    engine, model = compiled
    config = json.loads((model / "transformer" / "config.json").read_text())
    lora = random_lora(config, 4, torch.bfloat16)
    graphs = []
    for version in (1, 2):
        with staged_lora(lora, engine.pipeline.lora_key_map) as folder:
            engine.worker.load_lora(LoRARequest(f"policy-{version}", version, str(folder)))
        torch._dynamo.utils.counters["graph_break"].clear()
        with monkeypatch.context() as patch:  # else each request brings its own
            patch.setattr(engine.worker.lora_manager, "set_active_adapter", lambda *_, **__: None)
            assert not isinstance(engine.run(*(ask(f"policy {version}, {i}") for i in range(4)))[0], Exception)
        assert not torch._dynamo.utils.counters["graph_break"]
        graphs.append(engine.pipeline.read_stats(reset=True).compiled_graphs)
    assert graphs[0] > 0 and graphs[1] == 0
