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
        began: when the first request was sent, as `time.monotonic` tells it.
    """

    tokens_per_second: float
    p50: float
    p99: float
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


async def call(url: str, made: list[Request], exact: bool) -> Figures:
    """Send every request at its time.

    Args:
        exact: ask for exactly so many tokens through min_new_tokens (ours needs it said).
    """
    latencies: list[float] = []
    limits = httpx.Limits(max_connections=len(made))
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        at, began = time.monotonic(), time.perf_counter()

        async def one(request: Request) -> None:
            await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - began)))
            parameters: dict[str, object] = {"max_new_tokens": request.tokens}
            if exact:
                parameters |= {"min_new_tokens": request.tokens, "details": True}
            sent = time.perf_counter()
            response = await client.post(
                f"{url}/generate", json={"input_ids": request.src, "parameters": parameters}
            )
            response.raise_for_status()
            found = response.json()["details"]["generated_tokens"]
            assert abs(found - request.tokens) <= 1, (found, request.tokens)
            latencies.append(time.perf_counter() - sent)

        await asyncio.gather(*map(one, made))
        wall = time.perf_counter() - began
    latencies.sort()
    p99 = latencies[math.ceil(0.99 * len(latencies)) - 1]
    total = sum(request.tokens for request in made)
    return Figures(total / wall, latencies[len(latencies) // 2], p99, at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--eos", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    made = requests(options.count, options.rate, options.seed, options.eos)
    print(json.dumps(asdict(asyncio.run(call(options.url, made, options.exact)))))


if __name__ == "__main__":
    main()
