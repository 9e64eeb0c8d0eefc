"""The workload of a seed: requests, when they come, and what befalls them. Pure; same arguments, same workload.

It consists of rounds. A round is a script of actions, each of which waits for the one before it, for a number of
results of the round, and for some milliseconds more; at its end nothing is in flight.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_omni.testing.soak.faults import FAULTS, spoiled
from verl_omni.workers.rollout.request import RolloutRequest

CFG_KEYS = {"qwen_image": "true_cfg_scale", "sd3": "guidance_scale"}
"""Family → its knob of guidance."""
WORDS = "a red circle next to the small blue boat with sign that says rollout under bright light".split()
PROMPTS = 24
"""Different prompts of a seed: as in training, several requests share each."""
SIZES = ((64, 64), (32, 32), (64, 32), (32, 64))
MOST_STEPS = 6
SCALES = (0.0, 1.0, 1.0001, 1.5, 2.5)
"""Of guidance. It magnifies what a random model makes: far above 1, latents are rounded by more than is compared."""
NOISE_LEVELS = {"sde": (0.0, 0.3, 0.7), "cps": (0.0, 0.7, 1.0), "dance_sde": (0.0, 0.1, 0.3)}
"""SDE type → usual noise levels; the same holds for higher ones."""
ROUND = (4, 24)
"""Fewest and most requests of a round."""
LONGEST_WAIT_S = 0.1
"""Of an action: a round takes about ten times as long, so actions meet requests at every stage."""
STOPS = ("abort", "cancel", "leave", "abort all")
REFUSED_SHARE = 0.25
"""Of the policy changes, before which one comes that must be refused."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What makes the samples, by name; see :class:`~verl_omni.testing.soak.policies.Policies`."""

    weights: str = "original"
    lora: str | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, and what is known of its end before it is sent."""

    request: RolloutRequest
    fault: str | None = None
    """Name in ``FAULTS``; None: it must succeed."""
    stopped: bool = False
    """It is aborted, cancelled or left, unless it ends before."""
    checked: bool = False
    """Compared with its solo run."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """Happens once the round has `after` results or nothing in flight, and `wait_s` seconds later."""

    after: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Send(Action):
    """Send requests: as one burst, or each by itself."""

    jobs: tuple[Job, ...]
    burst: bool = True
    leave_after: int | None = None
    """The caller leaves the burst after so many results."""


@dataclass(frozen=True, kw_only=True)
class Stop(Action):
    """End requests: by an abort, or by cancelling who waits for them."""

    request_ids: tuple[str, ...] | None
    """None: all that are in flight."""
    cancel: bool = False


@dataclass(frozen=True, kw_only=True)
class Swap(Action):
    """Change to this policy, which differs from the one before in its LoRA or in its weights."""

    policy: Policy


@dataclass(frozen=True, kw_only=True)
class Refuse(Action):
    """Offer a policy that does not fit."""

    kind: str
    """"lora" or "weights"."""


@dataclass(frozen=True, kw_only=True)
class Sleep(Action):
    """Sleep and wake up."""


@dataclass(frozen=True, kw_only=True)
class Kill(Action):
    """Kill the engine's process. The last action of its round."""


Round = tuple[Action, ...]


@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """Of one seed."""

    family: str
    """Key of ``CFG_KEYS``."""
    requests: int = 400
    faults: float = 0.05
    """Share of requests that are wrong."""
    kinds: tuple[str, ...] = tuple(FAULTS)
    """How: keys of ``FAULTS``."""
    aborts: float = 0.05
    """Share of requests that are stopped."""
    swaps: int = 4
    """Changes of the policy."""
    sleeps: int = 2
    kills: int = 0
    check: float = 0.25
    """Share of requests whose result is compared with their solo run."""


def make_workload(settings: WorkloadSettings, seed: int) -> list[Round]:
    """The rounds of `seed`."""
    return _Maker(settings, seed).rounds()


def jobs_of(rounds: Sequence[Round]) -> Iterator[Job]:
    """All requests of `rounds`, in the order in which they are sent."""
    for script in rounds:
        for action in script:
            if isinstance(action, Send):
                yield from action.jobs


