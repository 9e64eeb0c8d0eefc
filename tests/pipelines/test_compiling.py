"""How often a pipeline is compiled: rows that join or leave and texts of other lengths need no new graph."""

from __future__ import annotations

import functools

import pytest
import torch

from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.harness import AdapterEngine, Arrival
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

pytestmark = pytest.mark.engine


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
