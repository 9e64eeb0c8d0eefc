"""Policies on their way to the workers."""

import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engines import SERIAL
from verl_omni.workers.config.lora import LORA_CONFIG, LORA_WEIGHTS
from verl_omni.workers.rollout import staging
from verl_omni.workers.rollout.handle import Placement, ServerDied, ServerHandle
from verl_omni.workers.rollout.replicas import RolloutReplicas
from verl_omni.workers.rollout.request import RolloutError
from verl_omni.workers.rollout.server import RolloutServer, ServerSettings
from verl_omni.workers.rollout.staging import LoraAdapter, WeightsFile, staged_lora, staged_weights, staging_folder
from verl_omni.workers.rollout.wire import pack


class OnDevice(torch.Tensor):
    """A tensor that has to be copied to reach the host, as one on a GPU has."""

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


def test_weights_leave_the_device_one_by_one():
    alive: weakref.WeakSet[OnDevice] = weakref.WeakSet()
    most = 0

    def gathered():
        nonlocal most
        for i in range(4):
            gc.collect()
            most = max(most, len(alive))
            tensor = torch.full((2, 3), float(i)).as_subclass(OnDevice)
            alive.add(tensor)
            yield f"w{i}", tensor
            del tensor

    with staged_weights(gathered()) as path:
        loaded = load_file(path)
    assert most == 0  # each had gone when the next was made
    assert all(torch.equal(loaded[f"w{i}"], torch.full((2, 3), float(i))) for i in range(4))


def test_a_lora_in_memory_is_staged_as_its_folder_is(tmp_path):
    both = torch.randn(8, 16)
    tensors = {"a.to_q.lora_A.weight": both[:4], "a.to_q.lora_B.weight": both[4:].T}  # views, one of them strided
    config = {"r": 4, "lora_alpha": 8}
    folder = tmp_path / "lora"
    folder.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / LORA_WEIGHTS)
    (folder / LORA_CONFIG).write_text(json.dumps(config))
    staged = []
    for source in (folder, LoraAdapter(config=config, tensors=tensors)):
        with staged_lora(source, {"to_q": "to_query"}) as path:
            staged.append((load_file(path / LORA_WEIGHTS), json.loads((path / LORA_CONFIG).read_text())))
    (weights, settings), (weights_too, settings_too) = staged
    assert settings == settings_too == {**config, "target_modules": ["to_query"]}
    assert weights.keys() == weights_too.keys() == {"a.to_query.lora_A.weight", "a.to_query.lora_B.weight"}
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)
    assert "target_modules" not in config


def test_a_lora_in_memory_is_checked_as_its_folder_is():
    tensors = {"a.lora_A.weight": torch.ones(1)}
    for config, names, message in (({"rank_pattern": {"a": 2}}, tensors, "rank_pattern"), ({}, {}, "no weights")):
        with pytest.raises(ValueError, match=message), staged_lora(LoraAdapter(config=config, tensors=names), {}):
            pass


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        ({"r": 3}, {}, r"a\.lora_A\.weight has shape \[4, 6\], which is not \[r, in\] with r=3 of its config"),
        ({}, {"B": torch.ones(8, 3)}, r"a\.lora_B\.weight has shape \[8, 3\], which is not \[out, r\] with r=4"),
        ({}, {"A": torch.ones(4)}, r"a\.lora_A\.weight has shape \[4\]"),
        *(({"r": value}, {}, "r must be an integer of at least 1") for value in (None, 0, True, "4", 4.0)),
        *(
            ({"lora_alpha": value}, {}, "lora_alpha must be a finite number above 0")
            for value in (None, 0, -1, math.nan, math.inf, 10**400, "4")
        ),
        ({}, {"A": torch.ones(4, 6, dtype=torch.int64)}, r"a\.lora_A\.weight is of dtype int64; .* float dtype"),
        *(
            ({}, {"B": torch.full((8, 4), value)}, r"a\.lora_B\.weight holds NaN or infinity")
            for value in (math.nan, math.inf)
        ),
    ],
)
def test_a_lora_that_contradicts_its_config_or_is_not_finite_is_refused(config, changed, message):
    halves = {"A": torch.ones(4, 6), "B": torch.ones(8, 4)} | changed
    lora = LoraAdapter(
        config={"r": 4, "lora_alpha": 8} | config,
        tensors={f"a.lora_{half}.weight": tensor for half, tensor in halves.items()},
    )
    with pytest.raises(ValueError, match=message), staged_lora(lora, {}):
        pass


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_lora_may_be_of_any_float_dtype_and_alpha_a_fraction(dtype, tmp_path):
    tensors = {"a.lora_A.weight": torch.ones(4, 6, dtype=dtype), "a.lora_B.weight": torch.ones(8, 4, dtype=dtype)}
    config = {"r": 4, "lora_alpha": 0.5}
    save_file(tensors, tmp_path / LORA_WEIGHTS)
    (tmp_path / LORA_CONFIG).write_text(json.dumps(config))
    for source in (tmp_path, LoraAdapter(config=config, tensors=tensors)):
        with staged_lora(source, {}) as path:
            assert load_file(path / LORA_WEIGHTS).keys() == tensors.keys()


