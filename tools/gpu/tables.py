"""The tables of a GPU's figures, in markdown, and one line per case.

Each table is made from the rows of a single kind. A row without the table's fields is named
below the table, and does not affect the other rows.
"""

import json
import signal

# Maximum characters of a text in a table.
MAX_WORDS = 160


def document(files):
    """Returns all tables. `files` maps a run's name to its headers and its rows by name."""
    lines = ["# Figures of a GPU", ""]
    rows = {}
    for run, (headers, found) in files.items():
        lines += measured(run, headers, found)
        for name, row in found.items():
            rows.setdefault(row.get("kind"), {})[name] = row
    for title, kind, header, make in TABLES:
        lines += table(title, header, {name: row for name, row in rows.get(kind, {}).items()
                                       if row.get("result")}, make)
    return "\n".join(lines) + "\n"


def measured(run, headers, rows):
    """Returns the machine of a run, and its cases that did not pass."""
    if not headers:
        return []
    lines = [f"## {run}", ""]
    for index, header in enumerate(headers):
        names = [name for name, row in rows.items() if row["header"] == index]
        if not names:
            continue
        passed = sum(rows[name]["status"] == "passed" for name in names)
        path = f", MOH_ATTENTION={header['path']}" if header.get("path") else ""
        which = "" if len(names) == len(rows) else " (" + ", ".join(names) + ")"
        lines += [f"Measured {header.get('date')} on {header.get('gpu')}, commit "
                  f"{header.get('commit')}{path}: {passed} of {len(names)} cases passed{which}.",
                  ""]
    broken = {name: row for name, row in rows.items() if row["status"] != "passed"}
    return lines + table("Not passed", ["case", "status", "code", "seconds", "why"], broken,
                         lambda row: [[row["status"], code(row), row["seconds"], reason(row)]])


def table(title, header, rows, make):
    """Returns a table. `make` returns the cells of a row of the file, after its name."""
    if not rows:
        return []
    lines, left_out = [], []
    for name, row in rows.items():
        try:
            lines += [[name, *cells] for cells in make(row)]
        except Exception as error:  # A row must not affect the others.
            left_out.append(f"{name}: cannot be shown: {type(error).__name__}: {error}")
    if not lines and not left_out:
        return []
    shown = [header, ["---"] * len(header), *lines]
    return [f"### {title}", "", *("| " + " | ".join(map(cell, line)) + " |" for line in shown),
            "", *(f"{line}\n" for line in left_out)]


def cell(value):
    return str(value).replace("|", "/").replace("\n", " ").strip() or "-"


def code(row):
    """Returns the exit code. The code of a signal includes its name."""
    number = row.get("code")
    if number is None:
        return "-"
    if number >= 0:
        return str(number)
    try:
        return f"{number} ({signal.Signals(-number).name})"
    except ValueError:
        return str(number)


def reason(row):
    """Returns why a case did not pass: the recorded reason, or the last line of output."""
    if row.get("why"):
        return row["why"].strip().splitlines()[-1][:MAX_WORDS]
    for stream in ["stderr_end", "stdout_end"]:
        lines = [line for line in row.get(stream, "").splitlines() if line.strip()]
        if lines:
            return lines[-1].strip()[:MAX_WORDS]
    return "printed nothing"


def milliseconds(seconds, places=3):
    return f"{seconds * 1e3:.{places}f}"


def decimal(value):
    return "-" if value is None else f"{value:.3f}"


def tera(rate):
    return f"{rate / 1e12:.0f}"


def tests(row):
    found = row["result"]
    errors = list(found["largest_relative_errors"].items())[:8]
    return [[found["passed"], found["failed"],
             ", ".join(f"{what} {error:.1e}" for what, error in errors),
             "; ".join([*found.get("failed_tests", []), *found.get("skipped", [])])[:MAX_WORDS]]]


OPERATIONS = ["instructions", "USETMAXREG", "HGMMA", "LDL", "STL", "UTMALDG", "UBLKCP", "UBLKRED"]


def sass(row):
    return [[kernel, *(counts[operation] for operation in OPERATIONS)]
            for kernel, counts in row["result"]["kernels"].items()]


def limits(row):
    machine = row["result"]["machine"]
    return [[machine["device"], tera(machine["f32_matmul_flops_per_second"]),
             tera(machine["bf16_matmul_flops_per_second"]),
             f"{machine['copy_bytes_per_second'] / 1e9:,.0f}"]]


