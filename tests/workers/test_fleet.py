"""What becomes of requests, policies and sleep when rollout servers die."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

import pytest

from tests.workers.fake_servers import Script
from verl_omni.workers.rollout.handle import ServerDied
from verl_omni.workers.rollout.replicas import Recovery, RolloutReplicas
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

FIRST, SECOND = (f"vllm_omni_server_{i}_0" for i in range(2))
LORA = ({"r": 8}, "tensors")
Start = Callable[..., "asyncio.Future[RolloutReplicas]"]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def start(script, monkeypatch) -> Start:
    return lambda servers, **timeouts: script.start(monkeypatch, servers, **timeouts)


def groups(*members: str) -> list[list[RolloutRequest]]:
    """A group a string, a request a letter."""
    return [[RolloutRequest(request_id=name) for name in group] for group in members]


async def gather(replicas: RolloutReplicas, *members: str) -> dict[str, RolloutSample | RolloutError]:
    found = [result async for result in replicas.generate_groups(groups(*members))]
    assert sorted(str(result.request_id) for result in found) == sorted("".join(members))
    return {str(result.request_id): result for result in found}


def versions(results: dict[str, RolloutSample | RolloutError]) -> set[int]:
    """The policies that made all of `results`."""
    return {result.policy_version for result in results.values()}


async def all_up(replicas: RolloutReplicas) -> None:
    """Wait for the servers that are being started."""
    await replicas.sleep()
    await replicas.wake_up()


def warnings_of(caplog) -> list[str]:
    """What was warned of; the plan's lines are told too where another test has turned them on."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_what_a_dead_server_leaves_behind_is_run_by_those_that_live(script, start, caplog):
    async with await start(2) as replicas:
        script.kills["y"] = 1
        assert versions(await gather(replicas, "abc", "xyz")) == {0}
        assert [call[1:] for call in script.made[0].calls if call[0] == "generate"] == [("a", "b", "c"), ("y", "z")]
        await all_up(replicas)
        assert replicas.living == [FIRST, SECOND]
        assert replicas.recovery(reset=True) == Recovery(servers_restarted=1, requests_retried=2)
        assert replicas.recovery() == Recovery()
        assert versions(await gather(replicas, "cd", "uv")) == {0}
        assert script.made[2].methods().count("generate") == 1  # it gets its share again
    died, serves = warnings_of(caplog)
    assert died == f"{SECOND} died: y killed it; requests run again: 2; a fresh server takes its place"
    assert re.fullmatch(rf"{SECOND} serves again, \d+\.\d s after it died", serves)


async def test_with_no_other_server_they_wait_for_the_fresh_one_and_it_has_the_policy_first(script, start):
    async with await start(1) as replicas:
        await replicas.sync("weights", 4, ["weights"])
        await replicas.sync("lora", 7, LORA, scale=0.5)
        script.kills["b"] = 1
        assert versions(await gather(replicas, "abc")) == {7}
        assert replicas.recovery() == Recovery(servers_restarted=1, requests_retried=2)
        fresh = script.made[1]
        given = [call for call in fresh.calls if call[0] in ("start", "set_weights", "set_lora", "generate")]
        assert [call[0] for call in given] == ["start", "set_weights", "set_lora", "generate"]
        assert given[2] == ("set_lora", 7, {"r": 8}, "reference to tensors", 0.5)
        assert ("stage_weights", ["weights"]) in fresh.calls


async def test_an_engine_that_ends_without_its_process_is_a_death_too(script, start):
    async with await start(2) as replicas:
        script.breaks["x"] = 1
        assert versions(await gather(replicas, "ab", "xy")) == {0}
        assert replicas.recovery().requests_retried == 2


async def test_a_server_that_dies_while_nothing_runs_is_replaced(script, start, caplog):
    async with await start(2) as replicas:
        script.made[1].die("out of\n memory")
        while len(script.made) < 3:
            await asyncio.sleep(0)
        await all_up(replicas)
        assert replicas.living == [FIRST, SECOND]
    assert f"{SECOND} died: out of memory; requests run again: 0" in caplog.text


async def test_whose_second_server_dies_too_fails_and_says_so(script, start, caplog):
    async with await start(2) as replicas:
        script.kills["x"] = 2
        results = await gather(replicas, "ab", "xy")
        assert versions({name: results.pop(name) for name in "ab"}) == {0}
        for error in results.values():
            assert error.message == (
                f"it was run twice, and both servers died: {SECOND} died: x killed it; {FIRST} died: x killed it"
            )
        assert versions(await gather(replicas, "abc")) == {0}
    assert "requests run again: 0, failed as they were on a dead server before: 2" in caplog.text


