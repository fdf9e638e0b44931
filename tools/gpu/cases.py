"""The cases of each run, cheapest and most informative first.

A case is a command with a time limit. `--case` and the tables use its name. Its kind selects the
reader of its output (`read_output.READERS`) and its table.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

RUNS = {"correctness": 420, "speed": 420, "depth": 360}

RECIPE = "recipes/moh-llama3-8b.toml"
# The longest sequence of the recipe's model, and the same model for longer sequences.
LONGEST = 8192
LONG_MODEL = ["--set", "model.config=tools/gpu/long_config.json"]
# The settings that move the fewest bytes and recompute nothing. Weights are still updated in f32.
STATE = ["--set", "precision.gradients=bf16", "--set", "precision.moments=bf16",
         "--set", "memory.recompute=none"]
HEADS = {"dense": ["--dense"], "75%": ["--active", "0.75"],
         "50%": ["--active", "0.5", "--shared-heads", "8"]}
# The recipe's vocabulary, and LLaMA-3-8B's original one.
VOCABULARY, ORIGINAL_VOCABULARY = 160896, 128256

# Tests of whole modules, in order, with their limits. `hopper` is a path of attention. Modules that
# fail with this path are run again without it.
MODULES = ["adamw", "attention", "convert", "cross_entropy", "embedding", "key_value_append",
           "lengths", "qk_norm", "rms_norm", "rope", "router", "sampling", "swiglu", "tensor_parallel"]
WITH_ATTENTION = ["attention", "devices", "tensor_parallel"]
# Modules whose tests are separate cases.
HOPPER = ["attention_paths", "attention_stress"]
# The tests of these modules on a GPU, if the program cannot list them.
PATHS = ["every_path_of_dense_attention_agrees",
         "every_path_of_selected_heads_within_documents_agrees",
         "every_path_of_a_whole_moh_attention_agrees",
         "every_path_leaves_heads_without_rows_alone",
         "every_path_of_keys_that_no_row_of_their_head_sees_agrees",
         "every_path_of_several_packed_blocks_agrees",
         "every_path_of_queries_over_a_cache_agrees",
         "gpus_of_little_shared_memory_keep_their_tensor_cores",
         "what_a_path_does_not_take_falls_to_the_next",
         "sums_have_the_same_bits_in_every_run"]
STRESS = ["dense", "three_quarters_of_the_heads", "half_of_the_heads", "skewed_routing",
          "within_documents", "several_sequences", "heads_of_64"]
# The tests that compute-sanitizer runs: every path, with heads of 64 and of 128, selected.
SANITIZED = "attention_paths::every_path_of_selected_heads_within_documents_agrees"
# The test of heads of 64, the less common size.
SMALL_HEADS = "attention_stress::heads_of_64"
# compute-sanitizer's filter of kernels with this part in their names.
ONLY_HOPPER = ["--kernel-regex", "kns=hopper"]


@dataclass(frozen=True)
class Case:
    """A command, and the reader of its output."""

    name: str
    kind: str
    # Seconds for the command itself. The run's deadline may leave fewer.
    seconds: float
    command: list
    variables: dict = field(default_factory=dict)
    # The case is a retry: skipped unless a case with a name that starts with one of these failed.
    unless_passed: tuple = ()
    # The directory to which the command writes, if any.
    folder: str = ""
    # The number of tests that the command must run. With None, any number but 0.
    num_tests: int | None = None


def of(run, programs, scratch, tests):
    """Returns the cases of a run. `tests` are the names that `test-kernels` lists, or none."""
    if run == "correctness":
        return correctness(programs, tests)
    return {"speed": speed, "depth": depth}[run](programs, scratch)


def python(script, *options):
    return [sys.executable, Path("tools") / script, *options]


def correctness(programs, tests):
    kernels = programs / "test-kernels"

    def alone(module, seconds):
        """Returns a case for each test of a module, dense attention first and heads of 64 last."""
        names = [name for name in tests if name.startswith(f"{module}::")]
        names.sort(key=lambda name: (name == SMALL_HEADS, "dense" not in name))
        return [Case(name.replace("::", "/"), "tests", seconds,
                     [kernels, "--exact", name, "--nocapture", "--test-threads", "1"],
                     num_tests=1)
                for name in names]

    def together(module, seconds):
        return Case(module, "tests", seconds,
                    [kernels, f"{module}::", "--nocapture", "--test-threads", "4"])

    cases = [Case("sass", "sass", 60, python("gpu/sass.py", kernels))]
    listed = {name.split("::")[0] for name in tests if "::" in name}
    for module, names in zip(HOPPER, [PATHS, STRESS]):
        if module not in listed:
            tests = [*tests, *(f"{module}::{name}" for name in names)]
    cases += alone("attention_paths", 60)
    cases += alone("attention_stress", 120)
    cases.append(together("linear", 90))
    cases.append(Case("devices", "tests", 90,
                      [programs / "test-devices", "devices::", "--include-ignored", "--nocapture", "--test-threads", "4"]))
    known = {"linear", *MODULES, *HOPPER}
    # Modules that are not in this list.
    cases += [together(module, 60) for module in [*MODULES, *sorted(listed - known)]]
    cases.append(Case("nccl", "tests", 60,
                      [programs / "test-nccl", "nccl", "--include-ignored", "--nocapture", "--test-threads", "1"]))
    return [turn for case in cases for turn in [case, *without_hopper(case)]]


def without_hopper(case):
    if case.name not in WITH_ATTENTION:
        return []
    return [Case(f"{case.name}/tiled", case.kind, case.seconds, case.command,
                 {"MOH_ATTENTION": "tiled"}, tuple(HOPPER))]


def bench(programs, *options):
    return [programs / "moh-bench", *options, "--device", "cuda"]


def attention(programs, length, batch=1, path="hopper", order=(), seconds=3, limit=45):
    shape = f"{length}x{batch}" if batch > 1 else f"{length}"
    name = "/".join(["attention", shape, "deterministic" if order else path])
    return Case(name, "attention", limit, bench(
        programs, "attention", "--length", length, "--batch", batch, "--dtype", "bf16",
        "--active", "1.0,0.75,0.5", "--seconds", seconds, *order, "--json"),
        {"MOH_ATTENTION": path})


def step(programs, heads, layers, name=None, length=8192, vocabulary=VOCABULARY, micro_batches=1,
         steps=3, limit=90, kind="step", more=()):
    return Case(name or f"{kind}/{layers}/{heads}", kind, limit, bench(
        programs, "step", "--recipe", RECIPE, "--stage", "moh", *STATE,
        *(LONG_MODEL if length > LONGEST else []),
        "--set", f"data.sequence_length={length}", "--set", f"model.vocab_size={vocabulary}",
        "--set", f"stage.moh.batch_tokens={length * micro_batches}", *HEADS[heads],
        "--layers", layers, "--steps", steps, "--warmup", 1, *more, "--json"))


def pytorch(name, seconds, *options):
    return Case(f"pytorch/{name}", "pytorch", seconds, python("peer/gpu.py", *options))


def speed(programs, _scratch):
    def attend(*shape, **options):
        return attention(programs, *shape, **options)

    def take(heads, layers, *more, **options):
        return step(programs, heads, layers, *more, **options)

    return [
        Case("limits", "limits", 45, bench(
            programs, "operators", "squared_norm", "--dtype", "bf16", "--seconds", 0.2, "--json")),
        attend(8192),
        attend(8192, order=["--deterministic"]),
        attend(8192, path="tiled"),
        take("dense", 4, limit=60),
        take("75%", 4, limit=60),
        # All 32 layers take about 110 GiB. On a GPU of 80 GB those cases fail, and these cases remain.
        take("75%", 16),
        take("75%", 32, limit=120),
        take("dense", 32, limit=120),
        take("50%", 32, limit=120),
        take("75%", 32, "step/32/75%/16-micro-batches", micro_batches=16, steps=1, limit=120),
        Case("operators", "operators", 90, bench(
            programs, "operators", "--dtype", "bf16", "--seconds", 0.1, "--json")),
        take("dense", 16),
        attend(2048, 4, seconds=2),
        attend(16384, seconds=2),
        attend(32768, seconds=2),
        attend(65536, seconds=2, limit=60),
        *(take(heads, 8, f"curve/{length}/8/{heads}", length=length, vocabulary=ORIGINAL_VOCABULARY)
          for length in [16384, 32768] for heads in HEADS),
        pytorch("attention/8192", 120, "attention", "--length", "8192", "--batch", "1",
                "--seconds", "30"),
        # PyTorch's step has the original vocabulary.
        take("dense", 16, "step/16/dense/128256", vocabulary=ORIGINAL_VOCABULARY),
        pytorch("step/16", 150, "step", "--layers", "16", "--length", "8192"),
        take("dense", 32, "step/32/dense/128256", vocabulary=ORIGINAL_VOCABULARY, limit=120),
        # If memory runs out, it recomputes every block, in a second row.
        pytorch("step/32", 180, "step", "--layers", "32", "--length", "8192"),
    ]


# Sections, because ncu defines the names of their metrics. All of their rows, because the reasons
# of stalls and the pipes are in charts.
SECTIONS = ["SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "WarpStateStats",
            "LaunchStats"]
# ncu fails the whole command on a name that it does not know, so these are separate.
METRICS = ["gpu__time_duration.sum", "lts__t_sector_hit_rate.pct", "dram__bytes_read.sum",
           "dram__bytes_write.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed",
           "sm__throughput.avg.pct_of_peak_sustained_elapsed",
           "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
           "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active"]


def ncu(programs, kernel, *metrics):
    """Returns cases of the first launches of a kernel: of dense attention, then of 75% of the heads."""
    name = f"ncu/{kernel}" + ("/metrics" if "--metrics" in metrics else "")
    return Case(name, "ncu", 75, [
        "ncu", "--clock-control", "none", "--kernel-name", f"regex:hopper_{kernel}_d128",
        "--launch-count", "2", *metrics, "--csv", "--page", "details", "--print-details", "all",
        *bench(programs, "attention", "--length", "8192", "--dtype", "bf16", "--active", "0.75",
               "--seconds", "0.01")], {"MOH_ATTENTION": "hopper"})


def depth(programs, scratch):
    def sanitize(tool, *options):
        # The program's other kernels would take most of the time.
        return Case(f"sanitizer/{tool}", "sanitizer", 75, [
            "compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--print-limit", "20",
            *options, programs / "test-kernels", "--exact", SANITIZED, "--nocapture",
            "--test-threads", "1"], num_tests=1)

    def quickstart(name, device, dtype):
        folder = str(Path(scratch) / name)
        return Case(f"quickstart/{name}", "quickstart", 120, [
            programs / "moh-train", "--recipe", "recipes/quickstart.toml",
            "--set", f"run.device={device}", "--set", f"run.dtype={dtype}",
            "--set", f"run.dir={folder}"], folder=folder)

    sections = [word for section in SECTIONS for word in ["--section", section]]
    return [
        sanitize("memcheck", *ONLY_HOPPER),
        sanitize("synccheck", *ONLY_HOPPER),
        sanitize("racecheck", *ONLY_HOPPER),
        ncu(programs, "forward", *sections),
        ncu(programs, "backward", *sections),
        # The GPU's time in another step, by kernel.
        step(programs, "75%", 32, steps=1, limit=120, kind="kernels", more=["--kernels"]),
        ncu(programs, "forward", "--metrics", ",".join(METRICS)),
        ncu(programs, "backward", "--metrics", ",".join(METRICS)),
        pytorch("flash/8192", 150, "flash", "--length", "8192", "--batch", "1",
                "--seconds", "30"),
        quickstart("gpu-bf16", "cuda", "bf16"),
        quickstart("cpu-f32", "cpu", "f32"),
        pytorch("limits", 60, "limits"),
        # For all kernels: a kernel reads another's output.
        sanitize("initcheck"),
    ]
