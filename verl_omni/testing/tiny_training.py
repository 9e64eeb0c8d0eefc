"""Settings of small training runs on the tiny models, for tests and benchmarks: seconds a run, on the CPU."""

from __future__ import annotations

from pathlib import Path

from verl_omni.trainer.diffusion.metrics_file import read_metrics

PROMPTS = ("a red fox", "two boats at sea", "a lighthouse in fog", "a bowl of plums")
MODES = {
    "step_wise": ("rollout.step_execution=true", "rollout.max_num_seqs=32"),
    "request_level": ("rollout.step_execution=false", "rollout.max_num_seqs=32"),
    "serial": ("rollout.max_num_seqs=1",),
}
"""Batching mode → what asks for it."""
LEARNING = ("actor.optim.lr=6e-3", "data.shuffle=false")
"""With these the reward of either tiny model rises clearly within 30 steps."""
_SETTINGS = [
    "actor.ppo_micro_batch_size_per_gpu=8",
    "actor.fsdp_config.model_dtype=float32",
    "actor.fsdp_config.param_dtype=float32",
    "model.lora_rank=8",
    "model.lora_alpha=16",
    "rollout.dtype=float32",
    "rollout.n=4",
    "rollout.pipeline.height=64",
    "rollout.pipeline.width=64",
    "rollout.pipeline.num_inference_steps=6",
    "rollout.pipeline.max_sequence_length=32",
    "rollout.algo.sde_window_size=2",
    "rollout.algo.sde_window_range=[0,4]",
    "rollout.log_prob_micro_batch_size_per_gpu=8",
]


def overrides(folder: Path, model: Path, *changes: str) -> list[str]:
    """Command line of a run in ``folder/run``: 4 prompts of 4 samples, rewarded for being red.

    Of keys below ``actor_rollout_ref`` that part is left out in `changes`.
    """
    prompts = folder / "prompts.txt"
    folder.mkdir(parents=True, exist_ok=True)
    prompts.write_text("\n".join(PROMPTS))
    arguments = [f"model.path={model}", *_SETTINGS, *changes]
    top = ("data.", "trainer.", "reward.", "algorithm.")
    return [
        f"data.train_files={prompts}",
        "data.train_batch_size=4",
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.device=cpu",
        "reward.scorers.color={type:color}",
        *(item if item.startswith(top) else f"actor_rollout_ref.{item}" for item in arguments),
    ]


def history(folder: Path) -> dict[int, dict[str, float]]:
    """Step → its metrics, of the run in ``folder/run``."""
    return {int(row["step"]): row for row in read_metrics(folder / "run")}
