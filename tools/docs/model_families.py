"""Text families that transformers registers as causal language models, and settings of tiny configurations of them."""

from __future__ import annotations

from typing import Any

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
OTHERS = {"mamba_chunk_size": 8, "linear_conv_kernel_dim": 4, "attention_window_size": 8, "sliding_window_size": 8, "chunk_size": 8} | {
    "keep_window_size": 8
}
# a pad token's embedding is 0, and so are then its scores of tokens: tied
INDEXED = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "num_key_value_heads": 4, "pad_token_id": None}
BYTES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "max_position_embeddings": 64
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
AUDIO = {"num_mel_bins": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SPOKEN = {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 2, "nemo_conv_channels": 16, "input_size": 16}
DECODER = {"is_decoder": True, "is_encoder_decoder": False, "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4} | {
    "decoder_ffn_dim": 96,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
}
ENCODERS = """
bert bert-generation camembert data2vec-text ernie megatron-bert roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl
""".split()  # noqa: SIM905
ENCODER_DECODERS = """
bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr whisper
""".split()  # noqa: SIM905
OWN: dict[str, dict[str, Any]] = {  # settings under names of a family's own, or that it needs besides
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64},
    "bloom": {"n_head": 4, "n_layer": 2},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 8},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "falcon": {"alibi": False},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_expand": 2},
    "zamba2": {"num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "deepseek_v32": INDEXED,
    "deepseek_v4": {"index_topk": 8, "pad_token_id": None},
    "glm_moe_dsa": INDEXED,
    "hy_v4": {"index_topk": 8, "pad_token_id": None},
    "minimax": {"block_size": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bailing_hybrid": {"layer_group_size": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 5,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "num_hidden_layers": 6},
    "longcat_flash": {
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "num_layers": 2,
    },
    "llama4_text": {"intermediate_size_mlp": 96},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 8},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "modernbert-decoder": {"local_attention": 8},
    **{name: {"is_decoder": True} for name in ENCODERS},
    **dict.fromkeys(ENCODER_DECODERS, DECODER),
    "electra": {"is_decoder": True, "embedding_size": 48},
    "inkling_text": {"rel_extent": 8},
    "inkling2_text": {"unpadded_vocab_size": 96, "rel_extent": 8, "log_scaling_n_floor": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64},
    "openai-gpt": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64, "rotary_dim": 8},
    "xglm": {"d_model": 64, "attention_heads": 4, "num_layers": 4, "ffn_dim": 96},
    "ctrl": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 64, "dff": 96},
    "axk2": INDEXED,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "dots3_note_text": INDEXED | {"per_layer_config": {}, "layer_types": ["indexed_attention", "sliding_attention"] * 2},
    "kimi_linear": {
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_hidden_layers": 2,  # 64 x 64 steps in Python a layer
        "layer_types": ["linear_attention", "full_attention"],
    },
    "xlstm": {"num_blocks": 2, "num_heads": 4},
    "zamba": {"n_mamba_heads": 2, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "roc_bert": {"is_decoder": True, "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 32, "shape_embed_dim": 16},
    "rembert": {"is_decoder": True, "input_embedding_size": 48, "output_embedding_size": 64},
    "xmod": {"is_decoder": True, "default_language": "en_XX", "adapter_reduction_factor": 2},
    "git": {"vision_config": VISION},
    "gemma3": {"text_config": "gemma3_text", "vision_config": VISION | {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": "gemma4_text",
        "vision_config": VISION | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
    },
    "gemma4_unified": {
        "text_config": "gemma4_unified_text",
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
    },
    "emu3": {"text_config": "emu3_text_model", "vq_config": {"base_channels": 32, "channel_multiplier": [1], "hidden_size": 32}},
    "mllama": {"text_config": "mllama_text_model"},
    "fuyu": {"text_config": "persimmon"},
    "got_ocr2": {"text_config": "qwen2", "vision_config": VISION},
    "moss_transcribe_diarize": {"text_config": "qwen3", "audio_config": AUDIO | {"max_source_positions": 16}},
    "moshi": {"ffn_dim": 96, "num_codebooks": 2},
    "phi4_multimodal": {"vision_config": VISION, "audio_config": SPOKEN | {"depthwise_separable_out_channel": 32}},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "logit_scale": 0.25,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "inkling2_loop_text": {
        "unpadded_vocab_size": 96,
        "rel_extent": 8,
        "log_scaling_n_floor": 8,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_gate_rank": 8,
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "pad_token_id": None,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "split_ngram_parts": 1,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "blt": {
        "vocab_size": 96,
        "hidden_size": 64,
        "encoder_hash_byte_group_vocab": 32,
        "encoder_hash_byte_group_size": [3, 4],
        "patcher_config": BYTES | {"sliding_window": 8},
        "encoder_config": BYTES | {"hidden_size_global": 64, "sliding_window": 8},
        "decoder_config": BYTES | {"hidden_size_global": 64},
        "global_config": BYTES,
    },
    # refused
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96, "d_head": 16},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "causal": True},
    "cpmant": {"dim_ff": 96, "dim_head": 16, "prompt_length": 4, "position_bias_num_buckets": 32, "position_bias_max_distance": 64},
    "gemma4_assistant": {"text_config": "gemma4_text", "backbone_hidden_size": 64},
    "gemma4_unified_assistant": {"text_config": "gemma4_unified_text", "backbone_hidden_size": 64},
    "prophetnet": {
        "is_decoder": True,
        "is_encoder_decoder": False,
        "add_cross_attention": False,
        "num_decoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
        "num_encoder_layers": 1,
        "num_encoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [32, 32],
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh"],
        "feed_forward_size": 96,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
}
DRAFTS = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4, "num_hidden_layers": 4}
FAMILIES = """
llama mistral ministral ministral3 qwen2 qwen3 qwen2_moe qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text mixtral gemma gemma2
gemma3_text gemma3n_text gemma4_text phi phi3 phimoe olmo olmo2 olmo3 olmoe olmo_hybrid gpt2 gpt_neox gpt_oss gptj mpt deepseek_v2
deepseek_v3 deepseek_v32 deepseek_v4 glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa smollm3 granite granitemoe granitemoehybrid cohere
cohere2 starcoder2 opt bloom falcon stablelm ernie4_5 ernie4_5_moe hunyuan_v1_dense hunyuan_v1_moe minimax minimax_m2 lfm2 lfm2_moe
exaone4 seed_oss dots1 flex_olmo longcat_flash mamba mamba2 bamba jamba falcon_h1 nemotron_h nemotron arcee apertus vaultgemma llama4_text
helium zamba2 recurrent_gemma afmoe solar_open youtu bitnet diffllama doge jetmoe cwm mimo_v2_flash hy_v3 hy_v4 persimmon nanochat jais2
exaone_moe minicpm3 hyperclovax laguna mellum bailing_hybrid kolibri1 flint falcon_mamba axk1 cohere2_moe granite_swa granitemoe_swa
granitemoeshared iquestcoder lfm3 minimax_m3_vl_text hrm_text inkling_text gpt_neox_japanese biogpt modernbert-decoder bert roberta
electra dory exaone internlm3 lara_mini beam aria_text apertus1p5_text inkling2_text gpt_neo gpt_bigcode openai-gpt ctrl codegen xglm
roformer sarvam_moe sarvam_mla kimi_linear axk2 zaya dots3_note_text qwen4_exp_text inkling2_loop_text cohere_compass_text zamba dbrx
xlstm rwkv blt gemma4_unified_text gemma3 gemma4 gemma4_unified emu3 mllama fuyu got_ocr2 moss_transcribe_diarize moshi phi4_multimodal
git bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr whisper bert-generation big_bird camembert
data2vec-text ernie megatron-bert rembert roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod
""".split()  # noqa: SIM905
REFUSED = {  # families that transformers registers as causal language models, and why they are refused
    "xlnet": "XLNet attends to later tokens: it predicts the tokens of a row in any order",
    "cpmant": "CPM-Ant attends to later tokens of its context",
    "xlm": "XLM takes each pad token in a row for one that the end of the row lacks, so a sampled token changes what is read after it",
    "prophetnet": "ProphetNet predicts several tokens at each position, from several hidden states",
    "reformer": "Reformer fills rows up to the sizes of its chunks and attends to tokens that random hashes choose",
    "gemma4_assistant": "a draft model that reads the hidden states, keys and values of Gemma 4, not tokens",
    "gemma4_unified_assistant": "a draft model that reads the hidden states, keys and values of Gemma 4, not tokens",
}
NOT_OPENED = {  # those of which AutoModelForCausalLM opens no tiny model here, and why
    "musicgen": "sound in several codebooks; AutoModelForCausalLM of transformers does not open it",
    "musicgen_melody": "sound in several codebooks; AutoModelForCausalLM of transformers does not open it",
    "gemma3n": "needs the package timm for its pictures, which was not installed; its language model is gemma3n_text",
}
