"""Talk to a seqserve server: `Client`, and `AsyncClient` with the same methods to await.

>>> client = Client("http://127.0.0.1:8000")  # doctest: +SKIP
>>> client.generate("hello").generated_text  # doctest: +SKIP
'HH EH L OW'

What a call sends and how its answer is read stands in `seqserve.calls`.

Errors are those of `seqserve.errors`, with `status`, `param` and `request_id`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, overload

import httpx

from seqserve.calls import (
    Attention,
    AttentionOptions,
    Call,
    Logits,
    LogitsOptions,
    Many,
    NextOptions,
    One,
    Options,
    Parameters,
    SpokenOptions,
    StreamReader,
    T,
    TextOptions,
    TokenizeOptions,
    attention_call,
    detokenize_call,
    error_of,
    generate_call,
    info_call,
    logits_call,
    next_call,
    ready_call,
    score_call,
    seconds_of,
    stream_call,
    tokenize_call,
)
from seqserve.errors import NoConnectionError, SeqserveError
from seqserve.schemas import (
    DetokenizeResponse,
    GenerateResponse,
    InfoResponse,
    NextResponse,
    ScoreResponse,
    StreamEvent,
    TokenizeResponse,
)

RETRIED = (429, 503)
DEFAULT_WAIT = 1.0
"""Seconds before another try, where the server does not say how long."""

LONGEST_WAIT = 30.0
"""Seconds; a server that asks for a longer pause gets this one."""


def _credentials(api_key: str | None) -> dict[str, str]:
    """The headers that say who asks."""
    key = os.environ.get("SEQSERVE_API_KEY", "") if api_key is None else api_key
    return {"authorization": f"Bearer {key}"} if key else {}


def _no_connection(error: httpx.HTTPError) -> NoConnectionError:
    return NoConnectionError(str(error) or type(error).__name__)


def _still_worth_it(response: httpx.Response, tries_left: int) -> int:
    """One try less; or the error, where another try is of no use or none is left."""
    if response.status_code in RETRIED and tries_left:
        return tries_left - 1
    raise error_of(response)


def _pause(response: httpx.Response) -> float:
    wait = seconds_of(response.headers.get("retry-after"))
    return min(DEFAULT_WAIT if wait is None else wait, LONGEST_WAIT)


# --- clients -------------------------------------------------------------------------------------


class Client:
    """A connection to a server. Use it as a context manager, or call `close`.

    Args:
        base_url: of the server.
        model: name of the model to ask where a call names none.
        api_key: sent with every request; None takes the variable `SEQSERVE_API_KEY`, if it is set.
        timeout: seconds to wait for an answer.
        retries: how often a call is repeated when the server is full or not ready (429, 503).
        http: what sends the requests, with its own address, timeout and headers; None makes one.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 2,
        http: httpx.Client | None = None,
    ) -> None:
        self.model = model
        self.retries = retries
        self._http = http or httpx.Client(
            base_url=base_url, timeout=timeout, headers=_credentials(api_key)
        )

    @overload
    def generate(
        self, inputs: One, parameters: Parameters | None = None, **options: Unpack[Options]
    ) -> GenerateResponse: ...
    @overload
    def generate(
        self,
        inputs: Many,
        parameters: Parameters | Sequence[Parameters] | None = None,
        **options: Unpack[Options],
    ) -> list[GenerateResponse]: ...
    def generate(self, inputs: Any, parameters: Any = None, **options: Unpack[Options]) -> Any:
        """Continue each input; `parameters` for all of them, or a list with one for each."""
        return self.send(generate_call(inputs, parameters, options))

    def stream(
        self, inputs: One, parameters: Parameters | None = None, **options: Unpack[Options]
    ) -> Generator[StreamEvent, None, None]:
        """Continue one input, token by token.

        Closing the iterator, or leaving a loop over it for good, ends the generation.

        Raises:
            SeqserveError: the server refused or failed, or broke off, also in the middle.
        """
        call = stream_call(inputs, parameters, options)
        left = self.retries
        while True:
            try:
                with self._http.stream(
                    call.method, call.path, json=call.body_for(self.model)
                ) as response:
                    if response.is_success:
                        reader = StreamReader()
                        for piece in response.iter_bytes():
                            yield from reader.push(piece)
                        reader.check_complete()
                        return
                    response.read()
            except httpx.HTTPError as error:
                raise _no_connection(error) from error
            left = _still_worth_it(response, left)
            time.sleep(_pause(response))

    @overload
    def logits(
        self, inputs: One, targets: One | None = None, **options: Unpack[LogitsOptions]
    ) -> Logits: ...
    @overload
    def logits(
        self, inputs: One, targets: Many, **options: Unpack[LogitsOptions]
    ) -> list[Logits]: ...
    @overload
    def logits(
        self, inputs: Many, targets: One | Many | None = None, **options: Unpack[LogitsOptions]
    ) -> list[Logits]: ...
    def logits(self, inputs: Any, targets: Any = None, **options: Unpack[LogitsOptions]) -> Any:
        """Teacher-forced logits; targets pair up with inputs, or are several for one input."""
        return self.send(logits_call(inputs, targets, options))

    @overload
    def next(
        self, inputs: One, target_prefix: One | None = None, **options: Unpack[NextOptions]
    ) -> NextResponse: ...
    @overload
    def next(
        self, inputs: One, target_prefix: Many, **options: Unpack[NextOptions]
    ) -> list[NextResponse]: ...
    @overload
    def next(
        self, inputs: Many, target_prefix: One | Many | None = None, **options: Unpack[NextOptions]
    ) -> list[NextResponse]: ...
    def next(self, inputs: Any, target_prefix: Any = None, **options: Unpack[NextOptions]) -> Any:
        """The likeliest next tokens, best first; prefixes pair up, or are several for one input."""
        return self.send(next_call(inputs, target_prefix, options))

    @overload
    def score(
        self, inputs: One, targets: One | None = None, **options: Unpack[SpokenOptions]
    ) -> ScoreResponse: ...
    @overload
    def score(
        self, inputs: One, targets: Many, **options: Unpack[SpokenOptions]
    ) -> list[ScoreResponse]: ...
    @overload
    def score(
        self, inputs: Many, targets: One | Many | None = None, **options: Unpack[SpokenOptions]
    ) -> list[ScoreResponse]: ...
    def score(self, inputs: Any, targets: Any = None, **options: Unpack[SpokenOptions]) -> Any:
        """Log-probabilities of given targets; they pair up, or are several for one input."""
        return self.send(score_call(inputs, targets, options))

    @overload
    def attention(
        self, inputs: One, targets: One | None = None, **options: Unpack[AttentionOptions]
    ) -> Attention: ...
    @overload
    def attention(
        self, inputs: One, targets: Many, **options: Unpack[AttentionOptions]
    ) -> list[Attention]: ...
    @overload
    def attention(
        self, inputs: Many, targets: One | Many | None = None, **options: Unpack[AttentionOptions]
    ) -> list[Attention]: ...
    def attention(
        self, inputs: Any, targets: Any = None, **options: Unpack[AttentionOptions]
    ) -> Any:
        """Attention weights of all layers and heads, for given targets."""
        return self.send(attention_call(inputs, targets, options))

    @overload
    def tokenize(self, inputs: str, **options: Unpack[TokenizeOptions]) -> TokenizeResponse: ...
    @overload
    def tokenize(
        self, inputs: list[str], **options: Unpack[TokenizeOptions]
    ) -> list[TokenizeResponse]: ...
    def tokenize(self, inputs: Any, **options: Unpack[TokenizeOptions]) -> Any:
        """Token ids of texts, and the vocabulary's names of them."""
        return self.send(tokenize_call(inputs, options))

    @overload
    def detokenize(
        self, input_ids: list[int], **options: Unpack[TextOptions]
    ) -> DetokenizeResponse: ...
    @overload
    def detokenize(
        self, input_ids: list[list[int]], **options: Unpack[TextOptions]
    ) -> list[DetokenizeResponse]: ...
    def detokenize(self, input_ids: Any, **options: Unpack[TextOptions]) -> Any:
        """Texts of token ids."""
        return self.send(detokenize_call(input_ids, options))

    def info(self) -> InfoResponse:
        """The server, its limits and its models."""
        return self.send(info_call())

    def ready(self) -> bool:
        """Whether a model can answer; False also where no server can be reached."""
        try:
            return self.send(ready_call(), retries=0)
        except SeqserveError:
            return False

    def send(self, call: Call[T], retries: int | None = None) -> T:
        """Send a call; again after a pause if the server is full or not ready.

        Raises:
            SeqserveError: the server refused or failed, or could not be reached.
        """
        left = self.retries if retries is None else retries
        while True:
            try:
                response = self._http.request(
                    call.method, call.path, json=call.body_for(self.model)
                )
            except httpx.HTTPError as error:
                raise _no_connection(error) from error
            if response.is_success:
                return call.parse(response)
            left = _still_worth_it(response, left)
            time.sleep(_pause(response))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: the same methods, to be awaited."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: int = 2,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self.model = model
        self.retries = retries
        self._http = http or httpx.AsyncClient(
            base_url=base_url, timeout=timeout, headers=_credentials(api_key)
        )

    @overload
    async def generate(
        self, inputs: One, parameters: Parameters | None = None, **options: Unpack[Options]
    ) -> GenerateResponse: ...
    @overload
    async def generate(
        self,
        inputs: Many,
        parameters: Parameters | Sequence[Parameters] | None = None,
        **options: Unpack[Options],
    ) -> list[GenerateResponse]: ...
    async def generate(
        self, inputs: Any, parameters: Any = None, **options: Unpack[Options]
    ) -> Any:
        """Continue each input; `parameters` for all of them, or a list with one for each."""
        return await self.send(generate_call(inputs, parameters, options))

    async def stream(
        self, inputs: One, parameters: Parameters | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[StreamEvent, None]:
        """Continue one input, token by token.

        Closing the iterator (`contextlib.aclosing`) ends the generation. Leaving a loop over it
        does so too, but only when Python collects the iterator.

        Raises:
            SeqserveError: the server refused or failed, or broke off, also in the middle.
        """
        call = stream_call(inputs, parameters, options)
        left = self.retries
        while True:
            try:
                async with self._http.stream(
                    call.method, call.path, json=call.body_for(self.model)
                ) as response:
                    if response.is_success:
                        reader = StreamReader()
                        async for piece in response.aiter_bytes():
                            for event in reader.push(piece):
                                yield event
                        reader.check_complete()
                        return
                    await response.aread()
            except httpx.HTTPError as error:
                raise _no_connection(error) from error
            left = _still_worth_it(response, left)
            await asyncio.sleep(_pause(response))

    @overload
    async def logits(
        self, inputs: One, targets: One | None = None, **options: Unpack[LogitsOptions]
    ) -> Logits: ...
    @overload
    async def logits(
        self, inputs: One, targets: Many, **options: Unpack[LogitsOptions]
    ) -> list[Logits]: ...
    @overload
    async def logits(
        self, inputs: Many, targets: One | Many | None = None, **options: Unpack[LogitsOptions]
    ) -> list[Logits]: ...
    async def logits(
        self, inputs: Any, targets: Any = None, **options: Unpack[LogitsOptions]
    ) -> Any:
        """Teacher-forced logits; targets pair up with inputs, or are several for one input."""
        return await self.send(logits_call(inputs, targets, options))

    @overload
    async def next(
        self, inputs: One, target_prefix: One | None = None, **options: Unpack[NextOptions]
    ) -> NextResponse: ...
    @overload
    async def next(
        self, inputs: One, target_prefix: Many, **options: Unpack[NextOptions]
    ) -> list[NextResponse]: ...
    @overload
    async def next(
        self, inputs: Many, target_prefix: One | Many | None = None, **options: Unpack[NextOptions]
    ) -> list[NextResponse]: ...
    async def next(
        self, inputs: Any, target_prefix: Any = None, **options: Unpack[NextOptions]
    ) -> Any:
        """The likeliest next tokens, best first; prefixes pair up, or are several for one input."""
        return await self.send(next_call(inputs, target_prefix, options))

    @overload
    async def score(
        self, inputs: One, targets: One | None = None, **options: Unpack[SpokenOptions]
    ) -> ScoreResponse: ...
    @overload
    async def score(
        self, inputs: One, targets: Many, **options: Unpack[SpokenOptions]
    ) -> list[ScoreResponse]: ...
    @overload
    async def score(
        self, inputs: Many, targets: One | Many | None = None, **options: Unpack[SpokenOptions]
    ) -> list[ScoreResponse]: ...
    async def score(
        self, inputs: Any, targets: Any = None, **options: Unpack[SpokenOptions]
    ) -> Any:
        """Log-probabilities of given targets; they pair up, or are several for one input."""
        return await self.send(score_call(inputs, targets, options))

    @overload
    async def attention(
        self, inputs: One, targets: One | None = None, **options: Unpack[AttentionOptions]
    ) -> Attention: ...
    @overload
    async def attention(
        self, inputs: One, targets: Many, **options: Unpack[AttentionOptions]
    ) -> list[Attention]: ...
    @overload
    async def attention(
        self, inputs: Many, targets: One | Many | None = None, **options: Unpack[AttentionOptions]
    ) -> list[Attention]: ...
    async def attention(
        self, inputs: Any, targets: Any = None, **options: Unpack[AttentionOptions]
    ) -> Any:
        """Attention weights of all layers and heads, for given targets."""
        return await self.send(attention_call(inputs, targets, options))

    @overload
    async def tokenize(
        self, inputs: str, **options: Unpack[TokenizeOptions]
    ) -> TokenizeResponse: ...
    @overload
    async def tokenize(
        self, inputs: list[str], **options: Unpack[TokenizeOptions]
    ) -> list[TokenizeResponse]: ...
    async def tokenize(self, inputs: Any, **options: Unpack[TokenizeOptions]) -> Any:
        """Token ids of texts, and the vocabulary's names of them."""
        return await self.send(tokenize_call(inputs, options))

    @overload
    async def detokenize(
        self, input_ids: list[int], **options: Unpack[TextOptions]
    ) -> DetokenizeResponse: ...
    @overload
    async def detokenize(
        self, input_ids: list[list[int]], **options: Unpack[TextOptions]
    ) -> list[DetokenizeResponse]: ...
    async def detokenize(self, input_ids: Any, **options: Unpack[TextOptions]) -> Any:
        """Texts of token ids."""
        return await self.send(detokenize_call(input_ids, options))

    async def info(self) -> InfoResponse:
        """The server, its limits and its models."""
        return await self.send(info_call())

    async def ready(self) -> bool:
        """Whether a model can answer; False also where no server can be reached."""
        try:
            return await self.send(ready_call(), retries=0)
        except SeqserveError:
            return False

    async def send(self, call: Call[T], retries: int | None = None) -> T:
        """Send a call; again after a pause if the server is full or not ready.

        Raises:
            SeqserveError: the server refused or failed, or could not be reached.
        """
        left = self.retries if retries is None else retries
        while True:
            try:
                response = await self._http.request(
                    call.method, call.path, json=call.body_for(self.model)
                )
            except httpx.HTTPError as error:
                raise _no_connection(error) from error
            if response.is_success:
                return call.parse(response)
            left = _still_worth_it(response, left)
            await asyncio.sleep(_pause(response))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
