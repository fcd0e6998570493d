"""Asks a server for its health while other requests cost it all that they can.

    python -m tools.health_load URL MODEL SECONDS

Prints a line of JSON: the 50th and 99th percentile of the seconds that `/health` took, and of
those that a server took meanwhile that does nothing else, which say how busy the machine is.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time

import httpx
import numpy as np

MIB = 2**20
SIZE = 8 * MIB - 4096
JOINED = {"allOf": [{"type": "integer", "multipleOf": 60_013}, {"multipleOf": 999}]}
TEXT = "The quick brown fox jumps over the lazy dog. "


def bodies(model):
    """By path, what costs: schemas, large JSON of all kinds, long texts, and small requests."""
    messages = [{"role": "user", "content": "hi"}]
    chat = {"model": model, "messages": messages, "max_tokens": 4}
    schema = {"type": "object", "properties": {"a": JOINED}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    many = {f"p{i}": {"type": "string", "maxLength": 9 + i} for i in range(900)}
    tool = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": many}}
    tools = [{"type": "function", "function": tool}]

    def of(part):
        return f'{{"model":"{model}","prompt":[{part * (SIZE // len(part))}1]}}'.encode()

    def texts(text):
        escaped = json.dumps(text)[1:-1]
        return json.dumps({"model": model, "prompt": text * (SIZE // len(escaped))}).encode()

    completions, conversations = "/v1/completions", "/v1/chat/completions"
    large = [of(part) for part in ("[],", "{},", '"",', "1,", "1.5,", '{"a":[]},')]
    ids = json.dumps({"model": model, "tokens": [97] * 700_000}).encode()
    return [
        *((completions, body) for body in large),
        (completions, texts(TEXT)),
        (completions, texts("\n\"")),
        ("/tokenize", texts(TEXT)),
        ("/detokenize", ids),
        (conversations, json.dumps(chat | {"response_format": form}).encode()),
        (conversations, json.dumps(chat | {"tools": tools, "tool_choice": "auto"}).encode()),
        (conversations, json.dumps(chat | {"messages": messages * 20_000}).encode()),
        *([(conversations, json.dumps(chat).encode())] * 12),
    ]  # fmt: skip


async def load(url, what, seed, until):
    """One client after another: each asks for something that costs, and some leave at once."""
    rng = random.Random(seed)
    headers = {"content-type": "application/json"}
    counts = {}
    async with httpx.AsyncClient(base_url=url) as client:
        while time.monotonic() < until:
            path, body = rng.choice(what)
            try:
                patience = rng.choice((0.3, 60))
                answer = await client.post(path, content=body, headers=headers, timeout=patience)
                counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
            except httpx.TransportError as error:
                name = type(error).__name__
                counts[name] = counts.get(name, 0) + 1
    return counts


async def probe(url, until):
    """Seconds that each of a second's twenty questions took."""
    took = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while time.monotonic() < until:
            start = time.perf_counter()
            (await client.get("/health")).raise_for_status()
            took.append(time.perf_counter() - start)
            await asyncio.sleep(0.05)
    return took


async def idle():
    """A server that does nothing but answer."""

    async def answer(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


async def ask(urls, seconds):
    until = time.monotonic() + seconds
    return await asyncio.gather(*(probe(url, until) for url in urls))


async def load_all(url, model, seconds):
    what, until = bodies(model), time.monotonic() + seconds
    return await asyncio.gather(*(load(url, what, seed, until) for seed in range(8)))


def program(*arguments):
    """This program, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tools.health_load", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )


def run(url, model, seconds):
    """Percentiles by name, and what the clients that cost were answered."""
    other, loader = program("idle"), program("load", url, model, str(seconds))
    try:
        took = asyncio.run(
            ask([url, f"http://127.0.0.1:{other.stdout.readline().strip()}"], seconds)
        )
        counts = json.loads(loader.communicate(timeout=600)[0])
    finally:
        other.kill()
        loader.kill()
        other.communicate()
        loader.communicate()
    names = ("health", "idle")
    found = {
        name: np.percentile(one, [50, 99]).tolist() for name, one in zip(names, took, strict=True)
    }
    return found | {"answers": counts}


def main(command="", *arguments):
    if command == "idle":
        asyncio.run(idle())
    elif command == "load":
        url, model, seconds = arguments
        print(json.dumps(asyncio.run(load_all(url, model, float(seconds)))))
    elif len(arguments) != 2:
        sys.exit(__doc__)
    else:
        print(json.dumps(run(command, arguments[0], float(arguments[1]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
