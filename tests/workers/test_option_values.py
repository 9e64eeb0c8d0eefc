"""Values of the engine's options: what it would fail on at its start is an error of the configuration before that."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.plans import JSON
from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.rollout import MANAGED_KEYS, PLAN_KEYS
from verl_omni.workers.rollout.engine_keys import check_engine_values, engine_keys

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
        ({"init_timeout": 0}, r"init_timeout=0 must be an integer of at least 1, or null for the engine's default"),
    ],
)
def test_the_error_names_what_is_refused_and_says_what_to_write(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        check_engine_values(options)
    assert "null for the engine's default" in str(error.value)


def test_numbers_may_be_strings_and_what_goes_together_is_taken():
    check_engine_values({"tensor_parallel_size": "2", "num_gpus": 4, "init_timeout": 90, "enforce_eager": True})
