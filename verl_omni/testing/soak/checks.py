"""What of an outcome breaks a contract. Pure: each check yields a line for each thing that is wrong."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.testing.expectations import difference, recorded_steps, shape
from verl_omni.testing.soak.faults import FAULTS
from verl_omni.testing.soak.workload import Job
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

CANCELLED = "cancelled"
ATOL = 1e-5
"""Float32 on a CPU: a different batch shape moves a value of at most 1 by less, and a larger one in proportion."""
POLICIES_APART = 1e-3
"""Least difference of the latents of two policies."""
MEMORY_GROWTH = 0.05
"""Most by which the last quarter's mean memory may exceed the second's."""
QUARTER_SAMPLES = 3
"""Fewest samples of memory in a quarter that can be judged: a process grows while it warms up."""

Outcome: TypeAlias = RolloutSample | RolloutError | BaseException | str
"""How a request ended; the string is ``CANCELLED``."""


@dataclass(kw_only=True)
class Flight:
    """One request on its way, from sending to its end; a retry is a flight of its own."""

    job: Job
    low: int
    """Version of the policy in force when it was sent."""
    high: int = 0
    """Version in force when it ended."""
    outcomes: list[Outcome] = field(default_factory=list)
    """One, if all is well."""
    stopped: bool = False
    """It was aborted, cancelled or left while on its way."""
    killed: bool = False
    """The engine's process was killed while it was on its way."""
    slept: bool = False
    """The engine was sent to sleep while it was on its way."""

    @property
    def name(self) -> str:
        return self.job.request.request_id

    @property
    def sample(self) -> RolloutSample | None:
        """What came of it; None if it did not succeed."""
        only = self.outcomes[0] if len(self.outcomes) == 1 else None
        return only if isinstance(only, RolloutSample) else None

    @property
    def to_retry(self) -> bool:
        """Whether it ended for no fault of its own, and nobody wanted it to."""
        return not self.stopped and error_kind(self) in ("died", "asleep")


def error_kind(flight: Flight) -> str | None:
    """Why a request did not succeed: "aborted", "cancelled", "died", "asleep", its fault, or "other"; None: it did."""
    if len(flight.outcomes) != 1 or isinstance(flight.outcomes[0], RolloutSample):
        return None
    outcome = flight.outcomes[0]
    if outcome == CANCELLED:
        return CANCELLED
    message = outcome.message if isinstance(outcome, RolloutError) else str(outcome)
    if message == "aborted":
        return "aborted"
    if flight.killed and "died" in message:
        return "died"
    if flight.slept and "asleep" in message:
        return "asleep"
    return flight.job.fault or "other"


def check_end(flight: Flight) -> Iterator[str]:
    """It ended once, as it had to."""
    name, job = flight.name, flight.job
    if len(flight.outcomes) != 1:
        yield f"{name}: ended {len(flight.outcomes)} times, not once"
        return
    outcome, kind = flight.outcomes[0], error_kind(flight)
    if isinstance(outcome, RolloutSample):
        if job.fault is not None and FAULTS[job.fault].message is not None:
            yield f"{name}: succeeded with the fault {job.fault!r}"
        if outcome.request_id != name:
            yield f"{name}: got the sample of {outcome.request_id}"
        return
    if isinstance(outcome, BaseException) and not isinstance(outcome, RolloutError):
        yield f"{name}: ended with {outcome!r}, which is no RolloutError"
        return
    if isinstance(outcome, RolloutError) and outcome.request_id != name:
        yield f"{name}: its error names request {outcome.request_id!r}: {outcome}"
    if kind in ("aborted", CANCELLED):
        if not flight.stopped:
            yield f"{name}: {kind}, which nobody asked for"
    elif kind not in ("died", "asleep"):
        message = None if job.fault is None else FAULTS[job.fault].message
        if message is None:
            yield f"{name}: failed: {outcome}"
        elif not re.search(message, str(outcome), re.DOTALL):
            yield f"{name}: its error does not tell the fault {job.fault!r}: {outcome}"


