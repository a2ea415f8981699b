#!/usr/bin/env bash
# GRPO with veRL on one node of 8 GPUs; actor updates, old and reference log-probs run on packed groups.
#
#     pip install '.[verl]' 'verl[vllm]==0.9.1'     # in a clone of this repository
#     dualkv toolchain install     # the compiler of kernels
#     bash examples/verl_grpo.sh Qwen/Qwen3-8B train.parquet validation.parquet [more=settings ...]
#
# The lines under "packed groups" are what differs from a run without them.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "expected a model, a file of training prompts and one of validation prompts (docs/verl.md)" >&2
    exit 2
fi
model=$1 train=$2 validation=$3
shift 3

packed_groups=(
    +actor_rollout_ref.model.model_type=dualkv
    trainer.v1.trainer_mode=dualkv_sync
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.use_dynamic_bsz=True
    # Packed tokens: a prompt of 8,192 with 32 responses of 2,048 needs 73,759; a larger group is split.
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=73760
    +actor_rollout_ref.model.fused_kernel_options.dualkv_keep=attention
)

python -m verl.trainer.main_ppo \
    "${packed_groups[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$train" \
    data.val_files="$validation" \
    data.train_batch_size=128 \
    data.max_prompt_length=8192 \
    data.max_response_length=2048 \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=32 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=1 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.logger='[console]' \
    trainer.experiment_name=dualkv-grpo \
    "$@"
