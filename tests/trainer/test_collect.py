"""A sweep scores what arrives and leaves out what fails."""

import asyncio

import pytest

from tests.trainer.samples import scored
from verl_omni.reward_loop.item import RewardError, RewardResult
from verl_omni.trainer.diffusion.collect import collect
from verl_omni.trainer.diffusion.data import PromptGroup
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.trainer.prompts import PromptRow
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest


def group(uid: str, samples: int = 2) -> PromptGroup:
    row = PromptRow(values={}, source=f"prompts.txt:{uid}")
    return PromptGroup(uid=uid, row=row, requests=[RolloutRequest(request_id=f"{uid}-{k}") for k in range(samples)])


GROUPS = [group(uid) for uid in ("p0", "p1")]


async def reward(group, request, sample):
    return RewardResult(total=float(request.request_id[-1]), parts={})


def generating(*results):
    async def generate(groups):
        assert [[r.request_id for r in group] for group in groups] == [["p0-0", "p0-1"], ["p1-0", "p1-1"]]
        for result in results:
            yield result

    return generate


def sample(name):
    return scored(name).sample


async def test_samples_come_back_in_the_order_of_the_requests():
    arrived = [sample(name) for name in ("p1-1", "p0-0", "p1-0", "p0-1")]
    sweep = await collect(GROUPS, generating(*arrived), reward)
    assert [item.sample.request_id for item in sweep.samples] == ["p0-0", "p0-1", "p1-0", "p1-1"]
    assert [item.uid for item in sweep.samples] == ["p0", "p0", "p1", "p1"]
    assert [item.reward.total for item in sweep.samples] == [0, 1, 0, 1]
    assert not sweep.failures


async def test_scoring_goes_on_while_others_are_generated():
    started = asyncio.Event()

    async def score(group, request, sample):
        started.set()
        return RewardResult(total=0.0, parts={})

    async def generate(groups):
        yield sample("p0-0")
        await asyncio.wait_for(started.wait(), 10)  # a sweep that scores only at its end would wait here for ever
        yield sample("p0-1")

    assert len((await collect(GROUPS, generate, score)).samples) == 2


async def test_what_fails_is_left_out_and_told(caplog):
    async def score(group, request, sample):
        if request.request_id == "p1-0":
            raise RewardError("ocr", request.request_id, "no such text")
        return await reward(group, request, sample)

    arrived = [RolloutError("p0-0", "prompt too long"), sample("p0-1"), sample("p1-0"), sample("p1-1")]
    sweep = await collect(GROUPS, generating(*arrived), score)
    assert [item.sample.request_id for item in sweep.samples] == ["p0-1", "p1-1"]
    assert list(sweep.failures) == ["p0-0", "p1-0"]
    assert caplog.messages == [
        "left out: 1 of 2 images of prompts.txt:p0 (p0): prompt too long",
        "left out: 1 of 2 images of prompts.txt:p1 (p1): reward scorer ocr: no such text",
    ]


async def test_when_most_fails_the_sweep_does_and_says_of_which_prompts_and_why():
    arrived = [
        RolloutError("p0-0", "too long by 3"),
        RolloutError("p1-0", "no memory"),
        RolloutError("p1-1", "too long by 4"),
    ]
    with pytest.raises(TrainingError) as caught:
        await collect(GROUPS, generating(sample("p0-1"), *arrived), reward)
    assert str(caught.value) == (
        "more than half failed, 3 of 4 images: "
        "2 of 4 images of prompts.txt:p0 (p0), prompts.txt:p1 (p1): too long by 3; "
        "1 of 2 images of prompts.txt:p1 (p1): no memory"
    )


async def test_when_half_fails_the_sweep_goes_on():
    arrived = [RolloutError(f"p0-{k}", "no memory") for k in range(2)]
    sweep = await collect(GROUPS, generating(*arrived, sample("p1-0"), sample("p1-1")), reward)
    assert len(sweep.samples) == len(sweep.failures) == 2


async def test_an_engine_that_breaks_off_ends_the_scoring_too():
    cancelled = asyncio.Event()

    async def score(group, request, sample):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def generate(groups):
        yield sample("p0-0")
        await asyncio.sleep(0)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await collect(GROUPS, generate, score)
    await asyncio.wait_for(cancelled.wait(), 10)
