"""The conformance suite passes the built-in adapters and finds planted faults."""

from __future__ import annotations

import pytest

from tests.testing import broken_adapters
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.testing.conformance import CHECKS, main, run_conformance
from verl_omni.workers.rollout.plan import RolloutMode

pytestmark = pytest.mark.engine

FAMILIES = [("qwen", "QwenImagePipeline"), ("sd3", "StableDiffusion3Pipeline")]


@pytest.mark.parametrize(("family", "architecture"), FAMILIES)
def test_the_built_in_adapters_conform_in_all_modes(request, family, architecture):
    report = run_conformance(AdapterRegistry.get_pipeline_path(architecture), request.getfixturevalue(f"tiny_{family}"))
    report.raise_for_failures()
    assert {result.mode for result in report.results} == {"bfloat16", *(mode.value for mode in RolloutMode)}
    assert len(report.results) == 19


@pytest.mark.parametrize(
    ("adapter", "checks"),
    [
        (broken_adapters.SharedNoise, {"repeatability", "equals solo"}),
        (broken_adapters.FirstScaleForAll, {"equals solo"}),
        (broken_adapters.RoundedLatents, {"log-prob recomputation", "full precision"}),
        (broken_adapters.FailsTogether, {"fault isolation"}),
        (broken_adapters.RoundedTimesteps, {"full precision"}),
        (broken_adapters.SharedStorage, {"output contract"}),
        (broken_adapters.NeverEncodes, {"equals solo", "order and company"}),
    ],
)
def test_a_planted_fault_is_found(tiny_qwen, monkeypatch, adapter, checks):
    wanted = tuple(check for check in CHECKS if check in checks)  # the others would only take time
    monkeypatch.setattr("verl_omni.testing.conformance.CHECKS", wanted)
    report = run_conformance(adapter, tiny_qwen, modes=[RolloutMode.REQUEST_LEVEL])
    assert checks <= {result.check for result in report.results if result.failures}
    with pytest.raises(AssertionError, match=f"{adapter.__name__} does not conform"):
        report.raise_for_failures()
    assert "FAILED" in str(report)


def test_from_the_command_line_a_failure_is_exit_status_one(tiny_qwen, capfd, monkeypatch):
    monkeypatch.setattr("verl_omni.testing.conformance.CHECKS", ("repeatability",))
    name = f"{broken_adapters.SharedNoise.__module__}.SharedNoise"
    assert main([name, str(tiny_qwen), "--modes", "serial"]) == 1
    assert "not the same bytes" in capfd.readouterr().out
