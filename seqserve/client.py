"""Talk to a seqserve server: `Client`, and `AsyncClient` with the same methods to await.

>>> client = Client("http://127.0.0.1:8000")  # doctest: +SKIP
>>> client.generate("hello").generated_text  # doctest: +SKIP
'HH EH L OW'

What a call sends and how its answer is read stands in `seqserve.calls`, when it is tried again in
`seqserve.retries`. The clients differ in how they wait, and in nothing else: a test compares their
signatures.

Errors are those of `seqserve.errors`, with `status`, `param` and `request_id`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Sequence,
)
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import httpx

from seqserve import __version__
from seqserve.arrays import ArrayKind, Attention, Logits, chosen_kind
from seqserve.calls import (
    AttentionOptions,
    Call,
    LogitsOptions,
    Many,
    NextOptions,
    One,
    Options,
    Parameters,
    SpokenOptions,
    T,
    TextOptions,
    Timed,
    TokenizeOptions,
    attention_call,
    detokenize_call,
    generate_call,
    info_call,
    logits_call,
    next_call,
    ready_call,
    score_call,
    stream_call,
    tokenize_call,
)
from seqserve.errors import SeqserveError, VersionError
from seqserve.failures import check_version, failure_of
from seqserve.mapping import A, OnError, Progress, R, map_tasks, map_threads
from seqserve.retries import Tries
from seqserve.schemas import (
    DetokenizeResponse,
    GenerateResponse,
    InfoResponse,
    ModelInfo,
    NextResponse,
    ScoreResponse,
    StreamEvent,
    TokenizeResponse,
)
from seqserve.streams import AsyncStream, Stream, StreamReader

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT = 60.0
DEFAULT_RETRIES = 2
MAX_CONNECTIONS = 100

KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: the server closes it after 5."""


class _Caller:
    """What both clients know.

    Attributes:
        model, timeout, retries: see `Client`.
    """

    def __init__(
        self,
        model: str | None,
        timeout: float | None,
        retries: int,
        arrays: ArrayKind | None,
    ) -> None:
        Tries(retries, timeout)  # refuses what is out of range, here rather than at the first call
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self._arrays = chosen_kind(arrays)

    def _tries(self, call: Call[Any], retries: int | None = None) -> Tries:
        return Tries(
            self.retries if retries is None else retries,
            self.timeout if call.timeout is None else call.timeout,
        )


def _address(base_url: str | None) -> str:
    return base_url or os.environ.get("SEQSERVE_URL") or DEFAULT_URL


def _headers(api_key: str | None) -> dict[str, str]:
    """The headers that say who asks."""
    agent = {"user-agent": f"seqserve/{__version__}"}
    key = os.environ.get("SEQSERVE_API_KEY", "") if api_key is None else api_key
    return agent | {"authorization": f"Bearer {key}"} if key else agent


def _limits(max_connections: int) -> httpx.Limits:
    """A pool that keeps every connection for as long as that is of use."""
    return httpx.Limits(
        max_connections=max_connections,
        max_keepalive_connections=max_connections,
        keepalive_expiry=KEEP_ALIVE,
    )


# --- clients -------------------------------------------------------------------------------------


