#!/usr/bin/env python3
"""Soaks a running `muser serve` on this machine with good and bad clients, and says what it found.

    muser serve --port 8080 --log off &  benches/soak.py http://127.0.0.1:8080 --pid $!

Clients disconnect at random places, cancel, send bad bodies, read slowly, stream or not, over every protocol. It fails if
an answer is no proper JSON (or event stream), a good request gets anything but an answer or 503, a slot stays busy, or
memory grows by more than 2 % from the first quarter to the end. Only the standard library is used.
"""

import argparse
import asyncio
import collections
import json
import random
import sys
import time
import urllib.parse
import urllib.request

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/completion"]
TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SYSTEMS = ["You are brief.", "You are a helpful assistant. " * 40]
QUESTIONS = ["What is 12 + 30?", "Say hello.", "What is the weather in Paris?", "Tell a story.", "é<|eot|>\u0000 ok"]


def good_body(path, rng):
    """A request that deserves an answer."""
    stream = rng.random() < 0.6
    limit = rng.choice([1, 4, 16, 48])
    messages = [{"role": "user", "content": rng.choice(QUESTIONS)}]
    system = rng.choice(SYSTEMS)
    body = {"stream": stream, "seed": rng.randrange(1000)}
    if path in ("/v1/completions", "/completion"):
        body |= {"prompt": rng.choice(QUESTIONS), "max_tokens": limit}
    elif path == "/v1/responses":
        body |= {"input": messages, "instructions": system, "max_output_tokens": limit}
    elif path == "/v1/messages":
        body |= {"messages": messages, "system": system, "max_tokens": limit}
    elif path == "/api/chat":
        body |= {"messages": [{"role": "system", "content": system}] + messages, "options": {"num_predict": limit}}
    else:
        body |= {"messages": [{"role": "system", "content": system}] + messages, "max_tokens": limit}
        body["n"] = rng.choice([1, 1, 1, 2])
        if rng.random() < 0.3:
            body["tools"] = [{"type": "function", "function": TOOL}]
            body["tool_choice"] = rng.choice(["auto", "required", "none"])
        elif rng.random() < 0.3:
            body["response_format"] = {"type": "json_object"}
        if rng.random() < 0.2:
            body["reasoning_effort"] = rng.choice(["none", "low", "high"])
        if rng.random() < 0.2:
            body["reasoning_budget"] = rng.choice([1, 8])
    return json.dumps(body).encode()


def bad_body(path, rng):
    """A request that deserves a complaint."""
    good = json.loads(good_body(path, rng))
    kind = rng.randrange(6)
    if kind == 0:
        return json.dumps(good).encode()[: rng.randrange(1, 20)]
    if kind == 1:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 200)))
    if kind == 2:
        return b"[" * rng.randrange(1, 100_000)
    if kind == 3:
        return b"{}"
    if kind == 4:
        key = next(k for k in ("messages", "input", "prompt") if k in good)
        return json.dumps(good | {key: {"wrong": 1}}).encode()
    return json.dumps([good]).encode()


async def exchange(host, port, path, body, rng, misbehave):
    """Sends one request; the status and body, or None where the client left."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        if misbehave == "cut":
            writer.write(head.encode() + body[: len(body) // 2])
            await writer.drain()
            return None
        writer.write(head.encode() + body)
        await writer.drain()
        if misbehave == "leave":
            await asyncio.sleep(rng.random() * 0.2)
            return None
        data = b""
        while chunk := await reader.read(256 if misbehave == "slow" else 65536):
            data += chunk
            if misbehave == "leave-midway":
                return None
            if misbehave == "slow":
                await asyncio.sleep(0.02)
    finally:
        writer.close()
    head, _, rest = data.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    headers = head.lower()
    if b"transfer-encoding: chunked" in headers:
        joined = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            n = int(size, 16)
            if n == 0:
                break
            joined, rest = joined + rest[:n], rest[n + 2 :]
        else:
            raise ValueError("a chunked body without its end")
        rest = joined
    return status, headers, rest


def check(status, headers, body, good):
    """Complains about an answer that is not proper."""
    if b"text/event-stream" in headers:
        assert status == 200
        frames = [f for f in body.decode().split("\n\n") if f]
        for frame in frames:
            data = [line[6:] for line in frame.split("\n") if line.startswith("data: ")]
            if data and data[0] != "[DONE]":
                value = json.loads(data[0])
                assert "error" not in value or value["error"] is None, value
        assert frames, "an empty stream"
    elif b"application/x-ndjson" in headers:
        lines = [json.loads(line) for line in body.decode().splitlines()]
        assert lines and lines[-1].get("done") is True, lines[-1:]
    else:
        value = json.loads(body)
        assert isinstance(value, dict)
        assert (status == 200) == (value.get("error") is None), (status, value)
    allowed = (200, 503) if good else (400,)
    assert status in allowed, (status, body[:300])


async def client(n, args, host, port, tally):
    rng = random.Random(args.seed * 1000 + n)
    while tally["sent"] < args.requests:
        tally["sent"] += 1
        path = rng.choice(PATHS)
        good = rng.random() < 0.8
        body = good_body(path, rng) if good else bad_body(path, rng)
        misbehave = rng.choice(["leave", "leave-midway", "cut", "slow"]) if rng.random() < 0.3 else None
        try:
            answer = await asyncio.wait_for(exchange(host, port, path, body, rng, misbehave), 120)
            if answer is None:
                tally["left"] += 1
                continue
            check(*answer, good)
            tally[answer[0]] += 1
        except Exception as error:  # every kind of surprise is a finding
            tally["bad"] += 1
            if tally["bad"] <= 10:
                print(f"{path} {misbehave}: {type(error).__name__}: {error}\n  {body[:300]!r}", file=sys.stderr)


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


async def watch(args, tally, sizes):
    while True:
        if args.pid:
            sizes.append((tally["sent"], resident(args.pid)))
        await asyncio.sleep(1)


async def soak(args):
    url = urllib.parse.urlsplit(args.url)
    assert url.hostname in ("127.0.0.1", "localhost", "::1"), "this soaks servers of this machine only"
    tally, sizes = collections.Counter(), []
    watcher = asyncio.create_task(watch(args, tally, sizes))
    start = time.monotonic()
    await asyncio.gather(*(client(n, args, url.hostname, url.port, tally) for n in range(args.connections)))
    seconds = time.monotonic() - start
    for _ in range(100):
        slots = json.load(urllib.request.urlopen(f"{args.url}/slots"))
        if not any(slot["is_processing"] for slot in slots):
            break
        await asyncio.sleep(0.1)
    watcher.cancel()
    stuck = sum(slot["is_processing"] for slot in slots)
    print(f"{tally['sent']} requests in {seconds:.0f} s: " + ", ".join(f"{k} {v}" for k, v in tally.items() if k != "sent"))
    print(f"slots stuck: {stuck}")
    growth = 0.0
    if sizes:
        sizes.append((tally["sent"], resident(args.pid)))
        early = max(size for sent, size in sizes if sent <= args.requests / 4)
        growth = sizes[-1][1] / early - 1
        print(f"resident memory: {early} kB in the first quarter, {sizes[-1][1]} kB at the end ({growth:+.1%})")
    return 1 if tally["bad"] or stuck or growth > 0.02 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(asyncio.run(soak(parser.parse_args())))


if __name__ == "__main__":
    main()
