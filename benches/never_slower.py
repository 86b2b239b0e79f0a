#!/usr/bin/env python3
"""Drafted beside plain: total time of 30 mixed prompts on one server.

usage: never_slower.py [--muser target/release/muser] [--rounds 5] [--tokens 200] [--device cpu] [--processor-time] [--json]
                       [--draft auto] [--before MUSER] [--only CLASS]

Each round sends every prompt three times, one at a time, in turning order, without the prefix cache: twice with
"speculative.n_max": 0, so plain, and once drafted as the server thinks best. One process, because where its memory lies makes a whole run of
it some percent faster or slower; twice plain, because the two beside each other show what a figure is off by. Answers
must be equal token by token. Printed are, for each prompt, the medians of the rounds' ratios of total time (prompt and answer, as the client sees
it): drafted to the mean of both plain ones, and plain to plain; then the sum of each class. The first round is shown apart: there the
engine still learns what passes cost. Where other programs run, --processor-time helps: the CPU device gets one thread, and what counts is the
time that the server's threads had a processor (Linux); the server itself still goes by the clock. With --before another build's server
is sent everything too, in turn, and its ratios are printed beside. Of repetitive and code-like prompts those are counted that are 1.4 times faster. Only the standard library is used.
"""
import argparse, collections, json, pathlib, re, statistics, subprocess, time, urllib.request

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--muser", default="target/release/muser")
p.add_argument("-m", "--model")
p.add_argument("--rounds", type=int, default=5)
p.add_argument("--tokens", type=int, default=200)
p.add_argument("--device", default="cpu")
p.add_argument("--temp", type=float, default=0.0)
p.add_argument("--draft", default="auto", help="as of muser serve")
p.add_argument("--before", help="another build to compare with")
p.add_argument("--only", help="one class of prompts")
p.add_argument("--processor-time", action="store_true")
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
    def __init__(self, muser):
        command = [muser, "serve", "--draft", a.draft, "--port", "0", "--device", a.device, "--slots", "1", "--cache", "0", "--log", "info"]
        command += ["-m", a.model] if a.model else []
        command += ["--threads", "1"] if a.processor_time else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if found := re.search(r"http://[0-9.:]+", line):
                self.url = found.group()
                return
        raise SystemExit("the server did not start")

    def clock(self):
        if not a.processor_time:
            return time.perf_counter()
        tasks = pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def ask(self, name, prompt, plain):
        """Seconds, and the body of the answer."""
        body = {"max_tokens": a.tokens, "temperature": a.temp, "seed": 1, "cache_prompt": False}
        body |= {"speculative.n_max": 0} if plain else {}
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
        start = self.clock()
        with urllib.request.urlopen(request) as reply:
            answer = json.load(reply)
        return self.clock() - start, answer


def text(answer):
    if "choices" not in answer:
        return answer["content"]
    message = answer["choices"][0]["message"]
    return [message.get(key) for key in ("reasoning_content", "content")] + \
        [call["function"] for call in message.get("tool_calls") or []]


PLAIN, DRAFTED, AGAIN = range(3)
ORDERS = [[PLAIN, DRAFTED, AGAIN], [DRAFTED, AGAIN, PLAIN], [AGAIN, PLAIN, DRAFTED]]
servers = []
try:
    servers = [Server(muser) for muser in (a.muser, a.before) if muser]
    cases = [(name, i, prompt) for name, prompts in PROMPTS.items() for i, prompt in enumerate(prompts) if a.only in (None, name)]
    # Interleaved classes, as real requests come.
    cases.sort(key=lambda case: case[1])
    rounds, other, notes = [[] for _ in servers], 0, {}
    for r in range(a.rounds + 1):
        times = [{} for _ in servers]
        for n, (name, i, prompt) in enumerate(cases):
            for s, server in list(enumerate(servers))[::(-1) ** n]:
                got = {which: server.ask(name, prompt, which != DRAFTED) for which in ORDERS[(r + n) % 3]}
                times[s][name, i] = [got[which][0] for which in (PLAIN, DRAFTED, AGAIN)]
                other += text(got[PLAIN][1]) != text(got[DRAFTED][1])
                t = got[DRAFTED][1]["timings"]
                if s == 0:
                    notes[name, i] = f"{t['predicted_n']} tokens, {t['draft_n_accepted']} of {t['draft_n']} drafts accepted"
                    notes[name, i] += f", {t['lookup_n_accepted']} of {t['lookup_n']} lookups" if t.get("lookup_n") else ""
        for s, all_times in enumerate(times):
            rounds[s].append(all_times)
finally:
    for server in servers:
        server.process.terminate()

gain = lambda t: 2 * t[DRAFTED] / (t[PLAIN] + t[AGAIN])
if a.json:
    print(json.dumps([[{f"{n} {i}": t for (n, i), t in times.items()} for times in of] for of in rounds]))
worst, over, fast = collections.defaultdict(float), 0, [0] * len(servers)
names = [name for name in PROMPTS if a.only in (None, name)]
wanted = [case for case in cases if case[0] in ("repetitive", "code-like")]
for name, i, _ in sorted(cases, key=lambda case: (names.index(case[0]), case[1])):
    rest = rounds[0][1:]
    all_plain = [t for times in rest for t in (times[name, i][PLAIN], times[name, i][AGAIN])]
    ratios = [statistics.median(gain(times[name, i]) for times in of[1:]) for of in rounds]
    noise = statistics.median(times[name, i][AGAIN] / times[name, i][PLAIN] for times in rest)
    worst[name] = max(worst[name], ratios[0])
    over += ratios[0] > 1.02
    if name in ("repetitive", "code-like"):
        fast = [count + (ratio <= 1 / 1.4) for count, ratio in zip(fast, ratios)]
    before = f" (before {ratios[1]:.3f})" if a.before else ""
    print(f"{name:10} {i}  plain {statistics.median(all_plain) * 1e3:7.1f} ms  drafted/plain {ratios[0]:.3f}{before}  plain/plain {noise:.3f}  "
          f"first round {gain(rounds[0][0][name, i]):.3f}  {notes[name, i]}")
for name in names:
    total = lambda times: [sum(times[name, i][which] for i in range(len(PROMPTS[name]))) for which in (PLAIN, DRAFTED, AGAIN)]
    ratios = [statistics.median(gain(total(t)) for t in of[1:]) for of in rounds]
    before = f" (before {ratios[1]:.3f})" if a.before else ""
    print(f"{name:10} all  drafted/plain {ratios[0]:.3f}{before} ({1 / ratios[0]:.2f}x faster), first round {gain(total(rounds[0][0])):.3f}, "
          f"worst prompt {worst[name]:.3f}")
print(f"{over} of {len(cases)} prompts over 1.02; {other} of {len(cases) * len(rounds[0]) * len(servers)} answers differ between drafted and plain")
if wanted:
    print(f"{fast[0]} of {len(wanted)} repetitive and code-like prompts are 1.4 times faster" + (f" (before {fast[1]})" if a.before else ""))
