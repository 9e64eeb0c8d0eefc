"""The OCR data: our prompts, the sets made from them, and what is said about prompts that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from verl_omni.reward_loop.text import normalised, quoted_text
from verl_omni.trainer.prompts import read_prompts

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "flowgrpo_trainer"
OCR, PROMPTS = EXAMPLES / "data_process" / "ocr.py", EXAMPLES / "data" / "ocr_prompts.txt"


def run(folder: Path, *args: str, model: str = "qwen_image") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(OCR), "--output_dir", str(folder), "--model", model, *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_our_prompts_have_a_target_each():
    prompts = [row.prompt for row in read_prompts([PROMPTS])]
    assert len(prompts) == 200
    assert all(prompt.count('"') == 2 for prompt in prompts)
    targets = [quoted_text(prompt) for prompt in prompts]
    assert len({normalised(target) for target in targets}) == 200
    assert max(map(len, targets)) <= 20


@pytest.mark.parametrize(("model", "negative"), [("qwen_image", " "), ("sd35", "")])
def test_the_sets_are_read_as_prompts_with_their_targets(tmp_path, caplog, model, negative):
    result = run(tmp_path / "new" / "ocr", "--test_size", "16", model=model)
    assert result.returncode == 0, result.stderr
    files = [tmp_path / "new" / "ocr" / f"{name}.parquet" for name in ("train", "test")]
    assert all(str(file) in result.stdout for file in files)
    assert sorted(file.name for file in files[0].parent.iterdir()) == ["test.parquet", "train.parquet"]
    train, test = (read_prompts([file]) for file in files)
    assert (len(train), len(test)) == (184, 16)
    rows = train + test
    assert {row.prompt for row in rows} == {row.prompt for row in read_prompts([PROMPTS])}
    assert all(row.ground_truth == quoted_text(row.prompt) for row in rows)
    assert {(row.values["negative_prompt"], row.data_source) for row in rows} == {(negative, "ocr")}
    assert [row.extra_info["split"] for row in rows] == ["train"] * 184 + ["test"] * 16
    assert not caplog.records


def test_the_schema_is_that_of_verl(tmp_path):
    assert run(tmp_path).returncode == 0
    row = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()[0]
    assert list(row) == ["data_source", "prompt", "negative_prompt", "ability", "reward_model", "extra_info"]
    assert list(row["prompt"][0]) == ["role", "content"]
    assert row["reward_model"]["style"] == "rule" and row["reward_model"]["ground_truth"]


def test_the_split_is_drawn_by_the_seed(tmp_path):
    def test_set(name: str, *args: str) -> list[str | None]:
        assert run(tmp_path / name, *args).returncode == 0
        return [row.prompt for row in read_prompts([tmp_path / name / "test.parquet"])]

    first = test_set("a")
    assert len(first) == 20
    assert test_set("b", "--test_fraction", "0.1", "--seed", "42") == first != test_set("c", "--seed", "43")


def test_a_prompt_stands_in_one_set_only(tmp_path):
    (tmp_path / "p.txt").write_text('a sign "A"\n' * 9 + 'a sign "B"\n')
    assert run(tmp_path, "--input", str(tmp_path / "p.txt"), "--test_size", "1").returncode == 0
    assert [len(read_prompts([tmp_path / f"{name}.parquet"])) for name in ("train", "test")] == [1, 1]


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        (
            'a sign "A"\n\na sign\n',
            ["--test_size", "1"],
            "p.txt:3: no text in quotes; write what the image has to show",
        ),
        ('a sign "A"\na sign "B"\n', ["--test_size", "2"], "write --test_size from 1 to 1"),
        ('a sign "A"\na sign "B"\n', ["--test_fraction", "0.01"], "0 of 2 prompts for the test"),
        (None, [], "--input: there is no file"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_written(tmp_path, content, args, message):
    if content is not None:
        (tmp_path / "p.txt").write_text(content)
    result = run(tmp_path / "out", "--input", str(tmp_path / "p.txt"), *args)
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
