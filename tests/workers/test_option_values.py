"""Values of the engine's options: what it would fail on at its start is an error of the configuration before that."""

from __future__ import annotations

import dataclasses
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

from tests.workers.engines import SERIAL
from tests.workers.plans import JSON
from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.rollout import MANAGED_KEYS, PLAN_KEYS
from verl_omni.workers.rollout.engine_keys import check_engine_values, engine_flags, engine_keys, typed_options
from verl_omni.workers.rollout.launch import engine_arguments

KEYS = sorted(engine_keys() - MANAGED_KEYS.keys() - {*PLAN_KEYS})


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3))
def test_any_values_are_taken_or_refused(options):
    with suppress(ConfigError):
        check_engine_values(options)


@pytest.mark.parametrize("key", KEYS)
def test_any_kind_of_value_of_each_key_is_taken_or_refused(key):
    for value in (True, 3, 2.5, "x", "", [], ["x"], {}, {"k": 1}, {"default": 3}, {"quant_method": "fp8"}):
        with suppress(ConfigError):
            check_engine_values({key: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enforce_eager": True, "diffusion_attention_backend": 3}, r"rejects \{'diffusion_attention_backend': 3\}: "),
        (
            {"tensor_parallel_size": "two"},
            r"rejects \{'tensor_parallel_size': 'two'\}: .*tensor_parallel_size .*integer",
        ),
        ({"num_gpus": 3, "cfg_parallel_size": 2}, r"rejects \{'num_gpus': 3, 'cfg_parallel_size': 2\}: .*divisible"),
        (
            {"use_hsdp": True, "hsdp_shard_size": 2, "diffusion_attention_backend": 3},
            r"rejects \{'diffusion_attention_backend': 3\}: .*'lower'; write another value",
        ),
        (
            {"sequence_parallel_size": 2, "ulysses_degree": 2, "tensor_parallel_size": "two"},
            r"rejects \{'tensor_parallel_size': 'two'\}: .*integer.*; write another value",
        ),
        (
            {"sequence_parallel_size": 2, "ulysses_degree": 4},
            r"rejects \{'sequence_parallel_size': 2, 'ulysses_degree': 4\}: .*; write other values",
        ),
        ({"num_gpus": 10**12}, r"\{'num_gpus': 1000000000000\} asks for more than 1048576 devices; write smaller "),
        ({"ring_degree": 10**4000, "ulysses_degree": 10**4000}, "asks for more than"),
        ({"parallel_config": {"tensor_parallel_size": 10**9}}, r"asks for more than"),
        ({"tensor_parallel_size": "2048", "cfg_parallel_size": 2048}, r"asks for more than"),
        ({"use_hsdp": True, "hsdp_shard_size": 2**20, "hsdp_replicate_size": 2}, r"asks for more than"),
        ({"enforce_eager": "no"}, r"enforce_eager='no' must be true or false"),
        ({"trust_remote_code": "no"}, r"trust_remote_code='no' must be true or false"),
        ({"use_hsdp": 1}, r"use_hsdp=1 must be true or false"),
        ({"log_stats": []}, r"log_stats=\[\] must be true or false"),
        ({"diffusion_streaming_output": "on"}, r"diffusion_streaming_output='on' must be true or false"),
        ({"distributed_executor_backend": "abc"}, r"distributed_executor_backend='abc' must be one of uni, mp"),
        ({"distributed_executor_backend": "no.such.Executor"}, r"rejects \{'distributed_executor_backend': 'no\."),
        ({"num_weight_load_threads": -1}, r"num_weight_load_threads=-1 must be an integer of at least 1"),
        ({"init_timeout": 0}, r"init_timeout=0 must be an integer of at least 1, or null for the engine's default"),
    ],
)
def test_the_error_names_what_is_refused_and_says_what_to_write(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_engine_values(options)
    assert "null for the engine's default" in str(error.value)


def test_numbers_may_be_strings_and_what_goes_together_is_taken():
    check_engine_values({"tensor_parallel_size": "2", "num_gpus": 4, "init_timeout": 90, "enforce_eager": True})


def test_flags_are_the_options_that_the_engine_annotates_as_bool():
    configs = (OmniDiffusionConfig, DiffusionParallelConfig)
    annotated = {field.name for config in configs for field in dataclasses.fields(config) if field.type is bool}
    assert annotated <= engine_flags()
    without_field = {"log_stats", "diffusion_streaming_output", "enable_ar_profiler"}
    assert (engine_flags() - annotated) & engine_keys() == without_field


def test_the_engine_gets_options_that_came_as_strings_with_their_types():
    given = {"enforce_eager": "false", "trust_remote_code": "True", "num_weight_load_threads": "2", "init_timeout": "9"}
    typed = {"enforce_eager": False, "trust_remote_code": True, "num_weight_load_threads": 2, "init_timeout": 9}
    as_they_are = {"distributed_executor_backend": "mp", "flow_shift": 3.0}
    assert typed_options(given | as_they_are) == typed | as_they_are
    rest = {"adapter": "a.B", "dtype": "bfloat16", "executor": None, "masks_text": True}
    arguments = engine_arguments(SERIAL.plan, engine_kwargs=given, **rest)
    assert {key: arguments[key] for key in typed} == typed
    with pytest.raises(ConfigError, match="trust_remote_code='no' must be true or false"):
        engine_arguments(SERIAL.plan, engine_kwargs={"trust_remote_code": "no"}, **rest)
