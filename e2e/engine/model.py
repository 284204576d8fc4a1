"""Make a random-weight model and a tokenizer in which one printable ASCII character is one token.

No model hub is needed, every output re-encodes to the same tokens, and a context's length is exact. Run by the engine's
interpreter (it needs torch and transformers): ``python model.py DIRECTORY [SHAPE]``.

The shape ``demo`` is chosen for what it shows. Attention is narrow (4 heads of 64), the MLP wide, so that the share of
prefill that grows with new tokens only, as in a large model, outweighs the quadratic part. The output layer is scaled
up because random weights give near-ties, in which float noise flips a greedy token (1 in about 300 with bfloat16).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SEED = 7
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 16384}
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8} | GROUPED,
    # For tests with many engines.
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2} | GROUPED,
    # A DeepSeek-V2, whose ranks all hold the same compressed KV; vLLM's CPU kernel takes no other LoRA and RoPE sizes.
    "mla": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "max_position_embeddings": 4096,
    },
}
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def byte_symbols() -> dict[int, str]:
    """The byte-level BPE alphabet: a printable character for each byte (the mapping that GPT-2's tokenizer defined)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def make(directory: str, shape: str = "demo") -> int:
    """Write model, tokenizer and chat template into ``directory``; returns the number of parameters.

    The shape is one of ``SHAPES``.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    symbols = byte_symbols()
    vocabulary = {symbols[b]: i for i, b in enumerate([10, *range(32, 127)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)

    size = len(fast)
    common = {
        "vocab_size": size,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": size - 2,
        "pad_token_id": size - 1,
        "initializer_range": 0.05,
    }
    torch.manual_seed(SEED)
    model: Any
    if shape == "mla":
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**SHAPES[shape], **common)).float()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], **common)).float()
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)
        model.lm_head.weight[size - len(SPECIALS) :] = 0
    model.save_pretrained(directory)
    for file in Path(directory).iterdir():
        file.chmod(0o644)  # safetensors writes 0600; engine pods need not run as root
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    print(f"{make(*sys.argv[1:3]) / 1e6:.1f} M parameters in {sys.argv[1]}")
