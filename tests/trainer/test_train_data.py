"""Which prompts a training step takes, what their requests are, and tokens that the trainer makes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.docs.pages import DOCS, code_spans
from verl_omni.pipelines.model_base import VllmOmniPipelineBase
from verl_omni.trainer.diffusion.data import (
    _ONE_BATCH,
    _ONE_IMAGE,
    PromptSampler,
    TrainPrompts,
    read_validation_prompts,
    training_groups,
    validation_groups,
)
from verl_omni.trainer.diffusion.prompt_tokens import PromptTokenizer
from verl_omni.trainer.diffusion.settings import TrainDataConfig
from verl_omni.trainer.prompts import _KINDS, ROW_KEYS, PromptRow, check_values, read_prompts
from verl_omni.workers.config import (
    ConfigError,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    DiffusionSamplingConfig,
)
from verl_omni.workers.rollout.request import RolloutRequest
from verl_omni.workers.rollout.seeds import request_seed


def write_jsonl(file: Path, rows: list[dict]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def write_txt(file: Path, count: int) -> str:
    file.write_text("\n".join(f"prompt {index}" for index in range(count)))
    return str(file)


@given(size=st.integers(1, 40), batch_size=st.integers(1, 40), seed=st.integers(0, 2**40), shuffle=st.booleans())
def test_each_prompt_once_at_most_in_an_epoch(size, batch_size, seed, shuffle):
    batch_size = min(size, batch_size)
    sampler = PromptSampler(size=size, batch_size=batch_size, seed=seed, shuffle=shuffle)
    assert sampler.steps_per_epoch == size // batch_size
    for epoch in range(2):
        steps = range(1 + epoch * sampler.steps_per_epoch, 1 + (epoch + 1) * sampler.steps_per_epoch)
        batches = [sampler.batch_at(step) for step in steps]
        taken = [index for batch in batches for index in batch]
        assert {len(batch) for batch in batches} == {batch_size}
        assert len(set(taken)) == len(taken) and set(taken) <= set(range(size))
        if not shuffle:
            assert taken == list(range(len(taken)))


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_steps_before():
    sampler = PromptSampler(size=50, batch_size=10, seed=1)
    whole = [sampler.batch_at(step) for step in range(1, 16)]
    resumed = PromptSampler(size=50, batch_size=10, seed=1)
    assert [resumed.batch_at(step) for step in range(8, 16)] == whole[7:]
    epochs = [[index for batch in whole[start : start + 5] for index in batch] for start in (0, 5, 10)]
    assert epochs[0] != epochs[1] != epochs[2] and all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert PromptSampler(size=50, batch_size=10, seed=2).batch_at(1) != whole[0]


def test_training_prompts_are_read_and_counted(tmp_path):
    data = TrainDataConfig(train_files=[write_txt(tmp_path / "p.txt", 10)], train_batch_size=3, shuffle=False)
    prompts = TrainPrompts.read(data)
    assert [row.prompt for row in prompts.batch_at(2)] == ["prompt 3", "prompt 4", "prompt 5"]
    assert [row.prompt for row in prompts.batch_at(4)] == ["prompt 0", "prompt 1", "prompt 2"]
    assert prompts.total_steps(epochs=2, limit=None) == 6
    assert prompts.total_steps(epochs=2, limit=100) == 100


def test_rewards_get_what_the_rows_say(tmp_path):
    row = {"prompt": "a", "ground_truth": "HI", "data_source": "ocr", "extra_info": {"index": 3}, "seed": 1}
    data = TrainDataConfig(train_files=[write_jsonl(tmp_path / "p.jsonl", [row])], train_batch_size=1)
    (read,) = TrainPrompts.read(data).batch_at(1)
    assert (read.prompt, read.ground_truth, read.data_source, read.extra_info) == ("a", "HI", "ocr", {"index": 3})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"train_batch_size": 5},
            r"data.train_batch_size=5 is more than the 4 prompts .*write data.train_batch_size=4 or",
        ),
        (
            {"train_batch_size": 3, "train_max_samples": 2},
            r"write data.train_batch_size=2, raise data.train_max_samples, or give more prompts",
        ),
        ({"train_files": "none.txt"}, r"data\.train_files: there is no file none\.txt"),
    ],
)
def test_what_makes_no_batch_is_refused(tmp_path, overrides, message):
    values = {"train_files": [write_txt(tmp_path / "p.txt", 4)], **overrides}
    with pytest.raises(ConfigError, match=message):
        TrainPrompts.read(TrainDataConfig(**values))


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("height", 64, r"write actor_rollout_ref\.rollout\.pipeline\.height=… for all"),
        ("sde_window_size", None, r"write actor_rollout_ref\.rollout\.algo\.sde_window_size=… for all"),
        ("num_outputs_per_prompt", 2, r"write actor_rollout_ref\.rollout\.n=… for all"),
        ("logprobs", False, "leave it out"),
    ],
)
def test_a_row_cannot_set_what_its_batch_shares(tmp_path, key, value, instead):
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b", key: value}])
    with pytest.raises(ConfigError, match=rf"p\.jsonl:2: {key} can't be set for one row, .*; {instead}"):
        TrainPrompts.read(TrainDataConfig(train_files=[file], train_batch_size=1))


def test_the_page_names_the_keys_that_rows_cannot_set():
    page = " ".join((DOCS / "start/quickstart.md").read_text(encoding="utf-8").split())
    said = page.split("are refused at the start,")[1].split(". ")[0]
    training, validation = (set(code_spans(part)) for part in said.split("in validation"))
    assert training == set(_ONE_BATCH)
    assert validation == set(_ONE_IMAGE)


def test_validation_rows_may_have_sizes_of_their_own(tmp_path):
    train = write_txt(tmp_path / "p.txt", 1)
    assert read_validation_prompts(TrainDataConfig(train_files=train)) == []
    file = write_jsonl(tmp_path / "v.jsonl", [{"prompt": "a", "height": 64}, {"prompt": "b"}])
    data = TrainDataConfig(train_files=train, val_files=file, val_max_samples=1)
    assert [row.values["height"] for row in read_validation_prompts(data)] == [64]
    write_jsonl(tmp_path / "v.jsonl", [{"prompt": "a", "output_type": "latent"}])
    with pytest.raises(ConfigError, match=r"v\.jsonl:1: output_type can't be set"):
        read_validation_prompts(data)
    data.val_files = ["none.txt"]
    with pytest.raises(ConfigError, match=r"data\.val_files: there is no file"):
        read_validation_prompts(data)


def test_training_requests(tmp_path):
    rows = read_prompts([write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b", "negative_prompt": "x"}])])
    rollout = DiffusionRolloutConfig(n=3, seed=5)
    groups = training_groups(rows, rollout, step=12, negative_prompt=" ")
    assert [group.uid for group in groups] == ["s12-p000", "s12-p001"]
    assert [group.row for group in groups] == rows
    requests = [request for group in groups for request in group.requests]
    assert [request.request_id for request in requests] == [
        f"s12-p{prompt:03d}-k{sample:02d}" for prompt in range(2) for sample in range(3)
    ]
    assert [request.seed for request in requests] == [request_seed(5, index, step=12) for index in range(6)]
    for group, (prompt, negative) in zip(groups, [("a", " "), ("b", "x")], strict=True):
        assert {(request.prompt, request.negative_prompt) for request in group.requests} == {(prompt, negative)}
        alike = [dataclasses.replace(request, request_id="", seed=None) for request in group.requests]
        assert alike == alike[:1] * 3


def test_steps_share_no_seed(tmp_path):
    rows = read_prompts([write_txt(tmp_path / "p.txt", 4)])
    rollout = DiffusionRolloutConfig(n=4, seed=0)
    seeds = [
        request.seed
        for step in (1, 2, 3)
        for group in training_groups(rows, rollout, step=step)
        for request in group.requests
    ]
    assert len(set(seeds)) == 48


def test_validation_requests_are_the_same_at_every_step_but_for_their_ids(tmp_path):
    rows = read_prompts([write_txt(tmp_path / "p.txt", 2)])
    rollout = DiffusionRolloutConfig(
        n=8, seed=5, val_kwargs=DiffusionSamplingConfig(n=2, seed=7, num_inference_steps=28)
    )
    first, later = (validation_groups(rows, rollout, step=step) for step in (0, 40))
    assert [request.request_id for request in later[1].requests] == ["v40-p001-k00", "v40-p001-k01"]
    requests = [request for group in first for request in group.requests]
    assert [request.seed for request in requests] == [request_seed(7, index) for index in range(4)]
    assert {(request.noise_level, request.num_inference_steps) for request in requests} == {(0.0, 28)}
    for before, after in zip(first, later, strict=True):
        assert [dataclasses.replace(request, request_id="") for request in before.requests] == [
            dataclasses.replace(request, request_id="") for request in after.requests
        ]


def model(path: Path, *extra: str) -> DiffusionModelConfig:
    config = DiffusionModelConfig(path=str(path))
    config.extra_tokenizers = list(extra)
    return config


def adapter(architecture: str):
    return VllmOmniPipelineBase.get_class(architecture, "flow_grpo")


def test_sd3_prompts_get_the_ids_of_all_three_tokenizers(tiny_sd3):
    from transformers import AutoTokenizer

    config = model(tiny_sd3, "tokenizer_2", "tokenizer_3")
    tokenizer = PromptTokenizer.load(config, adapter("StableDiffusion3Pipeline"))
    text = "a red circle that says HELLO " * 10
    made = tokenizer.apply(RolloutRequest(request_id="a", prompt=text, negative_prompt=""))
    names = ("tokenizer", "tokenizer_2", "tokenizer_3")
    clip, clip_2, t5 = (AutoTokenizer.from_pretrained(tiny_sd3 / name) for name in names)
    assert made.prompt_token_ids == clip(text, truncation=True, max_length=77).input_ids
    assert made.prompt_token_ids_2 == clip_2(text, truncation=True, max_length=77).input_ids
    assert len(made.prompt_token_ids) == 77
    assert made.prompt_token_ids_3 == t5(text).input_ids
    assert made.negative_prompt_token_ids == clip("").input_ids
    assert made.negative_prompt_token_ids_3 == t5("").input_ids
    assert (made.prompt, made.request_id) == (text, "a")


def test_qwen_prompts_get_the_template_of_the_engine(tiny_qwen):
    tokenizer = PromptTokenizer.load(model(tiny_qwen), adapter("QwenImagePipeline"))
    made = tokenizer.apply(RolloutRequest(request_id="a", prompt="a cat"))
    from transformers import AutoTokenizer

    qwen = AutoTokenizer.from_pretrained(tiny_qwen / "tokenizer")
    system = (
        "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
        "objects and background:"
    )
    chat = [{"role": "system", "content": system}, {"role": "user", "content": "a cat"}]
    expected = qwen(qwen.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
    assert made.prompt_token_ids == expected
    assert made.prompt_token_ids_2 is made.negative_prompt_token_ids is None


def test_ids_that_a_row_gives_are_kept(tiny_qwen):
    tokenizer = PromptTokenizer.load(model(tiny_qwen), adapter("QwenImagePipeline"))
    request = RolloutRequest(request_id="a", prompt="a cat", prompt_token_ids=[1, 2], negative_prompt="dog")
    made = tokenizer.apply(request)
    assert made.prompt_token_ids == [1, 2]
    assert len(made.negative_prompt_token_ids) > 34


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("StableDiffusion3Pipeline", ["tokenizer_2"], r"3 text encoder.*=\[tokenizer_2, tokenizer_3\]"),
        ("StableDiffusion3Pipeline", ["tokenizer_3", "tokenizer_2"], r"=\[tokenizer_2, tokenizer_3\]"),
        ("QwenImagePipeline", ["tokenizer_2"], r"1 text encoder.*extra_tokenizers=null"),
    ],
)
def test_other_tokenizers_than_the_models_are_refused(tmp_path, architecture, extra, message):
    with pytest.raises(ConfigError, match=message):
        PromptTokenizer.load(model(tmp_path, *extra), adapter(architecture))


def test_a_model_without_tokenizers_is_told(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    config = model(tmp_path, "tokenizer_2", "tokenizer_3")
    with pytest.raises(ConfigError, match=r"the trainer can't tokenize for .*write .*extra_tokenizers=null"):
        PromptTokenizer.load(config, adapter("StableDiffusion3Pipeline"))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("seed", "many", "an integer"),
        ("seed", True, "an integer"),
        ("seed", 1.5, "an integer"),
        ("true_cfg_scale", "4", "a finite number"),
        ("true_cfg_scale", float("nan"), "a finite number"),
        ("prompt", 7, "a text"),
        ("negative_prompt", {"a": 1}, "a text"),
        ("prompt_token_ids", [1, "b"], "a list of integers"),
        ("prompt_mask_2", "111", "a list of integers"),
        ("max_sequence_length", [32], "an integer"),
    ],
)
def test_a_value_of_another_type_is_told_with_its_row(tmp_path, key, value, what):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "a"}, {"prompt": "b", key: value}]
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {"train_files": str(file), "train_batch_size": 2}
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl:2: {key} must be {what}, got "):
        TrainPrompts.read(TrainDataConfig(**data))
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl:2: {key} must be {what}, got "):
        read_validation_prompts(TrainDataConfig(**data, val_files=str(file)))


def test_null_and_every_type_that_a_key_takes_are_accepted():
    good = {"str": "a", "int": 3, "float": 2, "bool": True, "TokenIds": [1, 2], "tuple[int, int]": [0, 3]}
    for key in ROW_KEYS:
        for value in (None, good[_KINDS[key]]):
            check_values([PromptRow(values={key: value}, source="here")])
