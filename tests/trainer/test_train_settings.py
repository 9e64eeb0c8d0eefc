"""The configuration of a training run: YAML against dataclasses, and what its sections demand of each other."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.algorithms.flow_sde import sample_sde_window, sde_coefficients
from verl_omni.trainer.compose import CONFIG_DIR, compose
from verl_omni.trainer.diffusion.sde_window import window_range
from verl_omni.trainer.diffusion.settings import TrainSettings
from verl_omni.workers.config import ConfigError

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "model"))
MINIMAL = {
    f"{MODEL}.path": "some/model",
    f"{ROLLOUT}.n": 4,
    "data.train_files": "prompts.txt",
    "reward.scorers.light.type": "brightness",
}
REQUIRED = {f"{MODEL}.path", "data.train_files"}
OPEN = {f"{ROLLOUT}.engine_kwargs": {"vllm_omni": {}}}
"""Keys whose default the YAML shows in more detail than the dataclass has it."""


def settings(**changes) -> TrainSettings:
    """From dotted keys, on top of the minimal ones; __ stands for a dot in `changes`."""
    mapping: dict = {}
    for key, value in (MINIMAL | {name.replace("__", "."): value for name, value in changes.items()}).items():
        node = mapping
        *path, leaf = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return TrainSettings.from_mapping(mapping)


def composed(*overrides: str) -> dict:
    config = compose(overrides, "diffusion_trainer")
    assert config is not None
    return config


def defaults(cls: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            yield from defaults(typing.cast(type, hints[field.name]), f"{key}.")
        elif field.default is not dataclasses.MISSING:
            yield key, field.default
        elif field.default_factory is not dataclasses.MISSING:
            yield key, field.default_factory()
        else:
            yield key, None


def leaves(node: Mapping, known: set[str], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        name = f"{prefix}{key}"
        if name not in known and isinstance(value, Mapping):
            yield from leaves(value, known, f"{name}.")
        else:
            yield name, value


def test_the_yaml_has_every_key_of_the_dataclasses_with_its_default_and_no_other():
    want = dict(defaults(TrainSettings))
    got = dict(leaves(composed(), set(want)))
    assert got.keys() == want.keys()
    for key, value in want.items():
        if key not in OPEN:
            assert got[key] == (list(value) if isinstance(value, tuple) else value), key
    engine = got[f"{ROLLOUT}.engine_kwargs"]
    assert all(value in (None, 0) for value in engine["vllm_omni"].values())


def test_each_section_is_a_file_that_explains_itself():
    names = {file.stem for file in (CONFIG_DIR / "diffusion").glob("*.yaml")}
    sections = composed()
    assert names == {*sections.pop("actor_rollout_ref"), *sections}
    for file in (CONFIG_DIR / "diffusion").glob("*.yaml"):
        assert re.match(r"# [\w.]+: ", file.read_text()), file.name
        assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_the_shown_configuration_can_be_read_back_and_is_the_same(capfd):
    overrides = [f"{key}={value}" for key, value in MINIMAL.items()]
    assert compose([*overrides, "--cfg", "job", "--resolve"], "diffusion_trainer") is None
    shown = yaml.safe_load(capfd.readouterr().out)
    assert shown == composed(*overrides)
    assert list(shown) == ["actor_rollout_ref", "algorithm", "data", "reward", "trainer"]
    assert TrainSettings.from_mapping(shown) == TrainSettings.from_mapping(composed(*overrides))


@pytest.mark.parametrize("form", ["", "+", "++"])
def test_all_forms_of_an_override_reach_known_and_new_keys(form):
    if form != "+":  # Hydra's + is for what is not there yet
        assert composed(f"{form}{ACTOR}.optim.lr=3e-4")["actor_rollout_ref"]["actor"]["optim"]["lr"] == 3e-4
    config = composed(f"{form}{ROLLOUT}.engine_kwargs.vllm_omni.enable_sleep_mode=true")
    assert config["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm_omni"]["enable_sleep_mode"] is True
    config = composed(*(f"{key}={value}" for key, value in MINIMAL.items()), f"{form}{ACTOR}.optim.lrr=1")
    with pytest.raises(ConfigError, match=r"actor\.optim\.lrr .*actor\.optim\.lr\?"):
        TrainSettings.from_mapping(config)


def test_the_micro_batch_of_log_probs_is_the_actors_unless_given():
    def micro(**changes):
        return settings(**changes).actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu

    assert micro(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=4) == 4
    assert micro(actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=2) == 2


def test_a_micro_batch_of_the_reference_is_said_to_have_no_effect(caplog):
    settings(actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu=8)
    assert not caplog.records
    settings(actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu=2)
    assert "ref.log_prob_micro_batch_size_per_gpu=2 has no effect" in caplog.text


def test_merging_without_a_lora_is_said_to_have_no_effect(caplog):
    settings(actor_rollout_ref__rollout__merge_lora=True)
    assert not caplog.records
    settings(actor_rollout_ref__rollout__merge_lora=True, actor_rollout_ref__model__lora_rank=0)
    assert "rollout.merge_lora has no effect: actor_rollout_ref.model.lora_rank=0 trains all weights" in caplog.text


def test_mini_batch_and_replicas_come_from_the_batch_and_the_processes():
    assert (settings().mini_batch_size, settings().replicas) == (32, 1)
    config = settings(
        actor_rollout_ref__actor__ppo_mini_batch_size=8,
        trainer__nnodes=2,
        trainer__n_gpus_per_node=4,
        actor_rollout_ref__rollout__gpus_per_replica=2,
    )
    assert (config.mini_batch_size, config.replicas, config.trainer.processes) == (8, 4, 8)
    assert config.processes_per_device == 1 + 1  # a trainer, and at most one of the engines
    assert settings(actor_rollout_ref__rollout__colocate=False).processes_per_device == 1


BAD = [
    ({f"{MODEL}.path": None}, r"actor_rollout_ref\.model\.path is required"),
    ({"data.train_files": None}, r"data\.train_files is required"),
    ({"data.train_files": []}, "file name or a list of them"),
    ({"data.val_files": 3}, r"data\.val_files=3 must be a file name or a list of them, or null for no validation"),
    ({"data.train_batch_size": 0}, "integer of at least 1"),
    ({"data.train_max_samples": 0}, "at least 1, or null for all"),
    ({"data.max_prompt_length": 512}, "not a known key"),
    ({"data.negative_prompt": 3}, "must be a text, or null for none"),
    ({"reward.scorers.light.type": None}, r"reward\.scorers\.light\.type is required"),
    ({"algorithm.epsilon": 0}, "above 0"),
    ({"algorithm.gamma": 1.0}, "not a known key"),
    ({"algorithm.sde_window_schedule.type": "random"}, "one of fixed, moving"),
    ({"algorithm.sde_window_schedule.interval": 0}, r"interval=0 must be"),
    ({"trainer.device": "gpu"}, "one of cpu, cuda, or null"),
    ({"trainer.logger": ["tensorbord"]}, "did you mean tensorboard"),
    ({"trainer.logger": []}, "logger or a list of them"),
    ({"trainer.save_freq": 0}, r"save_freq=0 must be an integer of at least 1"),
    ({"trainer.ray_kwargs": 3}, "mapping of keys"),
    ({"trainer.critic_warmup": 0}, "not a known key"),
    ({"critic.lr": 1}, "critic is not a known key"),
    # between the sections
    ({f"{ROLLOUT}.n": 1}, r"rollout\.n=1 leaves nothing to compare .* write .*rollout\.n=8"),
    (
        {"data.train_batch_size": 10, f"{ACTOR}.ppo_mini_batch_size": 4},
        r"train_batch_size=10 is no multiple of .*ppo_mini_batch_size=4; write data\.train_batch_size=12$",
    ),
    (
        {"trainer.n_gpus_per_node": 3},
        r"data\.train_batch_size=32 prompts of .*n=4 samples cannot be .* 3 training processes .*train_batch_size=33",
    ),
    (
        {"trainer.nnodes": 4, "trainer.n_gpus_per_node": 4, f"{ACTOR}.ppo_mini_batch_size": 2},
        r"ppo_mini_batch_size=2 prompts .* 16 training processes .*write .*ppo_mini_batch_size=4$",
    ),
    (
        {"trainer.n_gpus_per_node": 4, f"{ACTOR}.fsdp_config.fsdp_size": 3},
        r"fsdp_size=3 does not divide the 4 training processes; write .*fsdp_size=-1",
    ),
    ({f"{MODEL}.lora_scale": 0.5}, r"lora_scale are for rollouts without training"),
    (
        {f"{MODEL}.lora_rank": 0, f"{MODEL}.target_modules": ["to_q"]},
        r"target_modules says where a LoRA goes, but .*lora_rank=0",
    ),
    ({f"{ROLLOUT}.pipeline.height": None}, r"pipeline\.height=null leaves it to the adapter"),
    ({f"{ROLLOUT}.pipeline.output_type": "latent"}, r"output_type=latent .* write .*output_type=pt"),
    ({f"{ROLLOUT}.algo.noise_level": 0}, r"noise_level=0 makes every step deterministic"),
    ({f"{ROLLOUT}.algo.sde_window_size": 0}, r"sde_window_size=0 records no step"),
    ({f"{ROLLOUT}.pipeline.num_inference_steps": 1}, r"num_inference_steps=1 records no step"),
    (
        {"algorithm.sde_window_schedule.type": "moving"},
        r"type=moving needs a window to move; write .*sde_window_size=4",
    ),
    (
        {f"{ROLLOUT}.gpus_per_replica": 2},
        r"gpus_per_replica=2 does not divide the 1 training processes; write .*replicas=",
    ),
    ({"trainer.device": "cuda", f"{ROLLOUT}.replicas": 2}, r"replicas=2 .* write .*replicas=1, or .*colocate=false"),
    ({"trainer.test_freq": 5}, r"test_freq=5 has nothing to validate with; write data\.val_files"),
    (
        {
            f"{ROLLOUT}.algo.sde_window_size": 2,
            f"{ROLLOUT}.algo.sde_window_range": [0, 8],
            f"{ROLLOUT}.val_kwargs.num_inference_steps": 4,
            "data.val_files": "v.txt",
        },
        r"val_kwargs\.num_inference_steps=4 is less than the 8 steps .* write .*num_inference_steps=8",
    ),
    (
        {f"{ROLLOUT}.algo.sde_type": "cps", f"{ROLLOUT}.val_kwargs.noise_level": 1.5},
        r"with actor_rollout_ref\.rollout\.val_kwargs: .*noise_level=1\.5",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[" ".join(changes) for changes, _ in BAD])
def test_what_cannot_be_is_one_error_with_the_key_and_what_to_write(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_a_run_without_a_scorer_is_told_how_to_add_one():
    with pytest.raises(ConfigError, match=r"reward has no scorer; add one"):
        TrainSettings.from_mapping({"actor_rollout_ref": {"model": {"path": "a/b"}}, "data": {"train_files": "p.txt"}})


def test_a_folder_with_a_lora_is_not_silently_left_out_of_training(tmp_path: Path):
    from tests.workers.test_config import write_lora

    write_lora(tmp_path / "lora")
    with pytest.raises(ConfigError, match=r"lora_path and .* are for rollouts without training"):
        settings(**{f"{MODEL}.lora_path": str(tmp_path / "lora")})


def test_own_advantages_may_do_without_groups():
    assert settings(**{f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "own"}).actor_rollout_ref.rollout.n == 1


def test_more_replicas_than_processes_may_share_a_cpu():
    assert settings(**{"trainer.device": "cpu", f"{ROLLOUT}.replicas": 2}).replicas == 2
    assert settings(**{"trainer.device": "cuda", f"{ROLLOUT}.replicas": 2, f"{ROLLOUT}.colocate": False}).replicas == 2


batches = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(2, 8), st.integers(1, 8))


@given(batches)
def test_an_accepted_batch_can_be_shared_evenly_and_the_advice_on_others_helps(batch):
    prompts, mini, n, processes = batch
    keys = {"data.train_batch_size": prompts, f"{ACTOR}.ppo_mini_batch_size": mini}
    keys |= {f"{ROLLOUT}.n": n, "trainer.n_gpus_per_node": processes}
    try:
        config = settings(**keys)
    except ConfigError as error:
        advice = re.findall(r"([\w.]+)=(\d+)", str(error).partition("; write ")[2])
        config = settings(**keys | {key: int(value) for key, value in advice})
    assert config.data.train_batch_size >= prompts
    assert config.mini_batch_size * n % processes == config.data.train_batch_size % config.mini_batch_size == 0


windows = st.tuples(
    st.integers(1, 8),
    st.none() | st.integers(1, 9),
    st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(["sde", "cps", "dance_sde"]),
)


@given(windows)
def test_in_an_accepted_window_every_step_has_noise_and_the_advice_on_others_helps(window):
    import torch

    steps, size, bounds, sde_type = window
    algo = f"{ROLLOUT}.algo"
    keys = {f"{ROLLOUT}.pipeline.num_inference_steps": steps, f"{algo}.sde_type": sde_type}
    keys |= {f"{algo}.sde_window_size": size, f"{algo}.sde_window_range": bounds}
    try:
        config = settings(**keys)
    except ConfigError as error:
        if "does not fit into" not in str(error):
            return  # a range without room, or no step at all
        for key, value in re.findall(r"([\w.]+)=(\d+|null|\[[\d, ]+\])", str(error).partition("; write ")[2]):
            keys[key] = yaml.safe_load(value)
        config = settings(**keys)
    rollout = config.actor_rollout_ref.rollout
    lo, hi = window_range(rollout.algo, steps)
    sigmas = torch.linspace(1, 0, steps + 1)
    noise = sde_coefficients(
        sigmas[:-1], sigmas[1:], noise_level=0.7, sde_type=sde_type, second_sigma=float(sigmas[1])
    ).noise
    start, stop = sample_sde_window(
        sde_window_size=rollout.algo.sde_window_size,
        sde_window_range=rollout.algo.sde_window_range,
        num_timesteps=steps,
    )
    assert lo <= start < stop <= hi
    assert (noise[lo:hi] > 0).all()


def test_a_bad_configuration_is_found_without_torch():
    code = (
        "import sys; from verl_omni.trainer.compose import compose; "
        "from verl_omni.trainer.diffusion.settings import TrainSettings\n"
        "from verl_omni.workers.config import ConfigError\n"
        "try: TrainSettings.from_mapping(compose(sys.argv[1:], 'diffusion_trainer'))\n"
        "except ConfigError as error: print(error)\n"
        "assert not {'torch', 'vllm', 'vllm_omni', 'ray', 'verl'} & sys.modules.keys()"
    )
    overrides = [f"{key}={value}" for key, value in (MINIMAL | {f"{ROLLOUT}.n": 1}).items()]
    done = subprocess.run([sys.executable, "-c", code, *overrides], capture_output=True, text=True, check=False)
    assert (done.returncode, "leaves nothing to compare" in done.stdout) == (0, True), done.stderr
