"""A reward function that hangs: it is given up, told, and holds up neither the others nor the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from tests.reward_loop.items import item, reward_config
from verl_omni.reward_loop import RewardError, RewardManager, tasks, threads
from verl_omni.reward_loop.tasks import Tasks
from verl_omni.reward_loop.threads import HangingError, Threads
from verl_omni.workers.config import ConfigError

SHORT = 0.05
SWALLOWS = """
import asyncio
async def compute_score():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return 1
"""


@pytest.fixture
def go():
    """What hangs waits for this; set at the end, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_hanging_function_is_given_up_and_another_thread_takes_its_place(go):
    pool = Threads(1)
    with pytest.raises(HangingError, match=r"reward\.timeout_s=0\.05; its thread cannot be ended and goes on, 1 of"):
        await pool.run(go.wait, SHORT)
    assert await pool.run(lambda: "fine", 30) == "fine"
    pool.close()


async def test_the_wait_for_a_turn_is_not_counted():
    pool = Threads(1)
    begun, first_done = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        first_done.wait(30)

    running = asyncio.ensure_future(pool.run(first, None))
    waiting = asyncio.ensure_future(pool.run(lambda: "fine", SHORT))
    await asyncio.to_thread(begun.wait, 30)
    done, _ = await asyncio.wait([waiting], timeout=4 * SHORT)
    assert not done
    first_done.set()
    assert await waiting == "fine"
    await running
    pool.close()


async def test_beyond_a_number_of_hanging_functions_no_more_are_begun(go, monkeypatch):
    monkeypatch.setattr(threads, "MAX_HANGING", 2)
    pool = Threads(1)
    calls = [asyncio.ensure_future(pool.run(go.wait, SHORT)) for _ in range(5)]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, HangingError) for error in found)
    with pytest.raises(HangingError, match="no more are begun"):
        await pool.run(lambda: "fine", SHORT)
    pool.close()


async def test_what_is_cancelled_before_its_turn_is_not_begun():
    pool, go, ran = Threads(1), threading.Event(), []
    first = asyncio.ensure_future(pool.run(lambda: go.wait(30), None))
    second = asyncio.ensure_future(pool.run(lambda: ran.append(2), None))
    await asyncio.sleep(0)
    second.cancel()
    go.set()
    await first
    assert await pool.run(lambda: "fine", None) == "fine" and not ran
    pool.close()


async def test_errors_come_through_and_a_closed_pool_begins_nothing():
    pool = Threads(1)
    for error in (KeyError("a"), SystemExit(1)):
        with pytest.raises(type(error)):
            await pool.run(_raising(error), None)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        await pool.run(lambda: 1, None)


def _raising(error: BaseException):
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def compute_score(extra_info):\n    extra_info['go'].wait()\n", "its thread cannot be ended"),
        ("import asyncio\nasync def compute_score():\n    await asyncio.Event().wait()\n", "no score within"),
        (SWALLOWS, "no score within"),
        ("async def compute_score():\n    raise TimeoutError('its own')\n", "TimeoutError: its own"),
    ],
    ids=["plain", "async", "swallows its cancellation", "its own"],
)
async def test_the_error_names_scorer_request_and_key(tmp_path, go, code, reason):
    (tmp_path / "slow.py").write_text(code)
    scorers = {"slow": {"type": "function", "path": str(tmp_path / "slow.py")}}
    async with RewardManager(reward_config(scorers=scorers, timeout_s=SHORT)) as manager:
        with pytest.raises(RewardError, match="scorer slow could not score request r7: ") as raised:
            await manager.score(item(extra_info={"go": go}))
    assert reason in raised.value.reason


def test_a_process_with_a_hanging_function_ends():
    code = (
        "import asyncio, threading\n"
        "from verl_omni.reward_loop.threads import Threads, HangingError\n"
        "async def main():\n"
        "    try:\n        await Threads(1).run(threading.Event().wait, 0.05)\n"
        "    except HangingError:\n        print('given up')\n"
        "asyncio.run(main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "given up\n"


async def test_what_swallows_one_cancellation_gets_another(monkeypatch):
    monkeypatch.setattr(tasks, "PATIENCE_S", 0.01)
    cancelled = []

    async def retry() -> None:
        while len(cancelled) < 3:
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 30)
            except asyncio.CancelledError:
                cancelled.append(True)

    running = Tasks()
    with pytest.raises(HangingError):
        await running.run(retry(), SHORT)
    await running.close()
    assert len(cancelled) == 3


@pytest.mark.parametrize("limit", [0, -1, "soon"])
def test_what_is_no_limit_is_refused(limit):
    with pytest.raises(ConfigError, match=r"reward\.timeout_s"):
        reward_config(scorers={"c": {"type": "color"}}, timeout_s=limit)
