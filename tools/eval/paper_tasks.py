"""The benchmarks of MoH-LLaMA3-8B in the MoH paper: tasks, shots and published scores.

Scores and shots are those of the table "Comparisons between MoH-LLaMA3-8B and LLaMA3-8B" of arXiv 2410.11842
(Table 5 in the first version, Table 4 in ICML's), in percent. The paper names lm-evaluation-harness, "accuracy"
for most tasks, and exact match for GSM8K and Natural Questions. It does not say which accuracy of the harness:
here it is acc_norm where choices differ in length and the harness has it, as on the Open LLM Leaderboard, which
the paper names for HellaSwag and ARC-C.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """A column of the paper's table."""

    name: str
    # The harness's name of the task or group.
    task: str
    shots: int
    # The harness's name of the metric, with its filter.
    metric: str
    llama3: float
    moh_llama3: float


PAPER = (
    Benchmark("MMLU", "mmlu", 5, "acc,none", 65.2, 65.8),
    Benchmark("CEVAL", "ceval-valid", 5, "acc,none", 52.3, 61.5),
    Benchmark("CMMLU", "cmmlu", 5, "acc,none", 50.7, 64.4),
    Benchmark("GSM8K", "gsm8k", 8, "exact_match,strict-match", 49.5, 56.9),
    # Others have measured 43.9 for LLaMA3-8B by this metric, so the paper probably uses another metric.
    Benchmark("TruthfulQA", "truthfulqa_mc2", 0, "acc,none", 35.4, 44.0),
    Benchmark("HellaSwag", "hellaswag", 10, "acc_norm,none", 81.9, 80.1),
    Benchmark("LogiQA", "logiqa", 0, "acc_norm,none", 30.0, 30.3),
    Benchmark("BoolQ", "boolq", 32, "acc,none", 83.9, 84.0),
    Benchmark("LAMBADA", "lambada_openai", 0, "acc,none", 75.5, 76.4),
    Benchmark("SciQ", "sciq", 0, "acc_norm,none", 94.0, 92.2),
    Benchmark("PIQA", "piqa", 0, "acc_norm,none", 81.0, 78.8),
    Benchmark("WinoGrande", "winogrande", 0, "acc,none", 72.5, 72.9),
    Benchmark("NQ", "nq_open", 32, "exact_match,remove_whitespace", 31.5, 28.3),
    Benchmark("ARC-C", "arc_challenge", 25, "acc_norm,none", 59.0, 60.1),
)

# The paper's averages over the fourteen.
AVERAGE = (61.6, 64.0)


def table(scores):
    """Returns the lines of a table of `scores`, in percent by name, next to the paper's."""
    header = f"{'':<12}{'shots':>6}  {'metric':<12}{'this model':>11}{'LLaMA3-8B':>11}{'MoH-LLaMA3-8B':>15}"
    lines = [header]
    for row in PAPER:
        score = scores.get(row.name)
        shown = "-" if score is None else f"{score:.1f}"
        metric = row.metric.split(",")[0]
        lines.append(
            f"{row.name:<12}{row.shots:>6}  {metric:<12}{shown:>11}{row.llama3:>11.1f}{row.moh_llama3:>15.1f}"
        )
    if all(row.name in scores for row in PAPER):
        average = f"{sum(scores[row.name] for row in PAPER) / len(PAPER):.1f}"
    else:
        average = "-"
    lines.append(f"{'average':<12}{'':>6}  {'':<12}{average:>11}{AVERAGE[0]:>11.1f}{AVERAGE[1]:>15.1f}")
    return lines
