"""OUT/RUN.jsonl: a header for each time the run was started, and a row for each case.

Rows are only ever appended, each with one write, so that a run that is cut off loses no more than
the row in flight. Of several rows of one name the last counts.
"""

import json
import os
import sys

# Maximum bytes of one row; a larger result is left out, and the row states so.
MAX_ROW = 256 << 10
# What a run's header says of the machine and of the programs.
SETUP = ["gpu", "commit"]


def append(path, row):
    """Appends a row, or prints it if that fails; returns it as it was written."""
    data = json.dumps(row).encode()
    if len(data) > MAX_ROW:
        row = row | {"result": None, "why": f"a result of {len(data)} bytes was left out"}
        if row["status"] == "passed":
            row["status"] = "unreadable output"
        data = json.dumps(row).encode()
    try:
        with open(path, "ab+") as file:
            # Ends a row that was cut off.
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
    """The headers, and the last row of each name in the order of the first ones.

    Lines that are no rows are passed over: a run that was killed may leave half a line.
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
            # A later run that does not reach a case keeps the earlier row.
            if row["status"] != "no time" or row["name"] not in rows:
                rows[row["name"]] = row | {"header": len(headers) - 1}
    return headers, rows


def is_final(row, headers, now):
    """Whether a case is done, by the file's headers and that of the present run.

    One that had its whole limit would take it again.
    """
    if row.get("cut"):
        return False
    if row["status"] == "failed":
        return is_same_setup(headers[row["header"]] if row["header"] >= 0 else {}, now)
    return row["status"] in ["passed", "timed out"]


def is_same_setup(then, now):
    """Whether a case that failed would fail again: on the same GPU, with the same programs.

    Programs of a tree with changes may be others of the same name.
    """
    known = "unknown" not in [now[name] for name in SETUP]
    return (known and not now["commit"].endswith("-dirty")
            and all(then.get(name) == now[name] for name in SETUP))
