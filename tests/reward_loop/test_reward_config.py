"""What may stand under ``reward``."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from tests.reward_loop.items import reward_config
from verl_omni.reward_loop.manager import SCORERS
from verl_omni.workers.config import ConfigError, build
from verl_omni.workers.config.reward import RewardConfig
from verl_omni.workers.config.scorers import SCORER_TYPES

HTTP = {"type": "http", "url": "http://localhost:1/score"}
VLM = {"type": "vlm", "base_url": "https://host/v1", "model": "judge"}


def test_every_type_has_a_scorer():
    assert list(SCORERS) == list(SCORER_TYPES)


def test_without_a_scorer_the_line_to_write_is_shown():
    with pytest.raises(ConfigError, match=r"^reward has no scorer; add one, such as reward\.scorers\.ocr\.type=ocr$"):
        RewardConfig()


def test_texts_of_a_command_line_become_numbers():
    config = reward_config(scorers={"h": {**HTTP, "weight": "0.5", "retries": "2", "timeout_s": "3"}}, num_workers="4")
    scorer = config.named_scorers()["h"]
    assert (scorer.weight, scorer.retries, scorer.timeout_s, config.num_workers) == (0.5, 2, 3.0, 4)


def test_as_plain_data_it_tells_all_options_and_builds_the_same_again():
    config = reward_config(scorers={"red": {"type": "color", "weight": "2"}, "o": {"type": "ocr"}})
    plain = dataclasses.asdict(config)
    assert plain["scorers"]["red"] == {"type": "color", "weight": 2.0, "channel": "red"}
    assert build(RewardConfig, plain, "reward") == config


def test_it_can_be_sent_to_another_process():
    config = reward_config(scorers={"h": HTTP, "v": VLM, "o": {"type": "ocr"}})
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        (3, r"reward\.scorers must be a mapping"),
        ({"a": "ocr"}, r"reward\.scorers\.a must be a mapping"),
        ({"a": None}, r"reward\.scorers\.a\.type is required, one of ocr, "),
        ({"a": {"typ": "ocr"}}, r"did you mean that by reward\.scorers\.a\.typ\?"),
        ({"a": {"type": "orc"}}, r"reward\.scorers\.a\.type='orc' must be one of ocr, .*; did you mean ocr\?"),
        ({"a/b": {"type": "ocr"}}, r"name of a scorer begins with a letter"),
        ({3: {"type": "ocr"}}, r"name of a scorer begins with a letter"),
        (
            {"a": {"type": "ocr", "wieght": 1}},
            r"a\.wieght is not a known key; .*scorers\.a\.weight\?",
        ),
        ({"a": {"type": "ocr", "weight": "inf"}}, r"reward\.scorers\.a\.weight='inf' must be a finite number"),
        ({"a": {"type": "ocr", "weight": None}}, r"weight=null must be a finite number"),
        ({"a": {"type": "ocr", "min_confidence": 2}}, r"min_confidence=2 must be a finite number from 0 to 1"),
        ({"a": {"type": "ocr", "ignore_extra_text": 1}}, r"must be true or false"),
        ({"a": {"type": "jpeg_compressibility", "quality": 0}}, r"quality=0 must be an integer of at least 1"),
        ({"a": {"type": "jpeg_compressibility", "quality": 101}}, r"quality=101 must be at most 100"),
        ({"a": {"type": "color", "channel": "gren"}}, r"did you mean green\?"),
        ({"a": {"type": "http"}}, r"reward\.scorers\.a\.url is required"),
        ({"a": {**HTTP, "url": "localhost:8000"}}, r"a\.url must be an address such as http://"),
        ({"a": {**HTTP, "url": "ftp://host/"}}, r"a\.url must be an address"),
        ({"a": {**HTTP, "url": "http://"}}, r"a\.url must be an address"),
        ({"a": {**HTTP, "url": "http://host:99999/"}}, r"a\.url must be an address"),
        ({"a": {**HTTP, "url": 3}}, r"a\.url=3 must be a text"),
        ({"a": {**HTTP, "timeout_s": 0}}, r"timeout_s=0 must be a finite number above 0"),
        ({"a": {**HTTP, "retries": -1}}, r"retries=-1 must be an integer of at least 0"),
        ({"a": {**HTTP, "retry_wait_s": -1}}, r"retry_wait_s=-1 must be"),
        ({"a": {**HTTP, "max_concurrency": 0}}, r"max_concurrency=0 must be"),
        ({"a": {**HTTP, "max_reply_bytes": 0}}, r"max_reply_bytes=0 must be"),
        ({"a": {**HTTP, "score_key": ""}}, r"score_key='' must be a text"),
        ({"a": {**VLM, "model": None}}, r"reward\.scorers\.a\.model is required"),
        ({"a": {**VLM, "base_url": "host"}}, r"base_url must be an address"),
        ({"a": {**VLM, "scale": [5]}}, r"scale=\[5\] must be \[worst, best\]"),
        ({"a": {**VLM, "scale": [5, 5]}}, r"scale=.* must rise; write a negative weight"),
        ({"a": {**VLM, "scale": [0, "x"]}}, r"scale='x' must be a finite number"),
        (
            {"a": {**VLM, "prompt_template": "{promt}?"}},
            r"template='promt' must be one of prompt, .*mean prompt\?",
        ),
        ({"a": {**VLM, "extra_body": 3}}, r"extra_body must be a mapping"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(scorers, message):
    with pytest.raises(ConfigError, match=message):
        reward_config(scorers=scorers)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"num_workers": 0}, r"reward\.num_workers=0 must be an integer of at least 1"),
        ({"num_worker": 1}, r"reward\.num_worker is not a known key; did you mean reward\.num_workers\?"),
        ({"custom_reward_function": {"file": "x.py"}}, r"reward\.custom_reward_function\.file is not a known key"),
        ({"custom_reward_function": {"path": ""}}, r"reward\.custom_reward_function\.path='' must be a text"),
        (
            {"custom_reward_function": {"path": "x.py"}, "scorers": {"custom": {"type": "ocr"}}},
            r"reward\.scorers\.custom has the name of what reward\.custom_reward_function adds",
        ),
    ],
)
def test_the_other_keys_too(reward, message):
    with pytest.raises(ConfigError, match=message):
        reward_config(**{"scorers": {"c": {"type": "color"}}, **reward})


def test_a_key_variable_must_be_set_and_neither_its_name_nor_its_value_is_shown(monkeypatch):
    """People write the key itself where its name belongs."""
    monkeypatch.delenv("sk-secret", raising=False)
    with pytest.raises(ConfigError, match="names an environment variable that is not set") as raised:
        reward_config(scorers={"v": {**VLM, "api_key_env": "sk-secret"}})
    assert "sk-secret" not in str(raised.value)
    monkeypatch.setenv("JUDGE_KEY", "two\nlines")
    with pytest.raises(ConfigError, match="no HTTP header can hold") as raised:
        reward_config(scorers={"v": {**VLM, "api_key_env": "JUDGE_KEY"}})
    assert "lines" not in str(raised.value)


def test_an_address_with_a_password_is_refused_without_showing_it():
    for url in ("http://me:hidden@host/", "ftp://me:hidden@host/"):
        with pytest.raises(ConfigError) as raised:
            reward_config(scorers={"h": {**HTTP, "url": url}})
        assert "hidden" not in str(raised.value)
