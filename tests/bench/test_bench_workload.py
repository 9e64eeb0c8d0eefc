"""What the bench generates follows from its arguments and its seed."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from verl_omni.bench.flops import forward_flop
from verl_omni.bench.full_size import TRANSFORMER
from verl_omni.bench.measure import Bench
from verl_omni.bench.workload import LOAD, RECIPES, SERIAL_REQUESTS, Workload, arrival_times, request_count
from verl_omni.workers.config import DiffusionRolloutConfig

QWEN, SD3 = (
    Workload(height=64, width=32, steps=10, cfg=4.0, n=4, text=(20, 90), recipe=RECIPES["QwenImagePipeline"]),
    Workload(height=64, width=32, steps=10, n=4, text=(20, 300), recipe=RECIPES["StableDiffusion3Pipeline"]),
)


def test_the_same_tag_gives_the_same_requests_and_another_tag_shares_none():
    first, again, other = (QWEN.requests(8, tag) for tag in ("a", "a", "b"))
    assert first == again
    for name in ("request_id", "seed"):
        assert not {getattr(r, name) for r in first} & {getattr(r, name) for r in other}
    assert not {tuple(r.prompt_token_ids) for r in first} & {tuple(r.prompt_token_ids) for r in other}


def test_a_group_shares_its_prompt_and_no_two_groups_do():
    requests = QWEN.requests(10, "a")
    prompts = [tuple(request.prompt_token_ids) for request in requests]
    assert [prompts.index(prompt) // 4 for prompt in prompts] == [i // 4 for i in range(10)]
    assert len({request.seed for request in requests}) == 10


def test_a_prompt_has_the_length_that_was_drawn_after_the_template_which_is_dropped():
    lengths = QWEN.lengths(50)
    assert min(lengths) >= 20 and max(lengths) <= 90
    assert len(set(lengths)) > 20
    requests = dataclasses.replace(QWEN, n=1).requests(50, "a")
    assert [len(request.prompt_token_ids) - 34 for request in requests] == lengths
    assert {len(request.negative_prompt_token_ids) for request in requests} == {34 + 6}


def test_repeats_have_the_same_lengths_and_the_warm_up_has_others():
    load = dataclasses.replace(QWEN, n=1)
    first, second, warmup = load.requests(9, "a"), load.requests(9, "b"), load.requests(9, "c", warmup=True)
    lengths = [[len(request.prompt_token_ids) for request in requests] for requests in (first, second, warmup)]
    assert lengths[0] == lengths[1] != lengths[2]


def test_each_encoder_of_sd3_gets_as_much_as_it_takes_and_a_long_prompt_raises_the_limit():
    for request, length in zip(dataclasses.replace(SD3, n=1).requests(20, "a"), SD3.lengths(20), strict=True):
        assert len(request.prompt_token_ids) == len(request.prompt_token_ids_2) == min(77, length)
        assert len(request.prompt_token_ids_3) == length
        assert request.max_sequence_length == 300 and request.negative_prompt_token_ids is None
    assert SD3.text_tokens(20) == 77 + 300
    limited = dataclasses.replace(SD3, max_sequence_length=320)
    assert limited.text_tokens(20) == 77 + 320 and limited.requests(1, "a")[0].max_sequence_length == 320
    assert dataclasses.replace(SD3, text=(20, 250)).text_tokens(20) == 77 + 256
    assert dataclasses.replace(SD3, text=(20, 250)).requests(1, "a")[0].max_sequence_length is None


def test_arrivals_are_seeded_and_outrun_the_engine():
    times = arrival_times(2001, cap=16, steps=10, step_s=0.5, seed=3)
    assert times == arrival_times(2001, cap=16, steps=10, step_s=0.5, seed=3)
    assert times != arrival_times(2001, cap=16, steps=10, step_s=0.5, seed=4)
    mean = LOAD * 10 * 0.5 / 16
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0 and max(gaps) <= 2 * mean
    assert times[-1] / 2000 == pytest.approx(mean, rel=0.05)
    assert mean < 10 * 0.5 / 16  # in which a place becomes free


@pytest.mark.parametrize(
    ("cap", "n", "waves", "count"), [(16, 16, 2, 32), (4, 16, 2, 16), (1, 8, 2, 8), (16, 1, 4, 64)]
)
def test_requests_are_whole_groups_and_enough_for_the_waves(cap: int, n: int, waves: int, count: int):
    assert request_count(cap, n, waves) == count


@pytest.mark.parametrize(
    ("n", "requests", "most", "group", "count"),
    [
        (16, None, SERIAL_REQUESTS, 8, 8),
        (3, None, SERIAL_REQUESTS, 3, 3),
        (1, None, SERIAL_REQUESTS, 1, 2),
        (16, 64, SERIAL_REQUESTS, 8, 8),
        (3, 64, SERIAL_REQUESTS, 3, 6),
        (1, 4, SERIAL_REQUESTS, 1, 4),
        (16, 64, None, 16, 64),
    ],
)
def test_serial_mode_gets_few_requests_in_whole_groups(n: int, requests: int | None, most: int | None, group, count):
    model: Any = None
    load = dataclasses.replace(SD3, n=n)
    bench = Bench(model=model, load=load, rollout=DiffusionRolloutConfig(), requests=requests, most_serial=most)
    assert (bench.workload("serial").n, bench.count("serial", 1)) == (group, count)
    assert bench.workload("step_wise") is load
    assert bench.count("step_wise", 16) == (requests or request_count(16, n, 2))


def test_flop_of_a_forward_are_the_published_ones():
    qwen = forward_flop(TRANSFORMER["qwen_image"], image_tokens=1024, text_tokens=64)
    sd3 = forward_flop(TRANSFORMER["sd3"], image_tokens=576, text_tokens=333)
    assert qwen is not None and sd3 is not None
    assert f"{qwen / 1e12:.2f} {sd3 / 1e12:.3f}" == "15.67 1.517"
    assert forward_flop({"_class_name": "Other"}, 1, 1) is None


@pytest.mark.parametrize("family", ["qwen_image", "sd3"])
def test_flop_are_those_that_torch_counts(family: str):
    """On a small configuration in diffusers, whose blocks are the engine's."""
    import diffusers
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = {**TRANSFORMER[family], "num_layers": 3, "num_attention_heads": 2, "joint_attention_dim": 48}
    if family == "sd3":
        config |= {"dual_attention_layers": [0, 1], "caption_projection_dim": 128, "pos_embed_max_size": 8}
    model = getattr(diffusers, config["_class_name"]).from_config(config)
    own = dict(hidden_states=torch.zeros(1, 16, 8, 8), pooled_projections=torch.zeros(1, 2048))
    if family == "qwen_image":
        own = dict(hidden_states=torch.zeros(1, 16, 64), img_shapes=[[(1, 4, 4)]])
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's fused attention
        model(timestep=torch.ones(1), encoder_hidden_states=torch.zeros(1, 10, 48), **own)
    d, pooled = 2 * config["attention_head_dim"], 2048
    left_out = 2 * (256 * d + d * d) + 2 * 2 * d * d  # once a row: embedding of the timestep, modulation of the output
    left_out += 2 * (pooled * d + d * d) if family == "sd3" else 0
    assert forward_flop(config, image_tokens=16, text_tokens=10) == counter.get_total_flops() - left_out
