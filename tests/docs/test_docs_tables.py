"""The tables of the docs say what the code does: settings and defaults, the resolver's rule, messages, names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import BATCHING, INTEGRATING, PAGES, ROOT, block, blocks, code_spans, prose, table, tables
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.trainer.config_reference import sections as training_sections
from verl_omni.trainer.generation.outputs import RunReport
from verl_omni.trainer.generation.settings import DataConfig, GenerationConfig
from verl_omni.trainer.main_generation import compose
from verl_omni.trainer.prompts import ROW_KEYS
from verl_omni.workers.config import ConfigError, DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.workers.config.rollout import PLAN_KEYS
from verl_omni.workers.rollout.engine_keys import engine_keys
from verl_omni.workers.rollout.plan import (
    DEFAULT_MAX_NUM_SEQS,
    AdapterCapabilities,
    PlanError,
    RolloutMode,
    RolloutPlan,
    resolve_plan,
)
from verl_omni.workers.rollout.profile import RolloutProfile

ENGINE = "rollout.engine_kwargs.vllm_omni"
SECTIONS = {
    "rollout": DiffusionRolloutConfig,
    "model": DiffusionModelConfig,
    "data": DataConfig,
    "generation": GenerationConfig,
}


def settings(cls: type, prefix: str) -> Iterator[tuple[str, object]]:
    """Every key of a config dataclass and its default, but for those that are for training only."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in getattr(cls, "TRAINING_KEYS", ()):
            continue
        key = f"{prefix}.{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            yield from settings(typing.cast(type, hints[field.name]), key)
        elif field.default is not dataclasses.MISSING:
            yield key, field.default
        elif field.default_factory is dataclasses.MISSING:
            yield key, "required"


def written(value: object) -> str:
    """As the tables write a value."""
    return value if isinstance(value, str) else json.dumps(value)


DEFAULTS = {key: written(value) for prefix, cls in SECTIONS.items() for key, value in settings(cls, prefix)}


def documented() -> dict[str, str]:
    """key → default of the tables of settings."""
    rows = [row for t in tables(BATCHING) if t.header[:2] == ("key", "default") for row in t.rows]
    return {code_spans(key)[0]: (code_spans(default) or [default])[0] for key, default, *_ in rows}


def test_the_tables_of_settings_have_every_key_with_its_default():
    own = {key: default for key, default in documented().items() if not key.startswith(ENGINE)}
    assert own == DEFAULTS


def test_the_defaults_of_the_entry_point_are_those_of_the_tables():
    config = compose([])
    assert config is not None
    for key, default in documented().items():
        node = config if key.startswith(("data", "generation")) else config["actor_rollout_ref"]
        for part in key.split("."):
            node = node.get(part, "absent") if isinstance(node, dict) else node
        if not key.startswith("rollout.val_kwargs") and default != "required":
            assert written(node) == default, key


def test_the_documented_engine_keys_exist_and_the_plans_keys_are_all_there():
    names = {key.rpartition(".")[2] for key in documented() if key.startswith(ENGINE)}
    assert set(PLAN_KEYS) <= names <= engine_keys() | set(PLAN_KEYS)


def test_every_key_in_the_text_exists():
    known = {*DEFAULTS, *(f"{ENGINE}.{name}" for name in engine_keys() | set(PLAN_KEYS))}
    known |= {key.removeprefix("actor_rollout_ref.") for section in training_sections() for key, _, _ in section.rows}
    known |= {key[:i] for key in known for i, c in enumerate(key) if c == "."}
    known |= {"rollout.json", "rollout.cond"}  # no keys: a file, an attribute
    for page in PAGES:
        for span in code_spans(prose(page)):
            for key in re.findall(r"^(?:actor_rollout_ref\.)?((?:rollout|model|data|generation)\.[\w.]+)", span):
                assert key in known, f"{page.name}: {key}"


