"""Callers that are cancelled while a worker does what they asked, or closes, on an engine that only pretends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
        self.is_shut = threading.Event()
        self.final_output_task = None
        self._answer = answer

    async def collective_rpc(self, method, args):
        self.calls.append(method)
        self.called.set()
        await self.may_answer.wait()
        return [self._answer]

    async def sleep(self, level):
        await self.collective_rpc("sleep", ())
        return []

    async def wake_up(self):
        self.calls.append("wake_up")
        return []

    def shutdown(self):
        self.is_shut.set()


CHANGES = {
    "load_lora": (False, ["load_lora"], lambda engine, lora: engine.load_lora(lora, scale=0.5, version=9)),
    "merge_lora": (True, ["merge_lora"], lambda engine, lora: engine.load_lora(lora, scale=0.5, version=9)),
    "unmerge_lora": (True, ["unmerge_lora"], lambda engine, lora: engine.remove_lora()),
    "update_weights": (False, ["load_weights_file"], lambda engine, lora: engine.update_weights(WEIGHTS, version=9)),
}
REFUSED = {"supported": False, "error": "refused"}


async def cancelled_amid(omni: Omni, call: Coroutine[Any, Any, Any]) -> None:
    """Cancel who makes `call` when the worker has it and has not answered yet."""
    caller = asyncio.create_task(call)
    await omni.called.wait()
    caller.cancel()
    omni.may_answer.set()
    with pytest.raises(asyncio.CancelledError):
        await caller


@pytest.mark.parametrize("answer", [1, REFUSED], ids=["done", "refused"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_caller_who_is_cancelled_leaves_policy_and_version_together(tmp_path, change, answer):
    merge, calls, call = CHANGES[change]
    engine = RolloutEngine(omni := Omni(answer), {}, merge)
    await cancelled_amid(omni, call(engine, write_lora(tmp_path / "lora", WEIGHTS, 1)))
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
    await cancelled_amid(omni, engine.remove_lora())
    assert omni.calls == ["load_lora", "remove_lora"]
    assert engine._lora is None and engine.policy_version == 2


async def test_a_caller_who_is_not_cancelled_gets_the_error(tmp_path):
    engine = RolloutEngine(omni := Omni(REFUSED), {})
    omni.may_answer.set()
    with pytest.raises(RolloutError, match="load_weights_file failed: refused"):
        await engine.update_weights(WEIGHTS)
    assert engine.policy_version == 0


async def test_whose_sleep_was_cancelled_can_be_woken_up():
    engine = RolloutEngine(omni := Omni(1), {})
    await cancelled_amid(omni, engine.sleep())
    assert omni.calls == ["check_sleep", "release_caches", "sleep"]
    await engine.wake_up()
    assert omni.calls[3:] == ["wake_up"] and engine.policy_version == 0


async def test_an_engine_closes_while_all_threads_of_the_loop_wait_for_it():
    engine = RolloutEngine(omni := Omni(1), {})
    loop, pool = asyncio.get_running_loop(), ThreadPoolExecutor(1)
    loop.set_default_executor(pool)
    waiting = loop.run_in_executor(None, omni.is_shut.wait, 30)
    await engine.close()
    assert await waiting
