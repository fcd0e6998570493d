"""The server beside its engine: `python -m benchmarks.bench_server [options]`.

Serves the shipped checkpoint to streaming clients in a process of their own, and drives the same
engine directly with the same requests, in turns. Prints tokens/s of both, their ratio, and how long
`/health` takes under load. `taskset -c 0,1` in front gives both two cores.
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import sys
import threading
import time

import numpy as np

PROMPT = "The import statement"


class Client(asyncio.Protocol):
    """Sends one request, and waits for the end of its answer."""

    def __init__(self, request, end):
        self._request = request
        self._end = end
        self._tail = b""
        self.done = asyncio.get_running_loop().create_future()
        self.first_s = None

    def connection_made(self, transport):
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data):
        if self.first_s is None:
            self.first_s = time.perf_counter()
        self._tail = self._tail[-16:] + data
        if self._end in self._tail:
            self._transport.close()
            if not self.done.done():
                self.done.set_result(None)

    def connection_lost(self, error):
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("cut off"))


def request_of(number, args):
    body = json.dumps(
        {
            "model": "shipped",
            "prompt": PROMPT,
            "max_tokens": args.tokens,
            "temperature": 0.6,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = f"content-type: application/json\r\ncontent-length: {len(body)}"
    return f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}".encode()


async def ask_health(address, times):
    """Asks again and again, on a connection of its own each time."""
    while True:
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        assert b" 200 " in answer, answer
        times.append(time.perf_counter() - started)
        writer.close()
        await asyncio.sleep(0.1)


async def run_clients(address, args):
    """Seconds from the first request to the last answer, and those of each `/health`."""
    loop, times = asyncio.get_running_loop(), []
    health = asyncio.create_task(ask_health(address, times))
    started = time.perf_counter()
    clients = [
        (await loop.create_connection(lambda n=n: Client(request_of(n, args), b"[DONE]"), *address))
        for n in range(args.clients)
    ]
    await asyncio.gather(*(client.done for _, client in clients))
    seconds = time.perf_counter() - started
    health.cancel()
    firsts = [client.first_s - started for _, client in clients]
    return seconds, times, firsts


def serve_clients(pipe, args):
    """The process of the clients: runs them whenever it gets an address."""
    while (address := pipe.recv()) is not None:
        before = time.process_time()
        found = asyncio.run(run_clients(tuple(address), args))
        pipe.send((*found, time.process_time() - before))


def drive(engine, args):
    """Seconds that the engine takes by itself."""
    started = time.perf_counter()
    ids = [
        engine.submit(
            PROMPT, max_new_tokens=args.tokens, temperature=0.6, seed=n, stop_token_ids=()
        )
        for n in range(args.clients)
    ]
    while engine.num_unfinished:
        engine.step()
    seconds = time.perf_counter() - started
    for request in ids:
        engine.completion(request)
    return seconds


def in_loop(server, call):
    """What a call gives in the thread of the server's event loop."""
    over, results = threading.Event(), []
    server.loop.call_soon_threadsafe(lambda: (results.append(call()), over.set()))
    over.wait()
    return results[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="profile the event loop's thread")
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    clients = multiprocessing.get_context("spawn").Process(
        target=serve_clients, args=(theirs, args)
    )
    clients.start()

    import dsv4_jax as ds
    from dsv4_jax.serve import Server, ServeSettings
    from dsv4_jax.serving import AsyncEngine

    ds.set_xla_flags()
    ds.use_compilation_cache()
    engine = ds.Engine.from_checkpoint(
        ds.SHIPPED_CHECKPOINT, max_requests=args.clients, max_context_tokens=512
    )
    engine.warmup()
    drive(engine, args)
    count, alone, served, health, firsts = args.clients * args.tokens, [], [], [], []
    cpu_s = []  # of the engine alone, of the server, and of the clients
    for _ in range(args.rounds):
        cpu_s.append([-time.process_time()])
        alone.append(count / drive(engine, args))
        cpu_s[-1][0] += time.process_time()
        with Server(AsyncEngine(engine), ServeSettings(model_name="shipped")) as server:
            profile = cProfile.Profile()
            if args.profile:
                in_loop(server, profile.enable)
            steps, loop_s = engine.metrics.steps, in_loop(server, time.thread_time)
            before = time.process_time()
            ours.send(server.address)
            seconds, times, first, theirs_s = ours.recv()
            cpu_s[-1] += [time.process_time() - before, theirs_s]
            steps = engine.metrics.steps - steps
            loop_s = in_loop(server, time.thread_time) - loop_s
            if args.profile:
                in_loop(server, profile.disable)
                pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        served.append(count / seconds)
        health += times
        firsts += first
        print(
            f"engine {alone[-1]:8.0f} tokens/s   server {served[-1]:8.0f} tokens/s   "
            f"ratio {served[-1] / alone[-1]:.3f}   {steps} steps   event loop "
            f"{loop_s / count * 1e6:.0f} us a token   /health {max(times) * 1e3:.0f} ms at most",
            flush=True,
        )
    ours.send(None)
    clients.join()
    ratios = np.array(served) / np.array(alone)
    p50, p99 = np.percentile(health, [50, 99]) * 1e3
    print(f"{sys.version.split()[0]}, jax {ds.runtime.jax.__version__}, {args}")
    print(f"engine {np.median(alone):.0f} tokens/s, server {np.median(served):.0f} tokens/s")
    print(f"ratio {np.median(ratios):.3f} (median), {ratios.min():.3f} to {ratios.max():.3f}")
    spent = np.median(np.array(cpu_s), axis=0) / count * 1e6
    print("CPU time a token: engine {:.0f} us, server {:.0f} us, clients {:.0f} us".format(*spent))
    print(f"/health {p50:.1f} ms p50, {p99:.1f} ms p99, of {len(health)}")
    print(f"first token {np.percentile(firsts, 50) * 1e3:.0f} ms p50")


if __name__ == "__main__":
    main()
