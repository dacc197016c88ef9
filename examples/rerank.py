"""Candidates put in order by the model's logits.

Something else (a dictionary, a search engine, another model) proposes answers, and this model says
how well each fits the source. `client.score` sums log-probabilities; the logits of every position
tell more, here also the least certain step: it finds the one wrong sound in an answer that is right
otherwise.
"""

import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqserve import Client

WORD = "colonel"
CANDIDATES = ["K AA L AH N EH L", "K ER N AH L", "K AO L AH N AH L", "K AE T"]


@dataclass(frozen=True)
class Ranked:
    """A candidate and how well it fits, in nats.

    Attributes:
        total: log-probability of all of it, its end included.
        mean: the same per token, so that long candidates are not behind for their length.
        weakest: that of its least likely token.
    """

    text: str
    total: float
    mean: float
    weakest: float


def rank(client: Client, source: str, candidates: list[str]) -> list[Ranked]:
    """The candidates, best first: by mean log-probability."""
    end = client.models()[0].eos_token_id
    assert end is not None, "this model's answers end by their length alone"
    targets = [tokens.ids for tokens in client.tokenize(candidates, side="target")]
    targets = [ids if ids[-1] == end else [*ids, end] for ids in targets]
    # The source is encoded once, and all candidates run through the decoder as one batch. What is
    # fed lacks the end: its logits stand behind the last token fed.
    answers = client.logits(source, [ids[:-1] for ids in targets], positions="all")
    ranked = []
    for text, ids, answer in zip(candidates, targets, answers, strict=True):
        steps = log_softmax(answer.logits[-len(ids) :])[np.arange(len(ids)), ids]
        ranked.append(Ranked(text, steps.sum(), steps.mean(), steps.min()))
    return sorted(ranked, key=lambda each: each.mean, reverse=True)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Along the last axis: log-probabilities, from logits that may be -infinity."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    normal: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normal


def main(source: str, candidates: list[str]) -> None:
    with Client(arrays="numpy") as client:
        print("   total    mean  weakest")
        for each in rank(client, source, candidates):
            print(f"{each.total:8.3f}{each.mean:8.3f}{each.weakest:9.3f}  {each.text}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(sys.argv[1], sys.argv[2:])
    else:
        main(WORD, CANDIDATES)
