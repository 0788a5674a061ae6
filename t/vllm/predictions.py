"""Sends a seeded load through the gateway and compares what it foretold with what the engine reports.

Pass A: one request at a time, the next when the index shows the blocks of the last; a worker is
restarted in the middle. Every foretold count has to be equal. Pass B: four at once; the counts of
exact, over and under are printed. The exit status is 1 where pass A has a difference.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

WORDS = (
    "time server weather London list of the a and with please table number report customer order "
    "cannot which find write function error value name when where between system data answer "
    "question short long under over policy refund contract page line code return"
).split()

BLOCK = 32
SETTLE = 0.25  # seconds without an event
PATIENCE = 10.0  # seconds to wait for the events of a request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


class Load:
    """Requests of several kinds; chat sessions grow by the engine's own answers."""

    def __init__(self, model, seed):
        self.model = model
        self.random = random.Random(seed)
        self.systems = [self.text(400), self.text(900), self.text(1800)]
        self.sessions = [
            [{"role": "system", "content": self.systems[number % 3]}] for number in range(6)
        ]
        self.document = self.text(600)
        self.tool_session = [{"role": "system", "content": "You call tools when they help. " + self.text(120)}]
        self.ids = [self.random.randrange(1000, 100000) for _ in range(BLOCK * 6)]

    def text(self, words):
        return " ".join(self.random.choice(WORDS) for _ in range(words))

    def plan(self, rounds):
        """(kind, path, body, callback with the answer's message)"""
        for number in range(rounds):
            yield self.turn(number)
            yield self.tools(number)
            yield self.completion(number)
            yield self.turn(number + 3)
            yield self.salted(number)
            yield self.exact_fill(number)
            yield self.one_off(number)

    def chat(self, kind, messages, after=None, **extra):
        body = {"model": self.model, "messages": list(messages), "temperature": 0, **extra}
        body.setdefault("max_tokens", 8)
        return kind, "/v1/chat/completions", body, after

    def turn(self, number):
        messages = self.sessions[number % len(self.sessions)]
        messages.append({"role": "user", "content": self.text(self.random.randint(10, 60))})
        limit = 48 if number % 3 == 0 else 8  # some answers fill a block of their own

        def after(message):
            messages.append({"role": "assistant", "content": message.get("content") or ""})

        return self.chat("chat", messages, after, max_tokens=limit)

    def tools(self, number):
        messages = self.tool_session
        if number % 2 == 0:
            messages.append({"role": "user", "content": self.text(20)})
        else:
            call = {"name": "weather", "arguments": json.dumps({"city": "London", "days": number})}
            messages.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": f"call{number}", "type": "function", "function": call}],
                }
            )
            messages.append({"role": "tool", "tool_call_id": f"call{number}", "content": self.text(15)})
        choice = "auto" if number % 4 < 2 else "none"
        return self.chat("tools", messages, tools=TOOLS, tool_choice=choice)

    def completion(self, number):
        prompt = self.document + " " + self.text(5 + number * 7 % 60)
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return "completion", "/v1/completions", body, None

    def salted(self, number):
        messages = [
            {"role": "system", "content": self.systems[0]},
            {"role": "user", "content": f"{self.text(5)}"},
        ]
        return self.chat("salt", messages, cache_salt=f"tenant-{number % 2}")

    def exact_fill(self, number):
        """Prompts of token ids that end where a block ends: the last block is stored again."""
        length = BLOCK * (2 + number % 5)
        body = {"model": self.model, "prompt": self.ids[:length], "max_tokens": 1, "temperature": 0}
        return "ids", "/v1/completions", body, None

    def one_off(self, number):
        """Long and never seen again: these push others out of the cache."""
        prompt = self.text(1500 + 400 * (number % 3))
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return "long", "/v1/completions", body, None


class Gateway:
    def __init__(self, arguments):
        self.url, self.admin = arguments.gateway, arguments.admin

    def post(self, url, body):
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.headers, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.headers, {"error": error.read().decode(errors="replace")}

    def send(self, kind, path, body):
        status, headers, answer = self.post(self.url + path, body)
        row = {"kind": kind, "status": status, "server": headers.get("X-Upstream", "")}
        if status != 200:
            return {**row, "error": answer.get("error")}, None
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        row.update(
            state=headers.get("X-Kvc-Status", ""),
            exact=headers.get("X-Kvc-Exact", ""),
            foretold=int(headers.get("X-Kvc-Matched-Tokens") or 0),
            cached=details.get("cached_tokens") or 0,
            prompt=usage["prompt_tokens"],
            answer=usage.get("completion_tokens", 0),
        )
        return row, answer["choices"][0].get("message", {})

    def index(self):
        with urllib.request.urlopen(self.admin + "?limit=0", timeout=10) as answer:
            return json.load(answer)

    def explain(self, path, body):
        return self.post(f"{self.admin}?path={urllib.parse.quote(path)}", body)[2]

    def sequences(self):
        return {server["server"]: server["last_seq"] for server in self.index()["servers"]}

    def wait_for(self, row, path, body):
        """Until the index shows all of the prompt's full blocks there, and no event comes any more."""
        server = row["server"].split(", ")[-1]
        want = (row["prompt"] - 1) // BLOCK * BLOCK
        end = time.monotonic() + PATIENCE
        seen = -1
        while time.monotonic() < end:
            rows = {entry["server"]: entry for entry in self.explain(path, body)["servers"]}
            seen = rows.get(server, {}).get("matched_tokens", -1)
            if seen >= want:
                break
            time.sleep(0.02)
        before, since = self.sequences(), time.monotonic()
        while time.monotonic() - since < SETTLE:
            time.sleep(0.05)
            now = self.sequences()
            if now != before:
                before, since = now, time.monotonic()
        return seen >= want


