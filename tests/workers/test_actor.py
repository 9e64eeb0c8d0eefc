"""The training worker, two of them under Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.training import META, actor_config, make_rows
from verl_omni.platforms import verl_cpu_environment
from verl_omni.workers.config import DiffusionModelConfig
from verl_omni.workers.config.lora import read_lora_config

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def workers(tiny_sd3: Path, ray_session: None) -> Iterator[Any]:
    """A group of two."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from verl_omni.workers.actor import ActorWorkerConfig, DiffusionActorWorker

    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    environment = verl_cpu_environment() | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    config = ActorWorkerConfig(
        model=DiffusionModelConfig(path=str(tiny_sd3), lora_rank=4, lora_alpha=8),
        actor=actor_config(),
        log_prob_micro_batch_size=2,
        optimizer_steps=4,
    )
    group = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(ray.remote(DiffusionActorWorker), config=config),
        device_name="cpu",
        worker_env=environment,
    )
    group.init_model()
    yield group
    for placed in pool.pgs:
        ray.util.remove_placement_group(placed)


def make_batch(path: Path) -> Any:
    from verl import DataProto

    return DataProto.from_dict(tensors=make_rows(path), meta_info=META | {"mini_batch_size": 4})


def test_a_step_of_training(workers: Any, tiny_sd3: Path, tmp_path: Path) -> None:
    batch = make_batch(tiny_sd3)
    assert "old_log_probs" in batch.batch
    (kind, adapter, before), nothing = workers.policy_state()
    assert kind == "lora"
    assert nothing is None
    batch.batch["old_log_probs"] = workers.compute_log_prob(batch).batch["old_log_probs"]
    metrics = workers.update_actor(batch).meta_info["metrics"]
    assert metrics["actor/first_ratio_max_dev"] == 0  # nothing has changed since the log-probs were computed
    assert all(isinstance(value, float) for value in metrics.values())
    names = "loss pg_loss kl_loss ratio_mean ratio_max_dev first_ratio_max_dev clip_fraction grad_norm skipped_steps lr"
    assert set(metrics) == {f"actor/{name}" for name in names.split()}
    (_, _, after), _ = workers.policy_state()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert adapter["r"] == 4
    assert adapter["lora_alpha"] == 8
    assert adapter["base_model_name_or_path"] == str(tiny_sd3)

    workers.offload()
    workers.onload()
    workers.save_lora(str(tmp_path / "lora"))
    assert read_lora_config(tmp_path / "lora") == adapter
    workers.save_checkpoint(str(tmp_path / "actor"))
    workers.update_actor(batch)
    workers.load_checkpoint(str(tmp_path / "actor"))
    (_, _, back), _ = workers.policy_state()
    assert all(torch.equal(back[name], after[name]) for name in after)


def test_log_probs_come_back_in_the_order_of_the_samples(workers: Any, tiny_sd3: Path) -> None:
    batch = make_batch(tiny_sd3)
    found = workers.compute_log_prob(batch).batch["old_log_probs"]
    turned = workers.compute_log_prob(batch.select_idxs([3, 2, 1, 0])).batch["old_log_probs"]
    assert found.shape == (4, 2)
    assert found.dtype == torch.float32
    assert torch.allclose(found, turned.flip(0), rtol=0, atol=1e-5)


def test_mini_batches_that_cannot_be_spread_are_refused(workers: Any, tiny_sd3: Path) -> None:
    batch = make_batch(tiny_sd3)
    batch.meta_info["mini_batch_size"] = 3
    with pytest.raises(ValueError, match="mini_batch_size=3 samples cannot be spread over 2 ranks"):
        workers.update_actor(batch)
