"""Callers that are cancelled while a worker changes the policy, on an engine that only pretends."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.workers.policies import write_lora
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.request import RolloutError

WEIGHTS = {"attn.to_q.weight": torch.ones(4, 4)}


class Omni:
    """Answers each call of the worker once it may, with `answer`."""

    def __init__(self, answer) -> None:
        self.calls: list[str] = []
        self.called, self.may_answer = asyncio.Event(), asyncio.Event()
        self._answer = answer

    async def collective_rpc(self, method, args):
        self.calls.append(method)
        self.called.set()
        await self.may_answer.wait()
        return [self._answer]


CHANGES = {
    "load_lora": (False, ["load_lora"], lambda engine, lora: engine.load_lora(lora, scale=0.5, version=9)),
    "merge_lora": (True, ["merge_lora"], lambda engine, lora: engine.load_lora(lora, scale=0.5, version=9)),
    "unmerge_lora": (True, ["unmerge_lora"], lambda engine, lora: engine.remove_lora()),
    "update_weights": (False, ["load_weights_file"], lambda engine, lora: engine.update_weights(WEIGHTS, version=9)),
}
REFUSED = {"supported": False, "error": "refused"}


@pytest.mark.parametrize("answer", [1, REFUSED], ids=["done", "refused"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_caller_who_is_cancelled_leaves_policy_and_version_together(tmp_path, change, answer):
    merge, calls, call = CHANGES[change]
    engine = RolloutEngine(omni := Omni(answer), {}, merge)
    caller = asyncio.create_task(call(engine, write_lora(tmp_path / "lora", WEIGHTS, 1)))
    await omni.called.wait()
    caller.cancel()
    omni.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert omni.calls == calls
    wanted = 0 if answer is REFUSED else 1 if change == "unmerge_lora" else 9
    assert engine.policy_version == wanted
    assert (engine._lora_scale == 0.5) is (change == "load_lora" and answer is not REFUSED)


async def test_a_lora_whose_removal_is_cancelled_is_gone(tmp_path):
    engine = RolloutEngine(omni := Omni(1), {})
    omni.may_answer.set()
    await engine.load_lora(write_lora(tmp_path / "lora", WEIGHTS, 1))
    omni.called.clear()
    omni.may_answer.clear()
    caller = asyncio.create_task(engine.remove_lora())
    await omni.called.wait()
    caller.cancel()
    omni.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert omni.calls == ["load_lora", "remove_lora"]
    assert engine._lora is None and engine.policy_version == 2


async def test_a_caller_who_is_not_cancelled_gets_the_error(tmp_path):
    engine = RolloutEngine(omni := Omni(REFUSED), {})
    omni.may_answer.set()
    with pytest.raises(RolloutError, match="load_weights_file failed: refused"):
        await engine.update_weights(WEIGHTS)
    assert engine.policy_version == 0
