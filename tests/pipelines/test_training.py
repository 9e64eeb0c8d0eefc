"""The training side of the models: the score of a recorded step is what the rollout recorded, and is differentiable."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_omni.algorithms.flow_sde import SDE_TYPES
from verl_omni.pipelines.model_base import DiffusionModelBase, VllmOmniPipelineBase
from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler
from verl_omni.pipelines.training import NEGATIVE, StepKnobs
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutRequest

ARCHITECTURES = {"qwen": "QwenImagePipeline", "sd3": "StableDiffusion3Pipeline"}
STEPS, HEIGHT, WIDTH, NOISE = 6, 64, 96, 0.8
BASE, LORA = "base", "lora"
TEXTS = ("hi", "a red circle", "a blue square on a black background and quite a few more words after that")
TEXT_OUT = ("add_q_proj", "to_add_out", "txt_mlp")
WINDOWS = ((0, 2), (3, 5), (1, 3), (0, 5))


class Rollouts:
    """What an engine recorded with a family's tiny model, under its own weights and under a LoRA."""

    def __init__(self, family: str, path: Path, folder: Path) -> None:
        self.family, self.path = family, path
        self.model = DiffusionModelBase.get_class(ARCHITECTURES[family])(path)
        self.lora = folder / "lora"
        with seeded():
            lora_model(self).save_pretrained(self.lora)
        self.samples = asyncio.run(self._run())

    def requests(self) -> list[RolloutRequest]:
        """Of each SDE type four, which differ in text, guidance and window; of "sde" also one of a single step."""
        guidance: list[dict[str, Any]] = [
            {self.model.cfg_key: 4.0, "negative_prompt": "blurry, and many other things that nobody wants"},
            {self.model.cfg_key: 4.0},
            {self.model.cfg_key: 1.5, "negative_prompt": ""},
            {self.model.cfg_key: 1.0, "negative_prompt": "blurry"},
        ]
        requests = [
            RolloutRequest(
                request_id=f"{sde_type}-{i}",
                prompt=TEXTS[i % 3],
                max_sequence_length=128,
                height=HEIGHT,
                width=WIDTH,
                num_inference_steps=STEPS,
                seed=i,
                noise_level=NOISE,
                sde_type=sde_type,
                sde_window_size=2,
                sde_window_range=window,
                **knobs,
            )
            for sde_type in SDE_TYPES
            for i, (window, knobs) in enumerate(zip(WINDOWS, guidance, strict=True))
        ]
        single = dict(request_id="single", num_inference_steps=1, sde_window_size=1, sde_window_range=(0, 1))
        return [*requests, dataclasses.replace(requests[0], **single)]

    async def _run(self) -> dict[str, dict[str, Any]]:
        plan = RolloutPlan(
            mode=RolloutMode.STEP_WISE,
            max_num_seqs=16,
            request_batch_max_wait_ms=0.0,
            rows_per_forward=None,
            reason="the test says so",
        )
        adapter = VllmOmniPipelineBase.get_pipeline_path(ARCHITECTURES[self.family])
        engine = await RolloutEngine.start(
            model_path=self.path, plan=plan, adapter=adapter, dtype="float32", executor="uni"
        )
        try:
            samples = {BASE: [item async for item in engine.generate_all(self.requests())]}
            await engine.load_lora(self.lora)
            samples[LORA] = [item async for item in engine.generate_all(self.requests())]
        finally:
            await engine.close()
        return {policy: {item.request_id: item for item in items} for policy, items in samples.items()}

    def rows(self, sde_type: str, policy: str = BASE, steps: int = STEPS) -> dict[str, torch.Tensor]:
        """The batch of one SDE type and number of steps."""
        alike = (sde_type, steps)
        requests = [request for request in self.requests() if (request.sde_type, request.num_inference_steps) == alike]
        samples = [self.samples[policy][request.request_id] for request in requests]
        guided = ["negative_prompt_embeds" in sample.prompt_embeddings for sample in samples]
        scales = [getattr(request, self.model.cfg_key) for request in requests]
        prompts = defaultdict(list)
        for sample, is_guided in zip(samples, guided, strict=True):
            for side in ("", NEGATIVE):
                for name in ("prompt_embeds", *self.model.extra_conditions):
                    prompts[side + name].append(sample.prompt_embeddings[(side if is_guided else "") + name])
                prompts[f"{side}prompt_embeds_mask"].append(torch.ones(len(prompts[f"{side}prompt_embeds"][-1])) > 0)
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "all_latents": torch.cat([sample.trajectory_latents for sample in samples]),
            "all_timesteps": torch.cat([sample.trajectory_timesteps for sample in samples]),
            "rollout_log_probs": torch.cat([sample.trajectory_log_probs for sample in samples]),
            "sde_steps": torch.tensor([list(range(*sample.sde_windows[0])) for sample in samples]),
            "cfg_scale": torch.tensor([s if g else 1.0 for s, g in zip(scales, guided, strict=True)]),
            **{name: pad(tensors, batch_first=True) for name, tensors in prompts.items()},
        }

    def score(self, transformer, rows, column, sde_type, **knobs):
        """The model's score at the knobs of the rollout."""
        defaults = dict(height=HEIGHT, width=WIDTH, num_inference_steps=STEPS, noise_level=NOISE, sde_type=sde_type)
        return self.model.score_step(transformer, rows, column, StepKnobs(**(defaults | knobs)))


