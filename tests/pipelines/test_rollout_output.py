"""Outputs on their way out of the engine: nothing lost, nothing carried along."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from vllm_omni.diffusion.data import DiffusionOutput

from verl_omni.pipelines.diffusion_rollout_output import rollout_output, with_rollout_data, wrap_rollout_postprocessor


def test_a_row_of_a_batch_pickles_to_its_own_bytes():
    batch = torch.zeros(64, 100)
    output = rollout_output(
        media=batch[3:4],
        trajectory_latents=batch[5:6],
        trajectory_decoded=[batch[6]],
        prompt_embeddings={"prompt_embeds": batch[7]},
        rl={"seed": 1, "list": [batch[8]]},
    )
    assert len(pickle.dumps(output)) < batch.nbytes / 4
    assert output.output["payload"]["image"].shape == (1, 100)
    assert output.output["metadata"]["prompt_embeddings"]["prompt_embeds"].shape == (100,)


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_a_view_is_a_copy_wherever_it_stands_and_what_is_whole_is_not(kind):
    whole, array = torch.zeros(4, 5), np.zeros((4, 5))
    spread = torch.zeros(4)[:1].expand(4)  # has as many bytes as what it is a view of
    rl = {"nested": kind([whole, whole[1:], array, array[1:], spread, 7, "x"])}
    made = rollout_output(media=whole, rl=rl, to_cpu=False).output
    nested = made["metadata"]["rl"]["nested"]
    same, part, same_array, part_array, copy, *rest = nested
    assert made["payload"]["image"] is same is whole and same_array is array and rest == [7, "x"]
    assert type(nested) is kind and part_array.base is None
    assert part.untyped_storage().nbytes() == part.nbytes
    assert copy.untyped_storage().nbytes() == copy.nbytes and copy.stride() == (1,)


def test_data_added_to_a_stock_output_leaves_the_rest_as_it_was():
    base = DiffusionOutput(output=torch.zeros(1, 3), trajectory_latents=torch.ones(1, 2), peak_memory_mb=7.0)
    made = with_rollout_data(base, trajectory_log_probs=torch.full((1, 1), 2.0), rl={"seed": 3})
    assert made.trajectory_latents.tolist() == [[1, 1]]
    assert made.trajectory_log_probs.tolist() == [[2]]
    assert made.peak_memory_mb == 7.0
    assert made.output["payload"]["image"].tolist() == [[0, 0, 0]]
    assert made.output["metadata"]["rl"] == {"seed": 3}


def test_the_wrapped_postprocessor_touches_foreign_outputs_only():
    seen = []

    def stock(output, **kwargs):
        seen.append(kwargs)
        return "images"

    wrapped = wrap_rollout_postprocessor(stock)
    ours = rollout_output(media=torch.zeros(1)).output
    assert wrapped(ours) is ours
    assert wrapped(torch.zeros(1), sampling_params=1) == "images"
    assert seen == [{"sampling_params": 1}]
    assert wrap_rollout_postprocessor(None)("anything") == "anything"


@pytest.mark.parametrize("to_cpu", [True, False])
def test_every_output_is_known_as_ours(to_cpu):
    output = rollout_output(media=torch.zeros(1), to_cpu=to_cpu).output
    assert wrap_rollout_postprocessor(lambda _: None)(output) is output