class _Maker:
    def __init__(self, settings: WorkloadSettings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._draw = random.Random(f"soak {seed}")
        lengths = [self._draw.randint(1, 12) for _ in range(PROMPTS)]
        self._prompts = [" ".join(self._draw.choices(WORDS, k=length)) for length in lengths]
        self._policy = Policy()
        self._faults: list[str] = []

    def rounds(self) -> list[Round]:
        draw, settings = self._draw, self._settings
        counts: list[int] = []
        while (left := settings.requests - sum(counts)) > 0:
            counts.append(min(left, draw.randint(*ROUND)))
        numbers = range(len(counts))
        swapped = draw.choices(numbers, k=settings.swaps)
        slept = draw.choices(numbers, k=settings.sleeps)
        killed = draw.sample(numbers, k=min(settings.kills, len(counts)))
        first, rounds = 0, []
        for number, count in enumerate(counts):
            jobs = [self._job(first + i) for i in range(count)]
            happenings = [self._happening(count, "swap") for _ in range(swapped.count(number))]
            happenings += [self._happening(count, "sleep") for _ in range(slept.count(number))]
            kill = [Kill(**self._moment(count // 2))] if number in killed else []
            rounds.append((*self._script(jobs, [action for some in happenings for action in some]), *kill))
            first += count
        return rounds

    def _script(self, jobs: list[Job], happenings: list[Action]) -> list[Action]:
        """Sends with the happenings between them, and what stops requests at the end."""
        draw = self._draw
        stop = draw.choice(STOPS)
        stopped = [job for job in jobs if job.stopped]
        staying = [job for job in jobs if not job.stopped] if stop in ("cancel", "leave") else jobs
        sends: list[Action] = []
        while staying:
            size = draw.randint(1, len(staying))
            part, staying = staying[:size], staying[size:]
            moment = self._moment(size) if sends else {}
            sends.append(Send(jobs=tuple(part), burst=draw.random() < 0.7, **moment))
        script = [*sends[:1], *self._shuffled(sends[1:], happenings)]
        if not stopped:
            return script
        ids = tuple(job.request.request_id for job in stopped)
        if stop == "leave":
            return [*script, Send(jobs=tuple(stopped), leave_after=draw.randint(0, len(stopped) - 1))]
        if stop == "cancel":
            script.append(Send(jobs=tuple(stopped), burst=False))
        everything = stop == "abort all" and draw.random() < 0.2  # all would be many more than were asked for
        stops = Stop(request_ids=None if everything else ids, cancel=stop == "cancel", **self._moment(len(jobs) // 2))
        return [*script, stops]

    def _shuffled(self, sends: Sequence[Action], happenings: Sequence[Action]) -> list[Action]:
        """Both, each in its order."""
        picks = [True] * len(sends) + [False] * len(happenings)
        self._draw.shuffle(picks)
        left, right = iter(sends), iter(happenings)
        return [next(left) if pick else next(right) for pick in picks]

    def _happening(self, count: int, kind: str) -> list[Action]:
        if kind == "sleep":
            return [Sleep(**self._moment(count // 2))]
        self._policy = self._next_policy()
        swap = Swap(policy=self._policy, **self._moment(count // 2))
        refused = self._draw.random() < REFUSED_SHARE
        return [*([Refuse(kind=self._draw.choice(("lora", "weights")))] if refused else []), swap]

    def _next_policy(self) -> Policy:
        """Another than the one before: in training most changes are those of a LoRA."""
        now = self._policy
        if self._draw.random() < 0.2:
            return dataclasses.replace(now, weights="scaled" if now.weights == "original" else "original")
        loras = [(None, 1.0), ("a", 1.0), ("b", 1.0), ("b", 0.5)]
        lora, scale = self._draw.choice([pair for pair in loras if pair != (now.lora, now.scale)])
        return dataclasses.replace(now, lora=lora, scale=scale)

    def _moment(self, results: int) -> dict[str, Any]:
        """When an action of a round happens that has so many results to wait for."""
        return {"after": self._draw.randint(0, results), "wait_s": self._draw.uniform(0, LONGEST_WAIT_S)}

    def _job(self, number: int) -> Job:
        draw, settings = self._draw, self._settings
        request = self._request(f"s{self._seed}-{number}")
        fault = self._next_fault() if draw.random() < settings.faults else None
        stopped, checked = draw.random() < settings.aborts, draw.random() < settings.check
        if fault is not None:
            request = spoiled(request, fault)
        return Job(request=request, fault=fault, stopped=stopped, checked=checked)

    def _next_fault(self) -> str:
        """Each kind comes once before one comes again."""
        if not self._faults:
            self._faults = self._draw.sample(self._settings.kinds, k=len(self._settings.kinds))
        return self._faults.pop()

    def _request(self, request_id: str) -> RolloutRequest:
        draw = self._draw
        steps = draw.randint(1, MOST_STEPS)
        sde_type = draw.choice(tuple(NOISE_LEVELS))
        negative = draw.choice((None, "", "blurry", "a long list of things to keep out"))
        height, width = draw.choices(SIZES, weights=(7, 1, 1, 1))[0]
        knobs: dict[str, Any] = {
            "num_inference_steps": steps,
            "noise_level": draw.choice(NOISE_LEVELS[sde_type]),
            "sde_type": sde_type,
            "negative_prompt": negative,
            CFG_KEYS[self._settings.family]: draw.choice(SCALES) if negative is not None else None,
            "num_outputs_per_prompt": draw.choice((1, 1, 1, 2, 3)),
            "max_sequence_length": draw.choice((128, 160)),
            "logprobs": draw.random() < 0.9,
            "output_type": draw.choice((None, None, None, "latent")),
        }
        if draw.random() < 0.7:  # else all steps but the last
            size = draw.randint(0, steps)
            low = draw.randint(0, steps - size)
            # cps draws no noise on its last step; there a window must lie with certainty or not at all.
            most = max(low + size, steps - 1) if sde_type == "cps" else steps
            knobs |= {"sde_window_size": size, "sde_window_range": (low, draw.randint(low + size, most))}
        return RolloutRequest(
            request_id=request_id,
            prompt=draw.choice(self._prompts),
            height=height,
            width=width,
            seed=draw.getrandbits(32),
            **knobs,
        )
