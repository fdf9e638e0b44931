"""A moh-serve that runs for the duration of a check."""

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request


def request(address, path, body=None):
    """Returns the JSON that a server answers."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{path}: {error}: {error.read(1000).decode(errors='replace')}") from error


def metrics(address):
    """Returns the numbers of /metrics by their names."""
    with urllib.request.urlopen(address + "metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


@contextlib.contextmanager
def serve(program, model, *options):
    """Yields the process and the address of a server of `model`."""
    command = [program, "--model", model, "--port", "0", *options]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError as error:
        sys.exit(f"error: {program}: {error.strerror}: build it, or name it with --program")
    try:
        address = process.stdout.readline().strip()
        if not address:
            sys.exit(f"error: {' '.join(map(str, command))}: does not start: run it to see why")
        yield process, address
    finally:
        process.terminate()
        process.wait(timeout=60)
