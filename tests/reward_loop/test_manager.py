"""Several scorers at once: the weighted sum, and what happens when one fails."""

from __future__ import annotations

import asyncio
import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reward_loop.items import item, noise, plain, reward_config, score
from verl_omni.reward_loop import RewardError, RewardManager

weights = st.floats(-100, 100)


@pytest.fixture
def function(tmp_path, monkeypatch):
    """Writes a function and gives the scorer of it."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(name: str, code: str) -> dict[str, object]:
        (tmp_path / f"{name}.py").write_text(code)
        return {"type": "function", "path": str(tmp_path / f"{name}.py")}

    return write


@given(weights, weights)
def test_the_total_is_the_weighted_sum_of_the_parts(a, b):
    async def run():
        scorers = {"bright": {"type": "brightness", "weight": a}, "red": {"type": "color", "weight": b}}
        return await score(item(noise(8)), scorers=scorers, num_workers=1)

    result = asyncio.run(run())
    assert list(result.parts) == ["bright", "red"]
    assert result.total == pytest.approx(a * result.parts["bright"] + b * result.parts["red"], abs=1e-9)


async def test_a_weight_of_0_only_logs():
    scorers = {"bright": {"type": "brightness", "weight": 0}, "red": {"type": "color"}}
    result = await score(item(plain(255, 0, 0)), scorers=scorers)
    assert result.parts == pytest.approx({"bright": 1 / 3, "red": 1.0})
    assert result.total == 1.0


async def test_scorers_of_one_item_run_side_by_side(function):
    """Each waits for the other: one after the other they would never end."""
    code = (
        "import threading\n"
        "barrier = threading.Barrier(2, timeout=30)\n"
        "def compute_score():\n    barrier.wait()\n    return 1\n"
    )
    both = function("both", code)
    assert (await score(item(), scorers={"a": both, "b": both})).total == 2.0


async def test_the_event_loop_goes_on_while_a_scorer_computes(function):
    code = (
        "import threading\n"
        "go = threading.Event()\n"
        "def compute_score():\n    assert go.wait(30)\n    return 1\n"
        "def release():\n    go.set()\n    return 1\n"
    )
    slow = function("slow", code)
    async with RewardManager(reward_config(scorers={"a": slow}, num_workers=1)) as manager:
        waiting = asyncio.ensure_future(manager.score(item()))
        await asyncio.sleep(0)
        assert (await score(item(), scorers={"b": {**slow, "name": "release"}})).total == 1.0
        assert (await waiting).total == 1.0


async def test_one_failing_scorer_fails_the_item_and_gives_up_the_others(function):
    slow = (
        "import asyncio\n"
        "async def compute_score(extra_info):\n"
        "    extra_info['started'].set()\n"
        "    try:\n        await asyncio.Event().wait()\n"
        "    finally:\n        extra_info['given_up'].set()\n"
    )
    bad = (
        "async def compute_score(extra_info):\n    await extra_info['started'].wait()\n    raise KeyError('no label')\n"
    )
    events = {"started": asyncio.Event(), "given_up": asyncio.Event()}
    with pytest.raises(RewardError, match="scorer bad could not score request r7: KeyError: 'no label'") as raised:
        await score(item(extra_info=events), scorers={"slow": function("slow", slow), "bad": function("bad", bad)})
    assert isinstance(raised.value.__cause__, KeyError)
    assert events["given_up"].is_set()


async def test_one_failing_item_leaves_the_others_alone(function):
    code = "def compute_score(request_id):\n    return 1 / int(request_id)\n"
    async with RewardManager(reward_config(scorers={"f": function("f", code)})) as manager:
        items = [item(request_id=str(i)) for i in range(3)]
        failed, *fine = await asyncio.gather(*map(manager.score, items), return_exceptions=True)
    assert isinstance(failed, RewardError) and failed.request_id == "0"
    assert [result.total for result in fine] == [1.0, 0.5]


async def test_a_cancelled_score_is_cancelled(function):
    code = (
        "import asyncio\n"
        "async def compute_score(extra_info):\n"
        "    extra_info['started'].set()\n"
        "    await asyncio.Event().wait()\n"
    )
    started = asyncio.Event()
    async with RewardManager(reward_config(scorers={"h": function("hanging", code)})) as manager:
        task = asyncio.ensure_future(manager.score(item(extra_info={"started": started})))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_cancellation_that_is_the_functions_own_fails_the_item(function):
    code = (
        "import asyncio\n"
        "async def compute_score():\n"
        "    inner = asyncio.ensure_future(asyncio.Event().wait())\n"
        "    inner.cancel()\n"
        "    await inner\n"
    )
    with pytest.raises(RewardError, match="scorer own could not score request r7: CancelledError"):
        await score(item(), scorers={"own": function("own", code)})


async def test_a_sum_beyond_all_numbers_is_an_error(function):
    huge = function("huge", "def compute_score():\n    return 1e308\n")
    with pytest.raises(RewardError, match=r"scorer a \+ b could not score request r7: the weighted sum is too large"):
        await score(item(), scorers={"a": {**huge, "weight": 10}, "b": huge})


def test_an_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(RewardError("ocr", "r7", "no text")))
    assert (error.scorer, error.request_id, error.reason) == ("ocr", "r7", "no text")
    assert str(error) == "reward scorer ocr could not score request r7: no text"


async def test_close_may_be_called_twice_and_ends_scoring():
    manager = RewardManager(reward_config(scorers={"c": {"type": "color"}, "h": {"type": "http", "url": "http://a/"}}))
    await manager.close()
    await manager.close()
    with pytest.raises(RewardError, match=r"c could not score .* the threads are closed"):
        await manager.score(item())


async def test_an_error_of_a_function_is_told_without_secrets(function):
    code = "def compute_score():\n    raise OSError('401 for https://me:hush-hush@host/score?key=hush-hush')\n"
    with pytest.raises(RewardError) as raised:
        await score(item(), scorers={"f": function("telling", code)})
    assert raised.value.reason == "OSError: 401 for https://***@host/score?key=***"
