"""State rows over context length for the three budgets of the paper's runs, from our own budget function: our reading
of the paper's Figure 2.

    python benchmarks/state_rows.py [FOLDER]

writes `state-rows.json` and `state-rows.png` (to `benchmarks/results/state-rows/` by default). No model is run.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from kvm_hf import GPTAlphaConfig
from kvm_hf.state_kvm import StateRule, rows_after

RUNS = {
    "kvm-256": "fixed, 256 rows",
    "kvm-sqrt": "square root, 16 * sqrt(tokens), at least 256",
    "kvm-saturation-hybrid": "saturation, 1024 * tokens / (1024 + tokens)",
}
LENGTHS = sorted({1} | {int(2 ** (step / 4)) for step in range(20, 69)})  # to 128k tokens


def state_rows() -> dict[str, list[int]]:
    """State rows of one layer after each of `LENGTHS` tokens, per run."""
    rules = {run: StateRule.from_config(GPTAlphaConfig.preset(run)) for run in RUNS}
    return {run: [rows_after(rule, tokens) for tokens in LENGTHS] for run, rule in rules.items()}


def main(folder: Path) -> None:
    rows, window = state_rows(), GPTAlphaConfig.preset("kvm-sqrt").window_size
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"tokens": LENGTHS, "rows": rows, "window": window, "command": "python benchmarks/state_rows.py"}
    (folder / "state-rows.json").write_text(json.dumps(facts, indent=1) + "\n")

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(LENGTHS, LENGTHS, color="0.6", linestyle="--", label="full attention: a row per token")
    for run, label in RUNS.items():
        axes.plot(LENGTHS, [max(count, 0.9) for count in rows[run]], drawstyle="steps-post", label=label)
    axes.axvline(window, color="0.85", zorder=0)
    axes.annotate(f"window, {window} tokens", (window, 1.2), rotation=90, fontsize=8, color="0.4", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="state rows per layer", ylim=(1, None))
    axes.set_title("What a KVM layer keeps beside its window")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(folder / "state-rows.png", dpi=150)
    print(f"{folder / 'state-rows.json'}\n{folder / 'state-rows.png'}")


if __name__ == "__main__":
    default = Path(__file__).parent / "results" / "state-rows"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
