#!/usr/bin/env python3
"""Counts the telling instructions of each Hopper kernel in a program, as JSON.

    python3 tools/gpu/sass.py gpu-programs/test-kernels

The kernels are a fat binary inside the program's constants, which cuobjdump does not look into: it
finds "no device code" there. So the fat binary is cut out first. The listing has hundreds of
megabytes and is read line by line.
"""

import collections
import json
import mmap
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

# setmaxnreg, wgmma, spills (loads and stores of local memory), and the bulk copies.
TELLING = ["USETMAXREG", "HGMMA", "LDL", "STL", "UTMALDG", "UBLKCP", "UBLKRED"]
WANTED = "hopper_"
# A fat binary's magic number, version, header's size and size without the header.
HEADER = struct.Struct("<IHHQ")
MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)

ARCHITECTURE = re.compile(rb"^arch = (\S+)")
FUNCTION = re.compile(rb"^\s*Function : (\S+)")
# An address, an optional predicate, and the operation without its suffixes.
INSTRUCTION = re.compile(rb"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)")


def fat_binaries(program):
    """Yields each fat binary in a file."""
    if Path(program).stat().st_size == 0:
        return
    with open(program, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        at = data.find(MAGIC)
        while at >= 0:
            size = 0
            if at + HEADER.size <= len(data):
                size = HEADER.unpack_from(data, at)[3]
            # The magic number may also occur in code that reads such headers.
            if 0 < size <= len(data) - at - HEADER.size:
                end = at + HEADER.size + size
                yield data[at:end]
            else:
                end = at + 1
            at = data.find(MAGIC, end)


def count(lines, counts):
    """Adds a listing's instructions to `counts`, by kernel and architecture."""
    architecture, kernel = b"", None
    for line in lines:
        if found := ARCHITECTURE.match(line):
            architecture, kernel = found[1], None
        elif found := FUNCTION.match(line):
            kernel = None
            if WANTED.encode() in found[1]:
                name = b" ".join([found[1], architecture]).decode("ascii", "replace")
                kernel = counts.setdefault(name, collections.Counter())
        elif kernel is not None and (found := INSTRUCTION.match(line)):
            kernel["instructions"] += 1
            kernel[found[1].decode()] += 1


def main():
    if len(sys.argv) != 2:
        print("usage: tools/gpu/sass.py PROGRAM", file=sys.stderr)
        return 2
    if shutil.which("cuobjdump") is None:
        print("cuobjdump is not installed: put a CUDA toolkit's bin on the PATH", file=sys.stderr)
        return 127
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, binary in enumerate(fat_binaries(sys.argv[1])):
            paths.append(Path(folder) / f"{number}.fatbin")
            paths[-1].write_bytes(binary)
        for path in paths or [sys.argv[1]]:
            with subprocess.Popen(["cuobjdump", "-sass", path], stdout=subprocess.PIPE) as listing:
                count(listing.stdout, counts)
            if listing.returncode != 0:
                print(f"cuobjdump failed on {path}: code {listing.returncode}", file=sys.stderr)
                return 1
    kernels = {name: {key: counter[key] for key in ["instructions", *TELLING]}
               for name, counter in sorted(counts.items())}
    print(json.dumps({"kernels": kernels}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
