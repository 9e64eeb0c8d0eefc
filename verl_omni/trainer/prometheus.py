"""Figures of a run for Prometheus, served by the process that drives it: ``rollout.metrics_port``.

``docs/reference/metrics.md`` tells what each means. They live in a registry of the run's own, so nothing is registered
by importing this module, and runs in one process do not meet. No figure holds a prompt, a path or a key.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

from verl_omni.trainer.sizes import SizeLabels
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.request import RolloutError, RolloutSample

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from verl_omni.pipelines.stats import RolloutStats
    from verl_omni.workers.config import DiffusionRolloutConfig
    from verl_omni.workers.rollout.request import RolloutRequest

logger = logging.getLogger(__name__)

PREFIX = "verl_omni_rollout_"
OUTCOMES = ("success", "error", "aborted", "retried")
MIB = 2**20
_ROWS = tuple(2**power for power in range(9))
_REQUEST_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
_WAIT_S = (0.01, 0.03, *_REQUEST_S)
_STEP_S = (1, 3, 10, 30, 60, 120, 300, 600, 1200, 3600)

Result = RolloutSample | RolloutError


class NoMetrics:
    """What takes a run's figures where no one asked for them."""

    def watched(self, requests: Sequence[RolloutRequest], results: AsyncGenerator[Result]) -> AsyncIterator[Result]:
        """`results` of `requests`, which begin now, as they are; counts and times them."""
        return results

    def observe(self, stats: RolloutStats) -> None:
        """Add what the engines counted since the last time."""

    def stepped(self, metrics: dict[str, float]) -> None:
        """Take what the metrics of a training step tell beside that."""


class PrometheusMetrics(NoMetrics):
    """Figures in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter as Total
        from prometheus_client import Gauge, Histogram

        def make(kind: Any, name: str, help_text: str, *labels: str, **options: Any) -> Any:
            return kind(PREFIX + name, help_text, labels, registry=registry, **options)

        self._requests = make(Total, "requests", "Requests that ended, and those that were run again", "outcome")
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._in_flight = make(Gauge, "requests_in_flight", "Requests that wait or run", "size")
        self._seconds = make(
            Histogram, "request_seconds", "From the submission of a request to its end", "size", buckets=_REQUEST_S
        )
        self._waits = make(
            Histogram, "queue_wait_seconds", "Wait of a request for a place in a batch", "size", buckets=_WAIT_S
        )
        self._rows = make(Histogram, "batch_rows", "Rows in one transformer forward", buckets=_ROWS)
        self._waves = make(Total, "waves", "Times that denoising began with nothing in flight")
        self._encodes = make(Total, "encodes", "Prompts to be encoded", "result")
        self._stages = make(Total, "stage_seconds", "Time on the engines' devices", "stage")
        self._graphs = make(Total, "compiled_graphs", "Graphs made by torch.compile")
        self._out_of_memory = make(Total, "out_of_memory", "Forwards and decodes repeated in halves")
        self._restarts = make(Total, "server_restarts", "Fresh engines in the place of dead ones")
        self._memory = make(Gauge, "memory_peak_bytes", "Most device memory that an engine held so far")
        self._version = make(Gauge, "policy_version", "Version of the policy that made the latest sample")
        self._steps = make(Histogram, "training_step_seconds", "Whole training steps", buckets=_STEP_S)
        self._sizes = SizeLabels()
        self._peak = 0.0

    async def watched(
        self, requests: Sequence[RolloutRequest], results: AsyncGenerator[Result]
    ) -> AsyncIterator[Result]:
        """`results` of `requests`, which begin now, as they are; counts and times them.

        Those that are left without a result, when it is left early, count as aborted.
        """
        begun = time.perf_counter()
        sizes = {request.request_id: self._sizes.of(request) for request in requests}
        waiting = Counter(request.request_id for request in requests)
        for request in requests:
            self._in_flight.labels(sizes[request.request_id]).inc()
        try:
            async with aclosing(results):
                async for result in results:
                    request_id = str(result.request_id)
                    if waiting[request_id] > 0:
                        waiting[request_id] -= 1
                        self._end(sizes[request_id], result, time.perf_counter() - begun)
                    yield result
        finally:
            for request_id in waiting.elements():
                self._in_flight.labels(sizes[request_id]).dec()
                self._requests.labels("aborted").inc()

    def observe(self, stats: RolloutStats) -> None:
        """Add what the engines counted since the last time."""
        for rows, count in stats.batch_sizes.items():
            for _ in range(count):
                self._rows.observe(rows)
        self._waves.inc(stats.waves)
        self._encodes.labels("computed").inc(stats.encodes_computed)
        self._encodes.labels("reused").inc(max(0, stats.encodes_requested - stats.encodes_computed))
        for stage, seconds in stats.stage_s.items():
            self._stages.labels(stage).inc(seconds)
        self._graphs.inc(stats.compiled_graphs)
        self._out_of_memory.inc(stats.out_of_memory)

    def stepped(self, metrics: dict[str, float]) -> None:
        """Take what the metrics of a training step tell beside that."""
        self._requests.labels("retried").inc(metrics.get("rollout/requests_retried", 0))
        self._restarts.inc(metrics.get("rollout/servers_restarted", 0))
        if "time/step_s" in metrics:
            self._steps.observe(metrics["time/step_s"])

    def _end(self, size: str, result: Result, seconds: float) -> None:
        self._in_flight.labels(size).dec()
        self._seconds.labels(size).observe(seconds)
        if isinstance(result, RolloutError):
            self._requests.labels("aborted" if result.aborted else "error").inc()
            return
        self._requests.labels("success").inc()
        if result.queue_wait_s is not None:
            self._waits.labels(size).observe(result.queue_wait_s)
        self._version.set(result.policy_version)
        self._peak = max(self._peak, result.peak_memory_mb * MIB)
        self._memory.set(self._peak)


@contextmanager
def served_metrics(rollout: DiffusionRolloutConfig) -> Iterator[NoMetrics]:
    """What takes the figures of a run; served at ``rollout.metrics_port`` during the block, if that is set.

    Raises :class:`ConfigError` if the port can't be had.
    """
    if rollout.metrics_port is None:
        yield NoMetrics()
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    try:
        server, thread = start_http_server(rollout.metrics_port, addr=rollout.metrics_host, registry=registry)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{rollout.KEY}.metrics_port={rollout.metrics_port} cannot be had at {rollout.metrics_host}: {error}; "
            "write another one, or null for none"
        ) from error
    logger.info("Prometheus metrics: http://%s:%d/metrics", rollout.metrics_host, server.server_port)
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
