"""Collate and split helpers: any mix of lengths, dtypes, masks and coinciding sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
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
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FORMS = [
    lambda row: row,
    lambda row: row[None],
    lambda row: row.tolist(),
    lambda row: [row.tolist()],
    lambda row: row.numpy(),
]
PLACES = [
    lambda name, value: {name: value},
    lambda name, value: {"additional_information": {name: value}},
    lambda name, value: {"additional_information": {name: value}, name: None},
]


def collate(prompts, default=None):
    return collate_prompt_rows(prompts, IDS, default, device="cpu", field_name="prompt_token_ids", pad_value=0)


@st.composite
def prompts(draw):
    """Rows of any lengths and dtypes, in any form and place, and their masks, which some of them have."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))  # some equal their number
    dtypes = draw(st.sampled_from([INTEGERS, (torch.bool, *INTEGERS), (torch.uint8, *FLOATS)]))
    rows, masks, made = [], [], []
    for length in lengths:
        row = torch.tensor(draw(st.lists(st.integers(0, 200), min_size=length, max_size=length)))
        row = row.to(draw(st.sampled_from(dtypes)))
        mask = torch.tensor(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        form, mask_form = (
            draw(st.sampled_from(FORMS[:4] if row.dtype is torch.bfloat16 else FORMS)),
            draw(st.sampled_from(FORMS)),
        )
        prompt = draw(st.sampled_from(PLACES))(draw(st.sampled_from(IDS)), form(row))
        if draw(st.booleans()):
            prompt["mask"] = mask_form(mask.to(draw(st.sampled_from([torch.bool, torch.int64]))))
        else:
            mask = torch.ones(length, dtype=torch.bool)
        rows.append(row), masks.append(mask), made.append(prompt)
    return rows, masks, made


@given(prompts(), st.integers(0, 3))
def test_rows_of_any_form_keep_their_values_and_are_padded_on_the_right(case, room):
    rows, masks, asked = case
    tensor, lengths = collate(asked)
    longest = max(map(len, rows))
    assert lengths == [len(row) for row in rows]
    assert tensor.shape == (len(rows), longest)
    mask = collate_prompt_mask(
        asked, ("mask",), None, device="cpu", field_name="mask", token_lengths=lengths, target_seq_len=longest + room
    )
    assert mask.shape == (len(rows), longest + room) and mask.dtype is torch.bool
    for i, (row, valid) in enumerate(zip(rows, masks, strict=True)):
        assert tensor[i].double().tolist() == [*row.double().tolist(), *[0.0] * (longest - len(row))]
        assert mask[i].tolist() == [*valid.tolist(), *[False] * (longest + room - len(row))]


def test_the_dtype_is_the_common_one_and_no_integer_is_rounded_to_it():
    def dtype(*kinds):
        return collate([{"prompt_ids": torch.ones(2, dtype=kind)} for kind in kinds])[0].dtype

    assert dtype(torch.int32, torch.int32) is torch.int32
    assert dtype(torch.uint8, torch.int8) is torch.int16
    assert dtype(torch.int64, torch.float16) is torch.float16
    assert dtype(torch.uint16, torch.uint16) is dtype(torch.uint32, torch.int32) is torch.int64
    with pytest.raises(
        ValueError, match=r"prompt_token_ids of prompt 0 holds integers that torch\.float16, which others"
    ):
        collate([{"prompt_ids": [151643]}, {"prompt_ids": torch.ones(1, dtype=torch.float16)}])


def test_values_are_looked_at_before_they_are_on_the_device():
    rows = [{"prompt_ids": torch.ones(2, dtype=dtype)} for dtype in (torch.int32, torch.int64)]
    tensor, _ = collate_prompt_rows(rows, IDS, None, device="meta", field_name="prompt_token_ids")
    assert tensor.is_meta and tensor.shape == (2, 2)


def test_unsigned_integers_are_taken_up_to_the_largest_of_int64():
    largest = torch.tensor([2**63 - 1]).to(torch.uint64)
    tensor, _ = collate([{"prompt_ids": largest}])
    assert tensor.tolist() == [[2**63 - 1]] and tensor.dtype is torch.int64


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([2**63], dtype=np.uint64), r"holds integers of 2\*\*63 or more; use integers that int64 holds"),
        ("hello", "is no row of numbers"),
        ([[1], [2, 3]], "is no row of numbers"),
        ([10**30], "is no row of numbers"),
        ([], r"has shape \[0\]"),
        (3, r"has shape \[\]"),
        ([[1, 2], [3, 4]], r"has shape \[2, 2\]"),
        (torch.ones(2, 1), r"has shape \[2, 1\]"),
    ],
)
def test_what_is_no_row_is_refused_with_its_prompt(value, message):
    with pytest.raises(ValueError, match=f"prompt_token_ids of prompt 1 {message}"):
        collate([{"prompt_ids": [1]}, {"prompt_ids": value}])
    ask = dict(device="cpu", field_name="mask", token_lengths=[1, 4], target_seq_len=4)
    with pytest.raises(ValueError, match=f"mask of prompt 1 {message}"):
        collate_prompt_mask([{}, {"mask": value}], ("mask",), None, **ask)


