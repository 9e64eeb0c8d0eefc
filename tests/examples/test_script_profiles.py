"""A profile measured as the docs say is that of the training script: pure configuration, nothing is measured."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.docs.pages import BATCHING, block, code_spans, commands, table
from tests.examples.scripts import EXAMPLES
from verl_omni.bench.arguments import parse
from verl_omni.bench.model import BenchModel
from verl_omni.bench.session import checked_key, make_bench
from verl_omni.trainer.diffusion.data import TrainPrompts, training_groups
from verl_omni.trainer.rollout_setup import resolve_rollout
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.profile import ProfilePoint, RolloutProfile

pytestmark = pytest.mark.slow

BENCH = commands(block(BATCHING, "bash", "sd35_lora.json"))[0]
TRAIN = commands(block(BATCHING, "", "sd35_lora.json"))[0]
SCRIPTS = {code_spans(name)[0]: shlex.split(code_spans(options)[0]) for name, options in table(BATCHING, "script").rows}
MODELS = {
    "qwen_image": ("QwenImagePipeline", "QwenImageTransformer2DModel"),
    "sd35": ("StableDiffusion3Pipeline", "SD3Transformer2DModel"),
}
CAP = 24


@pytest.fixture(params=SCRIPTS)
def script(request, tmp_path: Path, monkeypatch) -> str:
    """Name of a script; a checkpoint without weights is where the page has its model."""
    monkeypatch.chdir(tmp_path)
    pipeline, transformer = MODELS[request.param.partition("/")[0]]
    Path("models/sd35/transformer").mkdir(parents=True)
    Path("models/sd35/vae").mkdir()
    Path("models/sd35/vae/config.json").write_text("{}")
    Path("profiles").mkdir()
    Path("models/sd35/model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    Path("models/sd35/transformer/config.json").write_text(json.dumps({"_class_name": transformer}))
    return request.param


def measure(*options: str) -> None:
    """As if the bench had measured, in request-level batches of `CAP` the faster."""
    # what the bench takes on a GPU by itself
    args = parse(["models/sd35", *options, "--profile", "profiles/sd35_lora.json", "--dtype", "bfloat16"], "")
    bench = make_bench(args, BenchModel.open(args.model, name="sd35"))
    points = (
        ProfilePoint(mode="step_wise", max_num_seqs=CAP, images_per_s=1.0),
        ProfilePoint(mode="request_level", max_num_seqs=CAP, images_per_s=2.0),
    )
    RolloutProfile(key=checked_key(bench, *args.lora_rank), points=points).save(args.profile)


def planned(settings, script: str, *overrides: str) -> RolloutPlan:
    """The plan of a run of `script`, on the data that it makes itself."""
    made = settings(EXAMPLES / script, *overrides, MODEL_PATH="models/sd35", OTHERS=sys.executable)
    model, rollout = made.actor_rollout_ref.model, made.actor_rollout_ref.rollout
    rows = TrainPrompts.read(made.data).batch_at(1)
    groups = training_groups(rows, rollout, step=1, negative_prompt=made.data.negative_prompt)
    requests = [request for group in groups for request in group.requests]
    return resolve_rollout(model, rollout, requests, trained_lora_rank=model.lora_rank).plan


def test_a_script_goes_by_the_profile_that_the_page_has_measured_for_it(settings, script):
    measure(*SCRIPTS[script])
    plan = planned(settings, script, *TRAIN[1:])
    assert (plan.mode, plan.max_num_seqs) == (RolloutMode.REQUEST_LEVEL, CAP), plan
    assert not [note for note in plan.notes if "profile" in note]


def test_without_the_overrides_a_warning_names_them(settings, script):
    measure(*SCRIPTS[script])
    auto, profile, *freeing = TRAIN[1:]
    plan = planned(settings, script, auto, profile)
    (note,) = [note for note in plan.notes if "overruled" in note]
    assert plan.max_num_seqs == 256 and "max_num_seqs=256" in note
    assert set(note.partition("to go by it, write ")[2].split()) <= set(freeing)


def test_a_stale_profile_is_told_with_the_options_of_the_page(settings, script):
    measure("--size", "128")
    plan = planned(settings, script, *TRAIN[1:])
    (note,) = [note for note in plan.notes if "stale" in note]
    assert f"measure one for this run: python -m verl_omni.bench …/sd35 {shlex.join(SCRIPTS[script])} --" in note


def test_the_worked_example_is_the_row_of_its_script():
    script = TRAIN[0].removeprefix("examples/flowgrpo_trainer/")
    assert BENCH[3 : 4 + len(SCRIPTS[script])] == ["models/sd35", *SCRIPTS[script]]
    assert BENCH[-1] == next(arg for arg in TRAIN if ".profile=" in arg).partition("=")[2]
