"""Requests on their way into the engine, and policies on theirs."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_omni.pipelines.params import RequestError, RolloutParams
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest
from verl_omni.workers.rollout.staging import engine_name, staged_lora, staged_weights


def test_a_request_says_only_what_was_set():
    prompt, sampling = RolloutRequest(request_id="r").to_engine()
    assert prompt == {} and sampling == {"num_outputs_per_prompt": 1, "extra_args": {"logprobs": True}}


def test_every_knob_goes_to_its_place():
    request = RolloutRequest(
        request_id="r",
        prompt="a cat",
        negative_prompt_token_ids_2=[1, 2],
        prompt_mask=[1, 0],
        height=64,
        true_cfg_scale=0.0,
        noise_level=0.0,
        sde_window_range=(0, 3),
        logprobs=False,
    )
    prompt, sampling = request.to_engine()
    assert prompt == {"prompt": "a cat", "negative_prompt_token_ids_2": [1, 2], "prompt_mask": [1, 0]}
    assert sampling.pop("extra_args") == {"noise_level": 0.0, "sde_window_range": (0, 3), "logprobs": False}
    assert sampling == {"height": 64, "true_cfg_scale": 0.0, "num_outputs_per_prompt": 1}


@pytest.mark.parametrize(
    "value", [torch.tensor(3), np.int64(3), np.array([3]), torch.ones(1, requires_grad=True)[0] * 3]
)
def test_numbers_of_torch_and_numpy_become_plain_ones(value):
    _, sampling = RolloutRequest(request_id="r", seed=value).to_engine()
    assert sampling["seed"] == 3 and type(sampling["seed"]) in (int, float)


@pytest.mark.parametrize("value", [torch.tensor([64, 64]), np.array([64, 64]), object(), {64}, [object()]])
@pytest.mark.parametrize("knob", ["height", "noise_level", "sde_window_range"])
def test_a_knob_that_is_no_plain_value_is_refused_before_the_engine_copies_it(knob, value):
    with pytest.raises(RequestError, match=f"{knob} must be a number, text, or a list of them, got a "):
        RolloutRequest(request_id="r", **{knob: value}).to_engine()


@pytest.mark.parametrize("value", [{0, 1}, {0: 1, 1: 2}, b"01", "01"])
def test_a_window_range_that_has_no_order_or_no_integers_is_refused_by_the_adapter_too(value):
    sampling = OmniDiffusionSamplingParams(seed=1, extra_args={"sde_window_size": 1, "sde_window_range": value})
    model = dict(default_size=64, default_steps=4, default_cfg_scale=1.0, text_limit=64, default_text_length=64)
    with pytest.raises(RequestError, match="sde_window_range must be two integers"):
        RolloutParams.read(sampling, cfg_key="true_cfg_scale", **model)


@pytest.mark.parametrize("request_id", [None, 5, ["x"], b"b"])
def test_an_id_that_is_no_text_is_refused(request_id):
    with pytest.raises(ValueError, match="request_id must be text, got "):
        RolloutRequest(request_id=request_id)


def test_an_error_survives_its_way_from_another_process():
    error = pickle.loads(pickle.dumps(RolloutError("r", "too long")))
    assert (error.request_id, error.message, str(error)) == ("r", "too long", "request 'r': too long")
    assert str(RolloutError(None, "asleep")) == "asleep"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (
            "base_model.model.blocks.0.attn.to_out.0.lora_A.weight",
            "base_model.model.blocks.0.attn.to_out.lora_A.weight",
        ),
        ("to_out.0.lora_B.weight", "to_out.lora_B.weight"),
        ("blocks.0.into_out.0.lora_A.weight", "blocks.0.into_out.0.lora_A.weight"),
        ("blocks.0.attn.to_q.lora_A.weight", "blocks.0.attn.to_q.lora_A.weight"),
    ],
)
def test_lora_names_are_mapped_by_their_trailing_part(key: str, expected: str):
    assert engine_name(key, {"to_out.0": "to_out"}) == expected


def adapter(folder, **config):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 2, "lora_alpha": 2, "target_modules": "all-linear"} | config)
    )
    save_file({"base_model.model.a.to_out.0.lora_A.weight": torch.ones(2, 4)}, folder / "adapter_model.safetensors")
    return folder


def test_a_staged_adapter_has_the_engines_names_and_is_gone_afterwards(tmp_path):
    with staged_lora(adapter(tmp_path / "lora"), {"to_out.0": "to_out"}) as staged:
        assert list(load_file(staged / "adapter_model.safetensors")) == ["base_model.model.a.to_out.lora_A.weight"]
        assert json.loads((staged / "adapter_config.json").read_text())["target_modules"] == ["to_out"]
    assert not staged.exists()


def test_an_adapter_that_the_engine_would_misread_is_refused(tmp_path):
    scaled = adapter(tmp_path / "scaled", alpha_pattern={"x": 1})
    with pytest.raises(ValueError, match="alpha_pattern"), staged_lora(scaled, {}):
        pass
    with pytest.raises(ValueError, match=r"adapter_config\.json"), staged_lora(tmp_path, {}):
        pass


def test_staged_weights_may_be_views_or_tied_and_are_gone_afterwards():
    whole = torch.arange(6.0).view(2, 3)
    weights = {"a": whole, "tied": whole, "view": whole[1], "wide": torch.ones(3).expand(2, 3), "columns": whole.T}
    with staged_weights(weights.items()) as path:
        loaded = load_file(path)
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    assert not path.parent.exists()
