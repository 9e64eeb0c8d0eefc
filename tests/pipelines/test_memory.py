"""The forecast of device memory, and the rule for what runs out of it."""

from __future__ import annotations

import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.pipelines import memory
from verl_omni.pipelines.memory import (
    SAFETY_SHARE,
    STEP_LATENTS,
    block_bytes,
    container_memory,
    decode_limit,
    forecast_rows,
    forward_limit,
    free_memory,
    is_out_of_memory,
    kept_bytes,
    rows_that_fit,
)
from verl_omni.pipelines.params import RequestError
from verl_omni.pipelines.rows import Rollout, Row

CPU = torch.device("cpu")


def out_of_memory(message="CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it."):
    return torch.OutOfMemoryError(message)


# ---- forecast


def test_the_forecast_grows_with_tokens_and_bytes_and_takes_the_larger_of_attention_and_mlp():
    wide = block_bytes(width=64, feed_forward=512, tokens=10, element_bytes=2)
    assert wide == 10 * 2 * (5 * 64 + 2 * 512)
    assert block_bytes(width=64, feed_forward=512, tokens=30, element_bytes=4) == 6 * wide
    assert block_bytes(width=64, feed_forward=64, tokens=10, element_bytes=2) == 10 * 2 * 15 * 64


@given(rows=st.integers(1, 600), cost=st.integers(1, 10**9), available=st.floats(-1e12, 1e12))
def test_all_rows_share_a_forward_if_they_fit_and_a_power_of_two_if_not(rows, cost, available):
    got = rows_that_fit(rows, row_cost=cost, available=available)
    if rows * cost <= available:
        assert got == rows
    else:
        assert got < rows or rows == 1
        assert got == 1 or (got.bit_count() == 1 and got * cost <= available)
        assert 2 * got * cost > available


def test_a_little_less_memory_changes_nothing():
    assert {rows_that_fit(32, row_cost=10, available=free) for free in range(160, 320)} == {16}
    assert rows_that_fit(32, row_cost=10, available=math.inf) == 32


class Cuda:
    """torch's word on the memory of two CUDA devices; `segments` are (device, pool, bytes, bytes handed out)."""

    def __init__(self, monkeypatch, free, segments):
        self.segments, self.snapshots, self.returned = segments, 0, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
        for name, call in (("memory_stats", self.stats), ("memory_snapshot", self.snapshot)):
            monkeypatch.setattr(torch.cuda, name, call)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        memory._idle_in_private_pools.cache_clear()

    def stats(self, device):
        own = [segment for segment in self.segments if segment[0] == device.index]
        reserved, allocated = (sum(segment[i] for segment in own) for i in (2, 3))
        return {
            "reserved_bytes.all.current": reserved,
            "allocated_bytes.all.current": allocated,
            "reserved_bytes.all.allocated": reserved + self.returned,
            "reserved_bytes.all.freed": self.returned,
        }

    def snapshot(self):
        self.snapshots += 1
        names = ("device", "segment_pool_id", "total_size", "allocated_size")
        return [dict(zip(names, segment, strict=True)) for segment in self.segments]


def test_what_the_driver_has_and_torch_has_not_handed_out_is_free_on_cuda_but_for_private_pools(monkeypatch):
    default, graphs, weights = (0, 0), (0, 7), (2, 0)
    own = [(0, default, 500, 300), (0, default, 40, 0), (0, graphs, 700, 100)]
    segments = [*own, (1, default, 90, 0), (1, weights, 80, 0)]
    cuda = Cuda(monkeypatch, 1000, segments)
    assert free_memory(torch.device("cuda", 0)) == 1000 + (500 - 300) + 40
    assert free_memory(torch.device("cuda", 1)) == 1000 + 90
    segments[0] = (0, default, 500, 450)
    assert [free_memory(torch.device("cuda", 0)) for _ in range(3)] == [1000 + (500 - 450) + 40] * 3
    assert cuda.snapshots == 3  # one a device, and device 0 again after device 1
    segments.append((0, (3, 0), 600, 0))  # a graph is captured
    assert free_memory(torch.device("cuda", 0)) == 1000 + (500 - 450) + 40
    del segments[-1]  # and dropped
    cuda.returned = 600
    assert free_memory(torch.device("cuda", 0)) == 1000 + (500 - 450) + 40
    assert cuda.snapshots == 5


