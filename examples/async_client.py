"""The asynchronous client: many questions at once, which the server answers as one batch."""

import asyncio
import sys

from seqserve import AsyncClient

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


async def main(words: list[str]) -> None:
    async with AsyncClient() as client:
        # Different questions side by side: gather.
        spoken, following = await asyncio.gather(
            client.generate("hello"), client.next("hello", "HH", top_k=2)
        )
        print("hello:", spoken.generated_text)
        print("behind HH:", [token.text for token in following.tokens])

        # The same question about many inputs: map, which keeps their order and bounds how many
        # are on their way.
        answers = client.map(client.generate, words, concurrency=8)
        async for answer in answers:
            print(answer.generated_text)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or WORDS))
