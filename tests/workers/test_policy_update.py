"""The update of the policy around an engine without a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.pipelines.training import StepScore
from verl_omni.trainer.diffusion.batch import deal
from verl_omni.workers.config import FSDPDiffusionActorConfig
from verl_omni.workers.engine.policy_update import PolicyUpdate, recorded_log_probs

verl = pytest.importorskip("verl")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of one; an engine that other tests left running has one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class RoundingEngine:
    """Its policy never changes, but the log-probs of a row depend a little on its mates, as those of kernels do."""

    def __init__(self, *norms: float) -> None:
        """`norms`: of the gradients to come; 1 after that."""
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
        self._weight = torch.ones((), requires_grad=True)
        self._norms = list(norms)
        self.train_mode = self.eval_mode = nullcontext
        self.optimizer_zero_grad = self.lr_scheduler_step = lambda: None
        self.get_data_parallel_size = dist.get_world_size
        self.optimizer_step = lambda: self._norms.pop(0) if self._norms else 1.0

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Any:
        return nullcontext()

    def score(self, rows: Any, column: int, knobs: Any) -> StepScore:
        number = rows["number"]
        log_prob = self._weight * (number + column + 1e-3 * number.sum() / len(number))
        return StepScore(log_prob, mean=log_prob, std=torch.ones_like(log_prob))


def batch_of(size: int) -> Any:
    return verl.DataProto.from_dict(
        tensors={
            "number": torch.arange(float(size)) ** 2,
            "sample_weight": torch.ones(size),
            "sde_steps": torch.zeros(size, 2),
            "advantages": torch.ones(size, 2),
        }
    )


@given(
    size=st.integers(1, 24),
    mini_batches=st.integers(1, 4),
    ranks=st.integers(1, 3),
    micro=st.integers(1, 5),
)
def test_the_ratio_is_exactly_one_before_the_first_update(size, mini_batches, ranks, micro):
    dealt, mini = deal(batch_of(size), mini_batches=mini_batches, ranks=ranks)
    config = FSDPDiffusionActorConfig(ppo_micro_batch_size_per_gpu=micro)
    for part in dealt.chunk(ranks):
        engine, rows = RoundingEngine(), dict(part.batch.items())
        rows["old_log_probs"] = recorded_log_probs(
            engine, rows, None, mini_batch_size=mini // ranks, micro_batch_size=micro
        )
        metrics = PolicyUpdate(engine=engine, config=config).run(rows, None, mini_batch_size=mini // ranks)
        # a rank that only holds filling has nothing to tell
        assert metrics.get("ratio_max_dev", 0) == metrics.get("first_ratio_max_dev", 0) == 0


@pytest.mark.parametrize(
    ("norms", "skipped"), [([1.0, 1.0], 0), ([math.nan, 1.0], 0.5), ([1.0, math.inf], 0.5), ([math.nan, math.inf], 1)]
)
def test_updates_with_a_gradient_that_is_not_finite_are_told_as_skipped(norms, skipped):
    rows = dict(batch_of(4).batch.items()) | {"old_log_probs": torch.zeros(4, 2)}
    update = PolicyUpdate(engine=RoundingEngine(*norms), config=FSDPDiffusionActorConfig())
    assert update.run(rows, None, mini_batch_size=2)["skipped_steps"] == skipped


def test_rows_that_do_not_fill_the_mini_batches_are_refused():
    rows = dict(batch_of(4).batch.items()) | {"old_log_probs": torch.zeros(4, 2)}
    with pytest.raises(ValueError, match="4 rows a rank do not fill mini-batches of 3"):
        PolicyUpdate(engine=RoundingEngine(), config=FSDPDiffusionActorConfig()).run(rows, None, mini_batch_size=3)
    with pytest.raises(ValueError, match="4 rows a rank do not fill mini-batches of 3"):
        recorded_log_probs(RoundingEngine(), rows, None, mini_batch_size=3, micro_batch_size=1)
