"""What the docs show can be run: code, commands, links, messages of a run that does not start."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import (
    BATCHING,
    INTEGRATING,
    PAGES,
    ROOT,
    Block,
    block,
    blocks,
    commands,
    console,
    documented_messages,
    matches,
    tables,
)
from verl_omni.trainer.generation.job import GenerationJob
from verl_omni.trainer.generation.settings import GenerationSettings
from verl_omni.trainer.main_generation import compose
from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.rollout import check_engine_keys
from verl_omni.workers.rollout.engine_keys import engine_keys
from verl_omni.workers.rollout.plan import AdapterCapabilities, resolve_plan

LANGUAGES = {"", "bash", "console", "json", "python"}
CAN_ALL = AdapterCapabilities(name="any adapter", request_batch=True, missing_step_methods=())
ROLLOUT = "actor_rollout_ref.rollout"

LIMITED_ADAPTERS = """
from verl_omni.pipelines.qwen_image.rollout import QwenImageRollout

@QwenImageRollout.register("QwenImagePipeline", "docs_request_only")
class RequestOnly(QwenImageRollout):
    supports_step_execution = False

@QwenImageRollout.register("QwenImagePipeline", "docs_step_only")
class StepOnly(QwenImageRollout):
    supports_request_batch = False

@QwenImageRollout.register("QwenImagePipeline", "docs_serial_only")
class SerialOnly(QwenImageRollout):
    supports_request_batch = supports_step_execution = False