async def test_a_server_that_does_not_start_again_is_left_out(script, start, caplog):
    async with await start(2) as replicas:
        script.kills["x"] = 1
        script.starts = [False, False]
        await gather(replicas, "a", "x")
        await all_up(replicas)
        assert replicas.living == [FIRST] and await replicas.alive() == {FIRST: True, SECOND: False}
        assert versions(await gather(replicas, "a", "x")) == {0}
        script.starts = [False, True]
        script.kills["a"] = 1
        assert versions(await gather(replicas, "a", "x")) == {0}  # the second attempt succeeds
        script.starts = [False, False]
        script.kills["a"] = 1
        results = await gather(replicas, "a")
        assert f"no server is left: {FIRST}, {SECOND} died" in str(results["a"])
        for call in (replicas.stats(), replicas.sync("lora", 1, LORA), replicas.sleep(), gather(replicas, "a")):
            with pytest.raises(ServerDied, match="no server is left"):
                await call
        assert replicas.recovery().servers_restarted == 1
    for attempt in (1, 2):
        assert f"{SECOND} did not start again, attempt {attempt} of 2: {SECOND}: no memory" in caplog.messages
    assert f"{SECOND} is left out; servers that go on: 1" in caplog.messages


async def test_a_server_that_gives_nothing_for_too_long_is_dead(script, start, caplog):
    async with await start(2, result_timeout_s=0.05) as replicas:
        script.stuck = {"y"}
        assert versions(await gather(replicas, "abc", "xyz")) == {0}
        assert replicas.recovery().requests_retried == 2
    assert (
        f"{SECOND} gave no result for 0.05 s (actor_rollout_ref.rollout.result_timeout_s=0.05); requests run again: 2"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("kind", "payload", "method"), [("lora", LORA, "set_lora"), ("weights", ["weights"], "set_weights")]
)
async def test_a_server_that_hangs_in_a_sync_is_replaced_by_one_with_the_new_policy(
    script, start, caplog, kind, payload, method
):
    async with await start(1, sync_timeout_s=0.05) as replicas:
        script.stuck = {method}
        await replicas.sync(kind, 3, payload)
        assert versions(await gather(replicas, "ab")) == {3}
    key = "actor_rollout_ref.rollout.sync_timeout_s=0.05"
    assert f"{FIRST} did not answer {method} for 0.05 s ({key}); requests run again: 0" in caplog.text


async def test_a_fresh_server_does_not_get_a_policy_that_was_refused(script, start):
    async with await start(1) as replicas:
        await replicas.sync("lora", 1, LORA)
        script.refused = {2}
        with pytest.raises(RolloutError, match=r"policy 2 was not taken, .* it does not fit"):
            await replicas.sync("lora", 2, LORA)
        script.kills["a"] = 1
        assert versions(await gather(replicas, "ab")) == {1}


async def test_who_dies_asleep_is_replaced_after_waking_up(script, start):
    async with await start(2) as replicas:
        await replicas.sleep()
        script.made[1].die()
        while replicas.living != [FIRST]:
            await asyncio.sleep(0)
        await replicas.sleep()  # once more does no harm
        assert len(script.made) == 2  # a start would take memory that others have now
        await replicas.wake_up()
        await replicas.sync("lora", 5, LORA)
        await all_up(replicas)
        assert await replicas.policy_versions() == {FIRST: 5, SECOND: 5}


async def test_all_asleep_and_dead_wait_for_nothing(script, start):
    async with await start(1) as replicas:
        await replicas.sleep()
        script.made[0].die()
        while replicas.living:
            await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="call wake_up"):
            await replicas.stats()
        await replicas.wake_up()
        assert replicas.living == [FIRST]


async def test_an_abort_ends_what_waits_for_a_fresh_server(script, start):
    async with await start(1) as replicas:
        script.kills["a"] = 1
        script.stuck = {"start"}
        waiting = asyncio.create_task(gather(replicas, "ab"))
        while len(script.made) < 2 or "start" not in script.made[1].methods():
            await asyncio.sleep(0)
        aborting = asyncio.create_task(replicas.abort_all_requests())
        await asyncio.sleep(0)
        script.made[1].die()  # the next attempt succeeds
        results = await waiting
        await aborting
        assert {result.message for result in results.values()} == {"aborted"}


async def test_closing_ends_a_start(script, start):
    replicas = await start(1)
    script.stuck = {"start"}
    script.made[0].die()
    while len(script.made) < 2 or "start" not in script.made[1].methods():
        await asyncio.sleep(0)
    await replicas.close()
    await replicas.close()
    assert script.made[1]._end.is_set() and len(script.made) == 2
    with pytest.raises(RolloutError, match="the servers are closed; start others"):
        await replicas.sleep()