def lora_model(rollouts: Rollouts) -> Any:
    """The transformer with a LoRA that is not zero on its default modules."""
    from peft import LoraConfig, get_peft_model

    modules = rollouts.model.default_target_modules
    config = LoraConfig(r=4, lora_alpha=8, target_modules=modules, init_lora_weights=False)
    return get_peft_model(rollouts.model.load_transformer(torch.float32), config)


@contextmanager
def seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


@contextmanager
def spied(transformer):
    """What the transformer is called with, one dict a forward."""
    calls: list[dict[str, Any]] = []
    handle = transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-5) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= atol)


def row(rows, i):
    return {name: tensor[i : i + 1] for name, tensor in rows.items()}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(request, family) -> Path:
    return request.getfixturevalue(f"tiny_{family}")


@pytest.fixture(scope="module")
def rollouts(family, path, tmp_path_factory) -> Rollouts:
    return Rollouts(family, path, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def transformer(rollouts) -> torch.nn.Module:
    return rollouts.model.load_transformer(torch.float32)


@pytest.mark.engine
@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_the_score_of_a_step_is_the_log_prob_that_the_rollout_recorded(rollouts, transformer, sde_type):
    rows = rollouts.rows(sde_type)
    assert ((rows["cfg_scale"] != 1) == torch.tensor([True, False, True, False])).all()
    if rollouts.model.masks_text:
        assert not rows["prompt_embeds_mask"].all() and not rows["negative_prompt_embeds_mask"].all()
    with torch.no_grad():
        for column in range(2):
            score = rollouts.score(transformer, rows, column, sde_type)
            assert close(score.log_prob, rows["rollout_log_probs"][:, column])
            assert {tensor.dtype for tensor in score} == {torch.float32}
            for i in range(4):
                alone = rollouts.score(transformer, row(rows, i), column, sde_type)
                assert all(close(a[i : i + 1], b) for a, b in zip(score, alone, strict=True))


@pytest.mark.engine
def test_a_single_step_is_scored_as_it_was_recorded(rollouts, transformer):
    rows = rollouts.rows("sde", steps=1)
    with torch.no_grad():
        score = rollouts.score(transformer, rows, 0, "sde", num_inference_steps=1)
    assert close(score.log_prob, rows["rollout_log_probs"][:, 0])


@pytest.mark.engine
@pytest.mark.parametrize("sde_type", SDE_TYPES)
def test_mean_and_deviation_are_those_of_the_stochastic_scheduler(rollouts, transformer, sde_type):
    rows = rollouts.rows(sde_type)
    with torch.no_grad(), spied(transformer) as calls:
        score = rollouts.score(transformer, row(rows, 1), 0, sde_type)
        velocity = transformer(**calls[0])[0]
    scheduler = FlowMatchSDEDiscreteScheduler.from_config(rollouts.model.scheduler.config)
    scheduler.timesteps, scheduler.sigmas = rollouts.model.schedule(
        STEPS, rollouts.model.image_tokens(tuple(rows["all_latents"].shape[2:]))
    )
    _, log_prob, mean, std = scheduler.step(
        velocity,
        rows["all_timesteps"][1, 0],
        rows["all_latents"][1:2, 0],
        prev_sample=rows["all_latents"][1:2, 1],
        noise_level=NOISE,
        sde_type=sde_type,
        return_dict=False,
    )
    assert close(score.log_prob, log_prob) and close(score.mean, mean) and close(score.std, std.flatten())


@pytest.mark.engine
def test_the_negative_prompt_is_run_only_where_the_batch_has_one(rollouts, transformer):
    rows = rollouts.rows("sde")
    with torch.no_grad(), spied(transformer) as calls:
        mixed = rollouts.score(transformer, rows, 0, "sde")
        assert len(calls) == 2
        unguided = {name: tensor for name, tensor in row(rows, 1).items() if not name.startswith(NEGATIVE)}
        assert close(rollouts.score(transformer, unguided, 0, "sde").log_prob, mixed.log_prob[1:2])
        assert len(calls) == 3
    with pytest.raises(ValueError, match="give negative_prompt_embeds"):
        rollouts.score(transformer, unguided | {"cfg_scale": torch.tensor([2.0])}, 0, "sde")


@pytest.mark.engine
def test_padding_is_cut_and_an_unpadded_batch_has_no_mask(rollouts, transformer):
    rows = rollouts.rows("sde")
    length = int(rows["prompt_embeds_mask"][0].sum())
    wider = dict(rows)
    for name in ("prompt_embeds", "prompt_embeds_mask"):
        wider[name] = torch.cat([rows[name], torch.zeros_like(rows[name])], dim=1)
    with torch.no_grad(), spied(transformer) as calls:
        score = rollouts.score(transformer, row(wider, 0), 0, "sde")
    assert calls[0]["encoder_hidden_states"].shape[1] == length
    assert calls[0].get("encoder_hidden_states_mask") is None
    assert close(score.log_prob, rows["rollout_log_probs"][:1, 0])
    if not rollouts.model.masks_text:
        ragged = rows["prompt_embeds_mask"].clone()
        ragged[0, -1] = False
        with pytest.raises(ValueError, match="must be of one length"):
            rollouts.score(transformer, rows | {"prompt_embeds_mask": ragged}, 0, "sde")


@pytest.mark.engine
def test_a_bfloat16_transformer_gets_timesteps_at_full_precision(rollouts):
    rows = rollouts.rows("sde")
    transformer = rollouts.model.load_transformer(torch.bfloat16)
    with torch.no_grad(), spied(transformer) as calls:
        score = rollouts.score(transformer, rows, 1, "sde")
    scale = 1 / 1000 if rollouts.family == "qwen" else 1
    for call in calls:
        torch.testing.assert_close(call["timestep"], rows["all_timesteps"][:, 1] * scale, atol=0, rtol=2e-7)
        floats = {name for name, value in call.items() if torch.is_tensor(value) and value.is_floating_point()}
        assert {call[name].dtype for name in floats - {"timestep"}} == {torch.bfloat16}
    assert {tensor.dtype for tensor in score} == {torch.float32}


@pytest.mark.engine
def test_rows_of_another_schedule_are_refused(rollouts, transformer):
    rows = rollouts.rows("sde")
    with pytest.raises(ValueError, match="give the rollout's num_inference_steps"):
        rollouts.score(transformer, rows, 0, "sde", num_inference_steps=STEPS + 1)
    rounded = rows | {"all_timesteps": rows["all_timesteps"].bfloat16().float()}
    with pytest.raises(ValueError, match="timesteps unrounded"):
        rollouts.score(transformer, rounded, 1, "sde")


@pytest.mark.engine
def test_the_gradient_of_a_batch_is_the_sum_of_its_rows_and_reaches_the_parameters(rollouts):
    rows = rollouts.rows("sde")

    def gradient(batch):
        transformer = rollouts.model.load_transformer(torch.float32)
        rollouts.score(transformer, batch, 0, "sde").log_prob.sum().backward()
        return {name: parameter.grad for name, parameter in transformer.named_parameters()}

    whole, parts = gradient(rows), [gradient(row(rows, i)) for i in range(4)]
    suffixes = tuple(f".{module}.weight" for module in rollouts.model.default_target_modules)
    targets = {name for name in whole if name.endswith(suffixes)}
    last = max(name.split(".")[1] for name in targets)  # nothing reads the text that its block gives out
    idle = {name for name in targets if name.split(".")[1] == last and any(part in name for part in TEXT_OUT)}
    assert {name for name in targets if whole[name] is None or not whole[name].any()} == idle
    for name, grad in whole.items():
        if grad is not None:
            total = torch.stack([part[name] for part in parts]).sum(0)
            torch.testing.assert_close(grad, total, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-7)


@pytest.mark.engine
def test_a_lora_on_the_default_modules_means_the_same_in_the_rollout(rollouts, transformer):
    from peft import PeftModel

    policy = PeftModel.from_pretrained(rollouts.model.load_transformer(torch.float32), rollouts.lora)
    rows = rollouts.rows("sde", LORA)
    with torch.no_grad():
        for column in range(2):
            recorded = rows["rollout_log_probs"][:, column]
            assert close(rollouts.score(policy, rows, column, "sde").log_prob, recorded)
            with policy.disable_adapter():
                base = rollouts.score(policy, rows, column, "sde")
            assert not close(base.mean, rollouts.score(policy, rows, column, "sde").mean, 1e-2)
            assert not close(base.log_prob, recorded, 1e-3)
            assert close(base.log_prob, rollouts.score(transformer, rows, column, "sde").log_prob)
    assert not close(rows["all_latents"][:, 1:], rollouts.rows("sde")["all_latents"][:, 1:], 1e-3)


@pytest.mark.engine
def test_fsdp2_around_a_lora_changes_nothing(rollouts, tmp_path):
    from peft import PeftModel
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rows = rollouts.rows("cps", LORA)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
            policy = PeftModel.from_pretrained(
                rollouts.model.load_transformer(torch.float32), rollouts.lora, is_trainable=True
            )
            precision = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
            for block in policy.get_base_model().transformer_blocks:
                fully_shard(block, mesh=mesh, mp_policy=precision)
            fully_shard(policy, mesh=mesh, mp_policy=precision)
            with spied(policy.get_base_model()) as calls:
                score = rollouts.score(policy, rows, 0, "cps", dtype=dtype)
            assert calls[0]["timestep"].dtype == torch.float32 and calls[0]["hidden_states"].dtype == dtype
            assert close(score.log_prob, rows["rollout_log_probs"][:, 0], atol)
            score.log_prob.sum().backward()
            grads = [p.grad for name, p in policy.named_parameters() if "lora_B" in name and p.grad is not None]
            assert grads and all(grad.to_local().isfinite().all() for grad in grads)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_the_schedule_is_bit_for_bit_the_stock_pipeline_s(family, path, dynamic):
    stock = VllmOmniPipelineBase.get_class(ARCHITECTURES[family]).prepare_timesteps
    model = DiffusionModelBase.get_class(ARCHITECTURES[family])(path)
    if dynamic is not None:
        model.scheduler.register_to_config(use_dynamic_shifting=dynamic)
    for steps in (2, 3, 10, 28, 50):
        for tokens in (16, 24, 256, 1000, 4096, 16384):
            theirs, _ = stock(model, steps, None, tokens)
            sigmas = model.scheduler.sigmas
            ours = model.schedule(steps, tokens)
            assert torch.equal(ours[0], theirs) and torch.equal(ours[1], sigmas)
            assert ours[0].dtype == ours[1].dtype == torch.float32 and len(ours[0]) + 1 == len(ours[1]) == steps + 1


def test_a_distilled_checkpoint_is_refused(tiny_qwen, tmp_path):
    import json
    import shutil

    shutil.copytree(tiny_qwen, tmp_path / "distilled", ignore=shutil.ignore_patterns("*.safetensors"))
    config = tmp_path / "distilled/transformer/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": True}))
    with pytest.raises(NotImplementedError, match="guidance-distilled"):
        DiffusionModelBase.get_class("QwenImagePipeline")(tmp_path / "distilled")


@pytest.mark.slow
def test_the_training_side_needs_no_engine(tiny_qwen, tiny_sd3):
    code = (
        "import sys, torch\n"
        "from verl_omni.pipelines.model_base import DiffusionModelBase\n"
        f"for architecture, path in {[*zip(ARCHITECTURES.values(), map(str, (tiny_qwen, tiny_sd3)), strict=True)]}:\n"
        "    DiffusionModelBase.get_class(architecture)(path).load_transformer(torch.float32)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'vllm_omni', 'ray', 'verl')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
