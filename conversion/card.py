"""The model card of a retrofit: huggingface_hub's card, the exact command, what changed, what was not measured."""

from pathlib import Path

import transformers
from huggingface_hub import ModelCard, ModelCardData

from .hub import is_hub_id
from .plan import Plan

TOP = """---
{{ card_data }}
---

# {{ title }}

"""
KVM = """{{ source }} with Key-Value Means (KVM, [arXiv 2605.09877](https://arxiv.org/abs/2605.09877)): {{ converted }} of
{{ layers }} attention layers ({{ layer_list }}) keep a window of {{ window }} tokens, which moves by {{ chunk }}, and a
compressed state of {{ budget }} instead of every key and value. {% if healing %}The weights were **healed**: trained for a
short while to do what the source does (below).{% else %}The weights are those of the source; **nothing was
trained**. Within the first {{ window }} tokens the model computes what the source computes; beyond, expect a loss between
a sliding window's and full attention's.{% endif %}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "{{ path }}"{% if path == title %}  # this folder{% endif %}
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

"""
MAGLEV = """{% if healing %}{{ source }} as a Maglev model ([arXiv 2608.02870](https://arxiv.org/abs/2608.02870)): a decoder with a
sliding window of {{ window }} tokens in each of its {{ layers }} layers, and a memory of what lies further back. The weights
were **healed**: trained for a short while to do what the source does (below).
{%- else %}{{ source }}, prepared for training as a Maglev model ([arXiv 2608.02870](https://arxiv.org/abs/2608.02870)), and **not
trained yet**. Until it is, its memory does nothing: the decoder is the source with a sliding window of {{ window }} tokens
in each of its {{ layers }} layers, and whatever lies further back is lost on it. Within the first {{ window }} tokens it
computes what the source computes.
{%- endif %}

Beside the decoder, this folder has what training needs. Prefiller: {{ prefiller }}.

## Train it{% if healing %} further{% else %}

`retrofit heal` trains it for a short while to do what the source does.{% endif %}

`MaglevTrainer` is in the package `kvm-maglev-hf`; transformers' `Trainer` does the same and logs less.

```python
from maglev_hf import GrowingSweeps, MaglevTrainer
from transformers import AutoModelForPreTraining, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

path = "{{ path }}"{% if path == title %}  # this folder{% endif %}
model = AutoModelForPreTraining.from_pretrained(path, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(path)
MaglevTrainer(
    model=model,
    args=TrainingArguments("training"),
    train_dataset=dataset,  # rows of `input_ids`; the collator pads them, and makes the labels
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[GrowingSweeps(12)],  # passes over the decoder's own memories, without which it learns to read and not to keep
).train()
```

How many sweeps, and which `consistency_weight` (here {{ weight }}), suits a model of this size was not measured.
`MaglevTrainer.evaluate()` gives the loss of the deployed decoder.

## Use it

{% if not healing %}Once trained, {% endif %}`export_decoder` writes what is deployed, without the prefiller, and code to load it with:

```python
model.export_decoder("deployed")
tokenizer.save_pretrained("deployed")
```

`AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)` reads the decoder of this folder too. Its cache holds
{{ cache }}, however long the text.

"""
HEALED = """{% if healing %}## How it was healed

{{ healing.steps }}, {{ healing.seen }} tokens in pieces of {{ healing.length }}. Trained: {{ healing.trained }}. The loss is
the divergence of the next token's distribution from that of the source with full attention{% if healing.cross_entropy %},
and {{ healing.cross_entropy }} times the cross-entropy beyond the window{% endif %}{% if healing.consistency_weight %}, and
{{ healing.consistency_weight }} times the distance between memories and the prefiller's targets, which the decoder reads in training,
with up to {{ healing.sweeps }} further passes over its own memories{% endif %}. Text: {{ healing.texts }}.

| on {{ healing.held_out }} of this text that were not trained on, beyond the window | before | after | source |
|---|---|---|---|
| loss | {{ "%.4f"|format(healing.before.loss) }} | {{ "%.4f"|format(healing.after.loss) }} | {{ "%.4f"|format(healing.after.teacher_loss) }} |
| divergence from the source | {{ "%.4f"|format(healing.before.divergence) }} | {{ "%.4f"|format(healing.after.divergence) }} | 0 |

{% if healing.consistency_weight %}The decoder is measured as it is deployed, reading its own memories. {% endif -%}
`heal.json` has every step, `heal.png` the curves. Within the window too the model is no longer exactly the source.

{% endif %}"""
MADE = """The code is in this folder. It was written with transformers {{ transformers }}, and needs 5.17 to 5.24.

## How it was made

```
{{ command }}
```

| context | cache with full attention | cache of this model |
|---|---|---|
{{ cache_table }}

Bytes per sequence in {{ dtype }}, by the formula of the format.

"""
MEASURED, NOT_MEASURED = "## Measured\n\n", "## Not measured\n\nQuality on any benchmark."
MEASURE_KVM = """ `retrofit verify` measures loss over position, recall and bytes against the source, on your own
text; do so before relying on this model.
"""
MEASURE_MAGLEV = " Evaluate before and after training, and compare with the source on text longer than the window.\n"
# Tags and template by the target's `model_type`.
CARDS = {
    "kvm": (["kvm", "key-value-means", "compressed-kv-cache"], TOP + KVM + HEALED + MADE + NOT_MEASURED + MEASURE_KVM),
    "maglev": (["maglev", "sliding-recurrent-memory"], TOP + MAGLEV + HEALED + MADE + NOT_MEASURED + MEASURE_MAGLEV),
}


