#!/usr/bin/env python3
"""Attacks moh-serve in the ways that once stopped it, and asks as another client meanwhile.

    tools/serve/attack.py MODEL [--program target/release/moh-serve] [--requests 2000] [--json FILE]

MODEL is a directory with weights. The attacks: bodies that are announced and do not come, or come slowly, or have as many
values as they may, or such values in a text, silent connections, and more that wait for answers than there may be (A1);
answers that are far too large (A2); long prompts (A3) and many choices; texts far beyond the context, and 600 long words
(A4); chats whose template does not end, or fills the memory (A5); clients that leave, with bytes behind their body (A6).
Under each of A1 to A5 another client's short completion, and the ids of a text of 5 KB, take less than 3 s, or where all
wait for answers are refused in this time; a client that has left frees its places within a second; the memory stays
bounded, and requests of all kinds mixed leave it flat. At last SIGTERM ends the server within 5 s while templates hang.
Fails otherwise. It uses Python's standard library alone.
"""

import argparse
import concurrent.futures
import contextlib
import json
import pathlib
import random
import shutil
import socket
import string
import struct
import sys
import tempfile
import threading
import time
import urllib.parse

from load import resident
from server import metrics, request, serve

# Maximum seconds that another client waits, that places of a client that left stay in use (including the request for
# the metrics), and that the end takes.
WAIT, LEAVE, END = 3, 1.5, 5
# Seconds of each attack.
SECONDS = 4
# Maximum bytes of memory: half a gigabyte for answers, a quarter for bodies, and two for templates.
MOST = 2_800_000_000
# Growth of the resident memory, from the first two thirds of the mixed requests to the last: the allocator keeps some
# memory.
GROWTH = 1.1
# A message with the first word makes the template loop for a long time, and its list grow. With the second word, the
# template keeps long texts, more for longer conversations.
TEMPLATE = (
    "{% for m in messages %}{% if 'hang' in m.content %}{% set ns = namespace(l=[1]) %}{% for i in range(60) %}"
    "{% set ns.l = ns.l + ns.l %}{% endfor %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{% if 'fill' in m.content %}{% set ns = namespace(l=[], s='x') %}{% for i in range(20) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}{% for i in range(200 + messages | length // 20) %}"
    "{% set ns.l = ns.l + [ns.s ~ i] %}{% endfor %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ m.content }}{% endfor %}"
)
# The requests of another client.
OTHERS = [
    ("v1/completions", {"prompt": "Once", "max_tokens": 1}), ("tokenize", {"prompt": "Once upon a time " * 300}),
]


