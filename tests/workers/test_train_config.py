"""The config dataclasses of training: defaults, accepted forms, errors that name the key and what may be written."""

from __future__ import annotations

import pytest

from verl_omni.workers.config import (
    ConfigError,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    FSDPDiffusionActorConfig,
    RefConfig,
    build,
)
from verl_omni.workers.config.named import NamedRegistry

ACTOR = "actor_rollout_ref.actor"


def actor(mapping):
    return build(FSDPDiffusionActorConfig, mapping, ACTOR)


def test_the_defaults_of_the_actor_are_those_of_flow_grpo_with_a_lora():
    config = actor(None)
    assert (config.strategy, config.ppo_mini_batch_size, config.ppo_micro_batch_size_per_gpu) == ("fsdp2", None, 8)
    assert (config.ppo_epochs, config.use_kl_loss, config.kl_loss_coef) == (1, False, 0.04)
    assert (config.diffusion_loss.loss_mode, config.diffusion_loss.clip_ratio) == ("flow_grpo", 1e-4)
    assert (config.optim.lr, config.optim.weight_decay, config.optim.betas) == (1e-4, 1e-4, (0.9, 0.999))
    assert config.fsdp_config.fsdp_size == -1


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"clip_ratio": 1e-3}, r"actor\.clip_ratio .*actor\.diffusion_loss\.clip_ratio\?"),
        ({"use_dynamic_bsz": True}, "known: "),
        ({"grad_clip": 1.0}, "known: "),
        ({"optim": {"learning_rate": 1}}, "known: "),
        ({"strategy": "fsdp"}, r"actor\.strategy='fsdp' must be one of fsdp2; did you mean fsdp2"),
        ({"ppo_mini_batch_size": 0}, r"ppo_mini_batch_size=0 must be an integer of at least 1, or null for the whole"),
        ({"ppo_micro_batch_size_per_gpu": None}, r"ppo_micro_batch_size_per_gpu=null must be an integer of at least 1"),
        ({"ppo_epochs": 1.5}, r"ppo_epochs=1\.5 must be an integer"),
        ({"use_kl_loss": 1}, "true or false"),
        ({"kl_loss_coef": -1}, "of at least 0"),
        ({"diffusion_loss": {"clip_ratio": 0}}, r"clip_ratio=0 must be a finite number above 0 and at most 1"),
        ({"diffusion_loss": {"clip_ratio": 2}}, r"above 0 and at most 1"),
        ({"diffusion_loss": {"loss_mode": ""}}, "text that is not empty"),
        ({"optim": {"optimizer": "SGD"}}, "one of AdamW, Adam"),
        ({"optim": {"lr": "fast"}}, r"optim\.lr='fast' must be a finite number of at least 0"),
        ({"optim": {"lr": -1e-4}}, r"of at least 0"),
        ({"optim": {"clip_grad": 0}}, r"clip_grad=0 must be a finite number above 0"),
        ({"optim": {"betas": [0.9]}}, r"betas=\[0\.9\] must be two numbers"),
        ({"optim": {"betas": [0.9, 1]}}, r"betas=\[0\.9, 1\] must be two numbers"),
        ({"optim": {"betas": "0.9"}}, "must be two numbers"),
        ({"optim": {"lr_scheduler_type": "linear"}}, "one of constant, cosine"),
        ({"optim": {"lr_warmup_steps": -1}}, "integer of at least 0"),
        ({"optim": {"min_lr_ratio": 1.1}}, "from 0 to 1"),
        (
            {"fsdp_config": {"model_dtype": "float16"}},
            r"fsdp_config\.model_dtype='float16' must be one of bfloat16, fl",
        ),
        ({"fsdp_config": {"param_dtype": None}}, "param_dtype=null must be one of"),
        ({"fsdp_config": {"fsdp_size": 0}}, r"fsdp_size=0 must be an integer of at least 1"),
        ({"fsdp_config": {"param_offload": "no"}}, "true or false"),
    ],
)
def test_errors_of_the_actor_name_the_key_and_the_accepted_form(mapping, message):
    with pytest.raises(ConfigError, match=message):
        actor(mapping)


