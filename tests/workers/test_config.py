"""Config dataclasses: defaults, unknown keys, and values with the accepted form in their errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.numpy import save_file

from verl_omni.algorithms import flow_sde
from verl_omni.pipelines import params
from verl_omni.workers.config import ConfigError, DiffusionModelConfig, DiffusionRolloutConfig, build
from verl_omni.workers.config.base import MANY_KEYS, unknown_key
from verl_omni.workers.config.lora import LORA_CONFIG, LORA_WEIGHTS, MIN_LORA_SCALE
from verl_omni.workers.config.rollout import OUTPUT_TYPES, SDE_TYPES, UNMERGEABLE, check_engine_keys
from verl_omni.workers.rollout import engine as engine_module
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.engine_keys import engine_keys
from verl_omni.workers.rollout.plan import AdapterCapabilities, resolve_plan
from verl_omni.workers.rollout.seeds import request_seed

ROLLOUT = "actor_rollout_ref.rollout"
CAPABLE = AdapterCapabilities(name="A", request_batch=True, missing_step_methods=())


def rollout(mapping):
    return build(DiffusionRolloutConfig, mapping, ROLLOUT)


def test_defaults_need_nothing():
    config = rollout(None)
    assert config == rollout({"pipeline": None, "engine_kwargs": {"vllm_omni": None}}) == DiffusionRolloutConfig()
    assert (config.name, config.n, config.seed, config.dtype, config.step_execution) == (
        "vllm_omni",
        1,
        42,
        "bfloat16",
        False,
    )


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"max_num_seq": 8},
            r"rollout\.max_num_seq is not a known key; did you mean actor_rollout_ref\.rollout\.max_num_seqs\?",
        ),
        ({"pipeline": {"heigth": 8}}, r"pipeline\.heigth .*pipeline\.height\?"),
        ({"height": 8}, r"rollout\.height .*rollout\.pipeline\.height\?"),
        ({"algo": {"sde_windowsize": 2}}, r"algo\.sde_window_size\?"),
        ({"tensor_model_parallel": 2}, "known: "),
        ({"engine_kwargs": {"vllm": {}}}, r"engine_kwargs\.vllm .*engine_kwargs\.vllm_omni\?"),
        ({"engine_kwargs": {"vllm_omni": 3}}, "must be a mapping"),
        ({"engine_kwargs": 3}, "must be a mapping"),
        ({"engine_kwargs": {"vllm_omni": {"dtype": "float32"}}}, r"write actor_rollout_ref\.rollout\.dtype"),
        ({"engine_kwargs": {"vllm_omni": {"engine_backend": "x"}}}, "leave it out"),
        ({"engine_kwargs": {"vllm_omni": {"rows_per_forward": 0}}}, "integer of at least 1"),
        ({"engine_kwargs": {"vllm_omni": {"request_batch_max_wait_ms": -1}}}, "number of at least 0"),
        ({"pipeline": 3}, r"rollout\.pipeline must be a mapping"),
        ({"n": 0}, r"rollout\.n=0 must be an integer of at least 1"),
        ({"n": None}, r"rollout\.n=null must be an integer"),
        ({"n": True}, r"rollout\.n=true must be an integer"),
        ({"seed": -1}, "integer of at least 0, or null for unseeded"),
        ({"dtype": "float64"}, "bfloat16, float16, float32"),
        ({"dtype": ["float32"]}, "bfloat16"),
        ({"step_execution": "yes"}, "true or false"),
        ({"step_execution": 1}, "true or false"),
        ({"batching_mode": "stepwise"}, "did you mean step_wise"),
        ({"name": "sglang"}, "vllm_omni"),
        ({"profile": 3}, "text"),
        ({"pipeline": {"height": 0}}, r"pipeline\.height=0"),
        ({"pipeline": {"true_cfg_scale": "much"}}, "finite number"),
        ({"pipeline": {"guidance_scale": float("inf")}}, "finite number"),
        ({"pipeline": {"output_type": "pil"}}, "one of pt, latent"),
        ({"algo": {"noise_level": -0.1}}, "of at least 0"),
        ({"algo": {"noise_level": 1.5, "sde_type": "cps"}}, "from 0 to 1"),
        ({"algo": {"sde_type": "ode"}}, "one of sde, cps, dance_sde"),
        ({"algo": {"sde_window_range": [0]}}, "two integers"),
        ({"algo": {"sde_window_range": "05"}}, "two integers"),
        ({"algo": {"sde_window_range": [0, 1.5]}}, "integer"),
        ({"algo": {"sde_window_size": 3, "sde_window_range": [1, 3]}}, "no room"),
        (
            {"algo": {"sde_window_range": [0, 5]}},
            r"range=\[0, 5\] is given without sde_window_size; write .*\.sde_window_size=… too, or .*_range=null",
        ),
        ({"val_kwargs": {"n": "many"}}, r"val_kwargs\.n="),
    ],
)
def test_errors_name_the_key_and_the_accepted_form(mapping, message):
    with pytest.raises(ConfigError, match=message):
        rollout(mapping)


def test_strings_and_short_names_are_read():
    config = rollout(
        {
            "n": "4",
            "dtype": "fp32",
            "step_execution": "true",
            "algo": {"sde_window_size": "2", "sde_window_range": ["0", 5], "noise_level": "0.5"},
        }
    )
    assert (config.n, config.dtype, config.step_execution) == (4, "float32", True)
    assert (config.algo.sde_window_range, config.algo.noise_level) == ((0, 5), 0.5)


def test_engine_options_leave_out_nulls_and_what_the_plan_reads():
    config = rollout(
        {
            "engine_kwargs": {
                "vllm_omni": {"enforce_eager": True, "num_gpus": None, "max_num_seqs": 4, "rows_per_forward": 2}
            }
        }
    )
    assert config.engine_options() == {"enforce_eager": True}
    assert config.vllm_omni == {"enforce_eager": True, "max_num_seqs": 4, "rows_per_forward": 2}


def test_engine_keys_are_those_that_reach_the_engine():
    known = engine_keys()
    check_engine_keys(
        {"enforce_eager": True, "enable_sleep_mode": True, "tensor_parallel_size": 2, "rows_per_forward": 4}, known
    )
    with pytest.raises(ConfigError, match=r"vllm_omni\.enforce_eagre .*vllm_omni\.enforce_eager\?"):
        check_engine_keys({"enforce_eagre": True}, known)
    with pytest.raises(ConfigError, match="moe_backend"):  # a field of the engine's config that its launcher drops
        check_engine_keys({"moe_backend": "auto"}, known)


def test_validation_samples_as_val_kwargs_say():
    val = rollout(
        {"n": 8, "val_kwargs": {"n": 2, "seed": 7, "num_inference_steps": 28, "true_cfg_scale": 4}}
    ).for_validation()
    assert (val.n, val.seed, val.pipeline.num_inference_steps, val.pipeline.true_cfg_scale, val.algo.noise_level) == (
        2,
        7,
        28,
        4.0,
        0.0,
    )


def test_model_config(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.path is required"):
        build(DiffusionModelConfig, {}, "actor_rollout_ref.model")
    for path in (tmp_path / "none", "./none", "none"):
        with pytest.raises(ConfigError, match="is no folder"):
            DiffusionModelConfig(path=str(path)).resolve_architecture()
    model = DiffusionModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path: .* holds no model_index\.json"):
        model.resolve_architecture()
    index = tmp_path / "model_index.json"
    for content, message in (
        ("{", r"model\.path: .* cannot be read"),
        ("{}", r"no _class_name; .* set actor_rollout_ref\.model\.arch"),
    ):
        index.write_text(content)
        with pytest.raises(ConfigError, match=message):
            model.resolve_architecture()
    index.write_text(json.dumps({"_class_name": "QwenImagePipeline"}))
    assert model.resolve_architecture() == "QwenImagePipeline"
    assert DiffusionModelConfig(path="a/b", architecture="Mine").resolve_architecture() == "Mine"


def write_lora(
    folder: Path,
    config: str = '{"r": 2, "lora_alpha": 4}',
    name: str = "base_model.model.a.lora_A.weight",
    dtype: str = "float32",
) -> None:
    folder.mkdir()
    (folder / LORA_CONFIG).write_text(config)
    save_file({name: numpy.ones((2, 4), dtype=dtype)} if name else {}, folder / LORA_WEIGHTS)


def test_the_files_of_a_lora_are_checked(tmp_path: Path):
    def error(folder: str) -> str:
        with pytest.raises(ConfigError, match=r"model\.lora_path: ") as caught:
            DiffusionModelConfig(path="a/b", lora_path=str(tmp_path / folder))
        return str(caught.value)

    write_lora(tmp_path / "good")
    assert DiffusionModelConfig(path="a/b", lora_path=str(tmp_path / "good")).lora_scale == 1.0
    assert f"absent; name the one that holds {LORA_CONFIG}, such as global_step_N/lora" in error("absent")
    assert f" has no {LORA_CONFIG}" in error("")
    (tmp_path / "good" / LORA_WEIGHTS).rename(tmp_path / "adapter_model.bin")
    assert f"good has no {LORA_WEIGHTS}; save the adapter with PEFT's save_pretrained" in error("good")
    (tmp_path / "good" / LORA_WEIGHTS).write_bytes(b"version https://git-lfs")
    assert f"{LORA_WEIGHTS} cannot be read" in error("good")
    cases = [
        ({"config": "{"}, "cannot be read"),
        ({"config": "[]"}, "must hold an object"),
        ({"config": '{"rank_pattern": {"to_q": 8}}'}, "uses rank_pattern, which the engine ignores"),
        ({"name": "a.lora_magnitude_vector"}, "holds a.lora_magnitude_vector, which is no LoRA weight"),
        ({"name": ""}, "holds no weights"),
        ({"config": '{"r": 3, "lora_alpha": 4}'}, "a.lora_A.weight has shape [2, 4], which is not [r, in] with r=3"),
        ({"config": '{"r": 2, "lora_alpha": NaN}'}, "has lora_alpha=nan in its config"),
        ({"dtype": "int64"}, "a.lora_A.weight is of dtype I64"),
    ]
    for index, (lora, message) in enumerate(cases):
        write_lora(tmp_path / str(index), **lora)
        assert message in error(str(index))


def test_a_lora_is_not_merged_into_weights_that_are_quantized_spread_or_offloaded():
    assert set(UNMERGEABLE) <= engine_keys()
    for key in UNMERGEABLE:
        value = "fp8" if "quant" in key else 2
        given = {"engine_kwargs": {"vllm_omni": {key: value}}}
        rollout(given)
        with pytest.raises(ConfigError, match=rf"{key}={value}; write {ROLLOUT}\.merge_lora=false"):
            rollout({**given, "merge_lora": True})
    harmless = {"quantization": None, "tensor_parallel_size": 1, "enable_layerwise_offload": False}
    assert rollout({"merge_lora": "true", "engine_kwargs": {"vllm_omni": harmless}}).merge_lora is True


async def test_an_engine_that_cannot_merge_is_closed_again_and_says_which_key_to_change(monkeypatch):
    omni, closed = SimpleNamespace(final_output_task=None), []

    async def refuse(method, args):
        return [{"supported": False, "error": f"{method}: its weight is quantized; use merge_lora=false"}]

    omni.collective_rpc, omni.shutdown = refuse, lambda: closed.append(True)
    monkeypatch.setattr(engine_module, "launch", lambda *_: omni)
    start = {
        "model_path": "m",
        "plan": resolve_plan(rollout(None), CAPABLE),
        "adapter": "builtins.object",
        "lora_key_map": {},
    }
    with pytest.raises(ConfigError, match=rf"{ROLLOUT}\.merge_lora=true: .*quantized; use merge_lora=false"):
        await RolloutEngine.start(**start, merge_lora=True)
    assert closed == [True]


@pytest.mark.parametrize("scale", [0.0, 9e-4, -9e-4, 1e-3, -1.0])
async def test_a_lora_scale_is_refused_where_the_engine_refuses_it(scale: float):
    engine = RolloutEngine(None, {})
    if abs(scale) < MIN_LORA_SCALE:
        with pytest.raises(ConfigError, match=r"lora_scale=.* is nearer to 0 than 0\.001; write .*lora_path=null"):
            DiffusionModelConfig(path="a/b", lora_scale=scale)
        with pytest.raises(ValueError, match="remove_lora"):
            await engine.load_lora("/no/such/adapter", scale=scale)
    else:
        assert DiffusionModelConfig(path="a/b", lora_scale=scale).lora_scale == scale
        with pytest.raises(ValueError, match="/no/such/adapter"):
            await engine.load_lora("/no/such/adapter", scale=scale)


@pytest.mark.parametrize("scale", [torch.tensor(1.0), "1", None, [1], True, math.nan, math.inf, 10**400])
async def test_what_is_no_finite_number_is_no_lora_scale(scale):
    engine = RolloutEngine(None, {})
    with pytest.raises(ValueError, match=r"scale must be a finite number .*; call remove_lora\(\)"):
        await engine.load_lora("/no/such/adapter", scale=scale)
    assert engine.policy_version == 0


@pytest.mark.parametrize("version", ["5", math.nan, 5.0, True])
async def test_a_policy_version_is_an_integer(version):
    engine = RolloutEngine(None, {})
    for change in (engine.load_lora("/no/such/adapter", version=version), engine.update_weights({}, version=version)):
        with pytest.raises(ValueError, match="version must be an integer, or None for one more than the old, got "):
            await change
    assert engine.policy_version == 0


def test_the_choices_are_those_of_the_adapters():
    """Written twice, as the configuration imports no torch."""
    assert SDE_TYPES == flow_sde.SDE_TYPES
    assert OUTPUT_TYPES == params.OUTPUT_TYPES


def test_request_seeds():
    assert request_seed(None, 3) is None
    assert request_seed(42, 3) == 42 * 1000003 + 3
    assert request_seed(42, 3, step=2) == 43 * 1000003 + 3
    assert request_seed(2**63, 0) == 2**63 * 1000003 % (2**63 - 1)
    seeds = [request_seed(42, row, step=step) for step in (1, 2) for row in range(512)]
    assert len(set(seeds)) == len(seeds)


def test_of_many_known_keys_those_most_like_an_unknown_one_are_told():
    names = [f"a.key_{i:02d}" for i in range(MANY_KEYS)]
    assert unknown_key("a.foo", names).endswith(f"known: {', '.join(name[2:] for name in names)}")
    told = unknown_key("a.flow", [*names, "a.flavour_it"])
    assert "known: flavour_it, key_" in told and told.endswith(f" and {MANY_KEYS + 1 - 5} more")
