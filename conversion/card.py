"""The model card of a retrofit: huggingface_hub's card, the exact command, what changed, what was not measured."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from .plan import PLANNED_LENGTHS, RetrofitPlan, cache_bytes

CARD = """---
{{ card_data }}
---

# {{ title }}

[{{ source }}]({{ source_link }}) with Key-Value Means (KVM, [arXiv 2605.09877](https://arxiv.org/abs/2605.09877)):
{{ converted }} of {{ layers }} attention layers keep a window of {{ window }} tokens and a compressed state instead of
every key and value. The weights are those of the source; **nothing was trained**. Within the first {{ window }} tokens
the model computes what the source computes; beyond, expect a loss between a sliding window's and full attention's.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{{ title }}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{{ title }}")
```

## How it was made

```
{{ command }}
```

Converted layers: {{ layer_list }}.

| context | cache of the source | cache of this model |
|---|---|---|
{{ cache_table }}

Bytes per sequence in {{ dtype }}, by the formula of the format; `retrofit verify` measures loss, recall and bytes.

## Not measured

Quality on any benchmark. Run `retrofit verify` with your own text before relying on this model.
"""


def write_card(plan: RetrofitPlan, folder: Path, command: str) -> None:
    """Writes README.md. Licence, languages and tags of the source's own card are carried over."""
    inherited = _source_metadata(plan.source.folder)
    is_hub_id = not Path(plan.source.label).exists() and "/" in plan.source.label
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=plan.source.label if is_hub_id else inherited.get("base_model"),
        license=inherited.get("license"),
        license_name=inherited.get("license_name"),
        license_link=inherited.get("license_link"),
        language=inherited.get("language"),
        tags=["kvm", "key-value-means", "compressed-kv-cache", *inherited.get("tags", [])],
    )
    lengths = [
        f"| {tokens} tokens | {cache_bytes(plan.full, tokens, plan.dtype) / 2**20:.1f} MiB | "
        f"{cache_bytes(plan.config, tokens, plan.dtype) / 2**20:.1f} MiB |"
        for tokens in PLANNED_LENGTHS
    ]
    card = ModelCard.from_template(
        data,
        template_str=CARD,
        title=folder.name.removesuffix(".incomplete"),
        source=plan.source.label,
        source_link=f"https://huggingface.co/{plan.source.label}" if is_hub_id else "#",
        converted=len(plan.converted),
        layers=plan.config.num_hidden_layers,
        window=plan.config.window_size,
        command=command,
        layer_list=", ".join(map(str, plan.converted)),
        cache_table="\n".join(lengths),
        dtype=str(plan.dtype).removeprefix("torch."),
    )
    card.save(folder / "README.md")


def _source_metadata(folder: Path) -> dict:
    readme = folder / "README.md"
    if not readme.is_file():
        return {}
    try:
        return ModelCard.load(readme, ignore_metadata_errors=True).data.to_dict()
    except ValueError:  # a README without readable metadata says nothing about licence or language
        return {}
