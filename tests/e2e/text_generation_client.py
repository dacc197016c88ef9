"""What the client of text-generation-inference makes of a server, as JSON.

A program of the tests, not a module: it runs where the package `text-generation` is installed.
"""

import asyncio
import json
import os

from text_generation import AsyncClient, Client

URL, SICK = os.environ["URL"], os.environ["SICK"]
HEADERS = {"Authorization": f"Bearer {os.environ['KEY']}"}

client = Client(URL, headers=HEADERS, timeout=60)


def kind_of_error(text: str, client: Client = client, **parameters: object) -> str:
    """The name of what a call raises."""
    try:
        client.generate(text, **parameters)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__
    return "none"


async def generate() -> str:
    answer = await AsyncClient(URL, headers=HEADERS, timeout=60).generate(
        "hello", max_new_tokens=6, decoder_input_details=True
    )
    [start] = answer.details.prefill
    assert (start.id, start.logprob) == (1, None)
    return answer.generated_text


events = list(client.generate_stream("hello", max_new_tokens=6, top_n_tokens=2))
pieces = [event.token.text for event in events if not event.token.special]
print(
    json.dumps(
        {
            "whole": client.generate("hello", max_new_tokens=6).generated_text,
            "stream": ["".join(pieces), events[-1].generated_text],
            "asyncio": asyncio.run(generate()),
            "drawn": client.generate("hello", temperature=1.5, seed=3).generated_text,
            "errors": [
                kind_of_error("hello", watermark=True),
                kind_of_error(SICK),
                kind_of_error("hello", Client(URL)),
            ],
        }
    )
)
