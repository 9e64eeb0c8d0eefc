"""Conformance suite: does an adapter keep the contracts of a rollout in every mode it offers?

One call runs it on the real engine with any adapter and a (tiny) model::

    from verl_omni.testing.conformance import run_conformance
    run_conformance("my_models.rollout.MyRollout", "path/to/tiny_model").raise_for_failures()

or, from a shell, ``python -m verl_omni.testing.conformance my_models.rollout.MyRollout path/to/tiny_model``. Checks:

========================  ==============================================================================================
equals solo               every request of a mixed batch (texts, lengths, steps, sizes, guidance, negatives, windows,
                          SDE types, noise levels, several outputs) equals the same request run alone
order and company         the same again in reverse order, beside other requests, and joining in the middle of a run
log-prob recomputation    running the transformer again at the recorded latents gives the recorded log-probs
output contract           shapes, dtypes, timesteps, windows, finite values, unpadded embeddings, storage of its own
repeatability             the same request twice gives the same bytes
fault isolation           a bad request, and a forward that fails with one request in it, end that request alone
full precision            with a bfloat16 model, latents stay float32 and timesteps reach the transformer unrounded
========================  ==============================================================================================

On a GPU, bfloat16 kernels round differently at other batch shapes: pass a wider `atol` there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_omni.testing.expectations import (
    contract,
    difference,
    facts,
    failing_forward,
    full_precision,
    shape,
    tensors,
    workload,
)
from verl_omni.testing.harness import AdapterEngine, Arrival
from verl_omni.utils.console import own_stdout
from verl_omni.workers.rollout.plan import AdapterCapabilities, RolloutMode
from verl_omni.workers.rollout.request import RolloutRequest

CHECKS = (
    "equals solo",
    "order and company",
    "log-prob recomputation",
    "output contract",
    "repeatability",
    "fault isolation",
)
ATOL = 1e-5
"""Float32 on a CPU: a different batch shape moves a log-prob by less than 1e-6."""
TEXT_LENGTH = 128
"""``max_sequence_length`` of the requests, where the model takes as much: enough for them, and quick."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One check in one mode."""

    check: str
    mode: str
    failures: tuple[str, ...]
    """What was wrong, a line each; empty if nothing was."""


