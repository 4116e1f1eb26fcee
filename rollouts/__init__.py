"""rollouts: post-training for language models, as pure functions over frozen values, with trio.

Every public name can be imported from here; its module is loaded when the name is first used, so `import rollouts` is quick and loads
neither torch nor transformers. The modules themselves are public, too: rollouts.losses, rollouts.advantages, ...
"""

from __future__ import annotations

import importlib
from typing import Any, Final

__version__ = "0.1.0"

_NAMES_OF_MODULES: Final = (
    ("types", "Algorithm Completion Group LossOutput Message Prompt RolloutBatch Sample SamplingParams Status TokenOutputs TrainBatch "
              "Turn Turns"),
    ("steps", "StepData Trajectory"),
    ("errors", "BackendError CheckpointError ConfigError DataError EngineContextError EngineError EngineProtocolError EngineRequestError "
               "EngineStatusError EngineTimeout EnvironmentFault EpisodeError EpisodeInterrupted GenerationError GenerationTimeout "
               "RewardError RolloutsError SandboxError ToolArgumentError ToolFault"),
    ("chat", "compute_loss_mask prepare_sft_sample tokenize_conversation tokenize_prompt"),
    ("samples", "apply_sample_transforms convert_to_batch derive_seed mask_truncated with_reward"),
    ("filters", "check_any_success check_min_reward check_quality_and_diversity check_reasonable_length check_response_diversity "
                "check_reward_nonzero_std make_length_filter make_threshold_filter"),
    ("batching", "collate_samples prepare_grpo_batch prepare_sft_batch select_rows shard_rows split_microbatches split_minibatches"),
    ("logprobs", "chunked_log_probs finite_exp token_entropy token_log_probs"),
    ("statistics", "batch_mean batch_std group_mean group_std leave_one_out_mean whiten"),
    ("advantages", "apply_kl_penalty combine_rewards compute_advantages discounted_returns gae gdpo_advantages greedy_baseline "
                   "normalize_by_group vtrace zero_truncated_rewards"),
    ("gigpo", "add_weighted gigpo_advantages hash_observation interpolate summarize_anchors turn_advantages"),
    ("gigpo_steps", "compute_step_levels merge_similar_states system_apply_gigpo_to_batch_steps with_step_advantages"),
    ("loss_weights", "fixed_length_mean group_token_mean sample_mean sample_sum token_mean"),
    ("kl", "abs_kl bounded k1 k2 k3 straight_through"),
    ("surrogates", "clipped importance_weighted sequence_ratio token_ratio"),
    ("losses", "clipped_policy_loss compute_entropy_loss compute_policy_loss compute_value_loss dft_loss grpo_loss kl_cov_policy_loss "
               "policy_loss ppo_loss reinforce_loss sft_loss value_loss"),
    ("covariance", "drop_clip_cov drop_tokens select_kl_cov"),
    ("corrections", "anchor_to_proximal decoupled_ppo_loss keep_tokens mask_weights truncate_weights"),
    ("estimators", "check_advantages estimate_gae estimate_gigpo estimate_gpg estimate_greedy_baseline estimate_group_relative "
                   "estimate_max_rl estimate_opo estimate_optimal_token_baseline estimate_pass_at_k estimate_reinforce_plus_plus "
                   "estimate_reinforce_plus_plus_baseline estimate_vtrace"),
    ("preferences", "PreferencePair bradley_terry_loss collate_pairs dpo_loss pair_mean preference_loss score_loss split_pairs"),
    ("algorithms", "chain cispo dapo decoupled dppo dppo_kl dr_grpo gmpo gpg grpo gspo opo ppo recomputed reinforce "
                   "reinforce_plus_plus reinforce_plus_plus_baseline remax rloo sapo truncated"),
    ("proximal", "approximate_proximal interpolate_log_probs interpolate_probs with_segment_log_probs"),
    ("kl_control", "KLControl measure_kl update_kl_control"),
    ("staleness", "compute_capacity summarize_staleness"),
    ("staleness_control", "CapacityModifier FilteredSamplesCapacityModifier SegmentWisePPOStrategy StalenessControlStrategy "
                          "StalenessManager StandardPPOStrategy"),
    ("executor_parts", "create_cache create_filtered_capacity_modifier create_queue create_staleness_manager create_staleness_strategy "
                       "register_capacity_modifiers"),
    ("rollout_queue", "FinishedRollout LocalRolloutCache LocalRolloutQueue RolloutCache RolloutQueue TimedResult"),
    ("config", "CheckpointConfig GenerationConfig OptimizerConfig RLTrainingConfig RewardConfig RewardModelTrainingConfig RolloutConfig "
               "SFTTrainingConfig"),
    ("config_json", "from_dict to_dict"),
    ("async_config", "AsyncConfig"),
    ("episode_config", "EpisodeConfig Failure StopReason"),
    ("chat_formats", "create_chat_format create_text_format"),
    ("episode_summaries", "summarize_episodes"),
    ("transcripts", "Transcript add_action add_messages begin_transcript"),
    ("char_tokenizer", "create_char_tokenizer"),
    ("data_buffer", "DataBuffer"),
    ("preference_data", "load_preference_pairs prepare_preference_pair"),
    ("datasets", "load_jsonl load_rl_prompts load_sft_conversations"),
    ("checkpoints", "latest_checkpoint load_run_state save_checkpoint verify_checkpoint"),
    ("metrics", "CompositeLogger JSONLLogger MetricsLogger StageLogger WandbLogger"),
    ("trajectory_records", "Estimate TrajectoryRecord attach_estimates derive_steps group_steps"),
    ("trajectories", "read_records read_samples read_steps select_samples select_steps write_records write_samples write_steps"),
    ("rewards.evaluate", "compute_reward create_overlong_penalty score_group"),
    ("rewards.results", "EvaluateResult MetricResult StepOutput"),
    ("rewards.reward_functions", "load_reward reward_function"),
    ("rewards.alignment", "align_rewards_with_step_data"),
    ("rewards.composite", "create_composite_reward weigh_metrics"),
    ("rewards.rules", "create_format_reward create_length_penalty create_numeric_reward"),
    ("rewards.math_answers", "MathReward"),
    ("rewards.code_tests", "CodeReward"),
    ("rewards.sandboxed", "SandboxedReward"),
    ("rewards.trajectory_rewards", "adapt_trajectory_reward environment_reward"),
    ("rewards.reward_model", "RewardModel open_reward_model"),
    ("rewards.remote_reward", "PlainScores SGLangScores VLLMScores open_remote_reward"),
    ("rewards.judge", "JudgeConfig PairwiseJudge RubricJudge"),
    ("rewards.gathering", "gather_calls"),
    ("rewards.answers", "exact_match gsm8k_reward"),
    ("sandbox.limits", "CallResult SandboxFailure SandboxLimits SandboxResult"),
    ("sandbox.confinement", "Confinement"),
    ("sandbox.run", "find_confinement run_confined"),
    ("sandbox.pool", "SandboxPool"),
    ("sandbox.reward_code", "execute_code execute_user_reward_code open_code_pool"),
    ("environments.protocol", "Environment EnvironmentConfig EnvironmentStep"),
    ("environments.observations", "observation_to_json observation_to_messages observation_to_text"),
    ("environments.calls", "check_step open_environment reset_environment step_environment"),
    ("environments.tools", "Tool call_tool create_tool"),
    ("environments.tool_calls", "ToolCall ToolCallError create_compact_parser parse_hermes_calls parse_json_calls"),
    ("environments.tool_environment", "ToolEnvironment describe_tools"),
    ("environments.calculator", "create_calculator_environment create_calculator_problems create_calculator_tool"),
    ("environments.text_game", "GameTurn SimpleGameEnvironment TextGameEnv create_number_parser create_tag_parser create_word_parser"),
    ("environments.gym", "GymEnvironment"),
    ("environments.grid_world", "GridWorld GridWorldConfig create_grid_world_prompts"),
    ("engines.protocol", "GroupGeneration InferenceEngine InMemoryWeightUpdates"),
    ("engines.inprocess", "InProcessEngine"),
    ("engines.server_commands", "ServerConfig"),
    ("engines.servers", "ServerProcess launch_server"),
    ("engines.openai_protocol", "ChatCompletion"),
    ("engines.openai_text", "OpenAITextEngine"),
    ("engines.batch", "BatchInferenceManager GeneratedText GeneratedTexts collect_texts generate_results generate_texts"),
    ("backends.protocol", "CheckpointingBackend TrainingBackend"),
    ("backends.futures", "ImmediateTrainFuture TrainFuture open_pipeline"),
    ("backends.reward_models", "create_reward_model create_reward_model_backend load_reward_model"),
    ("backends.pytorch", "PyTorchTrainingBackend"),
    ("backends.lora", "LoRAConfig"),
    ("backends.lora_reference", "create_lora_reference"),
    ("backends.fsdp", "FSDPTrainingBackend"),
    ("backends.fsdp_config", "FSDPConfig"),
    ("backends.fsdp_factory", "create_fsdp_backend create_fsdp_critic_backend create_fsdp_reference_backend "
                              "create_fsdp_reward_model_backend"),
    ("backends.rank_group", "RankGroup join_ranks"),
    ("backends.leading", "LeadingBackend"),
    ("backends.distributed", "init_distributed leave_distributed masked_normalization masked_whiten"),
    ("backends.torch_func", "TorchFuncTrainingBackend create_torch_func_backend"),
    ("backends.jax_backend", "JAXTrainingBackend create_jax_backend"),
    ("backends.torchax_backend", "create_torchax_backend"),
    ("backends.factory", "create_adamw_optimizer create_backend_with_scheduler create_critic_backend create_cross_entropy_loss "
                         "create_pytorch_backend create_reference_backend create_warmup_cosine_scheduler load_hf_model parse_dtype"),
    ("generation", "create_generate_fn evaluate_prompts generate_group generate_rollout_batch generate_rollout_batches"),
    ("rollout_manager", "AsyncRolloutManager"),
    ("async_rollouts", "WorkflowExecutor create_workflow_executor"),
    ("proximal_recompute", "ProximalRecomputer create_proximal_recomputer score_with_engines score_with_trainer"),
    ("workflows", "EpisodeData EpisodeEngine LLMRequest RLVRWorkflow ReMaxWorkflow RolloutWorkflow adapt_reward_fn "
                  "create_workflow_generate_fn"),
    ("agent_policies", "ActionRequest AgentAction AgentPolicy EngineAgentPolicy OpenAIAgentPolicy ScriptedAgentPolicy"),
    ("episodes", "Episode EpisodeSetting run_episode run_episode_group"),
    ("episode_groups", "EpisodeWorkflow create_episode_generate_fn create_policy_generate_fn"),
    ("multi_turn", "Conversation MultiTurnInferenceEngine"),
    ("rollout_worker", "RLRolloutWorker TaskDefinitionModel"),
    ("agent_integration", "agent_rollout_to_sample agent_rollouts_to_samples check_loss_mask sample_to_steps split_turns "
                          "trajectories_to_samples trajectory_to_sample"),
    ("weight_sync", "sync_weights_in_memory sync_weights_to_engines"),
    ("sft_loop", "run_sft_training"),
    ("reward_model_loop", "evaluate_reward_model train_reward_model"),
    ("rl_loop", "restore_rl_run run_async_rl_training run_rl_training train_on_rollouts"),
)  # fmt: skip

__all__ = [*sorted(name for _, names in _NAMES_OF_MODULES for name in names.split()), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Load the module of a public name (PEP 562)."""
    for module, names in _NAMES_OF_MODULES:
        if name in names.split():
            return getattr(importlib.import_module(f"rollouts.{module}"), name)
    raise AttributeError(f"module 'rollouts' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
