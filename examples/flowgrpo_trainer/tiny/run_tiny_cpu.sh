#!/usr/bin/env bash
# A whole FlowGRPO run on the CPU in a few minutes: a tiny random Qwen-Image learns to make its images red.
# Further Hydra overrides may follow as arguments.
set -euo pipefail

PYTHON=${PYTHON:-python3}
MODEL_PATH=${MODEL_PATH:-outputs/models/tiny_qwen_image}
PROMPTS=$(dirname "$0")/../../prompts
TRAIN_FILES=${TRAIN_FILES:-$PROMPTS/colors.txt}
VAL_FILES=${VAL_FILES:-$PROMPTS/demo.txt}
NUM_GPUS=${NUM_GPUS:-1}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-16}

if [[ ! -f $MODEL_PATH/model_index.json ]]; then
    "$PYTHON" -m verl_omni.testing.tiny_models qwen_image "$MODEL_PATH"
fi

"$PYTHON" -m verl_omni.trainer.main_diffusion \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=4 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.lora_rank=16 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.optim.lr=1e-2 \
    actor_rollout_ref.actor.fsdp_config.model_dtype=float32 \
    actor_rollout_ref.actor.fsdp_config.param_dtype=float32 \
    actor_rollout_ref.rollout.dtype=float32 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.step_execution=true \
    actor_rollout_ref.rollout.engine_kwargs.vllm_omni.max_num_seqs="$MAX_NUM_SEQS" \
    actor_rollout_ref.rollout.pipeline.height=64 \
    actor_rollout_ref.rollout.pipeline.width=64 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.algo.sde_window_size=2 \
    actor_rollout_ref.rollout.algo.sde_window_range='[0,5]' \
    reward.scorers.red.type=color \
    reward.scorers.red.channel=red \
    trainer.device=cpu \
    trainer.experiment_name=tiny \
    trainer.default_local_dir=outputs/tiny \
    trainer.n_gpus_per_node="$NUM_GPUS" \
    trainer.total_training_steps=30 \
    trainer.test_freq=10 \
    trainer.resume_mode=disable \
    "$@"