def attention(row):
    shape = row["result"]["shape"]
    return [[f"{shape['batch']} x {shape['length']}", found.get("path") or "-", heads(found),
             milliseconds(found["forward"]["seconds"]["median"]),
             milliseconds(found["backward"]["seconds"]["median"]),
             tera(found["forward"]["flops_per_second"]),
             tera(found["backward"]["flops_per_second"]),
             f"{found['forward']['ratio_to_dense']:.3f}",
             f"{found['backward']['ratio_to_dense']:.3f}",
             f"{found['both']['ratio_to_dense']:.3f}",
             milliseconds(found["route"]["seconds"]["median"])]
            for found in row["result"]["cases"]]


def heads(found):
    return "dense" if found["attention"] == "dense" else f"{found['active']:.0%}"


def step(row):
    found = row["result"]
    model, plan, memory = found["model"], found["step"], found.get("memory")
    return [[model["layers"],
             f"{plan['micro_batches']} x {plan['micro_batch']} x {plan['sequence_length']}",
             model["vocab_size"], f"{model['active_heads']} of {model['heads']}",
             f"{found['tokens_per_second']['median']:,.0f}",
             milliseconds(found["seconds"]["median"], 1),
             tera(found["flops_per_second"]["median"]), f"{found['share_of_bf16_matmul']:.1%}",
             f"{memory['peak_bytes'] / 2**30:.1f}" if memory else "-",
             f"{decimal(found['loss']['first'])}, {decimal(found['loss']['last'])}"]]


# Share of the GPU's time in a step: the table sums up the kernels below it.
MIN_SHARE = 0.001


def kernels(row):
    """Returns a step's time by kernel, most first."""
    found = row["result"]["gpu_time"]
    elapsed = found["elapsed_seconds"]

    def line(name, launches, seconds):
        return [name[:MAX_WORDS], launches, milliseconds(seconds, 2), f"{seconds / elapsed:.1%}"]

    shown = [kernel for kernel in found["kernels"] if kernel["seconds"] >= MIN_SHARE * elapsed]
    rest = [kernel for kernel in found["kernels"] if kernel not in shown]
    return [*(line(kernel["name"], kernel["launches"], kernel["seconds"]) for kernel in shown),
            line(f"{len(rest)} others", sum(kernel["launches"] for kernel in rest),
                 sum(kernel["seconds"] for kernel in rest)),
            line("nothing runs", "", found["idle_seconds"]),
            line("the step", found["launches"], elapsed)]


def operators(row):
    return [[found["operator"], milliseconds(found["seconds"]["median"], 4),
             f"{found['per_second'] / 1e9:,.0f} G{found['unit']}/s",
             f"{found['share_of_limit']:.0%}"] for found in row["result"]["operators"]]


# Fields of every row of the PyTorch side about the machine and the model, and separate columns.
SHAPE = ["kind", "backend", "torch", "gpu", "batch", "heads", "kv_heads", "head_dim", "hidden",
         "mlp"]


def pytorch(row):
    """Returns rows of the PyTorch side, which names its own figures."""
    lines = []
    for found in row["result"]["rows"]:
        figures = {name: value for name, value in found.items() if name not in SHAPE}
        lines.append([found.get("kind", "-"), found.get("backend", "-"),
                      ", ".join(f"{name} {figure(value)}" for name, value in figures.items())])
    return lines


def figure(value):
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value)


def sanitizer(row):
    found = row["result"]
    return [["; ".join(found["summary"]),
             "; ".join(f"{count} x {kind}" for kind, count in found["reports"].items())]]


# The most relevant metrics of a kernel. The row has all of them.
OF_INTEREST = ["duration", "hit rate", "throughput", "tensor", "busy", "stall", "registers",
               "dram__", "lts__", "sm__", "time_duration"]


def ncu(row):
    lines = []
    for index, kernel in enumerate(row["result"]["kernels"]):
        for name, (value, unit) in kernel["metrics"].items():
            # A chart lists every reason and pipe, most of them idle.
            if value and any(word in name.lower() for word in OF_INTEREST):
                lines.append([f"{kernel['kernel']} ({index})", name, f"{value:,.6g} {unit}"])
    return lines


def quickstart(row):
    evaluations = row["result"]["evaluations"]
    return [[", ".join(f"{moment(found)} {found['loss']:.4f}" for found in evaluations),
             row["seconds"]]]


def moment(evaluation):
    """Describes a moment of a run."""
    kind = evaluation["moment"]
    return kind if isinstance(kind, str) else " ".join(
        [*kind, *(str(value) for value in next(iter(kind.values())).values())])


