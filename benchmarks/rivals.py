"""Servers to compare with, each with a dynamic batcher.

CTranslate2 and transformers behind FastAPI, and transformers behind LitServe, which batches itself.

    python -m benchmarks.rivals ctranslate2 DIRECTORY --dtype int8 --port 8010

`POST /generate {"input_ids": [...], "parameters": {"max_new_tokens": n}}` decodes n tokens, as ours
does when min_new_tokens is n too.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import ctranslate2
import litserve
import torch
import uvicorn
from fastapi import FastAPI, Request
from transformers import AutoModelForSeq2SeqLM

from benchmarks.load import requests

MAX_WAITING = 64
MAX_BATCH = 32


class Work(Protocol):
    """What an engine is given."""

    @property
    def src(self) -> list[int]: ...

    @property
    def tokens(self) -> int: ...

    def answer(self, tokens: list[int]) -> None: ...


@dataclass(frozen=True)
class Job:
    """A request; `loop` and `future` say where its answer is waited for."""

    src: list[int]
    tokens: int
    future: asyncio.Future[list[int]]
    loop: asyncio.AbstractEventLoop

    def answer(self, tokens: list[int]) -> None:
        self.loop.call_soon_threadsafe(self.future.set_result, tokens)


@dataclass(frozen=True)
class Unasked:
    """Work that nobody waits for."""

    src: list[int]
    tokens: int

    def answer(self, tokens: list[int]) -> None:
        assert abs(len(tokens) - self.tokens) <= 1, (len(tokens), self.tokens)


Engine = Callable[[Sequence[Work]], None]


def ct2_engine(directory: str, dtype: str, threads: int) -> Engine:
    """Rows leave CTranslate2's batch as they end, by its callback."""
    translator = ctranslate2.Translator(directory, compute_type=dtype, intra_threads=threads)

    def run(jobs: Sequence[Work]) -> None:
        longest = max(job.tokens for job in jobs)
        results = translator.translate_batch(
            [[f"t{i}" for i in job.src] for job in jobs],
            beam_size=1,
            max_decoding_length=longest,
            min_decoding_length=longest,
            max_batch_size=MAX_BATCH,
            callback=lambda step: step.step + 1 >= jobs[step.batch_id].tokens,
            asynchronous=True,
        )
        for job, result in zip(jobs, results, strict=True):
            job.answer([int(token[1:]) for token in result.result().hypotheses[0]])

    return run


Decode = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Sources and numbers of tokens -> tokens."""


def reference_decode(directory: str, threads: int) -> Decode:
    """A padded batch that lasts as long as its longest row: what `generate` offers."""
    torch.set_num_threads(threads)
    model = AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    pad = model.config.pad_token_id

    @torch.inference_mode()
    def decode(sources: list[list[int]], tokens: list[int]) -> list[list[int]]:
        width, longest = max(map(len, sources)), max(tokens)
        ids = torch.tensor([src + [pad] * (width - len(src)) for src in sources])
        mask = torch.tensor([[i < len(src) for i in range(width)] for src in sources])
        found = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            num_beams=1,
        )
        return [row[1 : 1 + count] for row, count in zip(found.tolist(), tokens, strict=True)]

    return decode


def reference_engine(directory: str, threads: int) -> Engine:
    """`reference_decode`, so many at a time."""
    decode = reference_decode(directory, threads)

    def run(jobs: Sequence[Work]) -> None:
        for first in range(0, len(jobs), MAX_BATCH):
            batch = jobs[first : first + MAX_BATCH]
            found = decode([job.src for job in batch], [job.tokens for job in batch])
            for job, row in zip(batch, found, strict=True):
                job.answer(row)

    return run


class Served(litserve.LitAPI):  # type: ignore[misc] # it has no types
    """`reference_decode` as LitServe has it."""

    def __init__(self, directory: str, threads: int) -> None:
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=0.01, api_path="/generate")
        self._directory, self._threads = directory, threads

    def setup(self, device: str) -> None:
        self._decode = reference_decode(self._directory, self._threads)

    def decode_request(self, request):  # type: ignore[no-untyped-def] # LitServe reads the types
        return request["input_ids"], request["parameters"]["max_new_tokens"]

    def predict(self, batch: list[tuple[list[int], int]]) -> list[list[int]]:
        sources, tokens = zip(*batch, strict=True)
        return self._decode(list(sources), list(tokens))

    def encode_response(self, tokens: list[int]) -> dict[str, Any]:
        return {"details": {"generated_tokens": len(tokens)}}


def alone(engine: Engine, count: int, rounds: int = 5) -> float:
    """Tokens a second of an engine without a server, for requests that are all there: the best."""
    works = [Unasked(made.src, made.tokens) for made in requests(count, None, seed=0, eos=0)]
    seconds = []
    for _ in range(1 + rounds):
        began = time.perf_counter()
        engine(works)
        seconds.append(time.perf_counter() - began)
    return sum(work.tokens for work in works) / min(seconds[1:])


def app_of(engine: Engine) -> FastAPI:
    """Whatever waits, up to a bound, is the next batch."""
    jobs: queue.Queue[Job] = queue.Queue()

    def work() -> None:
        while True:
            batch = [jobs.get()]
            while len(batch) < MAX_WAITING and not jobs.empty():
                batch.append(jobs.get())
            engine(batch)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        threading.Thread(target=work, daemon=True).start()
        yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {}

    @app.post("/generate")
    async def generate(request: Request) -> dict[str, Any]:
        body = await request.json()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[int]] = loop.create_future()
        jobs.put(Job(body["input_ids"], body["parameters"]["max_new_tokens"], future, loop))
        tokens = await future
        return {"generated_text": None, "details": {"generated_tokens": len(tokens)}}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["ctranslate2", "transformers", "litserve"])
    parser.add_argument("directory")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, help="without one, say what the engine does alone")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    if options.engine == "litserve":
        served = Served(options.directory, options.threads)
        server = litserve.LitServer(served, "cpu", healthcheck_path="/ready", timeout=False)
        server.run(host="127.0.0.1", port=options.port, generate_client_file=False)
        return
    if options.engine == "ctranslate2":
        engine = ct2_engine(options.directory, options.dtype, options.threads)
    else:
        engine = reference_engine(options.directory, options.threads)
    if options.port is None:
        print(alone(engine, 64))
        return
    uvicorn.run(app_of(engine), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
