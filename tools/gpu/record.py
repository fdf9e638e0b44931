"""OUT/RUN.jsonl: a header for each start of the run, and a row for each case.

Rows are only appended, each with a single write, so that an interrupted run loses at most the
row in flight. If several rows have the same name, the last counts.
"""

import json
import os
import sys

# Maximum bytes of a row. A larger result is omitted, and the row says so.
MAX_ROW = 256 << 10
# The fields of a run's header about the machine and the programs.
SETUP = ["gpu", "commit"]


def append(path, row):
    """Appends a row, or prints it if that fails. Returns it as it was written."""
    data = json.dumps(row).encode()
    if len(data) > MAX_ROW:
        row = row | {"result": None, "why": f"a result of {len(data)} bytes was left out"}
        if row["status"] == "passed":
            row["status"] = "unreadable output"
        data = json.dumps(row).encode()
    try:
        with open(path, "ab+") as file:
            # Ends an interrupted row.
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                data = data if file.read(1) == b"\n" else b"\n" + data
            file.write(data + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        print(f"{path}: the row cannot be written: {error}: {data.decode()}", file=sys.stderr,
              flush=True)
    return row


def read(path):
    """Returns the headers, and the last row of each name in the order of the first rows.

    Lines that are not rows are skipped: a run that was killed may leave part of a line.
    """
    headers, rows = [], {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return headers, rows
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict):
            continue
        if row.get("header"):
            headers.append(row)
        elif isinstance(row.get("name"), str) and isinstance(row.get("status"), str):
            # If a later run does not reach a case, the earlier row stays.
            if row["status"] != "no time" or row["name"] not in rows:
                rows[row["name"]] = row | {"header": len(headers) - 1}
    return headers, rows


def is_final(row, headers, now):
    """Returns whether a case is done, by the file's headers and the header of the present run.

    A case that used its whole limit would use it again.
    """
    if row.get("cut"):
        return False
    if row["status"] == "failed":
        return is_same_setup(headers[row["header"]] if row["header"] >= 0 else {}, now)
    return row["status"] in ["passed", "timed out"]


def is_same_setup(then, now):
    """Returns whether a case that failed would fail again: on the same GPU, with the same programs.

    A modified tree may have different programs under the same commit.
    """
    known = "unknown" not in [now[name] for name in SETUP]
    return (known and not now["commit"].endswith("-dirty")
            and all(then.get(name) == now[name] for name in SETUP))
