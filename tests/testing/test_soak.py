"""The soak: its workload, its command line, its page, and a short run against a real engine."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT, code_spans, prose, table
from tests.testing.soak_samples import REQUEST
from verl_omni.testing.soak.cli import AFTER_KILLS, ENVIRONMENT, make_parser, parse
from verl_omni.testing.soak.faults import FAULTS, planted_fault, spoiled
from verl_omni.testing.soak.report import as_table
from verl_omni.testing.soak.settings import SoakSettings, share
from verl_omni.testing.soak.soak import Soak
from verl_omni.testing.soak.workload import (
    CFG_KEYS,
    ROUND,
    Kill,
    Policy,
    Send,
    Sleep,
    Stop,
    Swap,
    WorkloadSettings,
    jobs_of,
    make_workload,
)
from verl_omni.workers.rollout.plan import RolloutMode

MANY = WorkloadSettings(family="sd3", requests=500, faults=0.1, aborts=0.1, swaps=20, sleeps=5, kills=3)


# ---- the workload


def test_the_same_seed_gives_the_same_workload_and_another_seed_another():
    assert make_workload(MANY, 1) == make_workload(MANY, 1) != make_workload(MANY, 2)


def test_a_workload_holds_what_was_asked_for():
    rounds = make_workload(MANY, 3)
    jobs = list(jobs_of(rounds))
    assert len({job.request.request_id for job in jobs}) == len(jobs) == MANY.requests
    actions = Counter(type(action) for script in rounds for action in script)
    assert (actions[Swap], actions[Sleep], actions[Kill]) == (MANY.swaps, MANY.sleeps, MANY.kills)
    assert all(isinstance(script[0], Send) for script in rounds)
    assert all(not isinstance(action, Kill) for script in rounds for action in script[:-1])
    deviation = (MANY.requests * MANY.faults * (1 - MANY.faults)) ** 0.5
    for found in (sum(job.fault is not None for job in jobs), sum(job.stopped for job in jobs)):
        assert abs(found - MANY.requests * MANY.faults) < 4 * deviation
    assert {job.fault for job in jobs} == {None, *FAULTS}


def test_every_stopped_request_is_stopped_in_its_round():
    for script in make_workload(MANY, 4):
        sends = [action for action in script if isinstance(action, Send)]
        stops = [action for action in script if isinstance(action, Stop)]
        ended = {job.request.request_id for send in sends if send.leave_after is not None for job in send.jobs}
        for stop in stops:
            everyone = {job.request.request_id for job in jobs_of([script])}
            ended |= everyone if stop.request_ids is None else set(stop.request_ids)
            alone = {job.request.request_id for send in sends if not send.burst for job in send.jobs}
            assert not stop.cancel or set(stop.request_ids) <= alone
        assert {job.request.request_id for job in jobs_of([script]) if job.stopped} <= ended


def test_each_policy_differs_from_the_one_before_in_its_lora_or_its_weights():
    now = Policy()
    for script in make_workload(MANY, 5):
        for action in script:
            if isinstance(action, Swap):
                lora = (action.policy.lora, action.policy.scale) != (now.lora, now.scale)
                assert lora != (action.policy.weights != now.weights)
                now = action.policy


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_in_the_request_or_planted_by_its_prompt(name):
    request = spoiled(REQUEST, name)
    assert request != REQUEST
    assert planted_fault(request.prompt) == (None if FAULTS[name].knobs else name)


# ---- the command line


def test_counts_are_shared_out_among_the_seeds():
    settings = SoakSettings(executor="mp", requests=7, seeds=(4, 5), swaps=3, kills=1)
    shares = [settings.of_seed(i) for i in range(2)]
    assert [(s.seeds, s.requests, s.swaps, s.kills) for s in shares] == [((4,), 4, 2, 1), ((5,), 3, 1, 0)]
    assert [sum(share(total, 3, i) for i in range(3)) for total in range(7)] == list(range(7))


def test_the_command_of_a_violation_repeats_its_seed():
    settings = SoakSettings(
        family="sd3",
        mode=RolloutMode.REQUEST_LEVEL,
        executor="mp",
        requests=7,
        seeds=(4, 5),
        faults=0.1,
        kinds=("no prompt", "nan"),
        aborts=0.2,
        swaps=3,
        sleeps=1,
        kills=1,
        check=1.0,
        cap=4,
        deadline_s=9.0,
    )
    assert not any(getattr(settings, name) == value for name, value in vars(SoakSettings()).items())
    for wanted in (SoakSettings(), settings, settings.of_seed(0), settings.of_seed(1)):
        assert parse(shlex.split(wanted.command)[3:])[0] == wanted


def test_each_seed_has_as_many_rounds_as_kills_or_is_refused():
    for seeds in ((0,), (0, 1)):
        with pytest.raises(ValueError, match="need requests="):
            SoakSettings(executor="mp", kills=3, requests=len(seeds), seeds=seeds)
        least = next(n for n in range(len(seeds), 999) if accepted(executor="mp", kills=3, requests=n, seeds=seeds))
        settings = SoakSettings(executor="mp", kills=3, requests=least, seeds=seeds)
        for i, seed in enumerate(seeds * 20):
            part = settings.of_seed(i % len(seeds))
            actions = [action for script in make_workload(part, seed + i) for action in script]
            assert sum(isinstance(action, Kill) for action in actions) == part.kills


def accepted(**settings: Any) -> bool:
    try:
        return bool(SoakSettings(**settings))
    except ValueError:
        return False


def test_it_is_silent_unless_the_environment_says_otherwise_and_the_page_tells_so():
    assert ENVIRONMENT["VLLM_LOGGING_LEVEL"] == "CRITICAL" and "PYTHONWARNINGS" in AFTER_KILLS
    assert "`VLLM_LOGGING_LEVEL=ERROR` to see it" in prose(PAGE)
    assert f"each more needs {ROUND[1]} more requests" in prose(PAGE)


@pytest.mark.parametrize("argv", ["--kills 1 --executor uni", "--requests 1 --seed 1 2", "--mode fast", "--check some"])
def test_arguments_that_cannot_be_end_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(argv.split())
    assert exit.value.code == 2


# ---- a real engine


@pytest.mark.engine
async def test_a_short_soak_of_a_real_engine_finds_nothing(tiny_qwen):
    settings = SoakSettings(requests=40, swaps=3, sleeps=1, faults=0.15, aborts=0.1, check=0.4)
    record = await Soak(tiny_qwen, settings, print).run()
    assert record["violations"] == []
    assert record["requests"] == record["successes"] + sum(record["errors"].values()) - record["retried"] == 40
    assert record["swaps"] == 3 and record["sleeps"] == 1 and record["checked"] > 5
    assert record["batch_size_mean"] > 1


# ---- the docs


PAGE = DOCS / "reference/soak.md"
RECORDS = [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").glob("soak_*.json"))]


def test_the_page_shows_the_records():
    shown = as_table(RECORDS)
    if shown not in PAGE.read_text():
        pytest.fail(f"paste into {PAGE.name}:\n\n{shown}", pytrace=False)


def test_the_recorded_soaks_cover_both_models_and_modes_and_found_nothing():
    modes = [mode.value for mode in RolloutMode if mode is not RolloutMode.SERIAL]
    assert {(found["family"], found["mode"]) for found in RECORDS} == {(f, m) for f in CFG_KEYS for m in modes}
    for found in RECORDS:
        settings, _ = parse(shlex.split(found["command"])[3:])
        assert (settings.faults, settings.aborts, settings.kinds) == (0.05, 0.05, tuple(FAULTS))
        assert (settings.requests, len(settings.seeds), settings.swaps, settings.kills) == (2000, 5, 20, 3)
        assert found["requests"] == settings.requests and found["violations"] == []
        assert found["swaps"] == settings.swaps and found["kills"] == settings.kills


def test_the_options_and_faults_of_the_page_are_those_of_the_command():
    options = {option.option_strings[-1]: option.default for option in make_parser()._actions if option.dest != "help"}
    rows = table(PAGE, "option").rows
    assert [code_spans(row[0])[0] for row in rows] == list(options)
    for name, default, _ in rows:
        value = options[code_spans(name)[0]]
        shown = "all" if value == list(FAULTS) else f"{value[0]}" if isinstance(value, list) else f"{value or ''}"
        assert (default or "") == (shown.removesuffix(".0") if name != "`--kills`" else "0")
    faults = {code_spans(row[0])[0]: row[2] for row in table(PAGE, "kind of fault").rows}
    assert faults == {name: "fail" if fault.message else "succeed" for name, fault in FAULTS.items()}
