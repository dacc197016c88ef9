"""Servers to compare with: CTranslate2, and transformers, behind FastAPI with a dynamic batcher.

    python -m benchmarks.rivals ctranslate2 DIRECTORY --dtype int8 --port 8010

`POST /generate {"input_ids": [...], "parameters": {"max_new_tokens": n}}` decodes n tokens, as ours
does when min_new_tokens is n too.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ctranslate2
import torch
import uvicorn
from fastapi import FastAPI, Request
from transformers import AutoModelForSeq2SeqLM

MAX_WAITING = 64
MAX_BATCH = 32


@dataclass(frozen=True)
class Job:
    """A request; `loop` and `future` say where its answer is waited for."""

    src: list[int]
    tokens: int
    future: asyncio.Future[list[int]]
    loop: asyncio.AbstractEventLoop

    def answer(self, tokens: list[int]) -> None:
        self.loop.call_soon_threadsafe(self.future.set_result, tokens)


Engine = Callable[[list[Job]], None]


def ct2_engine(directory: str, dtype: str, threads: int) -> Engine:
    """Rows leave CTranslate2's batch as they end, by its callback."""
    translator = ctranslate2.Translator(directory, compute_type=dtype, intra_threads=threads)

    def run(jobs: list[Job]) -> None:
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


def reference_engine(directory: str, threads: int) -> Engine:
    """A padded batch that lasts as long as its longest row: what `generate` offers."""
    torch.set_num_threads(threads)
    model = AutoModelForSeq2SeqLM.from_pretrained(directory).eval()
    pad = model.config.pad_token_id

    @torch.inference_mode()
    def run(jobs: list[Job]) -> None:
        for first in range(0, len(jobs), MAX_BATCH):
            batch = jobs[first : first + MAX_BATCH]
            width = max(len(job.src) for job in batch)
            longest = max(job.tokens for job in batch)
            ids = torch.tensor([job.src + [pad] * (width - len(job.src)) for job in batch])
            mask = torch.tensor([[i < len(job.src) for i in range(width)] for job in batch])
            found = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                num_beams=1,
            )
            for job, row in zip(batch, found.tolist(), strict=True):
                job.answer(row[1 : 1 + job.tokens])

    return run


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
    parser.add_argument("engine", choices=["ctranslate2", "transformers"])
    parser.add_argument("directory")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    if options.engine == "ctranslate2":
        engine = ct2_engine(options.directory, options.dtype, options.threads)
    else:
        engine = reference_engine(options.directory, options.threads)
    uvicorn.run(app_of(engine), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
