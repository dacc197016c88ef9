"""Small random checkpoints that `transformers` itself has saved, and both sides' answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import EngineConfig
from model.loader import load_model
from model.sequence import Decoding
from model.sequence import Sequence as Row
from service.check import (
    Both,
    logits_differences,
    memory_differences,
    our_plan,
    reference_logits,
    reference_tokens,
    run_rows,
)

SPREAD = 2.0
"""Standard deviation of logits: certain enough to differ, open enough for beams to cross."""

POSITIONS = 100

SIZES: dict[str, Any] = {
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": POSITIONS,
    "vocab_size": 53,
}


def save_and_load(directory: Path, reference: Any, *, dtype: str = "float32", **save: Any) -> Both:
    """Write a reference model and load it again, on both sides.

    Args:
        save: arguments of `save_pretrained`.
    """
    reference.save_pretrained(directory, **save)
    return Both(reference, load_model(directory, "cpu", dtype))


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of `config.json`; `...` removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@torch.no_grad()
def enliven(network: Any, seed: int = 0) -> Any:
    """Draw weights such that answers vary in tokens and in length; returns the network.

    Queries and keys are drawn wider, so that attention is not an average; the bias on the logits
    makes all tokens alike on average, and `</s>` likelier than others.
    """
    draw = torch.Generator().manual_seed(seed)
    config = network.config
    tables = {
        id(module.weight) for module in network.modules() if hasattr(module, "num_embeddings")
    }
    for name, parameter in network.named_parameters():
        if "embed_positions" in name and not parameter.requires_grad:
            continue  # computed, not drawn
        if parameter.dim() == 1:
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1, generator=draw)
        else:
            width = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            width *= 0.5 * math.sqrt(parameter.shape[-1]) if id(parameter) in tables else 1.0
            parameter.normal_(0.0, width / math.sqrt(parameter.shape[-1]), generator=draw)
    src = torch.randint(3, config.vocab_size, (32, 8), generator=draw)
    tgt = torch.randint(3, network.lm_head.weight.shape[0], (32, 12), generator=draw)
    out = network(input_ids=src, decoder_input_ids=tgt, output_hidden_states=True)
    logits, hidden = out.logits, out.decoder_hidden_states[-1]
    # Negative, since a tied table would otherwise make every token likely to follow itself.
    scale = -SPREAD / logits.std(dim=(0, 1)).mean()
    last = getattr(network.model.decoder, "layer_norm", None)
    last = last if last is not None else network.model.decoder.layers[-1].final_layer_norm
    last.weight *= scale
    last.bias *= scale
    if not hasattr(network, "final_logits_bias"):  # the last norm's bias can say it too
        last.bias -= scale * hidden.mean(dim=(0, 1))
        ending = network.lm_head.weight[config.eos_token_id]
        last.bias += SPREAD * ending / ending.square().sum()
        return network.eval()
    network.final_logits_bias -= scale * logits.mean(dim=(0, 1))
    network.final_logits_bias[0, config.eos_token_id] += 0.8 * SPREAD
    return network.eval()


# --- our answers --------------------------------------------------------------------------------


def our_tokens(
    both: Both, sources: Sequence[list[int]], decodings: Sequence[Decoding]
) -> list[Any]:
    """Of all rows together: greedy tokens, or a beam search's hypotheses."""
    rows = [Row(s, both.start, d) for s, d in zip(sources, decodings, strict=True)]
    return run_rows(both, rows, max_rows=16)


def our_defaults(both: Both, source: list[int], **parameters: Any) -> list[list[int]]:
    """What a request gets that says no more than this."""
    plan = our_plan(both, source, **parameters)
    [answer] = run_rows(both, plan.sequences)
    if plan.sequences[0].decoding.num_beams == 1:
        return [answer]
    return [list(h.tokens) for h in answer[: plan.answers]]


def cached_logits(both: Both, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Step by step on the cache, all rows side by side -> ``[steps, vocab]`` of each.

    Targets begin with the decoder start and are of one length; prefixes are not: row i starts with
    i + 1 of its tokens.
    """
    stepper = both.ours.stepper(EngineConfig())
    rows = [Row(src, tgt[: i + 1], Decoding(POSITIONS)) for i, (src, tgt) in enumerate(pairs)]
    steps: list[list[Tensor]] = [[] for _ in rows]
    with torch.inference_mode():
        stepper.join(rows)
        for _ in range(len(pairs[0][1]) - len(rows)):
            for i, logits in enumerate(stepper.step(rows)):
                steps[i].append(logits.clone())
                rows[i].tokens.append(pairs[i][1][len(rows[i].target)])
    return [torch.stack(row) for row in steps]


# --- agreement -----------------------------------------------------------------------------------

ATOL = 1e-4


def largest_difference(both: Both) -> float:
    """Over encoder outputs and logits, padded and not; what is printed in docs/models.md."""
    sources = both.sources(12)
    pairs = list(zip(sources, both.targets(12), strict=True))
    assert all(reference_logits(both, *pair).std() > 0.5 for pair in pairs)
    differences = [*memory_differences(both, sources), *logits_differences(both, pairs)]
    return max(difference.largest for difference in differences)


def check_generation(both: Both) -> None:
    """Greedy and beam tokens are the reference's, alone and in company."""
    sources = both.sources(8, seed=1)
    greedy, beams = Decoding(20), Decoding(20, num_beams=4, length_penalty=0.8)
    alone = [our_tokens(both, [s], [d])[0] for d in (greedy, beams) for s in sources]
    together = our_tokens(both, sources * 2, [greedy] * 8 + [beams] * 8)
    length = {"max_new_tokens": 20, "forced_eos_token_id": None, "bad_words_ids": None}
    length |= {"forced_bos_token_id": None, "renormalize_logits": False}
    for i, source in enumerate(sources):
        [expected] = reference_tokens(both, source, num_beams=1, **length)
        assert alone[i] == together[i] == expected
        searched = reference_tokens(
            both, source, num_beams=4, num_return_sequences=4, length_penalty=0.8, **length
        )
        for found in (alone[8 + i], together[8 + i]):
            assert [list(h.tokens) for h in found] == searched
    assert len({token for answer in together[:8] for token in answer}) > 10  # answers vary
    lengths = {len(h.tokens) for search in together[8:] for h in search}
    assert len(lengths | {len(answer) for answer in together[:8]}) > 2


def check_long_targets(both: Both) -> None:
    """Cached steps equal the reference's full pass, beyond 64 positions."""
    rng = random.Random(5)
    allowed = [id for id in range(both.ours.spec.tgt_vocab_size) if id != both.pad]
    targets = [[*both.start, *rng.choices(allowed, k=89)] for _ in range(3)]
    pairs = list(zip(both.sources(3, seed=2, longest=60), targets, strict=True))
    for i, found in enumerate(cached_logits(both, pairs)):
        src, tgt = pairs[i]
        expected = reference_logits(both, src, tgt)[i : i + len(found)]
        assert len(found) > 80
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=1e-5)
