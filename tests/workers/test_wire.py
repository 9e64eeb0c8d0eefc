"""Tensors that leave the process."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.workers.rollout.request import RolloutError, RolloutSample
from verl_omni.workers.rollout.wire import buckets, pack, pack_results, unpack, unpack_results

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]


def sent(value):
    """Pickled as Ray does it: arrays beside the stream, in memory that is only to be read."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers]), len(stream)


@given(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES))
def test_a_tensor_arrives_as_it_was(shape, dtype):
    tensor = torch.randint(0, 2, shape, dtype=torch.int64).to(dtype)
    (arrived, _) = sent(pack({"w": tensor, "t": tensor.mT if tensor.ndim > 1 else tensor}))
    back = unpack(arrived)
    for name, expected in (("w", tensor), ("t", tensor.mT if tensor.ndim > 1 else tensor)):
        assert back[name].dtype == dtype and torch.equal(back[name], expected)


@pytest.mark.filterwarnings("error")
def test_the_bytes_travel_beside_the_pickle_and_are_not_copied():
    arrived, length = sent(pack({"w": torch.ones(1000, 1000)}))
    assert length < 1000
    assert unpack(arrived)["w"].data_ptr() == arrived["w"].data.ctypes.data


def test_what_was_not_packed_stays():
    tensor = torch.ones(3)
    assert unpack({"w": tensor})["w"] is tensor


def sample(request_id: str, embeds: torch.Tensor) -> RolloutSample:
    return RolloutSample(
        request_id=request_id,
        images=torch.randint(0, 255, (1, 3, 8, 8), dtype=torch.uint8),
        latents=None,
        trajectory_latents=torch.randn(1, 3, 4),
        trajectory_log_probs=torch.randn(1, 2),
        trajectory_timesteps=torch.rand(1, 2),
        prompt_embeddings={"prompt_embeds": embeds},
        sde_windows=[(0, 2)],
        seed=3,
        policy_version=9,
        peak_memory_mb=1.5,
        queue_wait_s=0.25,
    )


def test_a_sample_arrives_with_storage_of_its_own():
    one = sample("r", torch.randn(5, 4).bfloat16())
    (back,) = unpack_results(sent(pack_results([one]))[0])
    for name in ("images", "trajectory_latents", "trajectory_log_probs", "trajectory_timesteps"):
        assert torch.equal(getattr(back, name), getattr(one, name))
        getattr(back, name).zero_()  # writable
    assert torch.equal(back.prompt_embeddings["prompt_embeds"], one.prompt_embeddings["prompt_embeds"])
    assert back.latents is None and back.sde_windows == [(0, 2)]
    assert (back.request_id, back.seed, back.policy_version) == ("r", 3, 9)
    assert (back.peak_memory_mb, back.queue_wait_s) == (1.5, 0.25)


def test_what_samples_share_is_sent_once_and_shared_again_and_errors_arrive_between_them():
    shared = torch.randn(100, 50)
    results = [sample("a", shared), RolloutError("b", "bad"), sample("c", shared.detach()), sample("d", shared.clone())]
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(pack_results(results), protocol=5, buffer_callback=buffers.append)
    assert sum(memoryview(buffer).nbytes == shared.nbytes for buffer in buffers) == 2
    a, b, c, d = unpack_results(sent(pack_results(results))[0])
    assert str(b) == "request 'b': bad" and [r.request_id for r in (a, c, d)] == ["a", "c", "d"]
    texts = [r.prompt_embeddings["prompt_embeds"] for r in (a, c, d)]
    assert all(torch.equal(text, shared) for text in texts)
    assert texts[0] is texts[1] and texts[0].data_ptr() != texts[2].data_ptr()


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 20))
def test_buckets_hold_every_tensor_once_in_order_and_not_too_much(lengths, size):
    tensors = {f"w{i}": torch.zeros(length, dtype=torch.uint8) for i, length in enumerate(lengths)}
    names = list(tensors)
    made = list(buckets(tensors, size))
    assert [name for bucket in made for name in bucket] == names
    for bucket in made:
        assert bucket and (len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket.values()) <= size)


def test_what_is_in_a_bucket_is_held_by_no_one_else():
    tensors = {f"w{i}": torch.zeros(2) for i in range(4)}
    left = [list(tensors) for _ in buckets(tensors, 2 * tensors["w0"].nbytes)]
    assert left == [["w3"], []]
