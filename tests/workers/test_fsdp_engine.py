"""The training engine on tiny models, in one and in two processes."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.func import functional_call

from tests.workers import training
from tests.workers.ranks import Ranks, ranks
from tests.workers.training import BETA, CLIP, actor_config, make_rows
from verl_omni.workers.config.lora import read_lora_config

pytestmark = pytest.mark.engine
SCALE = 8 / 4
"""alpha over rank."""


@pytest.fixture(scope="module")
def one():
    with ranks(1) as started:
        yield started


@pytest.fixture(scope="module")
def two():
    with ranks(2) as started:
        yield started


@pytest.fixture(scope="module")
def start(one: Ranks, tiny_sd3: Path) -> Any:
    """Weights, metrics and gradients of one plain update of the new policy."""
    return one.run(training.update_from_start, tiny_sd3, make_rows(tiny_sd3), actor_config())[0]


def close(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-4) -> bool:
    """Equal to fp32 rounding, which is relative to the largest of all."""
    largest = max(float(value.abs().max()) for value in b.values())
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=rtol * largest) for name in a)


# ---- the gradient


def reference_loss(
    path: Path, weights: dict[str, Tensor], rows: dict[str, Tensor], base: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a mini-batch, from the formulas, in float64: clipped loss plus β times the KL, and both of them."""
    transformer, _ = double_transformer(path)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(path, subfolder="scheduler")
    scheduler.set_timesteps(6)
    sigmas, a = scheduler.sigmas.double(), 0.7

    def step(weights: dict[str, Tensor], column: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean of the next latents, std, and standard deviation of the noise."""
        x = rows["all_latents"][:, column].double()
        sides = []
        for side in ("", "negative_"):
            inputs = {
                "hidden_states": x,
                "timestep": rows["all_timesteps"][:, column].double(),
                "encoder_hidden_states": rows[f"{side}prompt_embeds"][:, :5].double(),
                "pooled_projections": rows[f"{side}pooled_prompt_embeds"].double(),
                "return_dict": False,
            }
            sides.append(functional_call(transformer, weights, kwargs=inputs)[0])
        v = sides[1] + rows["cfg_scale"].double().view(-1, 1, 1, 1) * (sides[0] - sides[1])
        s, s_next = (sigmas[rows["sde_steps"][:, column] + i].view(-1, 1, 1, 1) for i in (0, 1))
        dt = s_next - s
        std = a * torch.sqrt(s / (1 - torch.where(s >= 1, sigmas[1], s)))
        mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
        return mean, std, std * torch.sqrt(-dt)

    losses, kls = [], []
    for column in range(2):
        mean, std, noise = step(weights, column)
        taken = rows["all_latents"][:, column + 1].double()
        log_p = -((taken - mean) ** 2) / (2 * noise**2) - torch.log(noise) - 0.5 * math.log(2 * math.pi)
        ratio = torch.exp(log_p.mean((1, 2, 3)) - rows["old_log_probs"][:, column].double())
        advantage = rows["advantages"][:, column].double()
        losses.append(torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)))
        with torch.no_grad():
            reference, _, _ = step(base, column)
        kls.append((mean - reference).square().mean((1, 2, 3)) / (2 * std.view(-1) ** 2))
    loss, kl = torch.stack(losses).mean(), torch.stack(kls).mean()
    return loss + BETA * kl, loss, kl


def double_transformer(path: Path) -> tuple[Any, dict[str, Tensor]]:
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(path, subfolder="transformer").double()
    return transformer, {name: value.detach() for name, value in transformer.named_parameters()}


def test_the_gradient_of_a_lora_is_that_of_the_formulas(one: Ranks, tiny_sd3: Path) -> None:
    policy, rows, metrics, found = one.run(training.gradients, tiny_sd3, actor_config(), {})[0]
    _, base = double_transformer(tiny_sd3)
    lora = {name: value.double().requires_grad_() for name, value in policy.items()}
    merged = dict(base)
    for name in [name for name in lora if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        product = lora[name.replace("lora_A", "lora_B")] @ lora[name]
        merged[f"{module}.weight"] = base[f"{module}.weight"] + SCALE * product
    loss, pg_loss, kl = reference_loss(tiny_sd3, merged, rows, base)
    loss.backward()
    assert kl > 1e-6  # the policy has moved
    assert close(found, {name: value.grad.float() for name, value in lora.items() if value.grad is not None})
    for name, value in {"loss": loss, "pg_loss": pg_loss, "kl_loss": kl}.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4)
    norm = math.sqrt(sum(float(value.grad.square().sum()) for value in lora.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_the_gradient_of_all_weights_is_that_of_the_formulas(one: Ranks, tiny_sd3: Path) -> None:
    policy, rows, metrics, found = one.run(training.gradients, tiny_sd3, actor_config(lr=1e-4), {"lora_rank": 0})[0]
    _, base = double_transformer(tiny_sd3)
    weights = {name.removeprefix("transformer."): value.double() for name, value in policy.items()}
    trained = {name: weights[name].requires_grad_() for name in base}
    loss, _, kl = reference_loss(tiny_sd3, trained, rows, base)
    loss.backward()
    assert kl > 1e-6
    assert close(found, {name: value.grad.float() for name, value in trained.items() if value.grad is not None})
    assert metrics["kl_loss"] == pytest.approx(kl.item(), rel=1e-4)


# ---- how the batch is cut does not matter


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_micro_batches_do_not_change_the_gradient(one: Ranks, tiny_sd3: Path, start: Any, micro: int) -> None:
    actor = actor_config(micro=micro)
    found, metrics, gradients = one.run(training.update_from_start, tiny_sd3, make_rows(tiny_sd3), actor)[0]
    assert close(gradients, start[2], rtol=1e-5)
    assert close(found, start[0])
    assert metrics == pytest.approx(start[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("model", ["sd3", "qwen"])
def test_ranks_do_not_change_the_gradient_of_all_weights(
    one: Ranks, two: Ranks, request: pytest.FixtureRequest, model: str
) -> None:
    path = request.getfixturevalue(f"tiny_{model}")
    arguments = path, make_rows(path), actor_config(lr=1e-4), None, 2, {"lora_rank": 0}
    _, metrics, gradients = one.run(training.update_from_start, *arguments)[0]
    found = two.run(training.update_from_start, *arguments)[0]
    assert metrics["kl_loss"] > 0
    assert close(found[2], gradients)
    assert found[1] == pytest.approx(metrics, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("fsdp_size", [-1, 1])
def test_ranks_do_not_change_the_gradient(two: Ranks, tiny_sd3: Path, start: Any, fsdp_size: int) -> None:
    actor = actor_config(fsdp={"fsdp_size": fsdp_size})
    first, second = two.run(training.update_from_start, tiny_sd3, make_rows(tiny_sd3), actor)
    assert close(first[2], start[2], rtol=1e-5)
    assert close(first[0], start[0])
    assert first[1] == pytest.approx(start[1], rel=1e-4, abs=1e-6)
    assert second[1] == first[1]
    assert second[0] is None


def with_pads(rows: dict[str, Tensor], where: slice) -> dict[str, Tensor]:
    """Four more rows of weight 0, full of what they should not tell: at the end or in between."""
    noise = {
        name: value.flip(0) * 3
        for name, value in rows.items()
        if name in ("all_latents", "advantages", "prompt_embeds", "old_log_probs")
    }
    pads = rows | noise | {"sample_weight": torch.zeros(4)}
    joined = {name: torch.cat([value, pads[name]]) for name, value in rows.items()}
    order = torch.arange(8) if where == slice(4, 8) else torch.tensor([0, 4, 1, 5, 6, 2, 7, 3])
    return {name: value[order] for name, value in joined.items()}


@pytest.mark.parametrize("where", [slice(4, 8), slice(1, 8)], ids=["a whole rank", "mixed"])
def test_pad_rows_change_nothing(two: Ranks, tiny_sd3: Path, start: Any, where: slice) -> None:
    rows = with_pads(make_rows(tiny_sd3), where)
    _, metrics, gradients = two.run(training.update_from_start, tiny_sd3, rows, actor_config())[0]
    assert close(gradients, start[2], rtol=1e-5)
    assert metrics == pytest.approx(start[1], rel=1e-4, abs=1e-6)


def test_mini_batches_and_epochs_are_updates_one_after_the_other(one: Ranks, tiny_sd3: Path) -> None:
    rows, actor = make_rows(tiny_sd3), actor_config(epochs=2, lr_scheduler_type="cosine")
    found, metrics, _ = one.run(training.update_from_start, tiny_sd3, rows, actor, 2)[0]
    single = actor_config(lr_scheduler_type="cosine")
    expected = one.run(training.one_by_one, tiny_sd3, rows, single, 2, 2)[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert metrics["lr"] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * 3 / 4)))  # of the last of four steps
    assert metrics["ratio_max_dev"] >= metrics["first_ratio_max_dev"]


def test_a_mini_batch_without_weight_is_no_step(one: Ranks, tiny_sd3: Path, start: Any) -> None:
    rows = make_rows(tiny_sd3)
    empty = rows | {"sample_weight": torch.zeros(4)}
    both = {name: torch.cat([value, empty[name]]) for name, value in rows.items()}
    found, metrics, _ = one.run(training.update_from_start, tiny_sd3, both, actor_config(), 4)[0]
    assert all(torch.equal(found[name], start[0][name]) for name in found)
    assert metrics == start[1]


def test_the_same_seed_gives_the_same_bits(one: Ranks, tiny_sd3: Path, start: Any) -> None:
    again = one.run(training.update_from_start, tiny_sd3, make_rows(tiny_sd3), actor_config())[0]
    assert all(torch.equal(again[0][name], start[0][name]) for name in start[0])
    assert again[1] == start[1]


# ---- what the ranks start with


@pytest.fixture(scope="module", params=["sd3", "qwen"])
def odd_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, whose checkpoint has other numbers in its persistent buffer than the class computes."""
    path = request.getfixturevalue(f"tiny_{request.param}")
    odd = shutil.copytree(path, tmp_path_factory.mktemp("odd") / path.name)
    (file,) = (odd / "transformer").glob("*.safetensors")
    weights = load_file(file)
    if "pos_embed.pos_embed" in weights:
        weights["pos_embed.pos_embed"] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    return odd


@pytest.mark.parametrize(
    ("model", "dtype", "events"),
    [
        ({}, "bfloat16", ["read", "shard"]),
        ({"lora_rank": 0}, "float32", ["read", "shard", "read", "shard"]),  # the policy before the reference is read
    ],
    ids=["lora", "all weights"],
)
def test_all_ranks_start_with_what_the_first_one_reads(
    one: Ranks, two: Ranks, odd_model: Path, model: dict[str, Any], dtype: str, events: list[str]
) -> None:
    actor = actor_config(fsdp={"model_dtype": dtype})
    alone = one.run(training.loaded, odd_model, actor, model)[0]
    first, second = two.run(training.loaded, odd_model, actor, model)
    assert alone[0] == first[0] == events
    assert second[0] == [event for event in events if event != "read"]
    for found in (first, second):
        assert found[1].keys() == alone[1].keys()
        for name, value in alone[1].items():
            assert found[1][name].dtype == value.dtype, name
            assert torch.equal(found[1][name], value), name
        assert torch.equal(found[2], alone[2])
        assert torch.equal(found[3], alone[3])


# ---- scores


@pytest.mark.parametrize("model", [{}, {"lora_rank": 0}], ids=["lora", "all weights"])
def test_the_reference_is_the_base_model(one: Ranks, tiny_sd3: Path, model: dict[str, Any]) -> None:
    from verl_omni.pipelines.training import DiffusionModelBase

    policy, reference, log_prob, recorded = one.run(training.scores, tiny_sd3, model)[0]
    rules = DiffusionModelBase.get_class("StableDiffusion3Pipeline")(tiny_sd3)
    with torch.no_grad():
        base = rules.score_step(rules.load_transformer(torch.float32), make_rows(tiny_sd3), 1, training.KNOBS)
    assert torch.allclose(reference, base.mean, rtol=0, atol=1e-6)
    assert not torch.allclose(policy, base.mean, rtol=0, atol=1e-4)
    assert recorded.shape == (4, 2)
    assert recorded.dtype == torch.float32
    assert torch.allclose(recorded[:, 1], log_prob, rtol=0, atol=1e-5)


def test_bfloat16_keeps_trained_weights_timesteps_and_the_first_ratio_whole(one: Ranks, tiny_sd3: Path) -> None:
    dtypes, timesteps, gradients, metrics = one.run(training.storage, tiny_sd3)[0]
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {torch.bfloat16}
    assert gradients == {torch.float32}
    assert timesteps.dtype == torch.float32
    assert set(timesteps.tolist()) == set(make_rows(tiny_sd3)["all_timesteps"].flatten().tolist())
    assert metrics["first_ratio_max_dev"] == 0  # both passes see the same micro-batches
    assert metrics["ratio_max_dev"] > 0
    assert metrics["grad_norm"] > 0
    assert metrics["skipped_steps"] == 0


# ---- checkpoints, LoRA folders


@pytest.mark.parametrize(
    ("family", "writer", "reader"),
    [
        ("sd3", "one", "one"),
        ("sd3", "two", "two"),
        ("sd3", "two", "one"),
        ("qwen", "one", "one"),  # nothing follows its last block's text side: that never gets a gradient
    ],
)
def test_a_resumed_run_goes_on_as_if_never_stopped(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, writer: str, reader: str
) -> None:
    path = request.getfixturevalue(f"tiny_{family}")
    actor = actor_config(lr_scheduler_type="cosine")
    written = request.getfixturevalue(writer).run(training.save, path, tmp_path / "actor", actor)[0]
    handed_out_is_unchanged, at, after, metrics = written
    assert handed_out_is_unchanged
    resumed_at, resumed_after, resumed_metrics = request.getfixturevalue(reader).run(
        training.resume, path, tmp_path / "actor", actor
    )[0]
    assert all(torch.equal(at[name], resumed_at[name]) for name in at)
    assert resumed_metrics["lr"] == metrics["lr"]
    if writer == reader:
        assert all(torch.equal(after[name], resumed_after[name]) for name in after)
    else:
        assert close(after, resumed_after)
    kept = FileSystemReader(tmp_path / "actor").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in kept if name.startswith("model."))


