#!/usr/bin/env python3
"""Asks moh-serve from many clients at once, a third of whom leave, and checks every answer.

    tools/serve/load.py MODEL [--program target/release/moh-serve] [--requests 2000] [--clients 64] [--json FILE]

Prompts of 4 to a quarter of the context's tokens, answers as long, sampled with seeds. Each answer has to be the one that
its request gets alone. Prints tokens/s, the time to the first token, the time between tokens (median, p99), and the
server's memory; fails for a wrong answer, if the memory of the last quarter exceeds that of the second by more than
5%, or if something is left in the server. It uses Python's standard library alone.
"""

import argparse
import concurrent.futures
import http.client
import json
import random
import statistics
import sys
import threading
import time
import urllib.parse

from server import metrics, request, serve

# Growth of the resident memory from the second quarter of the requests to the last.
GROWTH = 1.05


def bodies(count, context, vocabulary, seed):
    """Yields the requests. Each request is always the same."""
    random_ = random.Random(seed)
    longest = context // 4
    prefix = [random_.randrange(vocabulary) for _ in range(longest)]
    for number in range(count):
        length = random_.randint(4, longest)
        # Some prompts have the same start.
        shared = prefix[: random_.randint(0, length - 1)] if number % 4 == 0 else []
        prompt = shared + [random_.randrange(vocabulary) for _ in range(length - len(shared))]
        temperature = random_.choice([0.0, 0.7, 1.0])
        yield {
            "prompt": prompt, "max_tokens": random_.randint(4, longest), "temperature": temperature,
            "seed": number, "ignore_eos": True, "stream": True, "return_tokens_as_token_ids": True, "logprobs": 0,
        }


class Client:
    """A thread's client."""

    def __init__(self, address):
        self.host = urllib.parse.urlsplit(address).netloc

    def ask(self, body, leave_after=None):
        """Returns the tokens of an answer and the arrival time of each. None if the client left."""
        connection = http.client.HTTPConnection(self.host, timeout=600)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:200]}")
        tokens, times = [], []
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            if choice["logprobs"]:
                tokens += choice["logprobs"]["tokens"]
                times.append(time.perf_counter() - start)
            if leave_after is not None and len(tokens) >= leave_after:
                connection.sock.close()
                connection.close()
                return None
        connection.close()
        return tokens, times


def resident(process, name="VmRSS"):
    """Returns the bytes of a process's memory, or its peak (VmHWM)."""
    with open(f"/proc/{process.pid}/status") as status:
        for line in status:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc does not tell the memory")


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--program", default="target/release/moh-serve")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="an option of moh-serve, such as --option=--max-num-seqs=32")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    with serve(arguments.program, arguments.model, *arguments.option) as (process, address):
        info = request(address, "tokenizer_info")
        asked = list(bodies(arguments.requests, info["model_max_length"], info["vocab_size"], arguments.seed))
        alone = Client(address)
        # Alone: one after another, before other requests are in the cache.
        checked = [number for number in range(len(asked)) if number % 3 != 1]
        expected = {number: alone.ask(asked[number])[0] for number in checked}
        memory, wrong, firsts, between, lock = [], [], [], [], threading.Lock()

        def one(number):
            if number % 3 == 1:
                alone.ask(asked[number], leave_after=random.Random(number).randint(0, asked[number]["max_tokens"] - 1))
                return
            tokens, times = alone.ask(asked[number])
            with lock:
                if tokens != expected[number]:
                    wrong.append(number)
                firsts.append(times[0])
                between.extend(after - before for before, after in zip(times, times[1:]))
                memory.append(resident(process))

        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(arguments.clients) as clients:
            list(clients.map(one, range(len(asked))))
        seconds = time.perf_counter() - start
        time.sleep(1)
        counts = metrics(address)
    quarter = len(memory) // 4
    growth = statistics.median(memory[-quarter:]) / statistics.median(memory[quarter : 2 * quarter])
    left = counts["moh_requests_running"] + counts["moh_requests_waiting"] + counts["moh_kv_cache_usage_ratio"]
    figures = {
        "requests": len(asked), "clients": arguments.clients, "seconds": seconds, "wrong": len(wrong),
        "tokens_per_second": sum(len(tokens) for tokens in expected.values()) / seconds,
        "cancelled": counts["moh_requests_cancelled_total"], "preemptions": counts["moh_preemptions_total"],
        "first_token": {"median": statistics.median(firsts), "p99": quantile(firsts, 0.99)},
        "between_tokens": {"median": statistics.median(between), "p99": quantile(between, 0.99)},
        "memory": {"first": memory[0], "last": memory[-1], "growth": growth}, "left": left,
    }
    figures["between_tokens"]["ratio"] = figures["between_tokens"]["p99"] / figures["between_tokens"]["median"]
    print(json.dumps(figures, indent=1))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file)
    faults = []
    if wrong:
        faults.append(f"{len(wrong)} answers are not those that their requests get alone, such as that of request {wrong[0]}")
    if growth > GROWTH:
        faults.append(f"the memory grows by {growth - 1:.1%}")
    if left:
        faults.append("something is left in the server")
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