def test_the_table_of_row_keys_is_complete():
    rows = table(BATCHING, "key of a row").rows
    assert {key for row in rows for key in code_spans(row[0])} == ROW_KEYS
    for _, place, _ in rows:
        assert set(code_spans(place)) <= set(DEFAULTS)


def test_the_reported_keys_are_all_described():
    plan = RolloutPlan(
        mode=RolloutMode.SERIAL, max_num_seqs=1, request_batch_max_wait_ms=0.0, rows_per_forward=None, reason=""
    )
    report = RunReport(plan=plan, stats=RolloutStats(), seconds=1.0, peak_memory_mb=0.0).as_dict([])
    rows = table(BATCHING, "key", "meaning").rows
    assert {key for row in rows for key in code_spans(row[0])} == set(report)


def capabilities(step_wise: bool, by_request: bool) -> AdapterCapabilities:
    missing = () if step_wise else ("denoise_step",)
    return AdapterCapabilities(name="Adapter", request_batch=by_request, missing_step_methods=missing)


ADAPTERS = {
    "any": [(True, True), (True, False), (False, True), (False, False)],
    "step-wise": [(True, True), (True, False)],
    "not step-wise": [(False, True), (False, False)],
    "only step-wise": [(True, False)],
    "by request": [(True, True), (False, True)],
    "not by request": [(True, False), (False, False)],
    "only by request": [(False, True)],
    "neither": [(False, False)],
}
CAPS = {"any": [None, 1, 8], "above 1": [8], "1 or unset": [None, 1]}
STEP_EXECUTION = {"any": [True, False], "`true`": [True], "`false`": [False]}


@pytest.mark.parametrize("row", table(BATCHING, "`batching_mode`").rows, ids=" ".join)
def test_the_resolver_does_what_each_row_of_its_table_says(row):
    mode, step, cap, adapter, result = row
    mode = None if mode == "`null`" else code_spans(mode)[0]
    for step_execution, max_num_seqs, able in itertools.product(STEP_EXECUTION[step], CAPS[cap], ADAPTERS[adapter]):
        config = DiffusionRolloutConfig(batching_mode=mode, step_execution=step_execution, max_num_seqs=max_num_seqs)
        if result == "error":
            with pytest.raises(PlanError, match="; write "):
                resolve_plan(config, capabilities(*able))
            continue
        plan = resolve_plan(config, capabilities(*able))
        expected, _, warning = result.partition(", ")
        assert plan.mode is RolloutMode(expected.replace("-", "_"))
        if plan.mode is RolloutMode.SERIAL:
            assert plan.max_num_seqs == 1
            assert bool(plan.notes) == bool(warning)
        else:
            assert plan.max_num_seqs == (max_num_seqs or DEFAULT_MAX_NUM_SEQS)


def test_the_rows_of_the_resolvers_table_cover_every_case():
    covered = set()
    for mode, step, cap, adapter, _ in table(BATCHING, "`batching_mode`").rows:
        cases = itertools.product(STEP_EXECUTION[step], CAPS[cap], ADAPTERS[adapter])
        for case in cases:
            assert (mode, *case) not in covered
            covered.add((mode, *case))
    assert len(covered) == 5 * 2 * 3 * 4


def test_the_log_line_is_the_one_that_the_plan_writes():
    plan = resolve_plan(DiffusionRolloutConfig(batching_mode="auto"), capabilities(True, True))
    assert block(BATCHING, "", "rollout plan:").strip() == plan.log_line()


def test_the_profile_in_the_docs_is_one_and_auto_goes_by_it(tmp_path: Path):
    (tmp_path / "profile.json").write_text(block(BATCHING, "json", "images_per_s"))
    profile = RolloutProfile.load(tmp_path / "profile.json")
    config = DiffusionRolloutConfig(batching_mode="auto")
    plan = resolve_plan(config, capabilities(True, True), profile)
    assert (plan.mode, plan.max_num_seqs) == (RolloutMode.STEP_WISE, 8)
    assert "tied within 3%" in plan.reason
    with pytest.raises(ConfigError):
        RolloutProfile.load(tmp_path / "absent.json")


