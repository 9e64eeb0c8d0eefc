"""Secrets reach neither logs nor files."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from verl_omni.utils.secrets import HIDDEN, ScrubbingFormatter, is_secret, is_secret_variable, masked, scrubbed

SECRET = "s3cr3t-of-mine"


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "X-Api-Key",
        "hf_token",
        "authToken",
        "Authorization",
        "password",
        "db_passwd",
        "client_secret",
    ],
)
def test_names_of_secrets(name):
    assert is_secret(name) and is_secret_variable(name)


@pytest.mark.parametrize("name", ["max_tokens", "extra_tokenizers", "score_key", "api_key_env", "prompt_token_ids"])
def test_names_that_only_sound_so(name):
    assert not is_secret(name)


def test_whatever_lies_under_a_secret_name_is_masked():
    given = {"secret": {"a": SECRET, "b": [SECRET, 7]}, "password": 1234, "token": None, "auth": True, "key": "score"}
    hidden = {"a": HIDDEN, "b": [HIDDEN, HIDDEN]}
    assert masked(given) == {**given, "secret": hidden, "password": HIDDEN}


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"GET https://me:{SECRET}@host:80/a?x=1#y", "GET https://***@host:80/a?x=***#y"),
        (
            f"no reply from http://host/score?token={SECRET}&n={SECRET}.",
            "no reply from http://host/score?token=***&n=***",
        ),
        (
            f"headers {{'Authorization': 'Bearer {SECRET}', 'A': 'b'}}",
            "headers {'Authorization': 'Bearer ***', 'A': 'b'}",
        ),
        (f"authorization: {SECRET}", "authorization: ***"),
        (f"sent bearer {SECRET}, got 401", "sent bearer ***, got 401"),
        ("step 3 of http://127.0.0.1:9095/metrics", "step 3 of http://127.0.0.1:9095/metrics"),
    ],
)
def test_a_text_loses_its_secrets_and_nothing_else(text, hidden):
    assert scrubbed(text) == hidden
    assert masked({"url": [text]}) == {"url": [hidden]}


def test_values_of_variables_that_are_named_like_secrets_are_hidden(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    monkeypatch.setenv("HOME_OF_MINE", "a-long-word")
    assert scrubbed(f"{SECRET} short a-long-word") == "*** short a-long-word"


def test_a_traceback_is_scrubbed_too():
    try:
        raise ValueError(f"https://me:{SECRET}@host")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "failed: %s", (f"bearer {SECRET}",), sys.exc_info())
    told = ScrubbingFormatter("%(levelname)s %(message)s").format(record)
    assert told.startswith("ERROR failed: bearer ***\nTraceback") and SECRET not in told


@pytest.mark.slow
@pytest.mark.parametrize("entry_point", ["main_diffusion", "main_generation"])
def test_entry_points_log_through_it(entry_point):
    code = (
        "import logging, sys\n"
        f"from verl_omni.trainer.{entry_point} import main\n"
        "main(['--cfg', 'job'])\n"
        f"logging.getLogger('verl_omni.x').info('bearer {SECRET}')\n"
        f"logging.getLogger('other').warning('https://me:{SECRET}@host')\n"
        f"main(['a=https://me:{SECRET}@host'])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "INFO bearer ***" in ran.stderr and "WARNING https://***@host" in ran.stderr
    assert "config error: " in ran.stderr and SECRET not in ran.stderr


def test_a_rollout_server_logs_warnings_through_it():
    code = (
        "import logging\n"
        "from verl_omni.workers.rollout.server import RolloutServer\n"
        "RolloutServer(None, replica=0)\n"
        "for log in map(logging.getLogger, ('verl_omni.x', 'other')):\n"
        "    log.info('no')\n"
        f"    log.warning('https://me:{SECRET}@host')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stderr.splitlines() == ["WARNING https://***@host"] * 2
