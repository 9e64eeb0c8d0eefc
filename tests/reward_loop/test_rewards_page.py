"""The page on rewards says what the code does, and its examples run."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.docs.pages import DOCS, block, blocks, code_spans, commands, prose, tables
from tests.reward_loop.items import item, plain, score
from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion.collect import MAX_FAILED
from verl_omni.trainer.diffusion.metrics import reward_metrics
from verl_omni.workers.config import build
from verl_omni.workers.config.reward import RewardConfig
from verl_omni.workers.config.scorers import SCORER_TYPES, EndpointConfig, ScorerConfig
from verl_omni.workers.config.user_function import KEYWORDS

PAGE = DOCS / "start/rewards.md"
COMMANDS = [command for found in blocks(PAGE, language="bash") for command in commands(found.text)]


@pytest.fixture(autouse=True)
def _folder_with_the_function(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(block(PAGE, "python", "def compute_score"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("JUDGE_KEY", "key")


def config_of(command: list[str]) -> RewardConfig:
    composed = compose(command[3:], "diffusion_trainer")
    assert composed is not None
    return build(RewardConfig, composed["reward"], "reward")


def written(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return field.default if isinstance(field.default, str) else json.dumps(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else json.dumps(field.default_factory())


def own_options(cls: type, *bases: type) -> dict[str, str]:
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    return {field.name: written(field) for field in dataclasses.fields(cls) if field.name not in inherited}


def test_every_type_and_every_option_with_its_default_is_in_the_tables():
    found = {t.heading: t for t in tables(PAGE)}
    assert [code_spans(row[0])[0] for row in tables(PAGE)[0].rows] == list(SCORER_TYPES)
    documented = {
        t.heading: {code_spans(key)[0]: (code_spans(default) or [default])[0] for key, default, _ in t.rows}
        for t in tables(PAGE)
        if t.header == ("key", "default", "meaning")
    }
    expected = {"Which one to use": own_options(ScorerConfig)}
    expected["Limits of `http` and `vlm`"] = own_options(EndpointConfig, ScorerConfig)
    for kind, cls in SCORER_TYPES.items():
        (heading,) = (name for name in found if kind in code_spans(name) and not name.startswith("Limits"))
        base = EndpointConfig if issubclass(cls, EndpointConfig) else ScorerConfig
        if options := own_options(cls, base):
            expected[heading] = options
    expected["`vlm`"]["prompt_template"] = "a rating from 0 to 10"
    assert documented == expected


def test_the_arguments_of_a_function_are_all_described():
    (found,) = (t for t in tables(PAGE) if t.header[0] == "argument")
    assert sorted(name for row in found.rows for name in code_spans(row[0])) == sorted(KEYWORDS)
    assert f"`reward.num_workers` threads ({RewardConfig(scorers={'c': {'type': 'color'}}).num_workers})" in prose(PAGE)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[3])
def test_the_commands_are_accepted(command):
    assert command[:3] == ["python", "-m", "verl_omni.trainer.main_diffusion"]
    assert config_of(command).named_scorers()


async def test_the_first_command_gives_the_sum_that_the_page_says():
    weights = {name: scorer.weight for name, scorer in config_of(COMMANDS[0]).named_scorers().items()}
    assert weights == {"text": 1.0, "size": 0.01}
    assert "`1.0 * text + 0.01 * size`" in prose(PAGE)


def test_the_prompt_template_of_the_command_arrives_whole():
    (command,) = (command for command in COMMANDS if "reward.scorers.judge.type=vlm" in command)
    judge = config_of(command).named_scorers()["judge"]
    assert judge.prompt_template == "From 1 to 5, how well does this show: {prompt}? Answer with a number."
    assert judge.scale == [1.0, 5.0]


async def test_the_function_runs_in_both_ways():
    custom, light = (config_of(command) for command in COMMANDS if any("my_reward.py" in part for part in command))
    scored = item(plain(51, 51, 51))
    assert (await score(scored, **dataclasses.asdict(custom) | {"num_workers": 1})).parts == pytest.approx(
        {"custom": 0.7, "custom/brightness": 0.2}
    )
    result = await score(scored, **dataclasses.asdict(light) | {"num_workers": 1})
    assert result.parts == pytest.approx({"light": 0.4, "light/brightness": 0.2})
    named = {name for name in reward_metrics([result], ["g"]) if "light" in name}
    assert named == {"reward/light/mean", "reward/light/brightness/mean"}
    assert "`reward/light/brightness/mean`" in prose(PAGE)


async def test_the_service_scores_and_gets_what_the_page_shows():
    service: dict[str, object] = {"__name__": "service"}
    exec(block(PAGE, "python", "aiohttp"), service)
    async with TestServer(service["app"]) as server:
        options = {"type": "http", "url": str(server.make_url("/score"))}
        result = await score(item(plain(51, 51, 51, size=512)), scorers={"mine": options})
    assert result.total == pytest.approx(0.2)


async def test_the_body_and_the_reply_look_as_the_page_shows():
    bodies = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        reply = next(span for span in code_spans(prose(PAGE)) if span.startswith('{"score"'))
        return web.json_response(text=reply)

    app = web.Application()
    app.router.add_post("/", answer)
    async with TestServer(app) as server:
        options = {"type": "http", "url": str(server.make_url("/"))}
        assert (await score(item(), scorers={"mine": options})).total == 0.7
    shown = json.loads(block(PAGE, "json", "request_id"))
    assert bodies == [shown | {"request_id": "r7", "image": bodies[0]["image"]}]


def test_a_run_stops_when_more_than_half_fails():
    assert MAX_FAILED == 0.5
    assert "more than half" in prose(PAGE)


def test_the_page_is_short():
    assert len(PAGE.read_text().splitlines()) < 200