def test_the_defaults_of_the_adapters_are_those_of_the_table():
    from verl_omni.pipelines.model_base import VllmOmniPipelineBase

    for architecture, *cells in table(BATCHING, "adapter", "steps").rows:
        cls = VllmOmniPipelineBase.get_class(code_spans(architecture)[0])
        values = (cls.default_steps, cls.default_cfg_scale, cls.default_text_length, cls.text_limit)
        assert tuple(cells) == tuple(map(str, values))
    decode_rows = next(row for row in table(BATCHING, "what").rows if row[0] == "decoding")[2]
    sd3 = VllmOmniPipelineBase.get_class("StableDiffusion3Pipeline")
    assert decode_rows.endswith(f": {VllmOmniPipelineBase.decode_rows}; of SD3.5: {sd3.decode_rows}")


def test_the_limits_of_a_request_are_those_of_the_page():
    from verl_omni.pipelines.params import MAX_EDGE, MAX_OUTPUTS, MAX_STEPS

    limits = f"A request has at most {MAX_STEPS} steps, {MAX_OUTPUTS} outputs and {MAX_EDGE} pixels an edge."
    assert limits in " ".join(prose(BATCHING).split())


def test_the_page_tells_up_to_how_many_tokens_guidance_takes_one_forward():
    from verl_omni.pipelines.rows import FUSED_GUIDANCE_TOKENS

    assert f"up to {FUSED_GUIDANCE_TOKENS:,} tokens of image and text together" in " ".join(prose(BATCHING).split())


def test_the_rollout_code_of_each_model_is_as_short_as_the_page_says():
    (limit,) = re.findall(r"a model, its rollout at most (\d+) lines", (ROOT / "CONTRIBUTING.md").read_text())
    for model in ("qwen_image", "sd3"):
        folder = ROOT / "verl_omni/pipelines" / model
        files = [file for file in folder.glob("*.py") if file.stem in ("rollout", "frame_decoder")]
        assert 0 < sum(len(file.read_text().splitlines()) for file in files) <= int(limit), model


def is_abstract(hook: typing.Callable[..., object]) -> bool:
    return inspect.getsource(hook).rstrip().endswith("raise NotImplementedError")


def test_the_hooks_and_attributes_of_an_adapter_are_all_described():
    from verl_omni.pipelines.hooks import ModelHooks as Base
    from verl_omni.pipelines.hooks import ModelRules

    hooks = [code_spans(row[0])[0] for t in tables(INTEGRATING) if t.header[0] == "hook" for row in t.rows]
    methods = [name for cls in (ModelRules, Base) for name, value in vars(cls).items() if inspect.isfunction(value)]
    assert sorted(hooks) == sorted(methods)
    abstract = [name for name, hook in vars(Base).items() if inspect.isfunction(hook) and is_abstract(hook)]
    assert abstract == hooks[:5]
    attributes = {code_spans(row[0])[0]: code_spans(row[1])[0] for row in table(INTEGRATING, "attribute").rows}
    for name, default in attributes.items():
        value = getattr(Base, name)
        assert (dict(value) if name == "lora_key_map" else value) == (
            default if isinstance(value, str) else eval(default)
        )
    hints = {name: str(hint) for cls in Base.__mro__ for name, hint in inspect.get_annotations(cls).items()}
    own = {name for name, hint in hints.items() if "ClassVar" in hint}
    assert own - {"interrupt"} == set(attributes)


def test_the_helpers_exist_where_the_table_says():
    for name, module, _ in table(INTEGRATING, "helper").rows:
        assert hasattr(importlib.import_module(code_spans(module)[0]), code_spans(name)[0])


def test_the_checks_of_the_conformance_suite_are_all_described():
    from verl_omni.testing.conformance import CHECKS

    assert [row[0] for row in table(INTEGRATING, "check").rows] == [*CHECKS, "full precision"]


def test_json_blocks_are_json():
    for found in blocks(language="json"):
        json.loads(found.text)
