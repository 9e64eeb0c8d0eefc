"""Scorers behind HTTP, against a real server: what is sent, what is tried again, what becomes an error."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.reward_loop.items import item, noise, reward_config
from verl_omni.reward_loop import RewardError, RewardManager, endpoint
from verl_omni.reward_loop.endpoint import MAX_WAIT_S, Outage, wait_before_retry
from verl_omni.reward_loop.item import ScoreError
from verl_omni.reward_loop.vlm import fill_template, read_answer
from verl_omni.workers.config.scorers import HttpConfig

SECRET = "sk-do-not-tell"
DOWN_S = 20.0
LONG_PAGE = web.Response(status=503, text="busy" * 1_000_000)
Reply = web.Response | Callable[[web.Request], Awaitable[web.Response]]


class Service:
    """Answers with the given replies in turn, the last of them again and again, and keeps what it was sent."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[web.Request] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.requests.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return (await reply(request)) if callable(reply) else _copy(reply)

    async def score(self, scored=None, **options: Any) -> float:
        """The score of one item by a manager of its own; "http" unless the type is given."""
        is_http = options.get("type", "http") == "http"
        address = {"url": f"{self.url}/score"} if is_http else {"base_url": f"{self.url}/v1", "model": "judge"}
        defaults = {"type": "http", "retry_wait_s": 0, "timeout_s": 30}
        config = reward_config(scorers={"judge": {**defaults, **address, **options}})
        async with RewardManager(config) as manager:
            return (await manager.score(scored or item())).total


def _copy(reply: web.Response) -> web.Response:
    """A response can be sent once."""
    return web.Response(body=reply.body, status=reply.status, headers=reply.headers)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    found = Service()
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/{path:.*}", found.handle)
    async with TestServer(app, shutdown_timeout=0) as server:
        found.url = str(server.make_url("")).rstrip("/")
        yield found


def scored(value: Any) -> web.Response:
    return web.json_response({"score": value})


def said(answer: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": answer}}]})


async def hang(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_the_service_is_sent_the_image_and_what_belongs_to_it(service):
    service.replies = [scored(0.5)]
    image = noise()
    assert await service.score(item(image, ground_truth="cat", data_source="pets")) == 0.5
    (body,) = service.bodies
    sent = Image.open(io.BytesIO(base64.b64decode(body.pop("image"))))
    assert sent.format == "PNG"
    assert np.array_equal(np.array(sent), image.permute(1, 2, 0).numpy())
    assert body == {"request_id": "r7", "prompt": "a red square", "ground_truth": "cat", "data_source": "pets"}
    assert "Authorization" not in service.requests[0].headers
    assert service.requests[0].path == "/score"


async def test_the_score_may_have_another_key(service):
    service.replies = [web.json_response({"points": 3})]
    assert await service.score(score_key="points") == 3.0


@pytest.mark.parametrize(
    "first",
    [
        hang,
        hang_up,
        web.Response(status=429),
        web.Response(status=500),
        web.Response(status=503, text="busy"),
        LONG_PAGE,
    ],
    ids=["timeout", "disconnect", "429", "500", "503", "503 too long"],
)
async def test_what_may_pass_is_tried_again(service, first):
    service.replies = [first, first, scored(0.25)]
    assert await service.score(timeout_s=1 if first is hang else 30) == 0.25
    assert service.bodies[0] == service.bodies[2]
    assert len(service.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (hang, "no reply within timeout_s=0.2"),
        (hang_up, "ServerDisconnectedError"),
        (web.Response(status=502, text="upstream is down"), "status 502: upstream is down"),
    ],
    ids=["timeout", "disconnect", "502"],
)
async def test_after_the_last_attempt_the_error_tells_address_attempts_and_reason(service, reply, reason):
    service.replies = [reply]
    with pytest.raises(RewardError) as raised:
        await service.score(timeout_s=0.2 if reply is hang else 30, retries=2)
    assert reply is hang or len(service.bodies) == 3
    start = f"reward scorer judge could not score request r7: POST {service.url}/score failed 3 times, "
    assert str(raised.value).startswith(f"{start}the last time with {reason}")


async def test_nobody_listening_is_tried_again_too(unused_tcp_port):
    options = {"type": "http", "url": f"http://127.0.0.1:{unused_tcp_port}/", "retry_wait_s": 0, "retries": 1}
    async with RewardManager(reward_config(scorers={"judge": options})) as manager:
        with pytest.raises(RewardError, match=r"failed 2 times, the last time with ClientConnectorError: "):
            await manager.score(item())


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (web.Response(status=400, text="no such model"), "was refused with status 400: no such model"),
        (web.Response(status=401), "was refused with status 401:"),
        (web.Response(status=302, headers={"Location": "/other"}), "was refused with status 302"),
        (web.Response(text="<html>"), "gave a reply that is no JSON: <html>"),
        (web.Response(body=b"\xff\xfe"), "gave a reply that is no JSON"),
        (web.Response(text="[" * 100_000), "gave a reply that is no JSON"),
        (web.Response(text=f'{{"score": 1, "pad": "{"x" * 1_000_000}"}}'), "more than max_reply_bytes=1000000"),
        (web.Response(text="{}", content_type="text/html"), "gave a reply of type text/html; it must be JSON"),
        (web.Response(body=b"{}", content_type="image/png"), "gave a reply of type image/png; it must be JSON"),
        (web.json_response({"score": [1.0, 2.0]}), "'score' of the reply must be a number, got a list"),
        (web.json_response([1]), "must be an object with the key 'score', got a list"),
        (web.json_response({"points": 1}), "must be an object with the key 'score', got the keys ['points']"),
        (web.json_response(None), "must be an object with the key 'score', got a NoneType"),
        (scored("0.5"), "'score' of the reply must be a number, got a str"),
        (scored(None), "'score' of the reply must be a number, got a NoneType"),
        (scored(True), "the score must be a finite number, got True"),
        (scored(float("nan")), "the score must be a finite number, got nan"),
        (web.Response(text='{"score": 1e999}'), "the score must be a finite number, got inf"),
        (web.Response(text=f'{{"score": 1{"0" * 400}}}'), "the score must be a finite number, got 1000"),
    ],
)
async def test_what_will_not_pass_is_an_error_at_once(service, reply, reason):
    service.replies = [reply]
    with pytest.raises(RewardError) as raised:
        await service.score()
    assert reason in str(raised.value)
    assert len(str(raised.value)) < 500
    assert len(service.bodies) == 1


