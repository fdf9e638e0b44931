"""Files of results: a JSON object in each line."""

import datetime
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def read(path):
    """The results in a file, and nothing if there is none."""
    return [json.loads(line) for line in path.open()] if path.exists() else []


def origin():
    """On what a row was measured, and when."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return {"date": datetime.date.today().isoformat(), "commit": commit.stdout.strip()}