TABLES = [
    ("Tests", "tests", ["case", "passed", "failed", "largest relative errors", "notes"], tests),
    ("Instructions of the Hopper kernels", "sass", ["case", "kernel", *OPERATIONS], sass),
    ("compute-sanitizer", "sanitizer", ["case", "summary", "reports"], sanitizer),
    ("Limits", "limits", ["case", "device", "f32 TFLOP/s", "bf16 TFLOP/s", "copy GB/s"], limits),
    ("Attention", "attention",
     ["case", "tokens", "path", "heads", "forward ms", "backward ms", "forward TFLOP/s",
      "backward TFLOP/s", "forward of dense", "backward of dense", "both of dense", "route ms"],
     attention),
    ("Steps of LLaMA-3-8B", "step",
     ["case", "layers", "tokens", "vocabulary", "heads", "tokens/s", "ms", "TFLOP/s",
      "of the bf16 matmul", "GiB", "first and last loss"], step),
    ("The GPU's time in a step", "kernels", ["case", "kernel", "launches", "ms", "share"], kernels),
    ("PyTorch", "pytorch", ["case", "what", "backend", "figures"], pytorch),
    ("Operators", "operators", ["case", "operator", "ms", "rate", "of limit"], operators),
    ("Counters of the Hopper kernels", "ncu", ["case", "kernel", "metric", "value"], ncu),
    ("Quickstart: validation losses", "quickstart", ["case", "losses", "seconds"], quickstart),
]


def fault(row):
    """Returns why a result cannot be shown, or None."""
    make = next(make for _, kind, _, make in TABLES if kind == row["kind"])
    try:
        make(row)
        HEADLINES[row["kind"]](row["result"])
    except Exception as error:  # Any exception: the output is a program's.
        return f"the result cannot be shown: {type(error).__name__}: {error}"
    return None


def headline(row):
    """Returns the figure that the progress line of a case shows."""
    if row["status"] != "passed":
        return " ".join(filter(None, [code(row) if row.get("code") else "", reason(row)]))
    try:
        return HEADLINES[row["kind"]](row["result"])
    except Exception as error:  # A line of progress is not worth a run.
        return f"(no figure: {type(error).__name__}: {error})"


def of_tests(found):
    errors = list(found["largest_relative_errors"].items())
    largest = f", {errors[0][0]} {errors[0][1]:.1e}" if errors else ""
    skipped = f", {len(found['skipped'])} skipped" if "skipped" in found else ""
    return f"{found['passed']} passed{skipped}{largest}"


def of_attention(found):
    dense, *routed = found["cases"]
    return (f"dense {tera(dense['forward']['flops_per_second'])} and "
            f"{tera(dense['backward']['flops_per_second'])} TFLOP/s; "
            + ", ".join(f"{heads(case)} {case['both']['ratio_to_dense']:.3f}" for case in routed))


def of_step(found):
    return (f"{found['tokens_per_second']['median']:,.0f} tokens/s, "
            f"{found['share_of_bf16_matmul']:.1%} of the bf16 matmul")


def of_kernels(found):
    time = found["gpu_time"]
    return (f"{milliseconds(time['elapsed_seconds'], 1)} ms, {time['launches']} launches, "
            f"nothing runs in {time['idle_seconds'] / time['elapsed_seconds']:.1%}")


def of_ncu(found):
    metrics = found["kernels"][0]["metrics"]
    shown = [name for name in metrics if "hit rate" in name.lower() or "hit_rate" in name]
    return ", ".join([f"{len(metrics)} metrics",
                      *(f"{name} {metrics[name][0]}" for name in shown[:2])])


def of_pytorch(found):
    failed = [row.get("backend", row.get("kind")) for row in found["rows"] if "error" in row]
    return f"{len(found['rows'])} rows" + "".join(f", {name} fails" for name in failed)


HEADLINES = {
    "tests": of_tests,
    "sass": lambda found: f"{len(found['kernels'])} kernels, " + ", ".join(
        f"{operation} {sum(counts[operation] for counts in found['kernels'].values())}"
        for operation in OPERATIONS[1:]),
    "sanitizer": lambda found: found["summary"][-1],
    "limits": lambda found: (
        f"bf16 {tera(found['machine']['bf16_matmul_flops_per_second'])} TFLOP/s, "
        f"copy {found['machine']['copy_bytes_per_second'] / 1e9:,.0f} GB/s"),
    "attention": of_attention,
    "step": of_step,
    "kernels": of_kernels,
    "operators": lambda found: f"{len(found['operators'])} operators",
    "pytorch": of_pytorch,
    "ncu": of_ncu,
    "quickstart": lambda found: f"last loss {found['evaluations'][-1]['loss']:.4f}",
}
