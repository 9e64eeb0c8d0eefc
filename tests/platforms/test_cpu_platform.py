"""The CPU platform under the engine's stock pipelines: real engines, tiny models, each executor and each mode."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from verl_omni.testing.tiny_models import build

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

ENGINES = {
    "qwen_image-uni-step_wise": dict(family="qwen_image", executor="uni", step_execution=True, max_num_seqs=4),
    "qwen_image-uni-request_level": dict(family="qwen_image", executor="uni", step_execution=False, max_num_seqs=4),
    "qwen_image-mp-step_wise": dict(family="qwen_image", executor="mp", step_execution=True, max_num_seqs=4),
    "sd3-uni-serial": dict(family="sd3", executor="uni", step_execution=False, max_num_seqs=1),
}


@dataclass(kw_only=True)
class Running:
    """A running engine with what the tests need to know about it."""

    omni: Any
    family: str
    model: Path
    ids: "itertools.count[int]" = field(default_factory=itertools.count)

    async def rpc(self, method: str, *args: Any) -> Any:
        """Calls a method of the one worker. The engine itself reports an error of it as a result; raises it here."""
        (result,) = await self.omni.collective_rpc(method, args=args)
        if isinstance(result, dict) and "error" in result:
            raise RuntimeError(f"{method}: {result['error']}")
        return result[0]

    async def image(self, prompt: str = "a red circle", *, seed: int = 0, lora: Any = None) -> np.ndarray:
        """Generates one image: u8[64, 64, 3]."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        sampling = OmniDiffusionSamplingParams(
            height=64,
            width=64,
            num_inference_steps=3,
            seed=seed,
            true_cfg_scale=1.0,
            guidance_scale=1.0,
            lora_request=lora,
        )
        request_id = f"r{next(self.ids)}"
        async for output in self.omni.generate(prompt, sampling_params_list=[sampling], request_id=request_id):
            last = output
        return np.asarray(last.images[0])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES.values(), ids=ENGINES.keys())
async def running(request: pytest.FixtureRequest, tiny_qwen: Path, tiny_sd3: Path) -> AsyncIterator[Running]:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    settings = dict(request.param)
    family = settings.pop("family")
    model = tiny_qwen if family == "qwen_image" else tiny_sd3
    omni = AsyncOmni(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend=settings.pop("executor"),
        worker_extension_cls="tests.platforms.reload_extension.ReloadExtension",
        **settings,
    )
    try:
        yield Running(omni=omni, family=family, model=model)
    finally:
        omni.shutdown()


def write_lora(folder: Path, *, seed: int) -> str:
    """A PEFT folder of rank 2 for the query projection of the first block, far from zero."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    key = "base_model.model.transformer.transformer_blocks.0.attn.to_q"
    a, b = (torch.randn(shape, generator=generator) for shape in ((2, 64), (64, 2)))
    save_file({f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


async def test_concurrent_requests_answer_their_own_prompts_and_repeat(running: Running) -> None:
    prompts = ["a red circle", "a blue square in the rain", "a cat"]
    first = await asyncio.gather(*(running.image(p) for p in prompts))
    assert all(image.shape == (64, 64, 3) and image.dtype == np.uint8 for image in first)
    assert all(image.std() > 1 for image in first)
    for one, other in itertools.combinations(first, 2):
        assert not np.array_equal(one, other)
    assert not np.array_equal(first[0], await running.image(prompts[0], seed=1))
    for prompt, image in zip(prompts, first, strict=True):
        alone = await running.image(prompt)
        assert np.abs(alone.astype(int) - image).max() <= 1  # fp32 rounding of another batch shape
        assert np.array_equal(alone, await running.image(prompt))


async def test_weights_can_be_loaded_again(running: Running, tmp_path: Path) -> None:
    before = await running.image()
    other = build(running.family, tmp_path / "other", seed=1)
    name = "transformer/diffusion_pytorch_model.safetensors"
    assert await running.rpc("reload_transformer", str(other / name)) > 50
    assert not np.array_equal(await running.image(), before)
    assert await running.rpc("reload_transformer", str(running.model / name)) > 50
    assert np.array_equal(await running.image(), before)


async def test_lora_changes_the_output_until_it_is_removed(running: Running, tmp_path: Path) -> None:
    from vllm_omni.lora.request import LoRARequest

    base = await running.image()
    images = []
    for version in (1, 2):  # the second takes the place of the first, under the same id
        lora = LoRARequest("policy", 7, write_lora(tmp_path / str(version), seed=version))
        assert await running.omni.add_lora(lora)
        assert await running.omni.list_loras() == [7]
        images.append(await running.image(lora=lora))
        assert np.array_equal(await running.image(), base)
        assert await running.omni.remove_lora(7)
        assert await running.omni.list_loras() == []
    assert not np.array_equal(images[0], base)
    assert not np.array_equal(images[1], base)
    assert not np.array_equal(images[0], images[1])
    assert np.array_equal(await running.image(), base)


async def test_sleep_and_wake_keep_the_output(running: Running) -> None:
    before = await running.image()
    (asleep,) = await running.omni.sleep(level=1)
    assert asleep.status == "SUCCESS"
    (awake,) = await running.omni.wake_up()
    assert awake.status == "SUCCESS"
    assert np.array_equal(await running.image(), before)


async def test_a_sleeping_worker_refuses_to_run(running: Running) -> None:
    before = await running.image()
    await running.rpc("sleep", 1)  # unlike omni.sleep(), this does not hold requests back
    with pytest.raises(Exception, match="the worker is asleep; call wake_up"):
        await running.image()
    assert await running.rpc("wake_up")
    assert np.array_equal(await running.image(), before)


async def test_memory_figures_are_told(running: Running) -> None:
    from vllm_omni.platforms import current_omni_platform as platform

    free, total = platform.get_device_memory()
    assert 0 < free <= total == platform.get_device_total_memory()
    assert 0 < platform.memory_allocated() <= platform.max_memory_allocated()