class Client(_Caller):
    """A connection to a server, for any number of threads. A context manager; or call `close`.

    Args:
        base_url: of the server; None takes the variable `SEQSERVE_URL`, or `DEFAULT_URL`.
        model: name of the model to ask where a call names none.
        api_key: sent with every request; None takes the variable `SEQSERVE_API_KEY`, if it is set.
        timeout: seconds for a call, its other tries and the pauses between them included, where the
            call names none. The server is told, and stops then too. None: the server's default.
        retries: how often a call is tried again, see `seqserve.retries`.
        max_connections: that are open at once; further calls wait for one.
        arrays: what logits and attention come as. None: numpy arrays where numpy is installed, else
            lists.
        http: what sends the requests, with its own address, headers and pool; None makes one.

    Raises:
        ValueError: an argument is out of range, or what `arrays` names is not installed.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        max_connections: int = MAX_CONNECTIONS,
        arrays: ArrayKind | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        super().__init__(model, timeout, retries, arrays)
        self._http = http or httpx.Client(
            base_url=_address(base_url), headers=_headers(api_key), limits=_limits(max_connections)
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
    ) -> Stream:
        """Continue one input, token by token.

        Use it as a context manager: leaving the block ends the generation. So does `close`, and
        leaving a loop over a stream that nothing else holds.

        Raises:
            SeqserveError: the server refused or failed, or broke off, also in the middle.
        """
        return Stream(self._events(stream_call(inputs, parameters, options)))

    def _events(self, call: Call[Any]) -> Generator[StreamEvent, None, None]:
        tries = self._tries(call)
        while True:
            reader = StreamReader()
            try:
                with self._http.stream(
                    call.method,
                    call.path,
                    json=call.body_for(self.model),
                    headers=tries.headers(),
                    timeout=tries.timeout(),
                ) as response:
                    if response.is_success:
                        check_version(response)
                        for piece in response.iter_bytes():
                            yield from reader.push(piece)
                        reader.check_complete()
                        return
                    response.read()
                pause = tries.pause_after_answer(response)
            except httpx.HTTPError as error:
                if reader.began:
                    raise failure_of(error, tries.request_id) from error
                pause = tries.pause_after_failure(error)
            time.sleep(pause)

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
        return self.send(logits_call(inputs, targets, options, self._arrays))

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
        return self.send(attention_call(inputs, targets, options, self._arrays))

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

    def info(self, **options: Unpack[Timed]) -> InfoResponse:
        """The server, its limits and its models."""
        return self.send(info_call(options))

    def models(self, **options: Unpack[Timed]) -> list[ModelInfo]:
        """The server's models; the first one answers calls that name none."""
        return self.info(**options).models

    def ready(self, **options: Unpack[Timed]) -> bool:
        """Whether a model can answer; False also where no server can be reached.

        Raises:
            VersionError: there is a server, but this client cannot talk to it.
        """
        try:
            return self.send(ready_call(options), retries=0)
        except VersionError:
            raise
        except SeqserveError:
            return False

    @overload
    def map(
        self,
        function: Callable[[A], R],
        inputs: Iterable[A],
        *,
        concurrency: int = 8,
        errors: Literal["raise"] = "raise",
        progress: Progress = False,
    ) -> Generator[R, None, None]: ...
    @overload
    def map(
        self,
        function: Callable[[A], R],
        inputs: Iterable[A],
        *,
        concurrency: int = 8,
        errors: Literal["return"],
        progress: Progress = False,
    ) -> Generator[R | SeqserveError, None, None]: ...
    def map(
        self,
        function: Callable[[A], R],
        inputs: Iterable[A],
        *,
        concurrency: int = 8,
        errors: OnError = "raise",
        progress: Progress = False,
    ) -> Generator[Any, None, None]:
        """Call a method of this client for each input, several at a time.

        The answers come in the order of the inputs, each as soon as those before it have come.
        Inputs are taken as they are needed, so that a file of any length can be read through it.
        Closing the iterator calls no more, and waits for the calls that run.

        Args:
            function: called in a thread, with one input.
            inputs: any iterable; a list of them tells `progress` how many there are.
            concurrency: calls that run at once, at most.
            errors: `raise` a failed call's error in its place and end, or `return` it as an answer.
            progress: True for a bar (needs tqdm), or what is called with (done, total) after each
                answer; total is None for inputs without a length.

        Raises:
            SeqserveError: a call failed.
            ValueError: an argument is out of range, or there is no tqdm.
        """
        return map_threads(function, inputs, concurrency, errors, progress)

    def send(self, call: Call[T], retries: int | None = None) -> T:
        """Send a call; again after a pause where that can help, see `seqserve.retries`.

        Raises:
            SeqserveError: the server refused or failed, or could not be reached.
        """
        tries = self._tries(call, retries)
        while True:
            try:
                response = self._http.request(
                    call.method,
                    call.path,
                    json=call.body_for(self.model),
                    headers=tries.headers(),
                    timeout=tries.timeout(),
                )
            except httpx.HTTPError as error:
                pause = tries.pause_after_failure(error)
            else:
                if response.is_success:
                    return call.read(response)
                pause = tries.pause_after_answer(response)
            time.sleep(pause)

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


