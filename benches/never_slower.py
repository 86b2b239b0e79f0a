#!/usr/bin/env python3
"""Drafted beside plain: total time of 30 mixed prompts on two servers, in interleaved pairs.

usage: never_slower.py [--muser target/release/muser] [--rounds 5] [--tokens 200] [--device cpu] [--json]

One server drafts as it thinks best, the other does not draft at all. Each round sends every prompt to both, one at a time,
in turning order, without the prefix cache; answers must be equal token by token. Printed are, for each prompt, the median of the
rounds' ratios of drafted to plain total time (prompt and answer, as the client sees it), and the sum of each class. The
first round is shown apart: there the engine still learns what passes cost. Only the standard library is used.
"""
import argparse, collections, json, re, statistics, subprocess, time, urllib.request

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--muser", default="target/release/muser")
p.add_argument("-m", "--model")
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--tokens", type=int, default=200)
p.add_argument("--device", default="cpu")
p.add_argument("--temp", type=float, default=0.0)
p.add_argument("--json", action="store_true", help="print one JSON object with every time")
a = p.parse_args()

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Get the weather for a city.",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
PROMPTS = {
    "chat": [
        "Hello", "Who are you?", "What is the capital of France?", "What does harbor mean?",
        "If today is Friday, what day is it in 10 days?", "Tell me a short story about a fox.",
        "Sort these words alphabetically: pear, apple, mango, kiwi", "Is 36 even or odd?",
    ],
    # Openings of books whose rights have ended.
    "prose": [
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.",
        "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse,",
        "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:",
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness,",
        "The town lies in a valley between two rivers. Its climate is temperate, with cold winters and",
        "The president said on Tuesday that the economy would grow, but that",
        "For the most wild, yet most homely narrative which I am about to pen, I neither expect nor solicit belief.",
        "The driver supports several queues. Packets are placed on a queue by the",
    ],
    "repetitive": [
        "one two three four five six seven eight nine ten\n" * 6,
        "The cat sat on the mat. The dog sat on the log. " * 6,
        ", ".join(str(i) for i in range(1, 60)) + ",",
        {"content": "Repeat after me: the quick brown fox"},
        "Monday\nTuesday\nWednesday\nThursday\nFriday\nSaturday\nSunday\n" * 5,
        "".join(f"{i} + 1 = {i + 1}\n" for i in range(1, 30)),
        {"content": "Count from 1 to 20."},
    ],
    "code-like": [
        {"content": "What is the weather in Oslo?", "tools": True},
        {"content": "Extract as JSON: Anna is 31 years old, lives in Paris and works as a teacher."},
        {"content": "Write a Python function that reverses a string."},
        "".join(f'{{"id": {i}, "name": "item {i}", "price": {i * 3}, "sold": false}}\n' for i in range(1, 14)),
        "".join(f"    if (value == {i}) {{\n        return table[{i}];\n    }}\n" for i in range(1, 12)),
        "<table>\n" + "".join(f"  <tr><td>{i}</td><td>row {i}</td></tr>\n" for i in range(1, 14)),
        "".join(f"def get_{n}(self):\n    return self.{n}\n\n" for n in
                ["name", "size", "color", "width", "height", "weight", "price", "title"]),
    ],
}


class Server:
    def __init__(self, *extra):
        command = [a.muser, "serve", "--port", "0", "--device", a.device, "--slots", "1", "--cache", "0", "--log", "info"]
        command += ["-m", a.model] if a.model else []
        self.process = subprocess.Popen(command + list(extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if found := re.search(r"http://[0-9.:]+", line):
                self.url = found.group()
                return
        raise SystemExit("the server did not start")

    def ask(self, name, prompt):
        """Seconds, and the body of the answer."""
        body = {"max_tokens": a.tokens, "temperature": a.temp, "seed": 1, "cache_prompt": False}
        path = "/completion"
        if name == "chat" or isinstance(prompt, dict):
            path = "/v1/chat/completions"
            prompt = prompt if isinstance(prompt, dict) else {"content": prompt}
            body["messages"] = [{"role": "user", "content": prompt["content"]}]
            if prompt.get("tools"):
                body["tools"] = TOOLS
        else:
            body["prompt"] = prompt
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        start = time.perf_counter()
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply)
        return time.perf_counter() - start, answer


def text(answer):
    if "choices" not in answer:
        return answer["content"]
    message = answer["choices"][0]["message"]
    return [message.get(key) for key in ("reasoning_content", "content")] + \
        [call["function"] for call in message.get("tool_calls") or []]


servers = []
try:
    servers = [Server("--draft", "off"), Server()]
    cases = [(name, i, prompt) for name, prompts in PROMPTS.items() for i, prompt in enumerate(prompts)]
    # Interleaved classes, as real requests come.
    cases.sort(key=lambda case: case[1])
    rounds, other, notes = [], 0, {}
    for r in range(a.rounds + 1):
        times = {}
        for n, (name, i, prompt) in enumerate(cases):
            order = [0, 1] if (r + n) % 2 else [1, 0]
            got = {which: servers[which].ask(name, prompt) for which in order}
            times[name, i] = (got[0][0], got[1][0])
            other += text(got[0][1]) != text(got[1][1])
            t = got[1][1]["timings"]
            notes[name, i] = f"{t['predicted_n']} tokens, {t['draft_n_accepted']} of {t['draft_n']} drafts accepted"
        rounds.append(times)
finally:
    for server in servers:
        server.process.terminate()

first, rest = rounds[0], rounds[1:]
if a.json:
    print(json.dumps([{f"{n} {i}": t for (n, i), t in times.items()} for times in rounds]))
worst = collections.defaultdict(float)
for name, i, _ in sorted(cases, key=lambda case: (list(PROMPTS).index(case[0]), case[1])):
    plain = statistics.median(times[name, i][0] for times in rest)
    ratio = statistics.median(times[name, i][1] / times[name, i][0] for times in rest)
    worst[name] = max(worst[name], ratio)
    print(f"{name:10} {i}  plain {plain * 1e3:7.1f} ms  drafted/plain {ratio:.3f}  first round "
          f"{first[name, i][1] / first[name, i][0]:.3f}  {notes[name, i]}")
for name, prompts in PROMPTS.items():
    total = lambda times, which: sum(times[name, i][which] for i in range(len(prompts)))
    ratio = statistics.median(total(t, 1) / total(t, 0) for t in rest)
    print(f"{name:10} all  drafted/plain {ratio:.3f} ({1 / ratio:.2f}x faster), first round "
          f"{total(first, 1) / total(first, 0):.3f}, worst prompt {worst[name]:.3f}")
print(f"{other} of {len(cases) * len(rounds)} answers differ between drafted and plain")