@dataclass(kw_only=True)
class ConformanceReport:
    """What the suite found; ``str()`` of it is a table."""

    adapter: str
    results: list[CheckResult] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Every failure as ``mode / check: what``."""
        return [f"{r.mode} / {r.check}: {line}" for r in self.results for line in r.failures]

    def raise_for_failures(self) -> None:
        """Raise AssertionError listing all failures, if there are any."""
        if self.failures:
            raise AssertionError(f"{self.adapter} does not conform:\n" + "\n".join(self.failures))

    def __str__(self) -> str:
        lines = [f"{r.mode:<14} {r.check:<24} {'FAILED' if r.failures else 'ok'}" for r in self.results]
        return "\n".join([self.adapter, *lines, *self.failures])


def run_conformance(
    adapter: str | type,
    model: str | Path,
    *,
    size: int = 64,
    atol: float = ATOL,
    modes: Sequence[RolloutMode] | None = None,
) -> ConformanceReport:
    """Run every check in every mode that `adapter` offers, or in those of `modes`.

    Args:
        adapter: adapter class, or its import path ``module.Class``.
        model: checkpoint folder in diffusers layout.
        size: smaller edge of the images in pixels; a second size, half as wide again, is mixed in.
        atol: largest difference of latents and log-probs between a batch and a solo run.
    """
    cls: Any = _resolve(adapter)
    name = f"{cls.__module__}.{cls.__qualname__}"
    report = ConformanceReport(adapter=name)
    solo: dict[str, Any] = {}
    requests = workload(cls.cfg_key, size, min(cls.text_limit, TEXT_LENGTH))
    for mode in modes if modes is not None else AdapterCapabilities.of(cls).modes:
        with AdapterEngine(cls, model, mode) as engine:
            # One request at a time is alone in any mode; the first mode's results are what the others must give too.
            solo = solo or {request.request_id: engine.run(request)[0] for request in requests}
            suite = _Suite(engine=engine, requests=requests, solo=solo, atol=atol, size=size)
            for check in CHECKS:
                failures = tuple(getattr(suite, check.replace(" ", "_").replace("-", "_"))())
                report.results.append(CheckResult(check=check, mode=mode.value, failures=failures))
    with AdapterEngine(cls, model, AdapterCapabilities.of(cls).modes[0], torch.bfloat16) as engine:
        failures = tuple(full_precision(engine, requests[0]))
        report.results.append(CheckResult(check="full precision", mode="bfloat16", failures=failures))
    return report


@dataclass(kw_only=True)
class _Suite:
    engine: AdapterEngine
    requests: list[RolloutRequest]
    solo: dict[str, Any]
    atol: float
    size: int
    batched: list[Any] = field(default_factory=list)
    """Outputs of all requests run together."""

    def equals_solo(self) -> Iterator[str]:
        self.engine.pipeline.read_stats(reset=True)
        self.batched = self.engine.run(*self.requests)
        yield from self._compare(self.requests, self.batched)
        largest = max(self.engine.pipeline.stats.batch_sizes, default=0)
        if self.engine.mode is not RolloutMode.SERIAL and largest < 2:
            yield "nothing was batched: no forward had more than one row"

    def order_and_company(self) -> Iterator[str]:
        backwards = self.requests[::-1]
        yield from self._compare(backwards, self.engine.run(*backwards))
        company = [dataclasses.replace(r, request_id=f"other-{r.request_id}", seed=7) for r in self.requests[:4]]
        joining = [Arrival(request=r, after=i) for i, r in enumerate(self.requests)]
        outputs = self.engine.run(*company, *joining)
        yield from self._compare(self.requests, outputs[len(company) :])

    def log_prob_recomputation(self) -> Iterator[str]:
        for request in self.requests:
            output = self.solo[request.request_id]
            if isinstance(output, Exception) or output.trajectory_latents is None:
                continue
            again = self.engine.recompute_log_probs(request, output.trajectory_latents)
            apart = difference(again, output.trajectory_log_probs)
            if not apart <= self.atol:
                yield f"{request.request_id}: recorded and recomputed log-probs differ by {apart:.3g}"

    def output_contract(self) -> Iterator[str]:
        for request, output in zip(self.requests, self.batched or self.engine.run(*self.requests), strict=True):
            if not isinstance(output, Exception):
                yield from (f"{request.request_id}: {line}" for line in contract(request, output))

    def repeatability(self) -> Iterator[str]:
        request = self.requests[0]
        first, second = self.engine.run(request)[0], self.engine.run(request)[0]
        if isinstance(first, Exception) or isinstance(second, Exception):
            yield f"{request.request_id}: failed: {first if isinstance(first, Exception) else second}"
            return
        for name, a, b in tensors(first, second):
            if a is not None and (b is None or not torch.equal(a, b)):
                yield f"{request.request_id}: {name} is not the same bytes the second time"

    def fault_isolation(self) -> Iterator[str]:
        good = self.requests[:3]
        template = good[1]
        bad = [
            dataclasses.replace(template, request_id="no prompt", prompt=None),
            dataclasses.replace(template, request_id="long prompt", prompt="word " * 3000, max_sequence_length=16),
            dataclasses.replace(template, request_id="odd height", height=self.size + 1),
            dataclasses.replace(template, request_id="no steps", num_inference_steps=0),
            dataclasses.replace(template, request_id="window", sde_window_size=5, sde_window_range=(0, 3)),
        ]
        outputs = self.engine.run(*good, *bad)
        yield from self._compare(good, outputs[:3])
        yield from (
            f"{request.request_id!r} should have failed"
            for request, output in zip(bad, outputs[3:], strict=True)
            if not isinstance(output, Exception)
        )
        with failing_forward(self.engine.pipeline):
            outputs = self.engine.run(*good)
        yield from self._compare(good[1:], outputs[1:])
        if not isinstance(outputs[0], Exception):
            yield "a request whose forward fails should have failed"

    def _compare(self, requests: list[RolloutRequest], outputs: list[Any]) -> Iterator[str]:
        for request, output in zip(requests, outputs, strict=True):
            want = self.solo[request.request_id]
            for side, value in (("alone", want), ("here", output)):
                if isinstance(value, Exception):
                    yield f"{request.request_id}: failed {side}: {value}"
            if isinstance(want, Exception) or isinstance(output, Exception):
                continue
            for name, a, b in tensors(output, want):
                if a is None or b is None or a.shape != b.shape:
                    if a is b is None:
                        continue
                    yield f"{request.request_id}: {name} is {shape(a)} here and {shape(b)} alone"
                elif not difference(a, b) <= (1.01 if a.dtype == torch.uint8 else self.atol):
                    yield f"{request.request_id}: {name} differs by {difference(a, b):.3g} from the solo run"
            if facts(output) != facts(want):
                yield f"{request.request_id}: {facts(output)} here, {facts(want)} alone"


def _resolve(adapter: str | type) -> type:
    if isinstance(adapter, type):
        return adapter
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(adapter)


def main(argv: list[str] | None = None) -> int:
    """Command line: print the table, exit 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_omni.testing.conformance", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("adapter", help="import path module.Class")
    parser.add_argument("model", help="checkpoint folder in diffusers layout")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--atol", type=float, default=ATOL)
    parser.add_argument("--modes", nargs="+", type=RolloutMode, choices=list(RolloutMode), help="all by default")
    args = parser.parse_args(argv)
    report = run_conformance(args.adapter, args.model, size=args.size, atol=args.atol, modes=args.modes)
    print(report, file=own_stdout())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
