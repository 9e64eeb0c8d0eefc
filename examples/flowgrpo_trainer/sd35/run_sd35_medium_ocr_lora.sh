#!/usr/bin/env bash
# Stable Diffusion 3.5 medium learns to write: FlowGRPO on a LoRA, OCR reward, rollouts batched by whole requests.
# Further Hydra overrides may follow as arguments.
set -euo pipefail

PYTHON=${PYTHON:-python3}
MODEL_PATH=${MODEL_PATH:-stabilityai/stable-diffusion-3.5-medium}
DATA=outputs/data/ocr_sd35
TRAIN_FILES=${TRAIN_FILES:-$DATA/train.parquet}
VAL_FILES=${VAL_FILES:-$DATA/test.parquet}
NUM_GPUS=${NUM_GPUS:-1}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-256}
REQUEST_BATCH_MAX_WAIT_MS=${REQUEST_BATCH_MAX_WAIT_MS:-10}

if [[ $TRAIN_FILES == "$DATA"/* && ! -f $DATA/train.parquet ]]; then
    "$PYTHON" "$(dirname "$0")/../data_process/ocr.py" --model sd35 --output_dir "$DATA"
fi

"$PYTHON" -m verl_omni.trainer.main_diffusion \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=8 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.step_execution=false \
    actor_rollout_ref.rollout.engine_kwargs.vllm_omni.max_num_seqs="$MAX_NUM_SEQS" \
    actor_rollout_ref.rollout.engine_kwargs.vllm_omni.request_batch_max_wait_ms="$REQUEST_BATCH_MAX_WAIT_MS" \
    actor_rollout_ref.rollout.pipeline.height=384 \
    actor_rollout_ref.rollout.pipeline.width=384 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.guidance_scale=4.5 \
    actor_rollout_ref.rollout.algo.sde_type=cps \
    actor_rollout_ref.rollout.algo.noise_level=0.8 \
    actor_rollout_ref.rollout.algo.sde_window_size=2 \
    actor_rollout_ref.rollout.algo.sde_window_range='[0,5]' \
    actor_rollout_ref.rollout.val_kwargs.num_inference_steps=28 \
    reward.scorers.ocr.type=ocr \
    trainer.experiment_name=sd35_medium_ocr_lora \
    trainer.default_local_dir=outputs/sd35_medium_ocr_lora \
    trainer.n_gpus_per_node="$NUM_GPUS" \
    trainer.total_training_steps=600 \
    trainer.save_freq=30 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.test_freq=30 \
    "$@"
