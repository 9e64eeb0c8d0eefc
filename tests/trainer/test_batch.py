"""Samples become one batch, and a batch is dealt to ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.samples import scored
from verl_omni.trainer.diffusion.batch import counted, deal, make_batch

pytest.importorskip("verl")


def batch_of(samples):
    return make_batch(samples, cfg_key="true_cfg_scale", default_cfg_scale=4.0)


def test_rows_keep_their_order_and_their_own_tensors():
    samples = [scored("a", uid="p0", reward=0.5, start=1), scored("b", uid="p1", reward=-1.0, start=3)]
    batch = batch_of(samples)
    assert batch.batch["all_latents"].shape == (2, 3, 5, 7)
    for row, item in enumerate(samples):
        assert torch.equal(batch.batch["all_latents"][row], item.sample.trajectory_latents[0])
        assert torch.equal(batch.batch["rollout_log_probs"][row], item.sample.trajectory_log_probs[0])
        assert torch.equal(batch.batch["all_timesteps"][row], item.sample.trajectory_timesteps[0])
        assert torch.equal(
            batch.batch["pooled_prompt_embeds"][row], item.sample.prompt_embeddings["pooled_prompt_embeds"]
        )
    assert batch.batch["sde_steps"].tolist() == [[1, 2], [3, 4]]
    assert batch.batch["rm_scores"].tolist() == [[0.5], [-1.0]]
    assert list(batch.non_tensor_batch["uid"]) == ["p0", "p1"]
    assert list(batch.non_tensor_batch["policy_version"]) == [4, 4]


def test_prompts_are_padded_on_the_right_and_masked():
    samples = [scored("short", length=2), scored("long", length=5)]
    batch = batch_of(samples)
    assert batch.batch["prompt_embeds"].shape == (2, 5, 4)
    assert batch.batch["prompt_embeds_mask"].sum(1).tolist() == [2, 5]
    assert batch.batch["prompt_embeds"][0, 2:].abs().sum() == 0
    names = batch.batch.keys()
    assert not [name for name in names if name.startswith("negative_")]
    assert batch.batch["cfg_scale"].tolist() == [1, 1]


def test_guidance_belongs_to_each_row():
    samples = [
        scored("guided", negative_length=2, true_cfg_scale=3.0),
        scored("by default", negative_length=4),
        scored("unguided", length=1),
    ]
    batch = batch_of(samples)
    assert batch.batch["cfg_scale"].tolist() == [3, 4, 1]
    assert batch.batch["negative_prompt_embeds_mask"].sum(1).tolist()[:2] == [2, 4]
    negative = samples[0].sample.prompt_embeddings["negative_prompt_embeds"]
    assert torch.equal(batch.batch["negative_prompt_embeds"][0, :2], negative)


def test_windows_of_different_sizes_make_no_batch():
    with pytest.raises(ValueError, match="different numbers of steps"):
        batch_of([scored("a", steps=2), scored("b", steps=3)])


def test_a_sample_without_recorded_steps_is_named():
    item = scored("silent")
    item.sample.trajectory_latents = None
    with pytest.raises(ValueError, match="silent recorded no stochastic step"):
        batch_of([item])


@given(size=st.integers(1, 40), mini_batches=st.integers(1, 4), ranks=st.integers(1, 4))
def test_each_rank_gets_its_share_of_every_mini_batch(size, mini_batches, ranks):
    batch = batch_of([scored(f"row {i}", reward=float(i)) for i in range(size)])
    dealt, mini = deal(batch, mini_batches=mini_batches, ranks=ranks)
    assert len(dealt) == mini * mini_batches and mini % ranks == 0
    shares = dealt.batch["rm_scores"][:, 0].view(ranks, mini_batches, -1)
    weights = dealt.batch["sample_weight"].view(ranks, mini_batches, -1)
    in_order = [reward for m in range(mini_batches) for reward in shares[:, m][weights[:, m] > 0].tolist()]
    assert in_order == list(range(size))  # mini-batch after mini-batch, as in the batch itself, and nothing else


def test_filling_samples_are_not_counted():
    dealt, _ = deal(batch_of([scored(f"row {i}", reward=1.0 + i) for i in range(5)]), mini_batches=2, ranks=2)
    rewards, steps = counted(dealt, "rm_scores", "sde_steps")
    assert len(dealt) == 8
    assert sorted(rewards[:, 0].tolist()) == [1, 2, 3, 4, 5]
    assert len(steps) == 5