def write_card(plan: Plan, folder: Path, command: str, healing: dict | None = None, repo: str | None = None) -> None:
    """Writes README.md. Licence, languages and tags of the source's own card are carried over.

    Args:
        command: or several, one a line.
        healing: what the section on healing says; None for a model that was not.
        repo: hub id that the folder will be pushed to.
    """
    tags, template = CARDS[plan.config.model_type]
    inherited = _source_metadata(plan.source.folder)
    from_hub = not Path(plan.source.label).exists() and is_hub_id(plan.source.label)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=plan.source.label if from_hub else _hub_ids(inherited.get("base_model")),
        license=inherited.get("license"),
        license_name=inherited.get("license_name"),
        license_link=inherited.get("license_link"),
        language=inherited.get("language"),
        tags=[*tags, *(inherited.get("tags") or [])],
        datasets=(healing or {}).get("datasets") or None,
    )
    label = plan.source.label if from_hub else Path(plan.source.label).name
    title = folder.name.removesuffix(".incomplete")
    card = ModelCard.from_template(
        data,
        template_str=template,
        title=title,
        path=repo or title,
        source=f"[{label}](https://huggingface.co/{label})" if from_hub else label,
        layers=plan.config.num_hidden_layers,
        transformers=transformers.__version__,
        command=command,
        healing=healing,
        cache_table="\n".join(
            f"| {length} | {before / 2**20:.1f} MiB | {after / 2**20:.1f} MiB |"
            for length, before, after in plan.cache_table
        ),
        dtype=str(plan.dtype).removeprefix("torch."),
        **plan.card_facts,
    )
    (folder / "README.md").write_text(str(card).rstrip() + "\n", encoding="utf-8")


def command_of(folder: Path) -> list[str]:
    """The commands that made a folder of ours, by its card; none if that cannot be told."""
    _, found, rest = _read(folder).partition("## How it was made\n\n```\n")
    return rest.partition("\n```\n")[0].splitlines() if found else []


def add_measurements(folder: Path, measured: str) -> None:
    """Puts results into the card of a folder of ours, in the place of earlier ones; another's card stays as it is."""
    before, found, rest = _read(folder).partition(NOT_MEASURED)
    if found:
        before = before.partition(MEASURED)[0]
        card = f"{before}{MEASURED}{measured}\n\n{NOT_MEASURED}{rest.replace(MEASURE_KVM.rstrip(), '')}"
        (folder / "README.md").write_text(card, encoding="utf-8")


def _read(folder: Path) -> str:
    readme = folder / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


def _hub_ids(base_model) -> list[str] | None:
    """What a source's card names as its own base, without folders of its author's machine, which the hub would refuse."""
    named = [base_model] if isinstance(base_model, str) else base_model or []
    return [name for name in named if is_hub_id(name)] or None


def _source_metadata(folder: Path) -> dict:
    readme = folder / "README.md"
    if not readme.is_file():
        return {}
    try:
        return ModelCard.load(readme, ignore_metadata_errors=True).data.to_dict()
    except ValueError:  # a README without readable metadata says nothing about licence or language
        return {}
