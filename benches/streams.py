#!/usr/bin/env python3
"""Total tokens a second of parallel streams over one running `muser serve` on this machine.

    muser serve --port 8080 --slots 16 --log off &  benches/streams.py http://127.0.0.1:8080

Every stream is a completion of its own prompt of a few words, greedy, of exactly --tokens tokens. The total is all streams'
tokens over the time from the first request's start to the last one's end, so the prompts are part of it. With --schema the
completions are JSON, held to a schema, and may end before --tokens. Only the standard library is used.
"""

import argparse
import asyncio
import json
import statistics
import time
import urllib.parse

WORDS = "river stone winter letter captain garden market silver morning bridge teacher window forest kitchen doctor harbour".split()
SCHEMA = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}


async def stream(host, port, body):
    """Tokens of one completion, the time of each piece, and the time until its first."""
    start = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    first, tokens = None, 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        first = first or time.monotonic() - start
        # Only the last frames are looked into: client and server share the processors.
        if b'"usage"' in line or b'"error"' in line:
            value = json.loads(line[6:])
            assert "error" not in value, value
            tokens = value["usage"]["completion_tokens"]
    writer.close()
    assert tokens, "a stream without usage"
    return tokens, first


async def together(host, port, n, args, round_):
    bodies = []
    for i in range(n):
        prompt = " ".join(WORDS[(i + k * (round_ + 3)) % len(WORDS)] for k in range(8))
        body = {"prompt": f"{i} {round_} {prompt}", "max_tokens": args.tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "cache_prompt": False}
        if args.schema:
            body["json_schema"] = SCHEMA
        else:
            body["ignore_eos"] = True
        bodies.append(json.dumps(body).encode())
    start = time.monotonic()
    ends = await asyncio.gather(*(stream(host, port, body) for body in bodies))
    seconds = time.monotonic() - start
    return sum(tokens for tokens, _ in ends) / seconds, max(first for _, first in ends)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--streams", default="1,4,16", help="numbers of parallel streams")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--schema", action="store_true")
    args = parser.parse_args()
    url = urllib.parse.urlsplit(args.url)
    assert url.hostname in ("127.0.0.1", "localhost", "::1"), "this measures servers of this machine only"
    await together(url.hostname, url.port, 1, args, 99)
    print("streams  total tok/s (median; all)         slowest first token")
    for n in map(int, args.streams.split(",")):
        rounds = [await together(url.hostname, url.port, n, args, round_) for round_ in range(args.repeat)]
        speeds, firsts = zip(*rounds)
        every = " ".join(f"{speed:.0f}" for speed in speeds)
        print(f"{n:7}  {statistics.median(speeds):8.1f}  ({every})  {1e3 * statistics.median(firsts):8.1f} ms")


asyncio.run(main())