@pytest.mark.parametrize(
    "kind", ["application/json", "application/problem+json", "text/plain", "application/octet-stream"]
)
async def test_json_may_have_any_of_its_types(service, kind):
    service.replies = [web.Response(body=b'{"score": 2}', content_type=kind)]
    assert await service.score() == 2.0


async def test_a_reply_that_unfolds_is_bounded_too(service):
    async def packed(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        content = gzip.compress(b" " * 100_000_000)
        return web.Response(body=content, content_type="application/json", headers={"Content-Encoding": "gzip"})

    service.replies = [packed]
    with pytest.raises(RewardError, match="max_reply_bytes=1000000"):
        await service.score(retries=0)


async def test_a_redirect_takes_neither_image_nor_key_elsewhere(service, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    service.replies = [web.Response(status=307, headers={"Location": f"{service.url}/elsewhere"}), scored(1)]
    with pytest.raises(RewardError, match="refused with status 307"):
        await service.score(api_key_env="JUDGE_KEY")
    assert [request.path for request in service.requests] == ["/score"]


@pytest.mark.parametrize("kind", ["http", "vlm"])
async def test_an_image_that_is_too_large_is_not_sent(service, kind):
    service.replies = [scored(1)]
    with pytest.raises(RewardError, match=r"of 4×4 pixels has \d+ bytes as a PNG, more than max_image_bytes=10"):
        await service.score(item(noise(4)), type=kind, max_image_bytes=10)
    assert not service.bodies


async def test_what_the_address_holds_is_not_told_when_it_is_repeated(service):
    service.replies = [web.Response(status=400, text="no user abc/def=, or abc%2Fdef%3D")]
    with pytest.raises(RewardError, match=r"no user \*\*\*, or \*\*\*"):
        await service.score(url=f"{service.url}/score?user=abc%2Fdef%3D")


async def test_the_defaults_bridge_20_seconds_in_which_nothing_answers_and_the_log_has_two_lines(
    service, monkeypatch, caplog
):
    """The waits are the shortest that may be drawn, on a clock that is moved by hand."""
    waited: list[float] = []

    def shortest_wait(attempt: int, first_s: float) -> float:
        waited.append(0.5 * first_s * 2 ** (attempt - 1))
        return 0.0

    async def down(request: web.Request) -> web.Response:
        return scored(0.5) if sum(waited) >= DOWN_S else await hang_up(request)

    monkeypatch.setattr(endpoint, "wait_before_retry", shortest_wait)
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    service.replies = [down]
    defaults = {"retry_wait_s": HttpConfig.retry_wait_s, "timeout_s": HttpConfig.timeout_s}
    assert await service.score(retries=HttpConfig.retries, **defaults) == 0.5
    scorer, after = f"scorer {service.url}/score", f"{sum(waited):.1f} s after it first did not"
    assert told(caplog) == [
        f"{scorer} is down, it is tried again: ServerDisconnectedError: Server disconnected",
        f"{scorer} answers again, {after}; failed attempts: {len(waited)}",
    ]


async def test_an_outage_of_many_images_is_told_once_and_the_next_one_again(service, caplog):
    tried: Counter[str] = Counter()

    async def down_twice(request: web.Request) -> web.Response:
        name = (await request.json())["request_id"]
        tried[name] += 1
        return web.Response(status=503, text="<p>\n busy\n") if max(tried.values()) < 4 else scored(1)

    service.replies = [down_twice]
    options = {"type": "http", "url": f"{service.url}/score", "retry_wait_s": 0}
    async with RewardManager(reward_config(scorers={"judge": options})) as manager:
        for number in (1, 2):
            tried.clear()
            await asyncio.gather(*(manager.score(item(request_id=str(i))) for i in range(8)))
            lines = told(caplog)
            assert len(lines) == 2 * number
            assert lines[-2].endswith("is down, it is tried again: status 503: <p> busy")
            assert re.search(r"answers again, \d+\.\d s after it first did not; failed attempts: \d+$", lines[-1])


@pytest.mark.parametrize(
    "reply",
    [web.Response(text="x" * 2_000_000), web.Response(status=404), web.Response(text="<html>"), scored(1)],
    ids=["too long", "refused", "no JSON", "score"],
)
async def test_any_reply_ends_an_outage(service, caplog, reply):
    down = web.Response(status=503)
    service.replies = [down, down, reply]
    with suppress(RewardError):
        await service.score()
    _, end = told(caplog)
    assert "answers again" in end and end.endswith("failed attempts: 2")


async def test_when_a_scorer_answers_again_all_images_that_wait_are_sent_at_once(service, monkeypatch):
    """One image finds out that it does, another has an hour to wait."""
    is_back, late_waits = asyncio.Event(), asyncio.Event()

    def an_hour_from_the_second_on(attempt: int, first_s: float) -> float:
        if attempt > 1:
            late_waits.set()
        return 3600.0 * (attempt - 1)

    async def down_for_late(request: web.Request) -> web.Response:
        late = (await request.json())["request_id"] == "late"
        return web.Response(status=503) if late and not is_back.is_set() else scored(1)

    monkeypatch.setattr(endpoint, "wait_before_retry", an_hour_from_the_second_on)
    service.replies = [down_for_late]
    options = {"type": "http", "url": f"{service.url}/score"}
    async with RewardManager(reward_config(scorers={"judge": options})) as manager:
        late = asyncio.create_task(manager.score(item(request_id="late")))
        await late_waits.wait()
        is_back.set()
        await manager.score(item(request_id="other"))
        assert (await asyncio.wait_for(late, 60)).total == 1


async def test_an_answer_among_failures_ends_no_wait():
    outage = Outage("http://a/")
    outage.failed("busy", None)
    waiting = asyncio.create_task(outage.wait(3600.0))
    await asyncio.sleep(0)
    outage.answered()
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_without_retries_the_errors_alone_tell_of_an_outage(service, caplog):
    down = web.Response(status=503, text="busy")
    service.replies = [down, down, down, scored(1)]
    for _ in range(3):
        with pytest.raises(RewardError, match="failed 1 times, the last time with status 503: busy"):
            await service.score(retries=0)
    assert await service.score(retries=0) == 1
    assert told(caplog) == []


def test_failures_among_answers_are_no_outage(caplog):
    outage = Outage("http://a/")
    seen = outage.failed("busy", None)
    for _ in range(3):
        outage.answered()  # another request
        seen = outage.failed("busy", seen)
    assert told(caplog) == []
    outage.failed("gone", seen)
    assert told(caplog) == ["scorer http://a/ is down, it is tried again: gone"]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a run's log shows."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_no_more_requests_at_a_time_than_allowed(service):
    running, most, all_in = 0, 0, asyncio.Event()

    async def reply(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_in.set()
        await all_in.wait()
        running -= 1
        return scored(1)

    service.replies = [reply]
    options = {"type": "http", "url": f"{service.url}/score", "max_concurrency": 3}
    async with RewardManager(reward_config(scorers={"judge": options})) as manager:
        await asyncio.gather(*(manager.score(item(request_id=str(i))) for i in range(9)))
    assert most == 3


async def test_the_key_is_sent_and_never_told(service, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", f" {SECRET}\n")
    caplog.set_level(logging.DEBUG)
    echo = web.Response(status=500, text=f"bad key {SECRET}")
    for replies in ([echo], [echo, web.Response(status=403, text=SECRET)], [echo, web.Response(text=SECRET)]):
        service.replies = [*replies]
        with pytest.raises(RewardError) as raised:
            await service.score(api_key_env="JUDGE_KEY", url=f"{service.url}/score?token={SECRET}", retries=2)
        assert SECRET not in str(raised.value) and "***" in str(raised.value)
    assert {request.headers["Authorization"] for request in service.requests} == {f"Bearer {SECRET}"}
    assert {request.query["token"] for request in service.requests} == {SECRET}
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("verl_omni")]
    assert ours and not any(SECRET in message for message in ours)


@given(st.integers(1, 10_000), st.floats(0, 1e9))
def test_waits_double_with_jitter_up_to_a_minute(attempt, first):
    full = min(first * 2.0 ** min(attempt - 1, 30), MAX_WAIT_S)
    assert full / 2 <= wait_before_retry(attempt, first) <= full


async def test_a_judge_is_asked_as_chat_completions_do(service, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    service.replies = [said("Score: 8/10")]
    found = await service.score(
        item(prompt="a {red} cat", ground_truth="cat"),
        type="vlm",
        prompt_template='Is {ground_truth} in "{prompt}"? Answer {"score": 1}.',
        api_key_env="JUDGE_KEY",
        extra_body={"max_tokens": 5, "seed": 1},
    )
    assert found == pytest.approx(0.8)
    (body,) = service.bodies
    (message,) = body.pop("messages")
    image, question = message["content"]
    assert service.requests[0].path == "/v1/chat/completions"
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert question == {"type": "text", "text": 'Is cat in "a {red} cat"? Answer {"score": 1}.'}
    assert body == {"model": "judge", "temperature": 0, "max_tokens": 5, "seed": 1}


async def test_a_judge_is_asked_again_as_well(service):
    service.replies = [web.Response(status=503), said("10")]
    assert await service.score(type="vlm") == 1.0


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (said("I cannot judge this"), "no number from 0 to 10: 'I cannot judge this'"),
        (said(None), "no text at choices[0].message.content"),
        (said([{"text": "5"}]), "no text at choices[0].message.content"),
        (web.json_response({"choices": []}), "no text at choices[0].message.content"),
        (web.json_response("5"), "no text at choices[0].message.content"),
        (web.json_response({"error": "x"}, status=404), "chat/completions was refused with status 404"),
    ],
)
async def test_an_answer_without_a_number_is_an_error(service, reply, reason):
    service.replies = [reply]
    with pytest.raises(RewardError) as raised:
        await service.score(type="vlm")
    assert reason in str(raised.value)
    assert len(service.bodies) == 1


async def test_a_template_that_needs_a_ground_truth_needs_it_of_each_prompt(service):
    service.replies = [said("5")]
    with pytest.raises(RewardError, match=r"prompt_template asks for \{ground_truth\}, which this prompt has not"):
        await service.score(type="vlm", prompt_template="Is {ground_truth} there?")
    assert not service.bodies


def test_what_is_filled_in_is_not_filled_in_again():
    assert fill_template("{prompt} {x}", prompt="{ground_truth}", ground_truth="no") == "{ground_truth} {x}"


@pytest.mark.parametrize(
    ("answer", "scale", "score"),
    [
        ("7", (0, 10), 0.7),
        ("7.5.", (0, 10), 0.75),
        ("**8**/10", (0, 10), 0.8),
        ("In 2024 I would say 3", (0, 10), 0.3),
        ("v1.5 is a 4", (0, 10), 0.4),
        ("Out of 10 I give it 3", (0, 10), 0.3),
        ("3, yes, 3 out of 10", (0, 10), 0.3),
        ("-1", (-1, 1), 0.0),
        ("3", (1, 5), 0.5),
        ("1", (1, 5), 0.0),
    ],
)
def test_the_number_on_the_scale_counts(answer, scale, score):
    assert read_answer(answer, scale) == pytest.approx(score)


@pytest.mark.parametrize("answer", ["", "none", "11", "-3", "NaN", "inf"])
def test_no_number_on_the_scale_is_no_score(answer):
    with pytest.raises(ScoreError, match="no number from 0 to 10"):
        read_answer(answer, (0, 10))


@pytest.mark.parametrize("answer", ["On a scale of 0 to 10: 7", "text 8, colours 5"])
def test_several_numbers_on_the_scale_are_no_score(answer):
    with pytest.raises(ScoreError, match=r"\d numbers from 0 to 10"):
        read_answer(answer, (0, 10))


@given(st.floats(0, 10))
def test_every_number_on_the_scale_is_read(number):
    assert read_answer(f"I give it {number:.6f} points", (0, 10)) == pytest.approx(number / 10, abs=1e-6)