def test_an_allocator_without_snapshots_has_no_private_pools(monkeypatch):
    Cuda(monkeypatch, 1000, [(0, (0, 0), 500, 300)])
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.delattr(torch.cuda, "memory_snapshot")
    assert free_memory(torch.device("cuda", 0)) == 1000 + 500 - 300


def test_the_machine_or_its_container_says_what_is_free_on_a_cpu(monkeypatch):
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=700))
    for limit, free in ((None, 700), (900, 700), (400, 400)):
        monkeypatch.setattr(memory, "container_memory", lambda limit=limit: limit)
        assert free_memory(CPU) == free


def test_a_container_has_what_its_limit_leaves_and_the_file_pages_it_can_drop(tmp_path):
    assert container_memory(tmp_path) is None
    v1 = tmp_path / "memory"
    v1.mkdir()
    (v1 / "memory.limit_in_bytes").write_text("1000\n")
    (v1 / "memory.usage_in_bytes").write_text("900\n")
    (v1 / "memory.stat").write_text("cache 80\ninactive_file 50\ntotal_inactive_file 60\n")
    assert container_memory(tmp_path) == 150
    (tmp_path / "memory.max").write_text("max\n")
    assert container_memory(tmp_path) == 150
    (tmp_path / "memory.max").write_text("2000\n")
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert container_memory(tmp_path) == 1700


def gathered(*windows, texts=(3,), record=True):
    """States of one row each with latents [4, 5], a window, and in turn a text of so many tokens."""

    def state(i, window):
        row = Row(generator=None, window=window, table=None, stochastic=[], record=record)
        text = {"prompt_embeds": torch.zeros(texts[i % len(texts)], 6)}
        uncond = {"prompt_embeds": torch.zeros(1, 6)}
        rollout = Rollout(params=None, rows=[row], latents=torch.zeros(1, 4, 5), cond=text, uncond=uncond)
        return SimpleNamespace(extra={"rollout": rollout})

    return [state(i, window) for i, window in enumerate(windows)]


def test_beside_a_forward_rows_keep_texts_latents_of_a_step_and_those_recorded_over_all_windows():
    latents, text = 4 * 5 * 4, (7 + 1) * 6 * 4
    states = gathered((0, 2), (1, 3), texts=(3, 7))
    assert kept_bytes(states) == 2 * (latents * (STEP_LATENTS + 4) + text)
    states = gathered((0, 2), (1, 3), texts=(3, 7), record=False)
    assert kept_bytes(states) == 2 * (latents * STEP_LATENTS + text)


def test_rows_of_a_forward_follow_from_free_memory_less_the_safety_share_and_what_is_kept(monkeypatch):
    states = gathered(*[(0, 2)] * 12, texts=(3, 7))
    need = 5 * 7000 + kept_bytes(states)
    asked = []

    def forecast(free, most=math.inf, devices=1, states=states, fused=False):
        monkeypatch.setattr(memory, "free_memory", lambda device: asked.append(device) or free)
        return forecast_rows(
            states, lambda text: 1000 * text, fuse_guidance=fused, most=most, device=CPU, devices=devices
        )

    assert forecast(math.ceil(need / (1 - SAFETY_SHARE))) == 4
    assert forecast(10 * need) == 12
    assert forecast(10 * need, fused=True) == 24
    assert forecast(10 * need, most=2 * 7000) == 2
    assert forecast(0) == 1
    assert asked == [CPU] * 5
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda least, op: least.fill_(8 * 7000))
    assert forecast(10 * need, devices=2) == 8
    assert len(asked) == 6
    assert forecast(0, states=states[:1]) == 1
    assert len(asked) == 6


# ---- errors


