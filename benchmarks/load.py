"""Callers of a server: the same requests for every one, at once or as they come by chance.

Runs in a process of its own: `python -m benchmarks.load URL --rate 8`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

import httpx


@dataclass(frozen=True)
class Request:
    """A source, how many tokens it shall get, and when it comes (seconds)."""

    src: list[int]
    tokens: int
    at: float


@dataclass(frozen=True)
class Figures:
    """What the callers saw: tokens a second over all, and latencies in seconds.

    Attributes:
        first: the median until the first token is there; of answers that do not stream, until all
            are.
        began: when the first request was sent, as `time.monotonic` tells it.
    """

    tokens_per_second: float
    p50: float
    p99: float
    first: float
    began: float


def requests(count: int, rate: float | None, seed: int, eos: int) -> list[Request]:
    """Targets of 5 to 100 tokens (log-normal around 22), sources about as long.

    Args:
        rate: requests a second, as a Poisson process; None has all come at once.
    """
    rng = random.Random(seed)
    made, at = [], 0.0
    for _ in range(count):
        tokens = target_length(rng)
        length = min(100, max(4, round(tokens * rng.uniform(0.8, 1.2))))
        src = [rng.randrange(10, 31000) for _ in range(length)]
        made.append(Request([*src, eos], tokens, at))
        at += rng.expovariate(rate) if rate else 0.0
    return made


def target_length(rng: random.Random) -> int:
    """Tokens of a target."""
    return min(100, max(5, round(rng.lognormvariate(math.log(22), 0.7))))


async def call(url: str, made: list[Request], exact: bool, stream: bool = False) -> Figures:
    """Send every request at its time.

    Args:
        exact: ask for exactly so many tokens through min_new_tokens (ours needs it said).
        stream: have the tokens come one by one.
    """
    latencies: list[float] = []
    firsts: list[float] = []
    limits = httpx.Limits(max_connections=len(made))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        at, began = time.monotonic(), time.perf_counter()

        async def one(request: Request) -> None:
            await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - began)))
            parameters: dict[str, object] = {"max_new_tokens": request.tokens}
            if exact:
                parameters |= {"min_new_tokens": request.tokens, "details": stream}
            body: dict[str, object] = {"input_ids": request.src, "parameters": parameters}
            if stream:
                body["stream"] = True
            sent = time.perf_counter()
            async with client.stream("POST", f"{url}/generate", json=body) as response:
                response.raise_for_status()
                lines = [line async for line in told(response, sent, firsts) if line]
            answer = json.loads(lines[-1].removeprefix("data:"))
            told_of = response.headers.get("x-generated-tokens")  # ours without details
            found = int(told_of or answer["details"]["generated_tokens"])
            assert abs(found - request.tokens) <= 1, (found, request.tokens)
            latencies.append(time.perf_counter() - sent)

        await asyncio.gather(*map(one, made))
        wall = time.perf_counter() - began
    latencies.sort()
    firsts.sort()
    p99 = latencies[math.ceil(0.99 * len(latencies)) - 1]
    total = sum(request.tokens for request in made)
    middle = len(latencies) // 2
    return Figures(total / wall, latencies[middle], p99, firsts[middle], at)


async def told(response: httpx.Response, sent: float, firsts: list[float]) -> AsyncIterator[str]:
    """The lines of an answer; when the first one came goes to `firsts`."""
    first = True
    async for line in response.aiter_lines():
        if first:
            firsts.append(time.perf_counter() - sent)
        first = False
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--eos", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    made = requests(options.count, options.rate, options.seed, options.eos)
    print(json.dumps(asdict(asyncio.run(call(options.url, made, options.exact, options.stream)))))


if __name__ == "__main__":
    main()
