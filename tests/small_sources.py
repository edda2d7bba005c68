"""Small sources of every family, with tokenizer files, several eos ids and everything else that must survive."""

import json

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = ["<unk>", "<s>", "</s>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz0123456789.?,"]
SHARED = dict(
    vocab_size=len(WORDS) + 1,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
    tie_word_embeddings=False,
)
FAMILIES = {
    "llama": dict(model_type="llama"),
    "llama-bias-tied": dict(model_type="llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": dict(model_type="mistral", sliding_window=None, head_dim=8),
    "qwen2": dict(model_type="qwen2"),
    "qwen2-sliding": dict(model_type="qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "smollm3": dict(model_type="smollm3", no_rope_layers=[1, 0, 1]),
    "phi3": dict(model_type="phi3", sliding_window=None),
    "phi3-partial": dict(
        model_type="phi3",
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
}


def make_source(folder, family="llama", shard_size="5GB", **fields):
    """A random causal LM of `family` saved to `folder` as people publish them."""
    settings = {**SHARED, **FAMILIES[family], **fields}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.7, 1.4)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 3], bos_token_id=1, temperature=0.6)
    model.generation_config.do_sample = True
    model.save_pretrained(folder, max_shard_size=shard_size)

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_tokens(["<tool>"])
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(folder)
    (folder / "LICENSE").write_text("be kind\n")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n")
    (folder / "notes.bin").write_bytes(b"weights of another format")
    return folder


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