def test_a_failed_allocation_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(out_of_memory())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("not enough memory of the prompt"))


class Runs:
    """Squares rows, and runs out of memory above `fits` of them."""

    def __init__(self, fits):
        self.fits, self.sizes, self.held, self.halvings = fits, [], None, 0
        self.limit = forward_limit(CPU, self.halve)

    def halve(self):
        self.halvings += 1

    def __call__(self, rows):
        # Not even a part of what failed before may still be held when it runs again.
        assert self.held is None or self.held() is None
        self.sizes.append(len(rows))
        if len(rows) > self.fits:
            activations = torch.zeros(3)
            self.held = weakref.ref(activations)
            raise out_of_memory()
        return rows**2

    def run(self, *parts, cost=10):
        done = self.limit.run(parts, self, cost=lambda part: cost, describe=lambda part: "8x8 pixels")
        assert torch.equal(torch.cat([result for _, result in done]), torch.cat(parts) ** 2)
        assert all(torch.equal(part**2, result) for part, result in done)
        sizes, self.sizes = self.sizes, []
        return sizes


def test_only_the_part_that_failed_is_repeated_in_halves_and_the_limit_stays(caplog):
    runs = Runs(fits=3)
    assert runs.run(torch.arange(3), torch.arange(8), torch.arange(6)) == [3, 8, 4, 2, 2, 2, 2, 2, 2, 2]
    assert runs.halvings == 2
    assert len(caplog.records) == 2
    assert caplog.messages[-1] == (
        "a transformer forward ran out of memory over 4 rows (8x8 pixels) and is repeated with 2 at a time, as is what "
        "follows; write rollout.engine_kwargs.vllm_omni.rows_per_forward=2 to start with that: "
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert runs.run(torch.arange(4)) == [2, 2]
    assert runs.run(torch.arange(8), cost=5) == [4, 2, 2, 2, 2]
    assert runs.halvings == 3
    runs.limit.forget()
    assert runs.run(torch.arange(4)) == [4, 2, 2]


def test_what_large_rows_taught_binds_small_ones_by_their_cost():
    runs = Runs(fits=4)
    assert runs.run(torch.arange(8), cost=100) == [8, 4, 4]
    runs.fits = 99
    assert runs.run(torch.arange(16), cost=25) == [16]
    assert runs.run(torch.arange(4), cost=400) == [1, 1, 1, 1]


def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_change():
    runs = Runs(fits=0)
    with pytest.raises(
        RequestError, match=r"over one row alone \(8x8 pixels\): ask for a smaller .* shorter prompt.*2.00"
    ):
        runs.run(torch.arange(2))
    assert (runs.sizes, runs.halvings) == ([2, 1], 1)
    runs.limit = decode_limit(CPU, runs.halve)
    with pytest.raises(RequestError, match=r"decoding ran out .* smaller height and width or output_type=latent"):
        runs.run(torch.arange(1))


def test_what_several_devices_run_together_is_not_repeated_by_one_of_them():
    runs = Runs(fits=3)
    runs.limit = forward_limit(CPU, runs.halve, devices=2)
    with pytest.raises(torch.OutOfMemoryError, match=r"over 6 rows .*8x8.* 2 devices .*; write rollout\.\S+=2: .*2.00"):
        runs.run(torch.arange(6))
    assert (runs.sizes, runs.halvings, runs.limit.most) == ([6], 0, math.inf)
    runs.fits, runs.held = 0, None
    with pytest.raises(RequestError, match="over one row alone"):
        runs.run(torch.arange(1))


def test_other_errors_pass():
    def run(part):
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        forward_limit(CPU, print).run([torch.arange(2)], run, cost=len, describe=str)


def test_the_cache_of_a_cuda_device_is_freed_before_a_part_is_repeated(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("freed"))

    def run(rows):
        events.append(len(rows))
        if len(rows) > 1:
            raise out_of_memory()

    forward_limit(torch.device("cuda", 0), lambda: None).run([torch.arange(2)], run, cost=lambda _: 1, describe=str)
    assert events == [2, "freed", 1, 1]
