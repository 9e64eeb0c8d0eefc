"""What Prometheus is told, and where it is told."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.pages import DOCS, code_spans, table
from tests.trainer.samples import scored
from verl_omni.pipelines.stage_clock import ROLLOUT_STAGES
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.trainer.prometheus import MIB, OUTCOMES, PREFIX, NoMetrics, PrometheusMetrics, served_metrics
from verl_omni.trainer.sizes import MAX_SIZES
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest

STATS = RolloutStats(
    batch_sizes={4: 3, 16: 2},
    waves=2,
    encodes_requested=10,
    encodes_computed=4,
    stage_s=dict.fromkeys(ROLLOUT_STAGES, 0.5),
    compiled_graphs=1,
    out_of_memory=5,
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry) -> PrometheusMetrics:
    return PrometheusMetrics(registry)


def figure(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(PREFIX + name, labels)


def requests(*names: str, **knobs) -> list[RolloutRequest]:
    return [RolloutRequest(request_id=name, prompt=name, **{"width": 64, "height": 32, **knobs}) for name in names]


async def results(*given):
    for item in given:
        yield item


async def drain(iterator: AsyncIterator) -> list:
    return [item async for item in iterator]


async def test_each_request_is_counted_once_by_how_it_ended(registry, metrics):
    given = [scored("a").sample, RolloutError("b", "over-long prompt"), RolloutError("c", "aborted")]
    assert await drain(metrics.watched(requests("a", "b", "c"), results(*given))) == given
    metrics.stepped({"rollout/requests_retried": 2.0, "rollout/servers_restarted": 1.0, "time/step_s": 7.0})
    found = {outcome: figure(registry, "requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert found == {"success": 1, "error": 1, "aborted": 1, "retried": 2}
    assert figure(registry, "requests_in_flight", size="64x32") == 0
    assert figure(registry, "request_seconds_count", size="64x32") == 3
    assert figure(registry, "server_restarts_total") == 1
    assert figure(registry, "training_step_seconds_sum") == 7


async def test_what_waits_or_runs_is_told_by_size_and_what_is_left_early_was_aborted(registry, metrics):
    asked = [*requests("a", "b"), *requests("c", width=None)]
    watched = metrics.watched(asked, results(scored("a").sample))
    await anext(watched)
    assert figure(registry, "requests_in_flight", size="64x32") == 1
    assert figure(registry, "requests_in_flight", size="defaultx32") == 1
    await watched.aclose()
    assert figure(registry, "requests_in_flight", size="64x32") == 0
    assert figure(registry, "requests_total", outcome="aborted") == 2


def test_what_the_engines_counted_is_added_up(registry, metrics):
    metrics.observe(STATS)
    metrics.observe(STATS)
    forwards, rows = sum(STATS.batch_sizes.values()), sum(size * n for size, n in STATS.batch_sizes.items())
    assert figure(registry, "batch_rows_count") == 2 * forwards
    assert figure(registry, "batch_rows_sum") == 2 * rows
    assert figure(registry, "batch_rows_bucket", le="4.0") == 2 * STATS.batch_sizes[4]
    assert figure(registry, "waves_total") == 2 * STATS.waves
    assert figure(registry, "encodes_total", result="computed") == 2 * STATS.encodes_computed
    assert figure(registry, "encodes_total", result="reused") == 2 * (STATS.encodes_requested - STATS.encodes_computed)
    assert figure(registry, "compiled_graphs_total") == 2 * STATS.compiled_graphs
    assert figure(registry, "out_of_memory_total") == 2 * STATS.out_of_memory
    for stage, seconds in STATS.stage_s.items():
        assert figure(registry, "stage_seconds_total", stage=stage) == 2 * seconds


async def test_the_wait_of_each_sample_is_told_by_size(registry, metrics):
    waits = {"a": 0.02, "b": 2.0, "c": 20.0, "e": None}
    asked = [*requests("a", "b", "e"), *requests("c", "d", width=32)]
    given = [scored(name).sample for name in waits]
    for sample, wait in zip(given, waits.values(), strict=True):
        sample.queue_wait_s = wait
    await drain(metrics.watched(asked, results(*given, RolloutError("d", "over-long prompt"))))
    for size, names in {"64x32": "ab", "32x32": "c"}.items():
        assert figure(registry, "queue_wait_seconds_count", size=size) == len(names)
        assert figure(registry, "queue_wait_seconds_sum", size=size) == sum(waits[name] for name in names)
    assert figure(registry, "queue_wait_seconds_bucket", size="64x32", le="0.03") == 1


async def test_memory_is_the_peak_and_the_version_the_latest(registry, metrics):
    samples = [scored(name).sample for name in "ab"]
    samples[0].peak_memory_mb, samples[1].peak_memory_mb = 300.0, 200.0
    samples[1].policy_version = 9
    await drain(metrics.watched(requests("a", "b"), results(*samples)))
    assert figure(registry, "memory_peak_bytes") == 300 * MIB
    assert figure(registry, "policy_version") == 9


async def test_no_row_of_a_prompt_file_makes_figures_without_end(registry, metrics):
    sizes = [*range(1, MAX_SIZES + 20), "a" * 10_000, True, [1]]
    asked = [requests(f"r{i}", width=size)[0] for i, size in enumerate(sizes)]
    await drain(metrics.watched(asked, results()))
    found = {
        sample.labels["size"]
        for family in registry.collect()
        for sample in family.samples
        if family.name == f"{PREFIX}requests_in_flight"
    }
    assert found == {*(f"{width}x32" for width in range(1, MAX_SIZES + 1)), "other", "invalid"}


def test_they_are_served_at_loopback_while_the_run_lasts_and_to_no_one_else(caplog):
    caplog.set_level("INFO")
    with served_metrics(DiffusionRolloutConfig(metrics_port=0)) as metrics:
        metrics.observe(STATS)
        url = caplog.records[-1].getMessage().split()[-1]
        assert url.startswith("http://127.0.0.1:")
        port = int(url.rpartition(":")[2].partition("/")[0])
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        assert f"{PREFIX}waves_total 2.0" in text
        assert _listening_at(port) == {"127.0.0.1"}
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0


def _listening_at(port: int) -> set[str]:
    """Addresses at which this machine listens on `port`."""
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()]
    places = [words[1].split(":") for words in lines if words[3] == "0A"]
    found = {address for address, number in places if int(number, 16) == port}
    return {socket.inet_ntoa(bytes.fromhex(a)[::-1]) if len(a) == 8 else a for a in found}


def test_a_port_that_is_taken_is_told_with_the_key():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rollout = DiffusionRolloutConfig(metrics_port=port)
        with pytest.raises(ConfigError, match=rf"rollout\.metrics_port={port} cannot be had at 127\.0\.0\.1"):  # noqa: SIM117
            with served_metrics(rollout):
                raise AssertionError


def test_without_a_port_nothing_is_served_and_importing_the_module_registers_nothing():
    with served_metrics(DiffusionRolloutConfig()) as metrics:
        assert type(metrics) is NoMetrics
    code = "import sys, verl_omni.trainer.prometheus; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("port", [-1, 65536, "x"])
def test_what_is_no_port_is_refused(port):
    with pytest.raises(ConfigError, match=r"rollout\.metrics_port"):
        DiffusionRolloutConfig(metrics_port=port)


async def test_the_page_lists_every_figure_with_its_type_and_labels(registry, metrics):
    await drain(metrics.watched(requests("a"), results(scored("a").sample)))
    metrics.observe(STATS)
    metrics.stepped({"time/step_s": 1.0})
    from prometheus_client import generate_latest

    served = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        if not family.name.endswith("_created"):
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            suffix = "_total" if family.type == "counter" else ""
            served[family.name + suffix] = (family.type, labels)
    rows = table(DOCS / "reference/metrics.md", "name", "type").rows
    documented = {code_spans(name)[0]: (kind, set(code_spans(labels))) for name, kind, labels, _ in rows}
    assert served == documented