class Restart:
    """Kills one worker and starts it again."""

    def __init__(self, arguments):
        self.arguments, self.process = arguments, None

    def __call__(self, gateway):
        print("   a worker restarts", flush=True)
        os.kill(self.arguments.restart_pid, signal.SIGTERM)
        while self.healthy():
            time.sleep(0.2)
        before = {server["server"]: server["restarts"] for server in gateway.index()["servers"]}
        command = [self.arguments.restart, "worker", str(self.arguments.restart_worker)]
        log = open(os.path.dirname(self.arguments.json) + "/restarted-worker.log", "w")
        end = time.monotonic() + 300
        # The port and the endpoints may be held for a moment by what is going down.
        while not self.healthy():
            if self.process is None or self.process.poll() is not None:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            if time.monotonic() > end:
                sys.exit("the worker did not come back")
            time.sleep(0.5)
        while not all(server["connected"] for server in gateway.index()["servers"]):
            time.sleep(0.2)
        return before

    def healthy(self):
        try:
            with urllib.request.urlopen(self.arguments.restart_health, timeout=5) as answer:
                return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def stop(self):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


def one_at_a_time(gateway, load, rounds, restart):
    rows, late = [], 0
    plan = load.plan(rounds)
    half = rounds * 7 // 2
    for number, (kind, path, body, after) in enumerate(plan):
        if number == half:
            restart(gateway)
        row, message = gateway.send(kind, path, body)
        rows.append(row)
        if message is None:
            continue
        late += not gateway.wait_for(row, path, body)
        if after:
            after(message)
    return rows, late


def several_at_once(gateway, load, rounds, width):
    rows = []
    with concurrent.futures.ThreadPoolExecutor(width) as pool:
        batch = []
        for planned in load.plan(rounds):
            batch.append(planned)
            if len(batch) == width:
                rows += run_batch(pool, gateway, batch)
                batch = []
        rows += run_batch(pool, gateway, batch)
    return rows


def run_batch(pool, gateway, batch):
    sent = [pool.submit(gateway.send, kind, path, body) for kind, path, body, _ in batch]
    rows = []
    for (_, _, _, after), future in zip(batch, sent):
        row, message = future.result()
        rows.append(row)
        if after and message is not None:
            after(message)
    return rows


def table(title, rows):
    """Prints the pass; the number of requests whose count was not equal."""
    print(f"\n{title}")
    print(f"{'':12}{'requests':>9}{'exact':>7}{'over':>6}{'under':>7}{'failed':>8}{'prompt':>9}{'cached':>9}{'hit rate':>10}")
    kinds = sorted({row["kind"] for row in rows})
    wrong = 0
    for kind in [*kinds, "all"]:
        of_kind = [row for row in rows if kind in (row["kind"], "all")]
        good = [row for row in of_kind if "cached" in row]
        exact = sum(row["foretold"] == row["cached"] for row in good)
        over = sum(row["foretold"] > row["cached"] for row in good)
        under = sum(row["foretold"] < row["cached"] for row in good)
        prompt, cached = sum(row["prompt"] for row in good), sum(row["cached"] for row in good)
        print(
            f"{kind:12}{len(of_kind):9}{exact:7}{over:6}{under:7}{len(of_kind) - len(good):8}"
            f"{prompt:9}{cached:9}{cached / max(prompt, 1):10.1%}"
        )
        wrong = len(of_kind) - exact
    for number, row in enumerate(rows):
        if row.get("foretold") != row.get("cached") or "cached" not in row:
            print(f"   {number}: {row}")
    return wrong


def computed(rows, blocks):
    """Tokens that each worker computed: more than it holds means that it evicted."""
    workers = {}
    for row in rows:
        if "cached" in row:
            server = row["server"].split(", ")[-1]
            workers[server] = workers.get(server, 0) + row["prompt"] - row["cached"] + row["answer"]
    print(f"tokens computed by each worker, whose cache holds {blocks * BLOCK}: {workers}")


def main():
    parser = argparse.ArgumentParser()
    for name in ("gateway", "admin", "model", "restart", "restart-health", "json"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--restart-pid", type=int, required=True)
    parser.add_argument("--restart-worker", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    gateway, restart = Gateway(arguments), Restart(arguments)
    try:
        rows, late = one_at_a_time(gateway, Load(arguments.model, 1), arguments.rounds, restart)
        wrong = table("Pass A: one at a time", rows)
        computed(rows, arguments.blocks)
        print(f"requests whose blocks the index did not show in {PATIENCE:.0f} s: {late}")
        together = several_at_once(gateway, Load(arguments.model, 2), arguments.rounds, 4)
        table("Pass B: four at once", together)
        computed(together, arguments.blocks)
        servers = [{key: server[key] for key in ("server", "gaps", "replays", "restarts", "dropped")}
                   for server in gateway.index()["servers"]]
        print("\nservers:", json.dumps(servers))
        with open(arguments.json, "w") as file:
            json.dump({"one_at_a_time": rows, "several_at_once": together}, file, indent=1)
    finally:
        restart.stop()
    sys.exit(1 if wrong else 0)


main()
