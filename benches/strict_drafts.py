#!/usr/bin/env python3
"""Drafted output is undrafted output, bit for bit: 200 prompts of 1 to 3,000 tokens in the strict lane, in groups of 1 to 4.

usage: strict_drafts.py [--muser target/release/muser] [--prompts 200] [--tokens 24] [--longest 3000]

Prompts are pieces of this repository's own texts, each sent to a server that drafts as it sees fit, to one that drafts by lookup alone and
to one that doesn't draft: half greedy, half sampled with a seed, 1 to 4 at a time. Token ids must be equal. Only the standard library is used.
"""
import argparse, concurrent.futures, json, pathlib, random, re, subprocess, time, urllib.request

p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("--muser", default="target/release/muser")
p.add_argument("--prompts", type=int, default=200)
p.add_argument("--tokens", type=int, default=24)
p.add_argument("--longest", type=int, default=3000)
a = p.parse_args()
root = pathlib.Path(__file__).resolve().parent.parent


class Server:
    def __init__(self, *extra):
        command = [a.muser, "serve", "--port", "0", "--device", "cpu", "--lane", "strict", "--slots", "4", *extra]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            if found := re.search(r"http://[0-9.:]+", line):
                self.url = found.group()
                return
        raise SystemExit("the server did not start")

    def ask(self, body):
        request = urllib.request.Request(self.url + "/completion", json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)


def ids(text):
    out = subprocess.run([a.muser, "tokenize", "--input", "text", "--plain"], input=text, check=True, capture_output=True, text=True)
    return json.loads(out.stdout)


rng = random.Random(6)
texts = [ids((root / name).read_text()) for name in ("README.md", "docs/guide.md", "docs/architecture.md", "benches/soak.py", "docs/server.md")]
goldens = [json.loads(line)["ids_in"] for line in (root / "tests/fixtures/mini/goldens.jsonl").read_text().splitlines()]
bodies = []
for i in range(a.prompts):
    # A third are chats, whose drafts are mostly confirmed; the others cover every length, short ones more often.
    if i % 3 == 0:
        prompt = goldens[i // 3 % len(goldens)]
    else:
        length = min(a.longest, max(1, int(3 ** (rng.random() * 7.3))))
        text = sum(rng.sample(texts, len(texts)), [])
        start = rng.randrange(max(1, len(text) - length))
        prompt = text[start:start + length]
    sampled = {"temperature": 0.9, "top_k": 40, "seed": i} if i % 2 else {"temperature": 0}
    bodies.append({"prompt": prompt, "max_tokens": a.tokens, "cache_prompt": False, "return_tokens": True, **sampled})

servers = []
try:
    servers = [Server("--draft", "off"), Server(), Server("--draft", "lookup")]
    drafted, accepted, different, done = [0, 0], [0, 0], 0, 0
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        while done < len(bodies):
            group = bodies[done:done + 1 + done % 4]
            plain, *drafts = [list(pool.map(s.ask, group)) for s in servers]
            for which, answers in enumerate(drafts):
                for body, one, two in zip(group, plain, answers):
                    drafted[which] += two["timings"]["draft_n"]
                    accepted[which] += two["timings"]["draft_n_accepted"]
                    if one["tokens"] != two["tokens"]:
                        different += 1
                        print(f"a prompt of {len(body['prompt'])} tokens differs: {one['tokens']} {two['tokens']}")
            done += len(group)
finally:
    for server in servers:
        server.process.terminate()
lengths = sorted(len(b["prompt"]) for b in bodies)
print(f"{len(bodies)} prompts of {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), {a.tokens} new tokens each, "
      f"groups of 1 to 4, half sampled: {different} differ; {accepted[0]} of {drafted[0]} drafted tokens accepted, by lookup alone {accepted[1]} of "
      f"{drafted[1]}; {time.monotonic() - start:.0f} s")
raise SystemExit(different > 0)
