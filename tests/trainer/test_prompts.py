"""Prompt files and the requests made from them."""

from __future__ import annotations

import copy
import json

import pyarrow
import pyarrow.parquet
import pytest

from verl_omni.trainer.prompts import REWARD_KEYS, ROW_KEYS, PromptRow, read_prompts
from verl_omni.trainer.requests import make_requests
from verl_omni.workers.config import (
    ConfigError,
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
)
from verl_omni.workers.rollout.seeds import request_seed
from verl_omni.workers.rollout.spread import LoadSpread

DOCUMENTED = (
    "prompt negative_prompt prompt_token_ids height width num_inference_steps true_cfg_scale guidance_scale seed "
    "noise_level sde_type sde_window_size sde_window_range logprobs num_outputs_per_prompt max_sequence_length"
)


def values(rows):
    return [dict(row.values) for row in rows]


def test_the_documented_keys_are_row_keys():
    assert set(DOCUMENTED.split()) <= ROW_KEYS
    assert "request_id" not in ROW_KEYS
    assert not REWARD_KEYS & ROW_KEYS


def test_txt_is_a_prompt_a_line(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("\ufeffa cat\n\n  a dog \r\nein Käfer,\u2028sehr klein", encoding="utf-8")
    rows = read_prompts([file])
    assert values(rows) == [{"prompt": "a cat"}, {"prompt": "a dog"}, {"prompt": "ein Käfer,\u2028sehr klein"}]
    assert [row.source for row in rows] == [f"{file}:{line}" for line in (1, 3, 4)]


def test_files_follow_each_other_and_max_samples_cuts(tmp_path):
    for name in ("a.txt", "b.TXT"):
        (tmp_path / name).write_text(f"{name} one\n{name} two\n")
    rows = read_prompts([tmp_path / "a.txt", tmp_path / "b.TXT"], 3)
    assert [row.values["prompt"] for row in rows] == ["a.txt one", "a.txt two", "b.TXT one"]


def test_jsonl_rows_set_any_sampling_key(tmp_path):
    rows = [
        {"prompt": "a cat", "height": 64, "sde_window_size": None, "logprobs": False},
        {"prompt_token_ids": [1, 2], "prompt_token_ids_2": [3], "negative_prompt_token_ids": [4]},
        {"prompt": [{"role": "system", "content": "no"}, {"role": "user", "content": "a dog"}]},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    read = values(read_prompts([file]))
    assert read[:2] == rows[:2]
    assert read[2] == {"prompt": "a dog"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"prompt": "b", "heigth": 64}',
            r"p\.jsonl:2: heigth is not a known key; did you mean height\?",
        ),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": ', r"p\.jsonl:3: no valid JSON"),
        ("p.jsonl", '{"extra_info": ' + "[" * 100_000, r"p\.jsonl:1: no valid JSON"),
        ("p.jsonl", '["a"]', r"p\.jsonl:1: must be an object"),
        ("p.jsonl", '{"prompt": "a", "request_id": "x"}', r"p\.jsonl:1: request_id"),
        ("p.jsonl", '{"prompt": [{"role": "system", "content": "a"}]}', r'p\.jsonl:1: prompt must be .*"role": "user"'),
        ("p.jsonl", '{"prompt": "a", "ground_thruth": "x"}', r"did you mean ground_truth\?"),
        ("p.jsonl", '{"prompt": "a", "extra_info": "x"}', r"p\.jsonl:1: extra_info must be an object, got 'x'"),
        ("p.jsonl", "", "holds no prompt"),
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.txt", b"\xff\xfe", "UTF-8"),
        ("p.csv", "a", r"must end in one of \.txt, \.jsonl, \.parquet"),
        ("p.parquet", "a", "no readable parquet"),
        ("p.txt", None, "there is no file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        read_prompts([tmp_path / name])


def test_parquet_is_read_by_the_schema_of_verl(tmp_path):
    def chat(text):
        return [{"role": "system", "content": "describe"}, {"role": "user", "content": text}]

    rows = [
        {
            "data_source": "ocr",
            "prompt": chat("a cat"),
            "negative_prompt": chat("blurry"),
            "seed": 3,
            "ability": "text",
            "reward_model": {"style": "rule", "ground_truth": "CAT"},
            "extra_info": {"index": 0},
        },
        {
            "data_source": "ocr",
            "prompt": chat("a dog"),
            "negative_prompt": None,
            "seed": None,
            "ability": "text",
            "reward_model": None,
            "extra_info": {"index": 1},
        },
    ]
    file = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    read = read_prompts([file])
    assert values(read) == [{"prompt": "a cat", "negative_prompt": "blurry", "seed": 3}, {"prompt": "a dog"}]
    assert read[1].source == f"{file}:2"
    assert [row.ground_truth for row in read] == ["CAT", None]
    assert [(row.data_source, row.extra_info) for row in read] == [("ocr", {"index": 0}), ("ocr", {"index": 1})]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), file)
    with pytest.raises(ConfigError, match="has no column prompt; there are text"):
        read_prompts([file])


