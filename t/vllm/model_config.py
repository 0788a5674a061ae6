"""Prints the config.json of a Qwen3 of random weights: model_config.py HIDDEN LAYERS HEADS KV INTERMEDIATE."""

import json
import sys

hidden, layers, heads, kv_heads, intermediate = map(int, sys.argv[1:])
print(
    json.dumps(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 151936,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        indent=2,
    )
)
