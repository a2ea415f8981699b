#!/usr/bin/env bash
# DAPO with veRL on one node of 8 GPUs; actor updates and old log-probs run on packed groups.
#
#     pip install '.[verl]' 'verl[vllm]==0.9.1'     # in a clone of this repository
#     dualkv toolchain install     # the compiler of kernels
#     bash examples/verl_dapo.sh Qwen/Qwen3-8B train.parquet validation.parquet [more=settings ...]
#
# DAPO's four parts are the lines under "dapo": a higher clip above, prompts whose rewards are all equal sampled anew, one
# mean over all tokens, and a penalty for responses that come near the longest one. It has no KL term.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "expected a model, a file of training prompts and one of validation prompts (docs/verl.md)" >&2
    exit 2
fi
model=$1 train=$2 validation=$3
shift 3
response_len=8192

packed_groups=(
    +actor_rollout_ref.model.model_type=dualkv
    trainer.v1.trainer_mode=dualkv_sync
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.use_dynamic_bsz=True
    # Packed tokens; a larger group is split.
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=65536
    +actor_rollout_ref.model.fused_kernel_options.dualkv_keep=attention
)
dapo=(
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_inflight_gen_batches=2
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.use_kl_loss=False
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.max_resp_len="$response_len"
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=2048
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward.reward_kwargs.overlong_buffer_cfg.log=False
)

python -m verl.trainer.main_ppo \
    "${packed_groups[@]}" \
    "${dapo[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$train" \
    data.val_files="$validation" \
    data.train_batch_size=128 \
    data.max_prompt_length=4096 \
    data.max_response_length="$response_len" \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=1 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.logger='[console]' \
    trainer.experiment_name=dualkv-dapo \
    "$@"
