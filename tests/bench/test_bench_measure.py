"""How an engine is timed and looked at, and what is kept when something fails; without an engine."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_omni.bench import measure, session
from verl_omni.bench.cli import INTERRUPTED, main
from verl_omni.bench.log_prob_gap import log_prob_gap
from verl_omni.bench.measure import Bench, Point, Run, Timing
from verl_omni.bench.workload import Workload
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.workers.config import DiffusionRolloutConfig
from verl_omni.workers.rollout.plan import RolloutMode
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

LOAD = Workload(height=64, width=64, steps=4, n=2)
STEPS = (1, 3)
"""The window of every request: steps 1 and 2."""


class Engine:
    """Stands for a running engine. Records log-probs 0, and scores them as thousandths of the rows in a forward."""

    def __init__(self, *, fails: Sequence[str] = (), most_rows: int = 99) -> None:
        self.fails, self.most_rows = fails, most_rows
        self.closed = self.cancelled = 0
        self.sizes: dict[int, int] = {}

    async def generate(self, request: RolloutRequest) -> RolloutSample:
        if request.request_id.endswith(tuple(self.fails)):
            raise RolloutError(request.request_id, "no")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError

    async def generate_all(
        self, requests: Sequence[RolloutRequest]
    ) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        try:
            for request in requests:
                if request.request_id.endswith(tuple(self.fails)):
                    yield RolloutError(request.request_id, "no")
                recorded = dict(trajectory_latents=torch.zeros(1, 3, 4), trajectory_log_probs=torch.zeros(1, 2))
                sample: Any = SimpleNamespace(
                    request_id=request.request_id, peak_memory_mb=1.0, sde_windows=[STEPS], **recorded
                )
                yield sample
        finally:
            self.closed += 1

    async def stats(self, reset: bool = False) -> RolloutStats:
        return RolloutStats(batch_sizes=self.sizes)

    async def call_worker(self, method: str, asked: Sequence[Any], latents: Tensor, rows: int) -> Tensor:
        assert method == "rescore" and len(asked) == len(latents)
        ran = min(rows, self.most_rows)
        self.sizes = {ran: 2 * len(asked) // ran}
        shift = torch.arange(len(asked))[:, None] * torch.tensor([0.0, 1.0])
        return rows / 1000 + (rows > 1) * shift

    async def load_lora(self, adapter: Any) -> None: ...

    async def close(self) -> None: ...


def timing(engine: Engine, arrivals: str = "burst", **settings: Any) -> Timing:
    where = Point(mode="step_wise", cap=4, replicas=1, lora_rank=0, arrivals=arrivals)
    model: Any = None
    target: Any = engine
    bench = Bench(model=model, load=LOAD, rollout=DiffusionRolloutConfig(), repeats=2, **settings)
    return Timing(bench, target, where, 1.0)


async def test_gaps_are_those_to_a_row_alone_by_step():
    engine: Any = Engine()
    found = await log_prob_gap(engine, LOAD.requests(4, "a"), [2, 4])
    expected = {
        "recorded": {"1": [0.001, 0.001], "2": [0.001, 0.001]},
        "2": {"1": [0.001, 0.001], "2": [1.501, 3.001]},
        "4": {"1": [0.003, 0.003], "2": [1.503, 3.003]},
    }
    assert found.keys() == expected.keys()
    for name, by_step in expected.items():
        assert found[name] == {step: pytest.approx(values) for step, values in by_step.items()}


async def test_forwards_that_the_engine_split_are_not_told_as_whole_ones():
    engine: Any = Engine(most_rows=2)
    with pytest.raises(RuntimeError, match=r"with 4 rows were asked for, but the engine ran \{2: 4\}.*--log-prob-gap"):
        await log_prob_gap(engine, LOAD.requests(4, "a"), [2, 4])


async def test_what_was_timed_is_kept_when_looking_closer_fails(monkeypatch):
    monkeypatch.setattr(measure, "RolloutEngine", Engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = await timing(Engine(most_rows=2), log_prob_gap=(4,)).run()
    assert len(run.seconds) == 2 and run.log_prob_gap is None
    assert run.problem is not None and run.problem.startswith("RuntimeError: log-probs of forwards with 4 rows")
    run = await timing(Engine(), log_prob_gap=(16,)).run()  # more than a repeat has
    assert run.problem is None and run.log_prob_gap is not None and list(run.log_prob_gap) == ["recorded", "16"]


@pytest.mark.parametrize(("cuda", "servers", "peak"), [(False, False, None), (True, False, 1.0), (False, True, 1.0)])
async def test_a_peak_that_engines_share_is_not_told(cuda: bool, servers: bool, peak: float | None, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    timed = timing(Engine(), servers=servers)
    await timed.burst(LOAD.requests(4, "a"))
    assert timed.result.peak_memory_mb == peak


async def test_a_request_of_a_burst_that_fails_ends_the_others():
    engine = Engine(fails=["-1"])
    with pytest.raises(RolloutError, match="no"):
        await timing(engine).burst(LOAD.requests(4, "a"))
    assert engine.closed == 1


async def test_a_request_among_staggered_ones_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setattr(measure, "arrival_times", lambda count, **_: [0.0] * count)
    engine, requests = Engine(fails=["-3"]), LOAD.requests(4, "a")
    with pytest.raises(RolloutError, match="no"):
        await timing(engine, "staggered").staggered(requests)
    assert engine.cancelled == 3


def test_what_was_measured_is_kept_and_every_round_that_failed_is_told(tmp_path: Path, monkeypatch, capfd):
    class Model:
        """What an engine holds."""

    models: list[weakref.ref[Model]] = []

    async def fake(bench: Bench, mode: RolloutMode, cap: int, replicas: int) -> AsyncGenerator[Run, None]:
        assert not any(model() for model in models)
        plain, _ = bench.points(mode, cap, replicas)
        model = Model()
        models.append(weakref.ref(model))
        if len(models) != 2:
            problem = "RuntimeError: split" if len(models) == 3 else None
            yield Run(point=plain, requests=2, start_s=1.0, first_s=1.0, seconds=[0.5], problem=problem)
        raise MemoryError("no room")

    peaks = iter([1e12, 3e12, 2e12])
    monkeypatch.setattr(session, "measure", fake)
    monkeypatch.setattr(session, "matrix_peak", lambda dtype: next(peaks))
    monkeypatch.setattr(session.logger, "error", lambda *args, **settings: None)  # pytest would keep the error
    argv = "--tiny sd3 --modes step_wise --caps 2 --lora-rank 0 4 --rounds 3".split()
    assert main([*argv, "--out", str(tmp_path / "r.json")]) == 1
    record = json.loads((tmp_path / "r.json").read_text())
    measured, failed = record["rows"]
    assert measured["images_per_s"] == 4.0 and len(measured["seconds"]) == 2
    assert measured["failed_rounds"] == {"2": "MemoryError: no room", "3": "RuntimeError: split"}
    assert failed["lora_rank"] == 4 and failed["error"] == "MemoryError: no room"
    assert record["matrix_peak_tflops"] == 3.0
    assert "not complete: step_wise cap 2, round 3 of 3: RuntimeError: split" in capfd.readouterr().out
    gc.collect()
    assert not any(model() for model in models)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model of the tests below is built, once."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def bench(kept: Path, monkeypatch) -> Any:
    """Runs the bench on starts of which each gives the next of `outcomes`: a rate, or what is raised instead."""

    def run(argv: str, *outcomes: float | BaseException) -> tuple[int, list[tuple[str, int]]]:
        left, started = iter(outcomes), []

        async def fake(bench: Bench, mode: RolloutMode, cap: int, replicas: int) -> AsyncGenerator[Run, None]:
            started.append((mode.value, cap))
            outcome = next(left)
            if isinstance(outcome, BaseException):
                raise outcome
            for point in bench.points(mode, cap, replicas):
                count = bench.count(mode.value, cap)
                yield Run(point=point, requests=count, start_s=1.0, first_s=1.0, seconds=[count / outcome])

        monkeypatch.setattr(session, "measure", fake)
        monkeypatch.setattr(session, "matrix_peak", lambda dtype: 1e12)
        return main(["--tiny", "sd3", "--keep", str(kept), *argv.split()]), started

    return run


MODES = "--modes request_level serial --caps 2"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RolloutError("0", "height=20 must be a multiple of 16"), ": height=20 must be a multiple of 16"),
        (RuntimeError("no weights"), ": RuntimeError: no weights. If another mode can do it, name that alone after"),
    ],
)
def test_what_fails_before_anything_was_measured_ends_the_run_with_one_line(error, reason: str, bench, capfd):
    assert bench(MODES, error) == (2, [("request_level", 2)])
    told = capfd.readouterr().err
    (line,) = [line for line in told.splitlines() if "config error: request_level with cap 2 failed" in line]
    assert reason in line and "Traceback" not in told
    assert ("another mode" in line) == (not isinstance(error, RolloutError))  # who refuses a request does in all modes


@pytest.mark.parametrize(
    "outcomes",
    [
        (MemoryError("no room"), 1.0),
        (RolloutError("0", "CUDA out of memory"), 1.0),
        (RolloutError("0", "the engine died, start another"), 1.0),
        (1.0, RolloutError("0", "height=20 must be a multiple of 16")),
    ],
)
def test_what_may_not_fail_elsewhere_does_not_end_the_run(outcomes, bench):
    assert bench(MODES, *outcomes) == (1, [("request_level", 2), ("serial", 1)])


def test_what_was_measured_before_an_interrupt_is_shown_and_recorded(bench, tmp_path: Path, capfd):
    files = [tmp_path / name for name in ("r.json", "p.json", "p.svg")]
    written = "--out {} --profile {} --plot {}".format(*files)
    assert bench(f"{MODES} {written}", 2.0, KeyboardInterrupt())[0] == INTERRUPTED
    out, err = capfd.readouterr()
    assert "request_level" in out and f"written: {files[0]}\n" in out
    assert err.splitlines()[-1] == "interrupted" and "Traceback" not in err
    (row,) = json.loads(files[0].read_text())["rows"]
    assert row["images_per_s"] == 2.0 and [file.exists() for file in files] == [True, False, False]


def test_an_interrupt_before_anything_was_measured_leaves_the_last_record_alone(bench, tmp_path: Path, capfd):
    (tmp_path / "r.json").write_text("of an earlier run")
    assert bench(f"{MODES} --out {tmp_path / 'r.json'}", KeyboardInterrupt())[0] == INTERRUPTED
    out, err = capfd.readouterr()
    assert "written" not in out and err.splitlines()[-1] == "interrupted"
    assert (tmp_path / "r.json").read_text() == "of an earlier run"


def test_a_record_that_cannot_be_written_ends_with_the_table_all_the_same(
    bench, tmp_path: Path, monkeypatch, capfd, caplog
):
    def full(path: Path, *args: Any, **settings: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert bench(f"{MODES} --out {tmp_path / 'r.json'}", 2.0, 1.0)[0] == 1
    assert "\nserial " in capfd.readouterr().out and "r.json was not written" in caplog.text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--baseline {baseline} --steps 4", "the baseline was measured with steps 10, this run with 4"),
        ("--baseline {baseline} --n 4", "the baseline was measured with n 8, this run with 4"),
        ('--baseline {baseline} --engine {{"vae_use_tiling":true}}', "the baseline was measured with engine {}"),
        ("--baseline {baseline} --requests 16", "the baseline was measured with 8 images in a repeat"),
        ("--baseline {baseline} --lora-rank 4", "the baseline shares no ratio with this run"),
        ('--engine {{"enforce_eager":"yes"}}', "--engine.enforce_eager='yes' must be true or false"),
        ('--engine {{"diffusion_attention_config":"x"}}', "--engine.diffusion_attention_config must be a mapping"),
        ('--engine {{"diffusion_attention_config":{{"per_role":3}}}}', "--engine: the engine rejects"),
        ('--engine {{"enforce_eagre":true}}', "--engine.enforce_eagre is not a known key"),
        ("--size 65", "--size 65 must be multiples of 16 for this model; write --size 64"),
        ("--size 64 7", "--size 64 7 must be multiples of 16 for this model; write --size 64 16"),
        ('--engine {{"diffusion_attention_backend":"fast"}}', "attention backend 'FAST' does not run on CPU"),
    ],
)
def test_what_cannot_be_compared_or_run_is_refused_before_an_engine_starts(argv, message, bench, tmp_path, capfd):
    baseline = tmp_path / "baseline.json"
    assert bench(f"{MODES} --out {baseline}", 8.0, 1.0)[0] == 0
    assert bench(f"{MODES} {argv.format(baseline=baseline)}") == (2, [])
    assert f"config error: {message}" in capfd.readouterr().err
    assert bench(f"{MODES} --baseline {baseline}", 8.0, 1.0)[0] == 0