"""


def test_blocks_say_what_they_are():
    for page in PAGES:
        languages = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)[::2]
        assert set(languages) <= LANGUAGES, page.name


@pytest.mark.parametrize("found", blocks(language="python"), ids=str)
def test_python_compiles(found: Block):
    compile(found.text, str(found.page), "exec")


@pytest.mark.parametrize("found", blocks(language="bash"), ids=str)
def test_commands_exist_and_their_keys_are_known(found: Block):
    for program, *args in commands(found.text):
        if program == "make":
            assert re.search(rf"^{args[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        elif args[0] != "-m":
            assert program == "python" and (ROOT / args[0]).is_file()
        else:
            assert program == "python" and importlib.util.find_spec(args[1])
            if args[1] == "verl_omni.trainer.main_generation":
                config = compose(args[2:])
                assert config is not None
                rollout = GenerationSettings.from_mapping(config).actor_rollout_ref.rollout
                check_engine_keys(rollout.engine_options(), engine_keys())
                resolve_plan(rollout, CAN_ALL)


@pytest.mark.parametrize("found", blocks(language="console"), ids=str)
def test_console_blocks_show_what_is_printed(found: Block):
    script, expected = console(found.text)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(script, {})
    assert printed.getvalue() == expected


def test_mkdocs_finds_no_broken_link_and_no_forgotten_page(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_from_outside_the_docs_lead_somewhere(name: str):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / name).read_text()):
        assert "://" in target or (ROOT / target).exists(), target


def test_the_registered_adapter_of_the_page_is_found_through_external_lib(tmp_path, tiny_qwen, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models").mkdir()
    (tmp_path / "my_models/small_decode.py").write_text(block(INTEGRATING, "python", "SmallDecode"))
    (tmp_path / "prompts.txt").write_text("a cat\n")
    ((_, _, _, *args),) = commands(block(INTEGRATING, "bash", "small_decode.py"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    files = [f"actor_rollout_ref.model.path={tiny_qwen}", "data.val_files=prompts.txt"]
    assert GenerationJob.prepare(compose([*args, *files])).adapter == "small_decode.SmallDecode"


def test_the_adapters_that_batch_in_one_way_do():
    classes: dict[str, type] = {}
    exec(block(INTEGRATING, "python", "class StepOnly"), {"__name__": "limited"}, classes)
    modes = {
        name: [m.value for m in AdapterCapabilities.of(classes[name]).modes] for name in ("RequestOnly", "StepOnly")
    }
    assert modes == {"RequestOnly": ["request_level", "serial"], "StepOnly": ["step_wise", "serial"]}


@pytest.fixture
def prepare(tmp_path: Path, tiny_qwen: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Checks a run with these overrides as the entry point does; gives its error, or its warnings and its plan."""
    (tmp_path / "limited.py").write_text(LIMITED_ADAPTERS)
    (tmp_path / "prompts.txt").write_text("a cat\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delitem(sys.modules, "limited", raising=False)
    fixed = [f"actor_rollout_ref.model.path={tiny_qwen}", f"data.val_files={tmp_path / 'prompts.txt'}"]

    def run(*overrides: str) -> list[str]:
        lib = [f"{ROLLOUT}.external_lib={tmp_path / 'limited.py'}"]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            try:
                job = GenerationJob.prepare(compose([*fixed, *lib, *overrides]))
            except ConfigError as error:
                return [str(error)]
        return [*caplog.messages, *job.plan.notes, job.plan.reason]

    return run


@pytest.mark.slow
def test_messages_of_a_run_that_does_not_start_read_as_the_page_shows_them(prepare, tmp_path):
    algorithm, lora = "actor_rollout_ref.model.algorithm", tmp_path / "lora"
    lora.mkdir()
    (lora / "adapter_config.json").write_text("{}")
    attempts = [
        [f"{ROLLOUT}.max_num_seq=8"],
        [f"{ROLLOUT}.max_num_seqs=8", f"{ROLLOUT}.engine_kwargs.vllm_omni.max_num_seqs=4"],
        [f"{ROLLOUT}.max_num_seqs=0"],
        [f"{ROLLOUT}.batching_mode=stepwise"],
        [f"{algorithm}=docs_request_only", f"{ROLLOUT}.step_execution=true"],
        [f"{algorithm}=docs_step_only", f"{ROLLOUT}.max_num_seqs=8"],
        [f"{ROLLOUT}.batching_mode=serial", f"{ROLLOUT}.max_num_seqs=8"],
        [f"{algorithm}=none_of_that_name"],
        [f"{ROLLOUT}.external_lib=no_module_of_that_name"],
        [f"{ROLLOUT}.algo.sde_window_size=2", f"{ROLLOUT}.algo.sde_window_range=[0,1]"],
        [f"{ROLLOUT}.algo.sde_window_range=[0,5]"],
        [f"actor_rollout_ref.model.lora_path={lora}"],
        ["actor_rollout_ref.model.lora_scale=0"],
        [f"{ROLLOUT}.merge_lora=true", f"{ROLLOUT}.engine_kwargs.vllm_omni.tensor_parallel_size=2"],
        [f"{ROLLOUT}.engine_kwargs.vllm_omni.model=other"],
    ]
    messages = [message for attempt in attempts for message in prepare(*attempt)]
    documented = documented_messages("The run does not start")
    documented = [pattern for pattern in documented if "the model has no layers" not in pattern]  # the engine says that
    assert len(documented) == len(messages) == len(attempts)
    for pattern, message in zip(documented, messages, strict=True):
        assert matches(pattern, message), f"{pattern}\n{message}"


@pytest.mark.slow
def test_messages_of_a_run_that_starts_read_as_the_page_shows_them(prepare, tmp_path):
    (tmp_path / "profile.json").write_text(block(BATCHING, "json", "images_per_s"))
    attempts = [
        ["actor_rollout_ref.model.algorithm=docs_serial_only", f"{ROLLOUT}.max_num_seqs=8"],
        [f"{ROLLOUT}.step_execution=true", f"{ROLLOUT}.engine_kwargs.vllm_omni.request_batch_max_wait_ms=5"],
        [f"{ROLLOUT}.batching_mode=auto", f"{ROLLOUT}.profile={tmp_path / 'profile.json'}"],
        [f"{ROLLOUT}.batching_mode=serial", f"{ROLLOUT}.profile={tmp_path / 'profile.json'}"],
        [f"{ROLLOUT}.pipeline.true_cfg_scale=4"],
        [f"{ROLLOUT}.pipeline.guidance_scale=4"],
        [f"{ROLLOUT}.step_execution=true", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8"],
    ]
    messages = [message for attempt in attempts for message in prepare(*attempt)]
    documented = documented_messages("It runs, but not as expected")
    assert len(documented) == len(attempts)
    for pattern in documented:
        assert any(matches(pattern, message) for message in messages), pattern


def test_the_troubleshooting_tables_have_no_empty_cell():
    for found in tables(BATCHING):
        if found.header[0] == "symptom":
            assert all(cell for row in found.rows for cell in row)
