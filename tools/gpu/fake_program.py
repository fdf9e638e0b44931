#!/usr/bin/env python3
"""Stands in for moh-bench, test-kernels and the others in the tests of measure.py.

`plan.json` beside it says what to do: pairs of a part of the command line and a behaviour, of which
the first that fits is taken. Process numbers are written to `processes` for the tests to look at.
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
    """Two processes that ignore SIGTERM and hold the pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time\n"
                              "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"])
    print("this much was done", flush=True)
    note_process(child.pid)
    note_process(os.getpid())
    time.sleep(1000)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def flood():
    while True:
        sys.stdout.write("x" * 65536)


def answer():
    print("ptxas info: a line before", json.dumps(ANSWERS[sys.argv[1]]), "} and {noise}")


def libtest(passed=1, failed=0):
    if "--list" in sys.argv:
        print((HERE / "tests").read_text())
        return
    path = os.environ.get("MOH_ATTENTION", "any")
    print(f"\nrunning 1 test\ntest some::test ... out on {path}: BF16 relative error 2.5e-3")
    print("d_x: F32 relative error 1.0e-6\nd_x: F32 relative error 3.0e-6\nok\n")
    if failed:
        print("failures:\n\nfailures:\n    some::test\n")
    print(f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; "
          "0 ignored; 0 measured; 9 filtered out; finished in 0.01s")
    sys.exit(101 if failed else 0)


BEHAVIOURS = {
    "hang": hang, "die": die, "flood": flood, "answer": answer,
    "garbage": lambda: print("{not JSON} \udcff\x00"),
    "wrong": lambda: print('{"unexpected": [1]}'),
    "tests": libtest,
    "no test": lambda: libtest(0),
    "failing test": lambda: libtest(0, 1),
}

sys.stdout.reconfigure(errors="surrogateescape")
WORDS = " ".join([os.environ.get("MOH_ATTENTION", ""), *sys.argv[1:]])
with open(HERE / "runs", "a") as log:
    log.write(WORDS + "\n")
for part, behaviour in json.loads((HERE / "plan.json").read_text()):
    if part in WORDS:
        BEHAVIOURS[behaviour]()
        break