def test_a_folder_without_a_checkpoint_is_refused(one: Ranks, tiny_sd3: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint of the training workers"):
        one.run(training.resume, tiny_sd3, tmp_path, actor_config())


def test_all_weights_are_handed_out_under_the_checkpoints_names(one: Ranks, tiny_sd3: Path) -> None:
    policy = one.run(training.gradients, tiny_sd3, actor_config(kl=False), {"lora_rank": 0})[0][0]
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(tiny_sd3, subfolder="transformer")
    assert set(policy) == {f"transformer.{name}" for name in transformer.state_dict()}


INPUTS = {
    "sd3": {
        "hidden_states": torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0)),
        "timestep": torch.tensor([500.0, 700.0]),
        "encoder_hidden_states": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)),
        "pooled_projections": torch.randn(2, 64, generator=torch.Generator().manual_seed(2)),
    },
    "qwen": {
        "hidden_states": torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0)),
        "timestep": torch.tensor([0.5, 0.7]),
        "encoder_hidden_states": torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)),
        "encoder_hidden_states_mask": torch.ones(2, 5, dtype=torch.bool),
        "img_shapes": [[(1, 4, 4)]] * 2,
    },
}
PIPELINES = {"sd3": diffusers.StableDiffusion3Pipeline, "qwen": diffusers.QwenImagePipeline}