def test_strings_from_a_command_line_and_short_dtypes_are_read():
    config = actor(
        {
            "ppo_mini_batch_size": "4",
            "use_kl_loss": "true",
            "optim": {"optimizer": "adamw", "lr": "3e-4", "betas": ["0.8", 0.99]},
            "fsdp_config": {"model_dtype": "fp32", "param_dtype": "bf16", "fsdp_size": "-1"},
        }
    )
    assert (config.ppo_mini_batch_size, config.use_kl_loss) == (4, True)
    assert (config.optim.optimizer, config.optim.lr, config.optim.betas) == ("AdamW", 3e-4, (0.8, 0.99))
    fsdp = config.fsdp_config
    assert (fsdp.model_dtype, fsdp.param_dtype, fsdp.fsdp_size) == ("float32", "bfloat16", -1)


def test_a_learning_rate_of_0_is_accepted():
    assert actor({"optim": {"lr": 0}}).optim.lr == 0


def test_the_micro_batch_of_the_reference_is_a_number_or_the_actors():
    assert RefConfig().log_prob_micro_batch_size_per_gpu is None
    assert RefConfig(log_prob_micro_batch_size_per_gpu="4").log_prob_micro_batch_size_per_gpu == 4
    with pytest.raises(ConfigError, match=r"ref\.log_prob_micro_batch_size_per_gpu=0 must be"):
        RefConfig(log_prob_micro_batch_size_per_gpu=0)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"lora_rank": -1}, r"model\.lora_rank=-1 must be an integer of at least 0"),
        ({"lora_alpha": 0}, r"model\.lora_alpha=0 must be an integer of at least 1"),
        ({"target_modules": []}, r"target_modules=\[\] must be a module name or a list of them, or null"),
        ({"target_modules": ["to_q", 3]}, "must be a module name or a list"),
        ({"extra_tokenizers": ""}, r"extra_tokenizers='' must be a folder name or a list of them, or null for none"),
        ({"attn_backend": 3}, "text that is not empty, or null"),
        ({"enable_gradient_checkpointing": None}, "true or false"),
        ({"lora_ranks": 3}, r"did you mean actor_rollout_ref\.model\.lora_rank\?"),
    ],
)
def test_errors_of_the_models_training_keys(mapping, message):
    with pytest.raises(ConfigError, match=message):
        build(DiffusionModelConfig, {"path": "a/b", **mapping}, DiffusionModelConfig.KEY)


def test_modules_come_as_a_list_or_as_all_linear():
    def modules(value):
        return DiffusionModelConfig(path="a/b", target_modules=value).target_modules

    assert modules(["to_q", "to_k"]) == ["to_q", "to_k"]
    assert modules("to_q") == ["to_q"]
    assert modules("all-linear") == "all-linear"
    assert modules(None) is None
    assert DiffusionModelConfig(path="a/b", extra_tokenizers="tokenizer_2").extra_tokenizers == ["tokenizer_2"]


def test_engines_and_their_devices():
    config = DiffusionRolloutConfig(replicas="2", gpus_per_replica="4", colocate="false", start_timeout_s="90")
    assert (config.replicas, config.gpus_per_replica, config.colocate) == (2, 4, False)
    assert config.start_timeout_s == 90.0
    with pytest.raises(ConfigError, match=r"rollout\.start_timeout_s=0 must be a finite number above 0"):
        DiffusionRolloutConfig(start_timeout_s=0)
    patient = DiffusionRolloutConfig(result_timeout_s="60", sync_timeout_s=None)
    assert (patient.result_timeout_s, patient.sync_timeout_s) == (60.0, None)
    for key in ("result_timeout_s", "sync_timeout_s"):
        with pytest.raises(
            ConfigError, match=rf"rollout\.{key}=0 must be a finite number above 0, or null for no limit"
        ):
            DiffusionRolloutConfig(**{key: 0})
    for key in ("replicas", "gpus_per_replica"):
        with pytest.raises(ConfigError, match=rf"rollout\.{key}=0 must be an integer of at least 1"):
            DiffusionRolloutConfig(**{key: 0})


def test_a_registry_names_what_it_has_and_refuses_a_second_of_the_same_name():
    registry: NamedRegistry[type] = NamedRegistry("some.key")

    @registry.register("one")
    class One:
        pass

    again = type("One", (), {"__module__": One.__module__, "__qualname__": One.__qualname__})
    assert registry.get("one") is One
    registry.register("one")(again)  # as after a reload
    assert registry.get("one") is again
    with pytest.raises(ConfigError, match=r"some\.key='onne' must be one of one; did you mean one\?"):
        registry.get("onne")
    with pytest.raises(ValueError, match=r"'one' is registered to .*One already"):
        registry.register("one")(dict)
