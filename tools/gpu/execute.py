"""Runs a command that can neither hang, flood the output nor outlive this program.

The command gets its own session, so that its whole process group can be ended. Its output is
read into buffers of fixed size, which keep the start and the end. Every wait has a limit, also the
wait for output and for a process that the kernel does not end.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass

# Bytes kept of each stream. JSON is at the start, the summary of tests at the end.
HEAD_BYTES = 4 << 20
TAIL_BYTES = 256 << 10
# A program that prints more than this, both streams together, is killed.
MAX_BYTES = 64 << 20
# Seconds between SIGTERM and SIGKILL, and maximum seconds until a killed process has ended.
GRACE = 1.0
# Seconds to wait for the end of the output after the program has ended: a process that left the
# group may keep the pipe open.
DRAIN = 0.5
# Maximum seconds that `execute` takes beyond its limit.
OVERRUN = 2 * GRACE + DRAIN
# Interval of polling for the program's end.
POLL = 0.05

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass
class Finished:
    """The end of a command, and its output."""

    # "exited", "timed out", "stopped", "flooded" or "cannot start"
    ended: str
    # Negative for a signal. None if it never started or is still running.
    code: int | None
    seconds: float
    stdout: str = ""
    stderr: str = ""
    why: str = ""


class Bounded:
    """The start and the end of a stream of any length."""

    def __init__(self):
        self.head, self.tail, self.length = bytearray(), bytearray(), 0

    def add(self, data):
        self.length += len(data)
        room = HEAD_BYTES - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if len(self.tail) > 2 * TAIL_BYTES:
            del self.tail[:-TAIL_BYTES]

    def text(self):
        tail = self.tail[-TAIL_BYTES:]
        lost = self.length - len(self.head) - len(tail)
        middle = b"\n... %d bytes left out ...\n" % lost if lost else b""
        return (bytes(self.head) + middle + bytes(tail)).decode("utf-8", "replace")


def execute(command, *, seconds, environment=None, folder=None, stopped=lambda: False):
    """Runs a command for at most `seconds`, and OVERRUN more to end it.

    `stopped` is called often. When it returns True, the command is ended as if its time were over.
    """
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            [str(word) for word in command], cwd=folder, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, preexec_fn=_end_with_parent)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Finished("cannot start", None, time.monotonic() - start, why=str(error))
    streams = {process.stdout: Bounded(), process.stderr: Bounded()}
    try:
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            ended = _watch(process, selector, streams, start + seconds, stopped)
            _end(process, selector, streams, politely=ended != "exited")
    except BaseException:
        _signal_group(process, signal.SIGKILL)
        raise
    for stream in streams:
        stream.close()
    stdout, stderr = (streams[stream].text() for stream in (process.stdout, process.stderr))
    why = {
        "timed out": f"took more than {seconds:.0f} seconds",
        "stopped": "this program was told to stop",
        "flooded": f"printed more than {MAX_BYTES >> 20} MiB",
    }.get(ended, "")
    if process.returncode is None:
        why = ", ".join(filter(None, [why, "and did not end when killed"]))
    return Finished(ended, process.returncode, time.monotonic() - start, stdout, stderr, why)


def _end_with_parent():
    """Makes the kernel kill the program if this program is killed, which no handler can catch."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(process, selector, streams, end, stopped):
    """Reads until the program has ended or must be ended. Returns which."""
    while True:
        # Output first: an ended program's output is already in the pipe.
        _read(selector, streams, POLL)
        if _has_ended(process):
            return "exited"
        if sum(stream.length for stream in streams.values()) > MAX_BYTES:
            return "flooded"
        if stopped():
            return "stopped"
        if time.monotonic() >= end:
            return "timed out"


def _end(process, selector, streams, politely):
    """Kills the whole group, reads the rest of the output, and reaps the program."""
    if politely:
        _signal_group(process, signal.SIGTERM)
        _wait(process, selector, streams, GRACE)
    # This also kills the program's leftover processes. The program is not reaped yet, so the group's number
    # is still its own.
    _signal_group(process, signal.SIGKILL)
    _wait(process, selector, streams, GRACE)
    end = time.monotonic() + DRAIN
    while selector.get_map() and time.monotonic() < end:
        _read(selector, streams, POLL)
    process.poll()


def _wait(process, selector, streams, seconds):
    end = time.monotonic() + seconds
    while not _has_ended(process) and time.monotonic() < end:
        _read(selector, streams, POLL)


def _has_ended(process):
    """Returns whether the program has ended. It is not reaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _signal_group(process, number):
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _read(selector, streams, seconds):
    """Reads a piece of each stream, waiting at most `seconds`."""
    if not selector.get_map():
        time.sleep(seconds)
        return
    for key, _ in selector.select(seconds):
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            continue
        if data:
            streams[key.fileobj].add(data)
        else:
            selector.unregister(key.fileobj)
