#!/usr/bin/env bash
# Qwen-Image learns to write: FlowGRPO on a LoRA, OCR reward, rollouts batched step-wise.
# Further Hydra overrides may follow as arguments.
set -euo pipefail

PYTHON=${PYTHON:-python3}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen-Image}
DATA=outputs/data/ocr_qwen_image
TRAIN_FILES=${TRAIN_FILES:-$DATA/train.parquet}
VAL_FILES=${VAL_FILES:-$DATA/test.parquet}
NUM_GPUS=${NUM_GPUS:-8}
MAX_NUM_SEQS=${MAX_NUM_SEQS:-256}

if [[ $TRAIN_FILES == "$DATA"/* && ! -f $DATA/train.parquet ]]; then
    "$PYTHON" "$(dirname "$0")/../data_process/ocr.py" --model qwen_image --output_dir "$DATA"
fi

"$PYTHON" -m verl_omni.trainer.main_diffusion \
    data.train_files="$TRAIN_FILES" \
    data.val_files="$VAL_FILES" \
    data.train_batch_size=32 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.lora_rank=64 \
    actor_rollout_ref.model.lora_alpha=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.step_execution=true \
    actor_rollout_ref.rollout.engine_kwargs.vllm_omni.max_num_seqs="$MAX_NUM_SEQS" \
    actor_rollout_ref.rollout.pipeline.height=512 \
    actor_rollout_ref.rollout.pipeline.width=512 \
    actor_rollout_ref.rollout.pipeline.num_inference_steps=10 \
    actor_rollout_ref.rollout.pipeline.true_cfg_scale=4.0 \
    actor_rollout_ref.rollout.algo.sde_window_size=2 \
    actor_rollout_ref.rollout.algo.sde_window_range='[0,5]' \
    actor_rollout_ref.rollout.val_kwargs.num_inference_steps=50 \
    reward.scorers.ocr.type=ocr \
    trainer.experiment_name=qwen_image_ocr_lora \
    trainer.default_local_dir=outputs/qwen_image_ocr_lora \
    trainer.n_gpus_per_node="$NUM_GPUS" \
    trainer.total_training_steps=300 \
    trainer.save_freq=30 \
    trainer.max_actor_ckpt_to_keep=2 \
    trainer.test_freq=30 \
    "$@"
