"""Failures are told by reason, with the prompts."""

import pytest

from tests.docs.pages import BATCHING
from verl_omni.reward_loop.item import RewardError
from verl_omni.trainer.failures import MAX_TOLD, by_reason
from verl_omni.workers.rollout.request import RolloutError


def told(reasons: dict[str, str], samples: int = 1) -> list[str]:
    """Of prompts, each with a reason for which its last sample fails."""
    failures = {f"{prompt}-{samples - 1}": RolloutError("id", reason) for prompt, reason in reasons.items()}
    return list(by_reason(failures, {f"{prompt}-{k}": prompt for prompt in reasons for k in range(samples)}, "images"))


def test_each_reason_has_a_line_and_what_most_failed_of_comes_first():
    reasons = {"a:1": "no such size", "a:2": "no\n  memory", "a:3": "no memory"}
    assert told(reasons, samples=2) == ["2 of 4 images of a:2, a:3: no memory", "1 of 2 images of a:1: no such size"]
    assert not told({})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("the prompt has 312 tokens, above 256", "the prompt has 9 tokens, above 256"),
        ("height=-3, width=64", "height=63, width=65"),
        ("a loss of 0.5", "a loss of 1e-05"),
        ("<Lock at 0x7f3a>", "<Lock at 0x10bc>"),
    ],
)
def test_reasons_that_differ_in_numbers_alone_are_told_once_as_of_the_first_prompt(first, second):
    assert told({"a:1": first, "a:2": second}) == [f"2 of 2 images of a:1, a:2: {first}"]
    failures = {"y": RolloutError("y", second), "x": RolloutError("x", first)}  # as they happened
    (line,) = by_reason(failures, {"x": "a:1", "y": "a:2"}, "images")
    assert line.endswith(f"a:1, a:2: {first}")


def test_scorers_that_differ_in_numbers_are_told_apart():
    failures = {"x": RewardError("clip-1", "x", "is 8 s late"), "y": RewardError("clip-2", "y", "is 9 s late")}
    assert list(by_reason(failures, {"x": "a:1", "y": "a:2"}, "images")) == [
        "1 of 1 images of a:1: reward scorer clip-1: is 8 s late",
        "1 of 1 images of a:2: reward scorer clip-2: is 9 s late",
    ]


def test_another_exception_is_told_with_its_type():
    assert list(by_reason({"x": OSError("gone")}, {"x": "a:1"}, "images")) == ["1 of 1 images of a:1: OSError: gone"]


def test_many_prompts_and_many_reasons_are_counted():
    prompts = [f"a:{i}" for i in range(MAX_TOLD + 1)]
    others = [f"reason {chr(ord('a') + i)}" for i in range(MAX_TOLD + 3)]
    first, *lines, rest = told(dict.fromkeys(prompts, "no memory") | {f"b:{name}": name for name in others})
    assert first == f"{len(prompts)} of {len(prompts)} images of {', '.join(prompts[:MAX_TOLD])} and 1 more: no memory"
    assert lines == [f"1 of 1 images of b:{name}: {name}" for name in others[: MAX_TOLD - 1]]
    assert rest == "4 more images, for 4 other reasons"


def test_the_page_shows_such_a_line():
    reason = "height=65, width=64 must be multiples of 16"
    failures = {f"{k}": RolloutError(f"{k}", reason) for k in range(16)}
    (line,) = by_reason(failures, dict.fromkeys(failures, "rows.jsonl:3"), "requests")
    assert f"ERROR failed: {line}\n" in BATCHING.read_text(encoding="utf-8")
