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
========================  ==============================================================================================

On a GPU, bfloat16 kernels round differently at other batch shapes: pass a wider `atol` there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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
    requests = _workload(cls.cfg_key, size)
    for mode in modes if modes is not None else AdapterCapabilities.of(cls).modes:
        with AdapterEngine(cls, model, mode) as engine:
            # One request at a time is alone in any mode; the first mode's results are what the others must give too.
            solo = solo or {request.request_id: engine.run(request)[0] for request in requests}
            suite = _Suite(engine=engine, requests=requests, solo=solo, atol=atol, size=size)
            for check in CHECKS:
                failures = tuple(getattr(suite, check.replace(" ", "_").replace("-", "_"))())
                report.results.append(CheckResult(check=check, mode=mode.value, failures=failures))
    return report


def _workload(cfg_key: str, size: int) -> list[RolloutRequest]:
    """Requests that differ in all that a batch may mix."""
    texts = ["a red circle", "a blue square on a black background with the words rollout and trajectory in it", "hello"]
    wide = size + size // 2
    own: list[dict[str, Any]] = [
        dict(negative_prompt="blurry", **{cfg_key: 4.0}, sde_window_size=2, sde_window_range=(0, 4)),
        dict(sde_type="cps", noise_level=0.9),
        dict(negative_prompt="", **{cfg_key: 2.5}, sde_type="dance_sde", noise_level=0.3),
        dict(num_inference_steps=3, negative_prompt="blurry", **{cfg_key: 1.0}),
        dict(num_inference_steps=8, sde_window_size=3, sde_window_range=(2, 8), sde_type="cps"),
        dict(num_inference_steps=1),
        dict(num_outputs_per_prompt=2, negative_prompt="a long list of things to keep out of it", **{cfg_key: 6.0}),
        dict(noise_level=0.0),
        dict(logprobs=False),
        dict(sde_window_size=0, sde_window_range=(0, 4)),
        dict(width=wide, sde_window_size=1, sde_window_range=(0, 4)),
        dict(width=wide, height=wide, negative_prompt="blurry", **{cfg_key: 4.0}, num_inference_steps=4),
        dict(output_type="latent"),
    ]
    base: dict[str, Any] = dict(height=size, width=size, num_inference_steps=6)
    return [
        RolloutRequest(request_id=f"r{i}", **{**base, "prompt": texts[i % 3], "seed": 1000 + i, **knobs})
        for i, knobs in enumerate(own)
    ]


@dataclass(kw_only=True)
class _Suite:
    engine: AdapterEngine
    requests: list[RolloutRequest]
    solo: dict[str, Any]
    atol: float
    size: int

    def equals_solo(self) -> Iterator[str]:
        yield from self._compare(self.requests, self.engine.run(*self.requests))

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
            difference = _difference(again, output.trajectory_log_probs)
            if not difference <= self.atol:
                yield f"{request.request_id}: recorded and recomputed log-probs differ by {difference:.3g}"

    def output_contract(self) -> Iterator[str]:
        for request in self.requests:
            output = self.solo[request.request_id]
            if not isinstance(output, Exception):
                yield from (f"{request.request_id}: {line}" for line in _contract(request, output))

    def repeatability(self) -> Iterator[str]:
        request = self.requests[0]
        first, second = self.engine.run(request)[0], self.engine.run(request)[0]
        for name, a, b in _tensors(first, second):
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
        with _failing_forward(self.engine.pipeline):
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
            for name, a, b in _tensors(output, want):
                if a is None or b is None or a.shape != b.shape:
                    if a is b is None:
                        continue
                    yield f"{request.request_id}: {name} is {_shape(a)} here and {_shape(b)} alone"
                elif not _difference(a, b) <= (1.01 if a.dtype == torch.uint8 else self.atol):
                    yield f"{request.request_id}: {name} differs by {_difference(a, b):.3g} from the solo run"
            if _facts(output) != _facts(want):
                yield f"{request.request_id}: {_facts(output)} here, {_facts(want)} alone"


@contextlib.contextmanager
def _failing_forward(pipeline: Any) -> Iterator[None]:
    """While it lasts, the transformer fails whenever the first row that it is given is among the rows."""
    hook = pipeline.predict_velocity
    poisoned: list[torch.Tensor] = []

    def predict_velocity(latents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not poisoned:
            poisoned.append(latents[0].clone())
        if any(torch.equal(row, poisoned[0]) for row in latents):
            raise RuntimeError("planted failure")
        return hook(latents, *args, **kwargs)

    pipeline.predict_velocity = predict_velocity
    try:
        yield
    finally:
        del pipeline.predict_velocity


def _tensors(a: Any, b: Any) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    for name in ("trajectory_latents", "trajectory_log_probs", "trajectory_timesteps"):
        yield name, getattr(a, name), getattr(b, name)
    yield "images", a.images[0], b.images[0]
    left, right = (x.multimodal_output["metadata"]["prompt_embeddings"] for x in (a, b))
    for name in sorted({*left, *right}):
        yield name, left.get(name), right.get(name)


def _contract(request: RolloutRequest, output: Any) -> Iterator[str]:
    n, steps = request.num_outputs_per_prompt, request.num_inference_steps or 0
    media, latents = output.images[0], output.trajectory_latents
    if request.output_type != "latent" and (
        media.dtype != torch.uint8 or media.shape != (n, 3, request.height, request.width)
    ):
        yield f"images are {media.dtype} {list(media.shape)}, not uint8 {[n, 3, request.height, request.width]}"
    windows = _facts(output)["sde_window"]
    width = request.sde_window_size if request.sde_window_size is not None else max(steps - 1, 0)
    if len(windows) != n or any(stop - start != width or stop > steps for start, stop in windows):
        yield f"windows {windows} are not {n} of {width} steps in {steps}"
    silent = request.noise_level == 0.0 or width == 0 or not request.logprobs
    if silent != (latents is None):
        yield "records steps that are not stochastic" if silent else "records nothing"
    if latents is not None:
        recorded = output.trajectory_log_probs.shape[1]
        if latents.shape[:2] != (n, recorded + 1) or output.trajectory_timesteps.shape != (n, recorded):
            yield f"trajectory of {list(latents.shape)} with {recorded} log-probs"
        for name in ("trajectory_latents", "trajectory_log_probs", "trajectory_timesteps"):
            tensor = getattr(output, name)
            if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
                yield f"{name} is {tensor.dtype} or not finite"
        falling = output.trajectory_timesteps.diff(dim=1) < 0
        if not bool(falling.all()) or not bool((output.trajectory_timesteps.abs() <= 1000).all()):
            yield "timesteps do not fall within 0 to 1000"
    if n > 1 and latents is not None and torch.equal(latents[0], latents[1]):
        yield "two rows of one request are twins"
    for name, tensor, _ in _tensors(output, output):
        if tensor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
            yield f"{name} carries a storage larger than itself"


def _facts(output: Any) -> dict[str, Any]:
    return dict(output.multimodal_output["metadata"]["rl"])


def _difference(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _shape(tensor: torch.Tensor | None) -> str:
    return "missing" if tensor is None else str(list(tensor.shape))


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
