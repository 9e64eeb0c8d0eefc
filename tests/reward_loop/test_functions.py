"""Functions of the user's own: what they are given, what they may return, and how they fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.reward_loop.items import item, reward_config, score
from verl_omni.reward_loop import RewardError
from verl_omni.workers.config import ConfigError


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file of functions and gives its path."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(code: str, name: str = "rewards.py") -> str:
        (tmp_path / name).write_text(code)
        return str(tmp_path / name)

    return write


async def run(path: str, scored=None, **options):
    return await score(scored or item(), scorers={"mine": {"type": "function", "path": path, **options}})


async def test_it_gets_the_keywords_that_it_takes(write):
    path = write(
        "def compute_score(image, prompt, ground_truth, extra_info, *, uid, request_id, data_source):\n"
        "    assert image.mode == 'RGB' and image.size == (32, 32) and image.getpixel((3, 4)) == (200, 100, 40)\n"
        "    assert (prompt, ground_truth, extra_info) == ('a cat', 'cat', {'row': 3})\n"
        "    assert (uid, request_id, data_source) == ('g0', 'r7', 'pets')\n"
        "    return 0.25\n"
    )
    scored = item(prompt="a cat", ground_truth="cat", extra_info={"row": 3}, data_source="pets")
    assert (await run(path, scored)).parts == {"mine": 0.25}


async def test_the_names_that_verl_uses_work_under_the_key_that_verl_uses(write):
    path = write(
        "def reward(data_source, solution_image, ground_truth, extra_info=None):\n"
        "    return solution_image.width + (ground_truth is None)\n"
    )
    result = await score(item(), custom_reward_function={"path": path, "name": "reward"})
    assert result.parts == {"custom": 33.0}
    assert result.total == 33.0


async def test_kwargs_take_everything_and_options_are_handed_on(write):
    path = write("def compute_score(**kwargs):\n    return kwargs['scale'] * len(kwargs)\n")
    assert (await run(path, reward_kwargs={"scale": 0.5})).total == 0.5 * 9
    path = write("def compute_score(scale=1):\n    return scale\n", "other.py")
    assert (await run(path, reward_kwargs={"scale": 3})).total == 3.0
    assert (await run(path)).total == 1.0


@pytest.mark.parametrize(
    "returned", ["0.5", "__import__('numpy').float32(0.5)", "__import__('torch').tensor(0.5)", "{'score': 0.5}"]
)
async def test_what_counts_as_a_number(write, returned):
    assert (await run(write(f"def compute_score(prompt):\n    return {returned}\n"))).total == 0.5


async def test_numbers_beside_the_score_become_parts(write):
    path = write("def compute_score(prompt):\n    return {'score': 2, 'words': len(prompt.split()), 'note': 'fine'}\n")
    result = await run(path, weight=10)
    assert result.parts == {"mine": 2.0, "mine/words": 3.0}
    assert result.total == 20.0


async def test_it_may_be_a_coroutine_function_or_an_object(write):
    code = "import asyncio\nasync def compute_score(prompt):\n    await asyncio.sleep(0)\n    return 0.75\n"
    assert (await run(write(code))).total == 0.75
    code = "class Scorer:\n    def __call__(self, prompt):\n        return 0.5\nscorer = Scorer()\n"
    assert (await run(write(code, "objects.py"), name="scorer")).total == 0.5


async def test_the_file_runs_once_and_imports_its_neighbours(write, tmp_path):
    write("VALUE = 0.5\n", "neighbour_of_rewards.py")
    path = write(
        "from pathlib import Path\n"
        "from neighbour_of_rewards import VALUE\n"
        "with Path(__file__).with_name('runs').open('a') as file:\n    file.write('x')\n"
        "def compute_score():\n    return VALUE\n"
    )
    assert [(await run(path)).total for _ in range(2)] == [0.5, 0.5]
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("raise StopIteration", "StopIteration"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "the score must be a finite number, got None"),
        ("return True", "the score must be a finite number, got True"),
        ("return '0.5'", "the score must be a finite number, got '0.5'"),
        ("return float('nan')", "the score must be a finite number, got nan"),
        ("return float('-inf')", "the score must be a finite number, got -inf"),
        ("return 10 ** 400", "the score must be a finite number, got 1000"),
        ("return __import__('torch').zeros(2)", "the score must be a finite number, got tensor"),
        ("return {'points': 1}", "needs the key \"score\", got ['points']"),
        ("return {'score': 1, 'words': float('nan')}", "words must be a finite number, got nan"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_failure_names_scorer_request_and_reason(write, body, reason, prefix):
    path = write(f"{prefix}def compute_score(prompt):\n    {body}\n")
    with pytest.raises(RewardError) as raised:
        await run(path)
    assert (raised.value.scorer, raised.value.request_id) == ("mine", "r7")
    assert str(raised.value).startswith("reward scorer mine could not score request r7: ")
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("code", "options", "reason"),
    [
        ("def compute_score(): return 1", {"path": "missing.py"}, "missing.py is no .py file"),
        ("def compute_score(): return 1", {"path": "."}, "is no .py file"),
        (
            "def compute_score(): return 1",
            {"name": "compute_scor"},
            "no function compute_scor; did you mean compute_score?",
        ),
        ("x = 1", {}, "has no function compute_score"),
        ("compute_score = 3", {}, "compute_score of … is 3, which cannot be called"),
        ("def compute_score(:", {}, "cannot be imported: SyntaxError"),
        ("import no_such_module_at_all", {}, "cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(2)", {}, "cannot be imported: SystemExit: 2"),
        ("def compute_score(solution_str): return 1", {}, "needs solution_str, which it is not called with"),
        ("def compute_score(image, /): return 1", {}, "needs image, which it is not called with"),
        ("def compute_score(): return 1", {"reward_kwargs": {"scale": 2}}, "the function takes no scale"),
        ("def compute_score(image): return 1", {"reward_kwargs": {"image": 2}}, "image is given by the trainer"),
        ("def compute_score(): return 1", {"reward_kwargs": 3}, "reward_kwargs must be a mapping"),
        ("def compute_score(): return 1", {"path": None}, "path is required"),
    ],
)
def test_a_function_that_cannot_be_used_is_found_at_once(write, monkeypatch, tmp_path, code, options, reason):
    monkeypatch.chdir(tmp_path)
    path = write(code)
    with pytest.raises(ConfigError) as raised:
        reward_config(scorers={"mine": {"type": "function", "path": path, **options}})
    head, _, tail = reason.partition(" … ")
    assert str(raised.value).startswith("reward.scorers.mine")
    assert head in str(raised.value) and tail in str(raised.value)


def test_the_same_is_said_of_the_custom_function_under_its_own_key():
    with pytest.raises(ConfigError, match=r"^reward\.custom_reward_function: .*missing\.py is no \.py file"):
        reward_config(custom_reward_function={"path": "missing.py"})