def check_sample(flight: Flight) -> Iterator[str]:
    """The policy was in force, and the tensors are such as were asked for. Nothing of what did not succeed."""
    sample, request = flight.sample, flight.job.request
    if sample is None:
        return
    if not flight.low <= sample.policy_version <= flight.high:
        yield (
            f"{flight.name}: made by policy {sample.policy_version}, but {flight.low} to {flight.high} were in force "
            "while it was on its way"
        )
    n = request.num_outputs_per_prompt
    wanted = (n, 3, request.height, request.width)
    if request.output_type == "latent":
        if sample.images is not None or sample.latents is None or len(sample.latents) != n:
            yield f"{flight.name}: latents are {shape(sample.latents)} for {n} rows"
    elif sample.images is None or sample.images.dtype != torch.uint8 or tuple(sample.images.shape) != wanted:
        yield f"{flight.name}: images are {shape(sample.images)}, not uint8 {list(wanted)}"
    recorded = recorded_steps(request, sample.sde_windows[0]) if sample.sde_windows else -1
    log_probs = sample.trajectory_log_probs
    if (0 if log_probs is None else log_probs.shape[1]) != recorded:
        yield f"{flight.name}: {shape(log_probs)} log-probs, where {recorded} steps are recorded"
    for name, tensor in tensors_of(sample).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{flight.name}: {name} is not finite"


def check_solo(name: str, sample: RolloutSample, alone: RolloutSample, atol: float = ATOL) -> Iterator[str]:
    """`sample` equals what the request gives alone."""
    here, there = tensors_of(sample), tensors_of(alone)
    for key in sorted({*here, *there}):
        a, b = here.get(key), there.get(key)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            yield f"{name}: {key} is {shape(a)} here and {shape(b)} alone"
        elif not difference(a, b) <= (1 if a.dtype == torch.uint8 else atol * max(1.0, largest(b))):
            yield f"{name}: {key} differs by {difference(a, b):.3g} from the solo run"
    for key in ("sde_windows", "seed"):
        if getattr(sample, key) != getattr(alone, key):
            yield f"{name}: {key} is {getattr(sample, key)} here and {getattr(alone, key)} alone"


def check_policies(samples: Mapping[str, RolloutSample], known: Mapping[str, RolloutSample]) -> Iterator[str]:
    """Samples of one request by policy: all differ from each other, each equals what is `known` of its policy."""
    for name, sample in samples.items():
        if name in known:
            yield from check_solo(f"the sample of {name}, made again", sample, known[name])
    latents = [(name, sample.latents) for name, sample in {**known, **samples}.items() if sample.latents is not None]
    for i, (one, a) in enumerate(latents):
        yield from (
            f"policies {one} and {other} give the same latents"
            for other, b in latents[:i]
            if not difference(a, b) > POLICIES_APART
        )


def check_stats(stats: RolloutStats, requests: Sequence[RolloutRequest]) -> Iterator[str]:
    """The counters cover at least `requests`, which succeeded since they were zero."""
    counted = sum(size * forwards for size, forwards in stats.batch_sizes.items())
    needed = sum(request.num_outputs_per_prompt * (request.num_inference_steps or 0) for request in requests)
    if counted < needed:
        yield f"the engine counted {counted} rows, but the successes alone took {needed}"
    if requests and not stats.waves:
        yield "the engine counted no wave, but requests succeeded"
    if not stats.encodes_computed <= stats.encodes_requested:
        yield f"{stats.encodes_computed} prompts were encoded where {stats.encodes_requested} were asked for"
    if stats.encodes_requested < len(requests):
        yield f"{stats.encodes_requested} prompts were asked for by {len(requests)} successes"


def quarters(samples: Sequence[float]) -> list[float]:
    """Mean of each quarter of `samples`; empty if they are too few."""
    if len(samples) < 4 * QUARTER_SAMPLES:
        return []
    bounds = [len(samples) * i // 4 for i in range(5)]
    return [statistics.mean(samples[a:b]) for a, b in itertools.pairwise(bounds)]


def check_memory(what: str, samples: Sequence[float]) -> Iterator[str]:
    """Memory [MiB] of one process, sampled over its life, is flat."""
    means = quarters(samples)
    if means and means[3] > (1 + MEMORY_GROWTH) * means[1]:
        yield (
            f"memory of {what} grows: {means[1]:.0f} MiB in its second quarter, {means[3]:.0f} MiB in its last, "
            f"{means[3] / means[1] - 1:.1%} more"
        )


def largest(tensor: Tensor) -> float:
    """Of the magnitudes; 0 if there are none."""
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def tensors_of(sample: RolloutSample) -> dict[str, Tensor]:
    """The tensors of a sample by name."""
    names = ("images", "latents", "trajectory_latents", "trajectory_log_probs", "trajectory_timesteps")
    own = {name: getattr(sample, name) for name in names}
    return {name: tensor for name, tensor in {**own, **sample.prompt_embeddings}.items() if tensor is not None}