def test_the_first_alias_wins_and_a_default_fills_in():
    tensor, lengths = collate([{"prompt_ids": [1], "prompt_token_ids": [2]}, "text"], default=[7, 7])
    assert tensor.tolist() == [[2, 0], [7, 7]]
    assert lengths == [1, 2]


def test_nobody_has_the_field():
    assert collate(["text", {}, {"additional_information": "text"}]) == (None, None)


def test_a_missing_field_is_named_with_its_prompt():
    with pytest.raises(ValueError, match="prompt 1 has no prompt_token_ids"):
        collate([{"prompt_ids": [1]}, {}])


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


ROWS = {
    "tensor": (lambda x: x.clone(), lambda part: part),
    "view": (lambda x: torch.cat([x, x])[: len(x)], lambda part: part),
    "every other": (lambda x: torch.stack([x, x], dim=1).flatten(0, 1)[::2], lambda part: part),
    "expanded": (lambda x: x[..., None].expand(*x.shape, 3), lambda part: part),
    "list": (lambda x: list(x.unbind()), lambda part: part),
    "tuple": (lambda x: tuple(x.unbind()), lambda part: part),
    "lists": (lambda x: [[{"row": row}, row] for row in x.unbind()], lambda part: [row for _, row in part]),
    "array": (lambda x: x.float().numpy(), lambda part: part),
    "mapping": (
        lambda x: {"a": {"b": list(x.unbind())}, "fps": 24, "scale": torch.ones(())},
        lambda part: part["a"]["b"],
    ),
}
"""Forms of a field with one entry a row: how it is made, and how its rows are read."""


def parts_in(value):
    """All tensors and arrays."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in parts_in(item)]
    return [value] if isinstance(value, (torch.Tensor, np.ndarray)) else []


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 12), max_size=2), st.data())
def test_split_gives_each_request_its_rows_and_nothing_else(requests, n, shape, data):
    """Any sizes: further dimensions may be as long as there are rows, requests, or images of one."""
    total = requests * n
    numbers = torch.arange(total).view(total, *[1] * len(shape)).expand(total, *shape)
    dtypes = st.sampled_from([torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64])
    forms = [data.draw(st.sampled_from(list(ROWS))) for _ in range(4)]
    payload, own, latents, log_probs = (ROWS[form][0](numbers.to(data.draw(dtypes))) for form in forms)
    shared = list(range(total))  # as many entries as there are rows, and still not cut: only named groups are per row
    metadata = {"rl": {"own": own, "seed": 7, "nothing": None}, "shared": shared}
    wrapped = data.draw(st.booleans())
    result = DiffusionOutput(
        output={"payload": payload, "metadata": metadata} if wrapped else payload,
        trajectory_latents=latents,
        trajectory_log_probs=log_probs,
        peak_memory_mb=5.0,
    )
    parts = split_diffusion_output_by_request(result, SimpleNamespace(num_reqs=requests), num_outputs_per_prompt=n)
    assert len(parts) == requests
    for k, part in enumerate(parts):
        assert part.trajectory_timesteps is None and part.peak_memory_mb == 5.0
        fields = [part.output, None, part.trajectory_latents, part.trajectory_log_probs]
        if wrapped:
            rl = part.output["metadata"]["rl"]
            assert rl["seed"] == 7 and rl["nothing"] is None and part.output["metadata"]["shared"] == shared
            fields[:2] = part.output["payload"], rl["own"]
        for form, value in zip(forms, fields, strict=True):
            if value is not None:
                rows = [float(torch.as_tensor(row).flatten()[0]) for row in ROWS[form][1](value)]
                assert rows == list(range(k * n, k * n + n))
            for part in parts_in(value):
                is_array = isinstance(part, np.ndarray)
                assert part.base is None if is_array else part.untyped_storage().nbytes() == part.nbytes


def test_split_refuses_a_field_with_other_rows():
    result = DiffusionOutput(output=torch.zeros(4, 3), trajectory_log_probs=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="trajectory_log_probs has 3 rows for 2 requests of 2 outputs each"):
        split_diffusion_output_by_request(result, SimpleNamespace(num_reqs=2), num_outputs_per_prompt=2)
    with pytest.raises(ValueError, match="num_outputs_per_prompt=0"):
        split_diffusion_output_by_request(result, SimpleNamespace(num_reqs=2), num_outputs_per_prompt=0)
