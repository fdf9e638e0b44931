#!/usr/bin/env python3
"""Stands in for moh-bench, test-kernels, ncu and the other programs in the tests of measure.py.

`plan.json` next to it has pairs of a part of the command line and a behaviour. The first pair
that fits is used. Process numbers are written to `processes` for the tests.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(sys.argv[0]).parent
SECONDS = {"seconds": {"median": 0.001, "best": 0.001}}
PASS = SECONDS | {"flops_per_second": 6e14, "ratio_to_dense": 0.8}
MACHINE = {"device": "a GPU", "threads": 2, "f32_matmul_flops_per_second": 4e14,
           "bf16_matmul_flops_per_second": 7e14, "copy_bytes_per_second": 4e12}
GPU_TIME = {"elapsed_seconds": 0.723, "idle_seconds": 0.003, "launches": 1681, "kernels": [
    {"name": "matmul", "launches": 1677, "seconds": 0.7195},
    {"name": "copy", "launches": 4, "seconds": 0.0005}]}
# The fields that moh-bench prints.
ANSWERS = {
    "operators": {"machine": MACHINE, "operators": [SECONDS | {
        "operator": "squared_norm", "dtype": "bf16", "runs": 3, "work": 1, "unit": "bytes",
        "per_second": 1e12, "share_of_limit": 0.5}]},
    "attention": {"machine": MACHINE, "shape": {"batch": 1, "length": 8192}, "cases": [
        {"attention": kind, "active": active, "forward": PASS, "backward": PASS, "route": SECONDS,
         "both": PASS} for kind, active in [("dense", 1.0), ("moh", 0.75)]]},
    "step": {
        "machine": MACHINE,
        "model": {"layers": 4, "vocab_size": 160896, "heads": 32, "active_heads": 24},
        "step": {"micro_batches": 1, "micro_batch": 1, "sequence_length": 8192},
        "tokens_per_second": {"median": 12000.0}, "flops_per_second": {"median": 5e14},
        "share_of_bf16_matmul": 0.7, "memory": {"peak_bytes": 1 << 36},
        "loss": {"first": 11.5, "last": 11.0}} | SECONDS,
}


def note_process(number):
    with open(HERE / "processes", "a") as file:
        file.write(f"{number}\n")


def hang():
    """Starts two processes that ignore SIGTERM and hold the pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time\n"
                              "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"])
    print("this much was done", flush=True)
    note_process(child.pid)
    note_process(os.getpid())
    time.sleep(1000)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def lose_gpu():
    """Acts as after an error of the hardware: nvidia-smi fails from then on."""
    (HERE / "gpu").unlink()
    sys.exit("no CUDA-capable device is detected")


def flood():
    while True:
        sys.stdout.write("x" * 65536)


def answer(path=os.environ.get("MOH_ATTENTION"), **others):
    found = ANSWERS[sys.argv[1]] | others
    if sys.argv[1] == "attention":
        found["cases"] = [one | {"path": path} for one in found["cases"]]
    if "--kernels" in sys.argv:
        found["gpu_time"] = GPU_TIME
    print("ptxas info: a {line} of {} before", json.dumps(found), "} and {noise}")


def libtest(passed=1, failed=0, line=None):
    if "--list" in sys.argv:
        print((HERE / "listed").read_text())
        return
    path = os.environ.get("MOH_ATTENTION", "any")
    line = line or f"out on {path}: BF16 relative error 2.5e-3"
    print(f"\nrunning 1 test\ntest some::test ... {line}")
    print("d_x: F32 relative error 1.0e-6\nd_x: F32 relative error 3.0e-6\nok\n")
    if failed:
        print("failures:\n\nfailures:\n    some::test\n")
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; "
          "0 ignored; 0 measured; 9 filtered out; finished in 0.01s")
    sys.exit(101 if failed else 0)


def sanitizer(path="Hopper", passed=1):
    """Prints compute-sanitizer's output around its program's. It exits with code 0 whatever ran."""
    print("========= COMPUTE-SANITIZER")
    print("========= ERROR SUMMARY: 0 errors")
    libtest(passed, line=f"{path}, true, on a GPU: a shape")


def ncu():
    print('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\ndense 100%\n'
          '"0","hopper_forward_d128","L2 Hit Rate","%","81.5"')


def trained():
    """Writes a run's directory, as moh-train leaves it."""
    folder = next(Path(word[len("run.dir="):]) for word in sys.argv if word.startswith("run.dir="))
    folder.mkdir()
    evaluations = [{"moment": "loaded", "loss": 5.5},
                   {"moment": {"trained": {"stage": "moh"}}, "loss": 0.5}]
    (folder / "summary.json").write_text(json.dumps({"evaluations": evaluations}))


BEHAVIOURS = {
    "hang": hang, "die": die, "flood": flood, "answer": answer, "ncu": ncu, "trained": trained,
    "lose GPU": lose_gpu,
    "plain path": lambda: answer("plain"),
    "loss of NaN": lambda: answer(loss={"first": 11.5, "last": None}),
    "too much": lambda: answer(more="x" * (300 << 10)),
    "rate of NaN": lambda: answer(share_of_bf16_matmul=None),
    "words for a rate": lambda: answer(tokens_per_second={"median": "12000"}),
    "sanitizer": sanitizer,
    "sanitizer without test": lambda: sanitizer(passed=0),
    "sanitizer without hopper": lambda: sanitizer("Tiled"),
    "skipped test": lambda: libtest(line="skipped: no Hopper GPU"),
    "two tests": lambda: libtest(2),
    "garbage": lambda: print("{not JSON} \udcff\x00"),
    "wrong": lambda: print('{"unexpected": [1]}'),
    "tests": libtest,
    "no test": lambda: libtest(0),
    "failing test": lambda: libtest(0, 1),
}

sys.stdout.reconfigure(errors="surrogateescape")
(HERE / "environment").write_text(json.dumps(dict(os.environ)))
WORDS = " ".join([os.environ.get("MOH_ATTENTION", ""), *sys.argv[1:]])
with open(HERE / "runs", "a") as log:
    log.write(WORDS + "\n")
for part, behaviour in json.loads((HERE / "plan.json").read_text()):
    if part in WORDS:
        BEHAVIOURS[behaviour]()
        break
