"""Collate and split helpers: any mix of lengths, dtypes, masks and coinciding sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_omni.diffusion.data import DiffusionOutput

from verl_omni.pipelines.request_batch import (
    collate_prompt_mask,
    collate_prompt_rows,
    sample_per_sample_sde_windows,
    split_diffusion_output_by_request,
)

IDS = ("prompt_token_ids", "prompt_ids")
rows = st.lists(st.lists(st.integers(1, 999), min_size=1, max_size=9), min_size=1, max_size=6)
forms = [lambda r: r, torch.tensor, lambda r: torch.tensor([r]), lambda r: torch.tensor(r, dtype=torch.int32)]


def collate(prompts, default=None):
    return collate_prompt_rows(prompts, IDS, default, device="cpu", field_name="prompt_token_ids", pad_value=0)


@given(rows, st.data())
def test_rows_of_any_form_are_padded_on_the_right(values, data):
    places = [lambda r: {"prompt_token_ids": r}, lambda r: {"additional_information": {"prompt_ids": r}}]
    prompts = [data.draw(st.sampled_from(places))(data.draw(st.sampled_from(forms))(row)) for row in values]
    tensor, lengths = collate(prompts)
    assert lengths == [len(row) for row in values]
    assert tensor.shape == (len(values), max(lengths))
    for got, row in zip(tensor.tolist(), values, strict=True):
        assert got == row + [0] * (max(lengths) - len(row))
    mask = collate_prompt_mask(
        prompts, ("mask",), None, device="cpu", field_name="mask", token_lengths=lengths, target_seq_len=max(lengths)
    )
    assert mask.sum(1).tolist() == lengths
    assert (tensor.bool() == mask).all()


def test_the_first_alias_wins_and_a_default_fills_in():
    tensor, lengths = collate([{"prompt_ids": [1], "prompt_token_ids": [2]}, "text"], default=[7, 7])
    assert tensor.tolist() == [[2, 0], [7, 7]]
    assert lengths == [1, 2]


def test_nobody_has_the_field():
    assert collate(["text", {}]) == (None, None)


def test_a_missing_field_is_named_with_its_prompt():
    with pytest.raises(ValueError, match="prompt 1 has no prompt_token_ids"):
        collate([{"prompt_ids": [1]}, {}])


def test_two_rows_in_one_prompt_are_refused():
    with pytest.raises(ValueError, match=r"prompt_token_ids of prompt 0 has shape \[2, 2\]"):
        collate([{"prompt_ids": [[1, 2], [3, 4]]}])


def test_a_mask_of_another_length_is_refused():
    ask = dict(device="cpu", field_name="prompt_mask", token_lengths=[3], target_seq_len=4)
    with pytest.raises(ValueError, match="prompt_mask of prompt 0 has 2 entries for 3 tokens"):
        collate_prompt_mask([{"m": [1, 1]}], ("m",), None, **ask)
    assert collate_prompt_mask([{"m": [1, 0, 1]}], ("m",), None, **ask).tolist() == [[True, False, True, False]]
    with pytest.raises(ValueError, match="3 tokens, above target_seq_len=2"):
        collate_prompt_mask([{}], ("m",), None, **{**ask, "target_seq_len": 2})


def test_windows_are_each_row_s_own():
    ask = dict(sde_window_size=2, sde_window_range=(0, 8), num_timesteps=10)
    seeds = [5, 6, 7]
    together = sample_per_sample_sde_windows(
        **ask, batch_size=3, generator=[torch.Generator().manual_seed(s) for s in seeds]
    )
    alone = [
        sample_per_sample_sde_windows(**ask, batch_size=1, generator=torch.Generator().manual_seed(s))[0] for s in seeds
    ]
    assert together == alone
    with pytest.raises(ValueError, match="1 generators for 2 rows"):
        sample_per_sample_sde_windows(**ask, batch_size=2, generator=[torch.Generator()])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12))
def test_split_gives_each_request_its_rows_and_nothing_else(requests, n, width):
    total = requests * n
    base = torch.arange(total, dtype=torch.float32)
    result = DiffusionOutput(
        output={
            "payload": {"image": base[:, None].expand(total, width).clone()},
            # `shared` has as many entries as there are rows, and is still not cut: only named groups are per row
            "metadata": {"rl": {"sde_window": [[i, i] for i in range(total)]}, "shared": list(range(total))},
        },
        trajectory_latents=base[:, None, None].expand(total, 3, width).clone(),
        trajectory_log_probs=base[:, None].clone(),
        peak_memory_mb=5.0,
    )
    parts = split_diffusion_output_by_request(result, SimpleNamespace(num_reqs=requests), num_outputs_per_prompt=n)
    assert len(parts) == requests
    for k, part in enumerate(parts):
        want = [float(i) for i in range(k * n, k * n + n)]
        assert part.output["payload"]["image"][:, 0].tolist() == want
        assert part.trajectory_latents[:, 0, 0].tolist() == want
        assert part.trajectory_log_probs[:, 0].tolist() == want
        assert [w[0] for w in part.output["metadata"]["rl"]["sde_window"]] == want
        assert part.output["metadata"]["shared"] == list(range(total))
        assert part.trajectory_timesteps is None
        assert part.peak_memory_mb == 5.0
        assert part.trajectory_latents.untyped_storage().nbytes() == part.trajectory_latents.nbytes


def test_split_refuses_a_field_with_other_rows():
    result = DiffusionOutput(output=torch.zeros(4, 3), trajectory_log_probs=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="trajectory_log_probs has 3 rows for 2 requests of 2 outputs each"):
        split_diffusion_output_by_request(result, SimpleNamespace(num_reqs=2), num_outputs_per_prompt=2)
    with pytest.raises(ValueError, match="num_outputs_per_prompt=0"):
        split_diffusion_output_by_request(result, SimpleNamespace(num_reqs=2), num_outputs_per_prompt=0)