def test_a_file_of_weights_is_staged_as_it_is_and_stays(tmp_path):
    weights = {"a": torch.ones(2, 3), "b": torch.zeros(4)}
    save_file(weights, tmp_path / "w.safetensors")
    file = WeightsFile(tmp_path / "w.safetensors")
    with staged_weights(file) as path:
        assert path == file.path
    assert {name: tensor.tolist() for name, tensor in file} == {name: t.tolist() for name, t in weights.items()}


class Server(ServerHandle):
    """A server without a process. It does to a call what `fate` says, else answers its name."""

    def __init__(self, calls, place, name, node, fate):
        super().__init__(place, Placement(), None)
        self.name, self.node = name, node
        self._calls, self._fate = calls, fate

    async def call(self, method, *arguments):
        self._calls.append((method, self.name, *arguments))
        if method in self._fate:
            raise self._fate[method]
        return f"/{self.name}"

    def kill(self):
        pass


@pytest.fixture
def sync_weights(monkeypatch):
    return lambda **fates: _sync_weights(monkeypatch, fates)


def _sync_weights(monkeypatch, fates):
    """Calls of a sync of weights to servers a and b of one node and c of another, and the error that it ended with."""
    calls = []
    nodes = {"a": "first", "b": "first", "c": "second"}

    def create(settings, place, placement, environment):
        name, node = list(nodes.items())[place]
        return Server(calls, place, name, node, fates.get(name, {}))

    monkeypatch.setattr(ServerHandle, "create", create)
    no_limits = {"start_timeout_s": 60, "result_timeout_s": None, "sync_timeout_s": None}
    replicas = RolloutReplicas(None, [Placement()] * 3, {}, **no_limits)
    try:
        asyncio.run(replicas.sync("weights", 7, ["reference"]))
    except RolloutError as error:
        return calls, error
    return calls, None


def test_weights_are_written_once_a_node_and_read_by_all_its_servers(sync_weights):
    files = {"first": "/a", "second": "/c"}
    calls, error = sync_weights()
    assert calls[:2] == [("stage_weights", name, ["reference"]) for name in "ac"]
    assert calls[2:5] == [("set_weights", name, 7, files) for name in "abc"]
    assert calls[5:] == [("drop_weights", name, list(files.values())) for name in "abc"]
    assert error is None


def test_another_server_of_the_node_writes_if_the_first_dies(sync_weights):
    calls, error = sync_weights(a={"stage_weights": ServerDied(None, "a died")})
    assert [name for method, name, *_ in calls if method == "stage_weights"] == ["a", "c", "b"]
    files = {"second": "/c", "first": "/b"}
    assert [call for call in calls if call[0] == "set_weights"] == [("set_weights", name, 7, files) for name in "bc"]
    assert error is None


@pytest.mark.parametrize("method", ["stage_weights", "set_weights"])
def test_a_sync_that_fails_leaves_no_file_and_no_server_half_told(sync_weights, method):
    calls, error = sync_weights(c={method: RolloutError(None, "no room"), "drop_weights": RolloutError(None, "late")})
    assert error is not None and "policy 7 was not taken" in str(error) and "no room" in str(error)
    told = [name for called, name, *_ in calls if called == "set_weights"]
    assert told == (list("abc") if method == "set_weights" else [])
    assert [name for called, name, *_ in calls if called == "drop_weights"] == list("abc")


def test_a_server_stages_what_is_in_the_store_and_drops_also_what_a_dead_one_left(tmp_path):
    server = RolloutServer(ServerSettings(model_path="m", plan=SERIAL.plan, adapter="a.B"), replica=0)
    buckets = [{"a": torch.ones(2, 3)}, {"b": torch.arange(4)}]
    with staging_folder(0) as folder:
        left = tmp_path / folder.name / "weights.safetensors"
    other = tmp_path / "not_ours" / "weights.safetensors"
    for file in (left, other):
        file.parent.mkdir()

    async def in_store(bucket):
        return pack(bucket)

    async def scenario():
        first = Path(await server.stage_weights([in_store(buckets[0])]))
        path = Path(await server.stage_weights([in_store(bucket) for bucket in buckets]))
        loaded = load_file(path)
        await server.drop_weights([str(file) for file in (path, left, other, tmp_path / "elsewhere" / "w")])
        return first, path, loaded

    first, path, loaded = asyncio.run(scenario())
    assert all(torch.equal(loaded[name], tensor) for bucket in buckets for name, tensor in bucket.items())
    assert not any(file.parent.exists() for file in (first, path, left)) and other.parent.exists()


def test_what_a_process_left_that_was_killed_is_removed(tmp_path, monkeypatch):
    """But not what a living one holds, nor what was made just now and may not be held yet."""
    monkeypatch.setattr(staging, "SHARED_MEMORY", str(tmp_path))
    stage = f"import signal\nfrom verl_omni.workers.rollout import staging\nstaging.SHARED_MEMORY = {str(tmp_path)!r}\n"
    hold = "with staging.staging_folder(0) as folder:\n print(folder, flush=True)\n signal.pause()"
    with subprocess.Popen([sys.executable, "-c", stage + hold], stdout=subprocess.PIPE, text=True) as process:
        left = Path(process.stdout.readline().strip())
        process.kill()
    young = left.with_name(f"{left.name}_young")
    young.mkdir()
    with staging_folder(0) as living:
        for folder in (left, living):
            os.utime(folder, (0, 0))
        with staging_folder(0):
            assert not left.exists() and living.exists() and young.exists()