class Attacker:
    """Raw requests to a server."""

    def __init__(self, address, context):
        self.place = urllib.parse.urlsplit(address)
        self.context = context
        self.open = []

    def head(self, path, *headers):
        return "\r\n".join([f"POST /{path} HTTP/1.1", f"Host: {self.place.netloc}", *headers, "", ""]).encode()

    def post(self, path, body, *headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(path, f"Content-Length: {len(body)}", *headers) + body

    def connect(self, data=b""):
        stream = socket.create_connection((self.place.hostname, self.place.port), timeout=60)
        with contextlib.suppress(OSError):
            stream.sendall(data)
        return stream

    def leave(self, stream, hard=False):
        if hard:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()

    def ask(self, path, body):
        """Returns the status of an answer that is read to its end, or 0 without an answer."""
        stream = self.connect(self.post(path, body, "Connection: close"))
        answer = b""
        with contextlib.suppress(OSError):
            while part := stream.recv(1 << 16):
                answer = answer or part
        stream.close()
        return int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/1.1 ") else 0

    # The attacks. Each method is a single attack of a single attacker.

    def announced(self, number):
        kind = number % 5
        if kind == 0:
            data = self.head("v1/completions", "Transfer-Encoding: chunked")
        elif kind == 1:
            data = self.head("v1/completions", f"Content-Length: {8 << 20}")
        elif kind == 2:
            data = self.head("v1/completions", f"Content-Length: {8 << 20}") + b" " * (3 << 20)
        elif kind == 3:
            data = b"POST /v1/completions HTTP/1.1\r\nHost: "
        else:
            data = b""
        self.open.append(self.connect(data))
        time.sleep(0.02)

    def values(self, number):
        # As many values as a body may have, which need far more memory than their text.
        body = b'{"prompt": "a", "logit_bias": [' + b'{"":0},' * 140_000 + b"0]}"
        return self.ask("v1/completions", body)

    def arguments(self, number):
        # More values than a body may have, or somewhat fewer, in a text that the template reads as values.
        call = {"function": {"name": "f", "arguments": "[" + "[1]," * (150_000 if number % 2 else 500_000) + "1]"}}
        message = {"role": "assistant", "content": "a", "tool_calls": [call]}
        return self.ask("v1/chat/completions", {"messages": [message], "max_tokens": 1})

    def large(self, number):
        prompt = [[5] * (self.context - 1)] * 8
        body = {"prompt": prompt, "n": 128, "max_tokens": 1, "echo": True, "moh_heads": True}
        if number % 2:
            body |= {"logprobs": 20}
        if number % 4 > 1:
            body |= {"stream": True}
        return self.ask("v1/completions", body)

    def long(self, number):
        length = self.context - 4
        body = {"prompt": [(number + n * n) % 200 for n in range(length)], "max_tokens": 1}
        return self.ask("v1/completions", body)

    def choices(self, number):
        body = {"prompt": "a", "n": 128, "max_tokens": self.context - 8, "ignore_eos": True, "temperature": 1}
        if number < 2:
            self.open.append(self.connect(self.post("v1/completions", body)))
        time.sleep(0.5)

    def text(self, number):
        text = ("word another %d " % number) * (400_000 if number % 2 else 4_000)
        path = ["v1/completions", "tokenize", "v1/chat/completions"][number % 3]
        body = {"messages": [{"role": "user", "content": text}]} if number % 3 == 2 else {"prompt": text}
        return self.ask(path, body)

    def word(self, number):
        return self.ask("tokenize", {"prompt": "".join(random.Random(number).choices(string.ascii_letters, k=63_000))})

    def messages(self, number):
        messages = [{"role": "user", "content": "fill"}] + [{"role": "user", "content": "a"}] * 11_999
        return self.ask("v1/chat/completions", {"messages": messages, "max_tokens": 1})

    def template(self, number):
        return self.ask("v1/chat/completions", {"messages": [{"role": "user", "content": "hang"}], "max_tokens": 1})

    def left(self, number):
        body = {"prompt": "a", "n": 32, "max_tokens": self.context - 8, "ignore_eos": True, "stream": number % 2 == 0}
        rest = [b"", b"x" * 130_000, b"GET /health HTTP/1.1\r\n\r\n", self.post("v1/completions", body)][number % 4]
        stream = self.connect(self.post("v1/completions", body) + rest)
        time.sleep(0.05)
        self.leave(stream, hard=number % 8 > 3)


def waits(attacker):
    """Returns the longest wait of another client, and the status of its answers: 0 if one is 0, otherwise the
    largest."""
    longest, statuses = 0, set()
    for path, body in OTHERS:
        start = time.perf_counter()
        statuses.add(attacker.ask(path, body))
        longest = max(longest, time.perf_counter() - start)
    return longest, min(statuses) and max(statuses)


def under(attacker, attack, attackers=32, seconds=SECONDS):
    """Returns the longest wait of another client while attackers repeat an attack."""
    stop, longest, faults = threading.Event(), 0, set()

    def repeat(number):
        while not stop.is_set():
            with contextlib.suppress(OSError):
                attack(number)
            number += attackers

    with concurrent.futures.ThreadPoolExecutor(attackers) as pool:
        for number in range(attackers):
            pool.submit(repeat, number)
        end = time.perf_counter() + seconds
        time.sleep(0.3)
        while time.perf_counter() < end:
            wait, status = waits(attacker)
            longest = max(longest, wait)
            if status != 200:
                faults.add(status)
        stop.set()
        for stream in attacker.open:
            stream.close()
        attacker.open.clear()
    return longest, faults


def idle(address, limit=60):
    """Returns the seconds until no request is computed or waits."""
    start = time.perf_counter()
    while time.perf_counter() - start < limit:
        counts = metrics(address)
        if counts["moh_requests_running"] + counts["moh_requests_waiting"] == 0:
            break
        time.sleep(0.02)
    return time.perf_counter() - start


def num_threads(process):
    return len(list(pathlib.Path(f"/proc/{process.pid}/task").iterdir()))


def rest(process, address, threads, limit=60):
    """Returns the resident memory once no request is computed and abandoned templates have ended."""
    idle(address)
    end = time.perf_counter() + limit
    while num_threads(process) > threads and time.perf_counter() < end:
        time.sleep(0.05)
    return resident(process)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--program", default="target/release/moh-serve")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    figures, faults = {}, []
    with tempfile.TemporaryDirectory() as place:
        model = pathlib.Path(place) / "model"
        shutil.copytree(arguments.model, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        with serve(arguments.program, str(model), "--served-model-name", "attacked") as (process, address):
            context = request(address, "tokenizer_info")["model_max_length"]
            attacker = Attacker(address, context)
            started = time.perf_counter()
            threads = num_threads(process)
            figures["alone"] = max(waits(attacker)[0] for _ in range(5))
            attacks = {
                "A1 bodies": attacker.announced, "A1 values": attacker.values, "A1 arguments": attacker.arguments,
                "A2 answers": attacker.large, "A3 prompts": attacker.long, "A3 choices": attacker.choices,
                "A4 texts": attacker.text, "A4 words": attacker.word, "A5 templates": attacker.template,
                "A5 messages": attacker.messages,
            }
            figures["waits"] = {}
            for name, attack in attacks.items():
                longest, bad = under(attacker, attack, 600 if name == "A4 words" else 32)
                figures["waits"][name] = longest
                print(f"{name}: {longest:.2f} s", file=sys.stderr)
                if longest > WAIT or bad:
                    faults.append(f"{name}: another client waits {longest:.1f} s, with statuses {sorted(bad | {200})}")
                idle(address)
            silent = [attacker.connect() for _ in range(1100)]
            time.sleep(1.1)
            figures["waits"]["A1 connections"], status = waits(attacker)
            if figures["waits"]["A1 connections"] > WAIT or status != 200:
                faults.append(f"silent connections: another client waits {figures['waits']['A1 connections']:.1f} s")
            for stream in silent:
                stream.close()
            body = {"prompt": "a", "max_tokens": context - 8, "ignore_eos": True}
            waiting = [attacker.connect(attacker.post("v1/completions", body)) for _ in range(1030)]
            figures["waits"]["A1 answers"], status = waits(attacker)
            if figures["waits"]["A1 answers"] > WAIT or status not in (200, 503):
                faults.append(f"all wait for answers: another client waits {figures['waits']['A1 answers']:.1f} s")
            for stream in waiting:
                stream.close()
            idle(address)
            figures["left"] = 0
            for number in range(8):
                attacker.left(number)
                figures["left"] = max(figures["left"], idle(address))
            if figures["left"] > LEAVE:
                faults.append(f"A6: the places of a client that left are taken for {figures['left']:.1f} s")

            figures["most"] = resident(process, "VmHWM")
            if figures["most"] > MOST:
                faults.append(f"the memory reaches {figures['most'] / 1e9:.1f} GB")

            # Chats use their two seconds. Many values leave free memory in the arenas of the threads that read them.
            apart = (attacker.template, attacker.messages, attacker.values, attacker.arguments)
            mixed = [attack for attack in attacks.values() if attack not in apart] * 5
            mixed += [attacker.left] * 5 + [attacker.template]
            memory, lock, order = [], threading.Lock(), random.Random(0)
            kinds = [order.randrange(len(mixed)) for _ in range(arguments.requests)]

            def one(number):
                with contextlib.suppress(OSError):
                    mixed[kinds[number]](number)
                with lock:
                    memory.append(resident(process))
                    while len(attacker.open) > 64:
                        attacker.open.pop(0).close()

            start, third, stays = time.perf_counter(), arguments.requests // 3, []
            for part in range(3):
                with concurrent.futures.ThreadPoolExecutor(32) as pool:
                    list(pool.map(one, range(part * third, (part + 1) * third)))
                stays.append(rest(process, address, threads))
            figures["mixed"] = {"requests": arguments.requests, "seconds": time.perf_counter() - start}
            growth = stays[2] / max(stays[:2])
            figures["memory"] = {"most": max(memory), "stays": stays, "growth": growth}
            if growth > GROWTH:
                faults.append(f"the memory grows by {growth - 1:.1%}")
            if waits(attacker)[1] != 200:
                faults.append("the server no longer answers")

            hanging = [threading.Thread(target=attacker.template, args=(0,), daemon=True) for _ in range(8)]
            for thread in hanging:
                thread.start()
            time.sleep(0.5)
            start = time.perf_counter()
            process.terminate()
            code = process.wait(timeout=60)
            figures["end"] = time.perf_counter() - start
            if figures["end"] > END or code != 0:
                faults.append(f"SIGTERM ends the server after {figures['end']:.1f} s with {code}")
    figures["seconds"] = time.perf_counter() - started
    print(json.dumps(figures, indent=1))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(figures))
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