def test_what_rewards_need_is_kept_apart_from_the_request(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "ground_truth": ["ä", 7], "data_source": null}\n{"prompt_token_ids": [1]}')
    first, second = read_prompts([file])
    assert (first.values, first.prompt, first.ground_truth) == ({"prompt": "a"}, "a", '["ä", 7]')
    assert (second.prompt, second.ground_truth, second.data_source, second.extra_info) == (None, None, "", {})


def test_the_key_of_the_files_is_that_of_the_caller(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train_files: there is no file"):
        read_prompts([tmp_path / "p.txt"], key="data.train_files")


def requests(tmp_path, rows, rollout, **kwargs):
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return make_requests(read_prompts([file]), rollout, **kwargs)


def test_ids_seeds_and_defaults(tmp_path):
    rollout = DiffusionRolloutConfig(
        n=2,
        seed=42,
        pipeline=DiffusionPipelineConfig(height=64, true_cfg_scale=4),
        algo=DiffusionRolloutAlgoConfig(sde_window_size=2, sde_window_range=(0, 5)),
    )
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "height": 32, "seed": 7, "sde_window_size": None},
        {"prompt": "c", "seed": "x"},
    ]
    made = requests(tmp_path, rows, rollout)
    assert [r.request_id for r in made] == ["0000-00", "0000-01", "0001-00", "0001-01", "0002-00", "0002-01"]
    assert [r.seed for r in made] == [request_seed(42, 0), request_seed(42, 1), 7, 8, "x", "x"]
    assert [r.height for r in made] == [64, 64, 32, 32, 64, 64]
    assert [r.sde_window_size for r in made] == [2, 2, None, None, 2, 2]
    assert {(r.width, r.true_cfg_scale, r.sde_window_range, r.noise_level, r.logprobs) for r in made} == {
        (512, 4.0, (0, 5), 0.7, True)
    }


def test_a_row_that_sets_one_half_of_the_window_gets_the_other_from_the_configuration(tmp_path):
    rollout = DiffusionRolloutConfig(algo=DiffusionRolloutAlgoConfig(sde_window_size=2, sde_window_range=(0, 5)))
    rows = [{"sde_window_size": 1}, {"sde_window_range": [1, 4]}, {"sde_window_size": None, "sde_window_range": None}]
    made = requests(tmp_path, [{"prompt": "a", **row} for row in rows], rollout)
    assert [(r.sde_window_size, r.sde_window_range) for r in made] == [(1, (0, 5)), (2, [1, 4]), (None, None)]


def test_seed_follows_the_place_in_the_run(tmp_path):
    rows = [{"prompt": str(index)} for index in range(5)]
    seeds = [r.seed for r in requests(tmp_path, rows, DiffusionRolloutConfig(n=3, seed=1))]
    assert seeds == [1_000_003 + index for index in range(15)]
    assert {r.seed for r in requests(tmp_path, rows, DiffusionRolloutConfig(n=3, seed=None))} == {None}


def test_two_workers_with_two_rows_each_get_four_seeds_and_the_callers_values_stay_as_they_are():
    rows = [PromptRow(values={"prompt": name}, source=name) for name in ("a", "b")]
    rollout = DiffusionRolloutConfig(n=2, seed=42)
    before = copy.deepcopy((rows, rollout))
    made = make_requests(rows, rollout)
    dealt = LoadSpread(2).deal([2, 2])
    seeds = [[made[2 * group + k].seed for group in groups for k in range(2)] for groups in dealt.values()]
    assert seeds == [[42 * 1_000_003, 42 * 1_000_003 + 1], [42 * 1_000_003 + 2, 42 * 1_000_003 + 3]]
    assert (rows, rollout) == before


def test_later_steps_have_other_seeds_and_ids_may_be_named(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "seed": 7}]
    made = requests(tmp_path, rows, DiffusionRolloutConfig(n=2, seed=1), step=3, make_id=lambda row, k: f"{row}/{k}")
    assert [r.request_id for r in made] == ["0/0", "0/1", "1/0", "1/1"]
    assert [r.seed for r in made] == [request_seed(1, 0, step=3), request_seed(1, 1, step=3), 7, 8]


def test_the_default_negative_prompt_is_for_rows_without_one(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b", "negative_prompt": "x"}, {"prompt": "c", "negative_prompt": None}]
    rows.append({"prompt": "d", "negative_prompt_token_ids": [1]})
    made = requests(tmp_path, rows, DiffusionRolloutConfig(), negative_prompt=" ")
    assert [r.negative_prompt for r in made] == [" ", "x", None, None]


def test_a_parquet_column_that_reads_like_a_slip_is_told(tmp_path, caplog):
    file = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "hight": [64], "data_source": ["own"]}), file)
    assert len(read_prompts([file])) == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: the column hight is not read; did you mean height?"
    ]
