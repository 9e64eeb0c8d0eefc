"""What the docs show, on a real engine: the worked-out adapter, the script, the messages of requests that fail."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests.docs import tiny_flux
from tests.docs.pages import (
    BATCHING,
    WORKED_OUT,
    block,
    blocks,
    code_spans,
    commands,
    documented_messages,
    matches,
    table,
)
from verl_omni.testing.conformance import run_conformance
from verl_omni.testing.harness import AdapterEngine
from verl_omni.trainer.generation.outputs import REPORT
from verl_omni.trainer.main_generation import main
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

pytestmark = pytest.mark.engine

SAME = dict(prompt="a blue square", height=96, width=64, num_inference_steps=4, seed=17)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux.build(tmp_path_factory.mktemp("tiny") / "flux")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Import path of the adapter on the page."""
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "flux_rollout.py").write_text(block(WORKED_OUT, "python", "class FluxRollout"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        importlib.import_module("flux_rollout")
        yield "flux_rollout.FluxRollout"
        sys.modules.pop("flux_rollout")


def test_the_worked_out_adapter_is_short():
    code = block(WORKED_OUT, "python", "class FluxRollout")
    assert len(code.splitlines()) < 100
    assert max(map(len, code.splitlines())) <= 120


def test_the_worked_out_adapter_conforms_in_all_modes(adapter, flux):
    report = run_conformance(adapter, flux, size=32)
    report.raise_for_failures()
    assert str(report) == block(WORKED_OUT, "", "equals solo").strip()


def reference(flux: Path, lora: Path | None = None, **knobs: Any) -> torch.Tensor:
    """The image [3, H, W] in 0–255 that diffusers makes."""
    from peft import PeftModel

    pipeline = diffusers.FluxPipeline.from_pretrained(flux, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if lora is not None:
        pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, lora).merge_and_unload()
    seed = SAME["seed"]
    asked = {name: value for name, value in SAME.items() if name != "seed"} | knobs
    generator = torch.Generator().manual_seed(seed)
    return pipeline(**asked, generator=generator, output_type="pt").images[0] * 255


def save_lora(flux: Path, out: Path) -> Path:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(flux, subfolder="transformer")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_add_out", "proj_mlp"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    get_peft_model(transformer, config).save_pretrained(out)
    return out


async def test_the_worked_out_adapter_computes_what_diffusers_does(adapter, flux, tmp_path):
    cases: list[dict[str, Any]] = [
        dict(),
        dict(guidance_scale=8.0),
        dict(guidance_scale=2.0, true_cfg_scale=4.0, negative_prompt="blurry"),
    ]
    lora = save_lora(flux, tmp_path / "lora")
    plan = RolloutPlan(
        mode=RolloutMode.STEP_WISE, max_num_seqs=8, request_batch_max_wait_ms=0, rows_per_forward=None, reason="test"
    )
    requests = [RolloutRequest(request_id=str(i), noise_level=0.0, **SAME, **case) for i, case in enumerate(cases)]
    bad = [
        RolloutRequest(request_id="ids", **{**SAME, "prompt": None}, prompt_token_ids=[1]),
        RolloutRequest(request_id="scale", **SAME, guidance_scale=-1.0),
    ]
    async with await RolloutEngine.start(model_path=flux, plan=plan, adapter=adapter, dtype="float32") as engine:
        results = {r.request_id: r async for r in engine.generate_all([*requests, *bad])}
        for request, case in zip(requests, cases, strict=True):
            close(results[request.request_id], reference(flux, **{"guidance_scale": 3.5, **case}))
        assert {"guidance", "negative_guidance"} <= set(results["2"].prompt_embeddings)
        assert all(isinstance(results[request.request_id], RolloutError) for request in bad)
        assert "guidance_scale must be a finite number of at least 0" in str(results["scale"])
        assert await describe(engine, results["ids"]) == []
        await engine.load_lora(lora)
        changed = await engine.generate(requests[0])
        close(changed, reference(flux, lora, guidance_scale=3.5))
        assert not torch.equal(changed.images, results["0"].images)


async def describe(engine: RolloutEngine, ids_only_in_part: RolloutError) -> list[str]:
    """Messages of the rollout engine itself; those of them that the page does not show."""
    twins = [RolloutRequest(request_id="twin", **SAME)] * 2
    messages = [str(ids_only_in_part)]
    messages += [str(r) async for r in engine.generate_all(twins) if isinstance(r, RolloutError)]
    await engine.sleep()
    with pytest.raises(RolloutError) as caught:
        await engine.generate(twins[0])
    await engine.wake_up()
    messages.append(str(caught.value))
    documented = documented_messages("Single requests fail")
    return [m for m in messages if not any(matches(pattern, m) for pattern in documented)]


def close(sample: RolloutSample | RolloutError, image: torch.Tensor) -> None:
    assert isinstance(sample, RolloutSample), sample
    assert sample.images is not None
    pixels = sample.images[0].float()
    assert float((pixels - image).abs().max()) < 1.01
    assert float(pixels.std()) > 1


def test_the_first_run_writes_what_the_page_says(tiny_qwen, tmp_path):
    from safetensors.torch import load_file

    (run,) = (c for c in commands(blocks(BATCHING, language="bash")[0].text) if c[2].endswith("main_generation"))
    files = [f"actor_rollout_ref.model.path={tiny_qwen}", f"generation.output_dir={tmp_path / 'out'}"]
    assert main([*run[3:], *files]) == 0
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["mode"] == "step_wise"
    assert (report["num_requests"], report["waves"]) == (16, 1)
    assert report["batch_sizes"] == {"16": 10}
    assert report["encodes"] == {"requested": 32, "computed": 5}  # four prompts and the negative one
    names = {name.partition("/")[2] for name in load_file(tmp_path / "out/trajectories.safetensors")}
    described = {name for row in table(BATCHING, "tensor").rows for cell in row for name in code_spans(cell)}
    assert names - {"negative_prompt_embeds_mask"} <= described


def test_the_script_runs(tiny_qwen, capfd):
    script = block(BATCHING, "python", "asyncio.run")
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(script, namespace)
    asyncio.run(namespace["main"](str(tiny_qwen)))
    printed = capfd.readouterr().out
    assert all(f"circle-{i} (1, 3, 64, 64) (1, 3)" in printed for i in range(4))
    assert "'waves': 1" in printed


def test_messages_of_failing_requests_read_as_the_page_shows_them(tiny_qwen):
    from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout

    base: dict[str, Any] = dict(prompt="a red circle", height=64, width=64, num_inference_steps=10, seed=1)
    bad: list[dict[str, Any]] = [
        dict(height=65),
        dict(prompt="one two three four", max_sequence_length=2),
        dict(prompt_token_ids=[1, 2, 3]),
        dict(prompt=None),
        dict(prompt_mask=[1]),
        dict(prompt_token_ids_2=[1]),
        dict(sde_window_size=9, sde_window_range=(0, 4)),
        dict(sde_window_range=(0, 4)),
        dict(sde_type="cps", sde_window_size=2, sde_window_range=(0, 10)),
        dict(num_inference_steps=1001),
        dict(sde_type="sde2"),
        dict(seed="seven"),
        dict(noise_level=1e38),
    ]
    requests = [RolloutRequest(request_id=f"r{i}", **{**base, **knobs}) for i, knobs in enumerate(bad)]
    with AdapterEngine(QwenImageRollout, tiny_qwen, RolloutMode.STEP_WISE) as engine:
        outputs = engine.run(*requests, RolloutRequest(request_id="good", **base))
    messages = [str(output) for output in outputs[:-1]]
    documented = documented_messages("Single requests fail")
    elsewhere = [p for p in documented if re.search("encoders|in flight|asleep", p)]
    assert len(documented) == len(messages) + len(elsewhere)
    for pattern in set(documented) - set(elsewhere):
        assert any(matches(pattern, message) for message in messages), f"{pattern}\n" + "\n".join(messages)
    for message in messages:
        assert any(matches(pattern, message) for pattern in documented), message
    assert not isinstance(outputs[-1], Exception)
