"""What the soak notes of an engine, here of one that only pretends."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from tests.testing.soak_samples import REQUEST, sample
from verl_omni.testing.soak import checks, drive
from verl_omni.testing.soak.drive import Driver, Hang
from verl_omni.testing.soak.policies import Policies
from verl_omni.testing.soak.settings import SoakSettings
from verl_omni.testing.soak.soak import Soak
from verl_omni.testing.soak.workload import Job, Kill, Policy, Refuse, Send, Swap
from verl_omni.workers.rollout.request import RolloutError


class Pretender:
    """Answers each request with `answer`; takes each policy, under a version that is `ahead` of the one it is given."""

    def __init__(self, *answer, ahead=0, refuses=False, silent=False) -> None:
        self.policy_version = 0
        self._answer, self._ahead, self._refuses, self._silent = answer, ahead, refuses, silent

    async def generate(self, request):
        if self._silent:
            await asyncio.Event().wait()
        return self._answer[0]

    async def generate_all(self, requests):
        if self._silent:
            await asyncio.Event().wait()
        for result in self._answer:
            yield result

    async def load_lora(self, adapter, *, scale=1.0, version=None):
        if self._refuses:
            raise RolloutError(None, "refused")
        self.policy_version = (self.policy_version + 1 if version is None else version) + self._ahead

    async def update_weights(self, weights, *, version=None):
        await self.load_lora(weights, version=version)


class NoPolicies(Policies):
    def __init__(self) -> None:
        self._transformer = {"attn.to_q.weight": torch.ones(4, 4)}


async def played(engine, *script):
    async def start():
        return engine

    driver = Driver(NoPolicies(), start, deadline_s=0.2)
    await driver.start()
    return await driver.play(script)


SEND = Send(jobs=(Job(request=REQUEST),))


@pytest.mark.parametrize("burst", [True, False])
async def test_what_an_engine_answers_is_noted(burst):
    (flight,) = (await played(Pretender(sample()), dataclasses.replace(SEND, burst=burst))).flights
    assert not list(checks.check_end(flight)) and flight.sample is not None


@pytest.mark.parametrize(("answers", "message"), [(0, "ended 0 times"), (2, "ended 2 times")])
async def test_a_burst_that_loses_or_doubles_a_result_is_told(answers, message):
    (flight,) = (await played(Pretender(*[sample()] * answers), SEND)).flights
    (line,) = checks.check_end(flight)
    assert message in line


async def test_a_result_that_is_no_requests_own_is_told():
    (problem,) = (await played(Pretender(sample(), sample(request_id="stranger")), SEND)).problems
    assert "none of its requests'" in problem


@pytest.mark.parametrize("burst", [True, False])
async def test_a_request_that_never_ends_is_a_hang_that_names_it(burst):
    with pytest.raises(Hang, match=r"not ended within 0\.2 s: r$"):
        await played(Pretender(silent=True), dataclasses.replace(SEND, burst=burst))


@pytest.mark.parametrize("kind", ["lora", "weights"])
async def test_a_misfit_that_is_taken_is_told(kind):
    taken = await played(Pretender(), Refuse(kind=kind))
    assert taken.problems == [f"{kind} that do not fit were taken", "a refused policy made 1 of 0"]
    refused = await played(Pretender(refuses=True), Refuse(kind=kind))
    assert refused.problems == [] and refused.counts["refused"] == 1


@pytest.mark.parametrize("policy", [Policy(lora="a"), Policy(weights="scaled")])
async def test_a_policy_that_is_refused_or_misnamed_is_told(policy):
    swap = Swap(policy=policy)
    assert (await played(Pretender(), swap)).problems == []
    (refused,) = (await played(Pretender(refuses=True), swap)).problems
    assert "was refused: refused" in refused
    assert (await played(Pretender(ahead=2), swap)).problems == ["policy 1 is called 3"]


class Mortal(Pretender):
    """Answers once it is dead, with an error that says so; the next one lives on."""

    def __init__(self) -> None:
        super().__init__()
        self.name = drive.WORKER
        self._dead, self._lives = asyncio.Event(), 1

    def kill(self):
        self._dead.set()

    async def alive(self):
        return not self._dead.is_set()

    async def close(self):
        self._lives -= 1

    async def generate_all(self, requests):
        if self._lives:
            await self._dead.wait()
            yield RolloutError("r", "the engine died, start another")
        else:
            yield sample()


@pytest.mark.parametrize(("limit", "late"), [(drive.NOTICED_S, 0), (-1.0, 1)])
async def test_what_dies_with_its_engine_is_sent_again_and_a_late_notice_is_told(monkeypatch, limit, late):
    engine = Mortal()
    monkeypatch.setattr(drive.multiprocessing, "active_children", lambda: [engine])
    monkeypatch.setattr(drive, "NOTICED_S", limit)
    found = await played(engine, SEND, Kill())
    assert [checks.error_kind(flight) for flight in found.flights] == ["died", None]
    assert [list(checks.check_end(flight)) for flight in found.flights] == [[], []]
    assert found.counts["kills"] == 1 and len(found.problems) == late
    assert all("to notice that the engine's process had died" in problem for problem in found.problems)


async def test_a_soak_that_breaks_down_tells_the_seed_and_the_command(tiny_qwen, monkeypatch):
    async def start(_):
        return Mortal()  # knows no remove_lora

    monkeypatch.setattr(Soak, "_engine", start)
    settings = SoakSettings(seeds=(3, 4), requests=40)
    (violation,) = (await Soak(tiny_qwen, settings, print).run())["violations"]
    assert violation["seed"] == 3 and "the soak broke down" in violation["what"]
    assert violation["command"] == settings.of_seed(0).command