@pytest.mark.parametrize("targets", [None, "all-linear"])
@pytest.mark.parametrize("family", ["sd3", "qwen"])
def test_a_written_lora_loads_everywhere(
    one: Ranks, request: pytest.FixtureRequest, tmp_path: Path, family: str, targets: str | None
) -> None:
    path, rows = request.getfixturevalue(f"tiny_{family}"), INPUTS[family]
    folder = tmp_path / "lora"
    expected = one.run(training.write_moved_lora, path, folder, rows, {"target_modules": targets})[0]

    def predict(transformer: Any) -> Tensor:
        with torch.no_grad():
            return transformer(**rows, return_dict=False)[0]

    pipe = PIPELINES[family].from_pretrained(path)
    assert not torch.allclose(predict(pipe.transformer), expected, atol=1e-3)
    pipe.load_lora_weights(folder)
    assert torch.allclose(predict(pipe.transformer), expected, rtol=0, atol=1e-5)
    fresh = type(pipe.transformer).from_pretrained(path, subfolder="transformer")
    assert torch.allclose(predict(PeftModel.from_pretrained(fresh, folder)), expected, rtol=0, atol=1e-5)
    assert read_lora_config(folder)["r"] == 4


def test_without_a_lora_none_is_saved(one: Ranks, tiny_sd3: Path, tmp_path: Path) -> None:
    message = one.run(training.save_lora_without_one, tiny_sd3, tmp_path)[0]
    assert message == "all weights are trained, there is no LoRA to save; use save_checkpoint"
    assert not list(tmp_path.iterdir())


# ---- what cannot be


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"target_modules": ["to_nowhere"]}, "ConfigError: .*model.target_modules=.*to_nowhere"),
        ({"attn_backend": "flash"}, "ConfigError: .*model.attn_backend='flash': SD3.* has one attention only"),
        ({"architecture": "NoPipeline"}, "ValueError: .*NoPipeline"),
    ],
)
def test_a_model_that_cannot_be_built_is_an_error(
    one: Ranks, tiny_sd3: Path, model: dict[str, Any], message: str
) -> None:
    assert re.match(message, one.run(training.refuse, tiny_sd3, model)[0])


def test_an_attention_that_is_not_there_is_an_error(one: Ranks, tiny_qwen: Path) -> None:
    assert (
        "ConfigError: actor_rollout_ref.model.attn_backend='nonsense'"
        in one.run(training.refuse, tiny_qwen, {"attn_backend": "nonsense"})[0]
    )
    assert one.run(training.refuse, tiny_qwen, {"attn_backend": "native"})[0] == ""
