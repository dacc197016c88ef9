"""Tokens as they come, with their probabilities; and stopping early."""

import math
import sys

from seqserve import Client


def main(word: str) -> None:
    with Client() as client:
        for event in client.stream(word):
            if event.token and not event.token.special:
                probability = math.exp(event.token.logprob or 0.0)
                print(f"{probability:6.1%} {event.token.text}", flush=True)
            if event.details:
                print(f"= {event.generated_text} ({event.details.finish_reason})")

        # Leaving the block closes the connection, and the server stops within a step.
        with client.stream(word) as events:
            for event in events:
                if event.index == 1:
                    break
        print("stopped after two tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "transformer")
