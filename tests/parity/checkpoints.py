"""Small random checkpoints that `transformers` itself has saved, and both sides' answers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.config import EngineConfig
from model.engine import Engine
from model.layers import padding_mask
from model.loader import LoadedModel, load_model
from model.sequence import Decoding, Forward, ForwardEvent
from model.sequence import Sequence as Row
from model.transformer import Transformer
from seqserve.schemas import GenerateRequest
from service.served import generator_of

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


@dataclass(frozen=True)
class Both:
    """One checkpoint, loaded by the reference and by us.

    Attributes:
        pad, start: ids of padding and decoder start.
        vocab: ids that sources are drawn from are below it.
    """

    directory: Path
    reference: Any
    ours: LoadedModel

    @property
    def network(self) -> Transformer:
        assert isinstance(self.ours.network, Transformer)
        return self.ours.network

    @property
    def pad(self) -> int:
        return self.ours.spec.pad_id

    @property
    def start(self) -> list[int]:
        return list(self.ours.spec.decoder_start_ids)

    def sources(self, count: int, seed: int = 0, longest: int = 14) -> list[list[int]]:
        """Ragged random sources."""
        return self._draw(self.ours.spec.src_vocab_size, count, seed, longest)

    def targets(self, count: int, seed: int = 0, longest: int = 14) -> list[list[int]]:
        """Ragged random decoder inputs, decoder start first."""
        drawn = self._draw(self.ours.spec.tgt_vocab_size, count, seed + 1000, longest)
        return [[*self.start, *ids] for ids in drawn]

    def _draw(self, vocab: int, count: int, seed: int, longest: int) -> list[list[int]]:
        rng = random.Random(seed)
        allowed = [id for id in range(vocab) if id != self.pad]
        return [rng.choices(allowed, k=rng.randint(1, longest)) for _ in range(count)]


def save_and_load(directory: Path, reference: Any, *, dtype: str = "float32", **save: Any) -> Both:
    """Write a reference model and load it again, on both sides.

    Args:
        save: arguments of `save_pretrained`.
    """
    reference.save_pretrained(directory, **save)
    return Both(directory, reference, load_model(directory, "cpu", dtype))


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


# --- the reference's answers ---------------------------------------------------------------------


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Right-padded ids and their attention mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


@torch.no_grad()
def reference_memory(both: Both, sources: Sequence[Sequence[int]]) -> Tensor:
    ids, mask = padded(sources, both.pad)
    encoded: Tensor = both.reference.get_encoder()(ids, attention_mask=mask).last_hidden_state
    return encoded


@torch.no_grad()
def reference_logits(both: Both, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Of one pair alone, ``[tgt, vocab]``."""
    ids = torch.tensor([list(source)])
    out = both.reference(input_ids=ids, decoder_input_ids=torch.tensor([list(target)]))
    logits: Tensor = out.logits[0]
    return logits


@torch.no_grad()
def reference_tokens(both: Both, source: Sequence[int], **options: Any) -> list[list[int]]:
    """What `generate` says of one source, without decoder start and what follows `</s>`."""
    ids = torch.tensor([list(source)])
    answers = both.reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [cut(answer[1:].tolist(), both.ours.spec.eos_id) for answer in answers]


def cut(ids: list[int], eos: int | None) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


# --- ours ----------------------------------------------------------------------------------------


@torch.inference_mode()
def our_memory(both: Both, sources: Sequence[Sequence[int]]) -> Tensor:
    ids, _ = padded(sources, both.pad)
    lengths = torch.tensor([len(source) for source in sources])
    return both.network.encode(ids, padding_mask(lengths, ids.shape[1]))


def our_logits(both: Both, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Of all pairs together."""
    engine = Engine(both.ours, EngineConfig())
    work = [Forward(src, tgt, positions="all") for src, tgt in pairs]
    for forward in work:
        engine.submit(forward)
    found = {e.forward: e.logits for e in engine.run() if isinstance(e, ForwardEvent)}
    return [found[forward] for forward in work]


def our_tokens(
    both: Both, sources: Sequence[list[int]], decodings: Sequence[Decoding]
) -> list[Any]:
    """Of all rows together: greedy tokens, or a beam search's hypotheses."""
    engine = Engine(both.ours, EngineConfig(max_rows=16))
    rows = [Row(s, both.start, d) for s, d in zip(sources, decodings, strict=True)]
    return _run(engine, rows)


def our_defaults(both: Both, source: list[int], **parameters: Any) -> list[list[int]]:
    """What a request gets that says no more than this."""
    request = GenerateRequest.model_validate({"input_ids": source, "parameters": parameters})
    [plan] = generator_of(both.ours).plan(request)
    [answer] = _run(Engine(both.ours, EngineConfig()), plan.sequences)
    if plan.sequences[0].decoding.num_beams == 1:
        return [answer]
    return [list(h.tokens) for h in answer[: plan.answers]]


def _run(engine: Engine, rows: list[Row]) -> list[Any]:
    for row in rows:
        engine.submit(row)
    hypotheses = {}
    for event in engine.run():
        if found := getattr(event, "hypotheses", ()):
            hypotheses[event.sequence] = found
    return [hypotheses.get(row, row.tokens) for row in rows]


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
    theirs = reference_memory(both, sources)
    ours = our_memory(both, sources)
    differences = [
        (a[: len(source)] - b[: len(source)]).abs().max()
        for source, a, b in zip(sources, ours, theirs, strict=True)
    ]
    for (src, tgt), logits in zip(pairs, our_logits(both, pairs), strict=True):
        assert logits.std() > 0.5
        differences.append((logits - reference_logits(both, src, tgt)).abs().max())
    return max(float(difference) for difference in differences)


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