class AsyncClient(_Caller):
    """`Client` for asyncio: the same methods, to be awaited."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        max_connections: int = MAX_CONNECTIONS,
        arrays: ArrayKind | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(model, timeout, retries, arrays)
        self._http = http or httpx.AsyncClient(
            base_url=_address(base_url), headers=_headers(api_key), limits=_limits(max_connections)
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

    def stream(
        self, inputs: One, parameters: Parameters | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Continue one input, token by token.

        Use it as a context manager (`async with`): leaving the block ends the generation. So does
        `aclose`. Leaving a loop does so only when Python collects the stream.

        Raises:
            SeqserveError: the server refused or failed, or broke off, also in the middle.
        """
        return AsyncStream(self._events(stream_call(inputs, parameters, options)))

    async def _events(self, call: Call[Any]) -> AsyncGenerator[StreamEvent, None]:
        tries = self._tries(call)
        while True:
            reader = StreamReader()
            try:
                async with self._http.stream(
                    call.method,
                    call.path,
                    json=call.body_for(self.model),
                    headers=tries.headers(),
                    timeout=tries.timeout(),
                ) as response:
                    if response.is_success:
                        check_version(response)
                        async for piece in response.aiter_bytes():
                            for event in reader.push(piece):
                                yield event
                        reader.check_complete()
                        return
                    await response.aread()
                pause = tries.pause_after_answer(response)
            except httpx.HTTPError as error:
                if reader.began:
                    raise failure_of(error, tries.request_id) from error
                pause = tries.pause_after_failure(error)
            await asyncio.sleep(pause)

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
        return await self.send(logits_call(inputs, targets, options, self._arrays))

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
        return await self.send(attention_call(inputs, targets, options, self._arrays))

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

    async def info(self, **options: Unpack[Timed]) -> InfoResponse:
        """The server, its limits and its models."""
        return await self.send(info_call(options))

    async def models(self, **options: Unpack[Timed]) -> list[ModelInfo]:
        """The server's models; the first one answers calls that name none."""
        return (await self.info(**options)).models

    async def ready(self, **options: Unpack[Timed]) -> bool:
        """Whether a model can answer; False also where no server can be reached.

        Raises:
            VersionError: there is a server, but this client cannot talk to it.
        """
        try:
            return await self.send(ready_call(options), retries=0)
        except VersionError:
            raise
        except SeqserveError:
            return False

    @overload
    def map(
        self,
        function: Callable[[A], Awaitable[R]],
        inputs: Iterable[A],
        *,
        concurrency: int = 8,
        errors: Literal["raise"] = "raise",
        progress: Progress = False,
    ) -> AsyncGenerator[R, None]: ...
    @overload
    def map(
        self,
        function: Callable[[A], Awaitable[R]],
        inputs: Iterable[A],
        *,
        concurrency: int = 8,
        errors: Literal["return"],
        progress: Progress = False,
    ) -> AsyncGenerator[R | SeqserveError, None]: ...
    def map(
        self,
        function: Callable[[A], Awaitable[R]],
        inputs: Iterable[A],
        *,
        concurrency: int = 8,
        errors: OnError = "raise",
        progress: Progress = False,
    ) -> AsyncGenerator[Any, None]:
        """Call a method of this client for each input, several at a time.

        The answers come in the order of the inputs, each as soon as those before it have come.
        Inputs are taken as they are needed, so that a file of any length can be read through it.
        Closing the iterator (`contextlib.aclosing`) cancels the calls that run.

        Args:
            function: called with one input, and awaited.
            inputs: any iterable; a list of them tells `progress` how many there are.
            concurrency: calls that run at once, at most.
            errors: `raise` a failed call's error in its place and end, or `return` it as an answer.
            progress: True for a bar (needs tqdm), or what is called with (done, total) after each
                answer; total is None for inputs without a length.

        Raises:
            SeqserveError: a call failed.
            ValueError: an argument is out of range, or there is no tqdm.
        """
        return map_tasks(function, inputs, concurrency, errors, progress)

    async def send(self, call: Call[T], retries: int | None = None) -> T:
        """Send a call; again after a pause where that can help, see `seqserve.retries`.

        Raises:
            SeqserveError: the server refused or failed, or could not be reached.
        """
        tries = self._tries(call, retries)
        while True:
            try:
                response = await self._http.request(
                    call.method,
                    call.path,
                    json=call.body_for(self.model),
                    headers=tries.headers(),
                    timeout=tries.timeout(),
                )
            except httpx.HTTPError as error:
                pause = tries.pause_after_failure(error)
            else:
                if response.is_success:
                    return call.read(response)
                pause = tries.pause_after_answer(response)
            await asyncio.sleep(pause)

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
