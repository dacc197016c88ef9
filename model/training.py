"""Train a Transformer of the project's own family on a file of pairs.

Everything that decides the result is in `TrainingConfig` and the seed: data order is a function of
(seed, epoch), and a checkpoint holds the rest (weights, averages, optimizer, random state), so that
a resumed run goes on exactly as if it had never stopped.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import Checkpoint
from model.evaluation import Evaluation, Pair, evaluate
from model.families.seqserve import (
    MODEL_TYPES,
    TransformerConfig,
    build,
    parse,
    tokenizers,
)
from model.files import SUMS
from model.loader import choose_device, load_model, read_config
from model.steppers import pad_rows
from model.tokenizer import Granularity, Tokenizer, build_tokenizer

MAY_GROW = ("encoder_layers", "decoder_layers", "relative_positions")
"""What of a model's shape may be more than when it was trained."""

ZERO_AT_FIRST = (".output", ".contract", "position_bias")
"""Ends of the names of what is new that changes nothing while it is zero: with pre-norm, the last
products in a layer; numbers that are added to attention scores."""

MAY_DIFFER = ("dropout", "max_src", "max_tgt", "undo_label_smoothing")
"""What of a model's shape no weight depends on."""


@dataclass(frozen=True)
class TrainingConfig:
    """How to train. Lengths and batches are counted in tokens.

    Attributes:
        source_tokens, target_tokens: what a token is on each side.
        fold_source: lower-case sources and strip their accents.
        vocab_size: bound for learned (SentencePiece) vocabularies.
        dev_size: distinct sources held out for evaluation.
        epochs: passes over the data.
        batch_tokens: rows x longest side of a batch, at most.
        learning_rate: the peak, reached after `warmup_steps` (at most a fifth of the run), then
            down a cosine to 0.
        label_smoothing: mass spread over the vocabulary; taken back out of what is served.
        consistency: weight of the difference between two passes over the same batch, each with its
            own dropout (R-Drop; see `disagreement`); 0 makes one pass.
        weight_decay: decoupled (AdamW), on matrices only.
        clip_norm: bound on the gradient's norm.
        average_decay: decay of the exponential moving average of the weights, which is shipped.
        bfloat16: run the network in bfloat16; weights, averages and the optimizer stay float32.
        start_from: directory of a model of the same shape and vocabularies, whose weights to begin
            with; empty begins with random ones. It may have fewer layers, and no relative
            positions: what is new changes nothing at first.
        evaluate_every: epochs between dev evaluations.
        checkpoint_every: steps between checkpoints.
        seed: of the split, the initial weights, the data order and dropout.
    """

    source_tokens: Granularity = "char"
    target_tokens: Granularity = "whitespace"
    fold_source: bool = False
    vocab_size: int = 8000
    dev_size: int = 1000
    epochs: int = 20
    batch_tokens: int = 2000
    learning_rate: float = 1e-3
    warmup_steps: int = 1000
    label_smoothing: float = 0.1
    consistency: float = 0.0
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    average_decay: float = 0.9995
    bfloat16: bool = False
    start_from: str = ""
    evaluate_every: int = 1
    checkpoint_every: int = 500
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("dev_size", "epochs", "batch_tokens", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.consistency >= 0:
            raise ValueError(f"consistency must not be negative, got {self.consistency}")


@dataclass
class Progress:
    """Where a run stands; handed to the caller after every step.

    Attributes:
        step, steps: done and planned.
        epoch: the running one, from 0.
        loss: of the last batch, nats per token with label smoothing.
        pairs_per_second: since this process started.
        evaluation: of the dev set, right after one.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    pairs_per_second: float
    evaluation: Evaluation | None = None


# --- data --------------------------------------------------------------------------------------


def read_pairs(path: Path) -> list[Pair]:
    """Lines of `source <tab> target`.

    Raises:
        ValueError: a line has no tab, or an empty side; the file is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from error
    pairs = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        source, tab, target = line.rstrip("\r").partition("\t")
        if not tab or not source.strip() or not target.strip():
            raise ValueError(f"{path}:{number}: expected 'source<TAB>target', got {line[:80]!r}")
        pairs.append((source, target))
    if not pairs:
        raise ValueError(f"{path}: no pairs")
    return pairs


def split_by_source(
    pairs: Sequence[Pair], dev_size: int, seed: int
) -> tuple[list[Pair], list[Pair]]:
    """Hold `dev_size` random distinct sources out, with all their targets -> (train, dev)."""
    sources = sorted({source for source, _ in pairs})
    if dev_size >= len(sources):
        raise ValueError(
            f"dev_size must be under the {len(sources)} distinct sources, got {dev_size}"
        )
    held_out = set(random.Random(seed).sample(sources, dev_size))
    train = [pair for pair in pairs if pair[0] not in held_out]
    return train, [pair for pair in pairs if pair[0] in held_out]


@dataclass(frozen=True)
class Batch:
    """Right-padded ids.

    Attributes:
        src: ``[rows, src]``.
        src_lengths: ``[rows]``.
        tgt: ``[rows, tgt]`` what the decoder is fed.
        targets: ``[rows, tgt]`` what it shall predict.
    """

    src: Tensor
    src_lengths: Tensor
    tgt: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, f.name).to(device) for f in fields(self)))

    def twice(self) -> Batch:
        """All rows, and all of them once more behind."""
        return Batch(*(torch.cat([getattr(self, f.name)] * 2) for f in fields(self)))


Example = tuple[list[int], list[int]]
"""Source ids and target ids, `</s>` last on both sides."""


def plan_epoch(examples: Sequence[Example], batch_tokens: int, seed: int) -> list[list[int]]:
    """Every example once, in batches of like length.

    Which examples of equal lengths meet, and the order of the batches, follow from `seed`; the
    number of batches does not depend on it.

    Args:
        batch_tokens: rows x longest side of a batch, at most.

    Returns:
        indices of examples per batch.
    """
    rng = random.Random(seed)
    keyed = sorted((len(src), len(tgt), rng.random(), i) for i, (src, tgt) in enumerate(examples))
    groups: list[list[int]] = [[]]
    longest = 0
    for src_length, tgt_length, _, i in keyed:
        longest = max(longest, src_length, tgt_length)
        if groups[-1] and (len(groups[-1]) + 1) * longest > batch_tokens:
            groups.append([])
            longest = max(src_length, tgt_length)
        groups[-1].append(i)
    rng.shuffle(groups)
    return groups


def collate(examples: Sequence[Example], shape: TransformerConfig) -> Batch:
    """Pad a batch; the decoder is fed the target behind the decoder start."""
    cpu = torch.device("cpu")
    return Batch(
        src=pad_rows([src for src, _ in examples], shape.pad_id, cpu),
        src_lengths=torch.tensor([len(src) for src, _ in examples]),
        tgt=pad_rows([[shape.bos_id, *tgt[:-1]] for _, tgt in examples], shape.pad_id, cpu),
        targets=pad_rows([tgt for _, tgt in examples], shape.pad_id, cpu),
    )


# --- learning ----------------------------------------------------------------------------------


def learning_rate(step: int, steps: int, config: TrainingConfig) -> float:
    """Linear warm-up, at most a fifth of the run, then half a cosine down to 0 at `steps`."""
    warmup = min(config.warmup_steps, max(1, steps // 5))  # small data has few steps
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW with the paper's betas; decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True
    )


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Every token, by id."""
    return [tokenizer.token(id) for id in range(tokenizer.vocab_size)]


def bfloat16_copy(model: nn.Module) -> nn.Module:
    """A network to take gradients with at half the memory traffic.

    Its weights and all it computes are bfloat16, but for softmax, loss and position encodings. A
    step changes weights by less than bfloat16 can tell, so `model` keeps them in float32.
    """
    network = copy.deepcopy(model)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return network


def hand_gradients_over(network: nn.Module, model: nn.Module) -> None:
    """Give `model` the gradients of its copy, in its own dtype; nothing where they are one."""
    for computed, kept in zip(network.parameters(), model.parameters(), strict=True):
        kept.grad = None if computed.grad is None else computed.grad.to(kept.dtype)


@torch.no_grad()
def round_weights(model: nn.Module, network: nn.Module) -> None:
    """Give the copy the weights of `model`; nothing where they are one."""
    if network is not model:
        torch._foreach_copy_(list(network.parameters()), list(model.parameters()))


def disagreement(logits: Tensor, targets: Tensor, pad_id: int) -> Tensor:
    """How far two passes over the same rows are apart: R-Drop (Liang et al., 2021, equation 2).

    Args:
        logits: ``[2 * rows, tgt, vocab]``, one pass behind the other.
        targets: ``[2 * rows, tgt]``; where they are `pad_id`, nothing counts.

    Returns:
        a number in nats per token: the Kullback-Leibler divergences of either pass's
        probabilities from the other's, averaged.
    """
    one, other = F.log_softmax(logits.float(), dim=-1).chunk(2)  # [rows, tgt, vocab] each
    apart = ((one.exp() - other.exp()) * (one - other)).sum(dim=-1)  # both divergences in one sum
    kept = targets.chunk(2)[0] != pad_id  # [rows, tgt]
    return apart[kept].mean() / 2.0


class WeightAverage:
    """Exponential moving average of a model's weights, with a short memory at first."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        current = [p.detach() for _, p in model.named_parameters()]
        torch._foreach_lerp_(list(self.weights.values()), current, 1.0 - decay)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take another average's weights over, in place."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])


class Trainer:
    """One run, from pairs to a directory that `seqserve serve` takes.

    Args:
        pairs: all pairs; the dev set is split off here.
        out: directory of the result; the checkpoint lies there too.
        shape: sizes of the model, fields of `TransformerConfig`; vocabularies, and maximum lengths
            where not given, come from the data.
        config: how to train.
        device: where; see `choose_device`.

    Raises:
        ValueError: `config` does not fit the data, the device or the model to start from.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        out: Path,
        shape: Mapping[str, Any],
        config: TrainingConfig,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.out = out
        self.device = choose_device(device)
        train, self.dev = split_by_source(pairs, config.dev_size, config.seed)
        self.source = build_tokenizer(
            [s for s, _ in train], config.source_tokens, config.fold_source, config.vocab_size
        )
        self.target = build_tokenizer(
            [t for _, t in train], config.target_tokens, vocab_size=config.vocab_size
        )
        self.examples = list(
            zip(
                self.source.encode([s for s, _ in train]),
                self.target.encode([t for _, t in train]),
                strict=True,
            )
        )
        lengths = {
            "max_src": max(len(src) for src, _ in self.examples),
            "max_tgt": max(len(tgt) for _, tgt in self.examples) + 1,
        }
        self.shape = TransformerConfig(
            self.source.vocab_size, self.target.vocab_size, **{**lengths, **shape}
        )
        torch.manual_seed(config.seed)
        self.model = build(self.shape).to(self.device)
        if config.start_from:
            self._take_weights(Path(config.start_from))
        self.network = bfloat16_copy(self.model) if config.bfloat16 else self.model
        self.optimizer = make_optimizer(self.model, config)
        self.average = WeightAverage(self.model, config.average_decay)
        self.step = 0
        self.evaluations: list[Evaluation] = []
        self._interrupted = False
        out.mkdir(parents=True, exist_ok=True)

    def run(self, on_progress: Callable[[Progress], None] = lambda _: None) -> None:
        """Train to the last epoch, evaluating, checkpointing and exporting on the way."""
        started, first = time.monotonic(), self.step
        per_epoch = len(self._plan(0))
        steps = per_epoch * self.config.epochs
        pairs_seen, loss = 0, math.nan

        def report(epoch: int, evaluation: Evaluation | None = None) -> None:
            speed = pairs_seen / (time.monotonic() - started) if self.step > first else 0.0
            on_progress(Progress(self.step, steps, epoch, loss, speed, evaluation))

        while True:
            epoch, done = divmod(self.step, per_epoch)
            if done == 0 and self._evaluation_is_due(epoch):
                report(epoch, self._evaluate(epoch))
            if self.step >= steps:
                return
            for group in self._plan(epoch)[done:]:
                loss = self._learn(collate([self.examples[i] for i in group], self.shape), steps)
                pairs_seen += len(group)
                report(epoch)
                if self._interrupted or self.step % self.config.checkpoint_every == 0:
                    self.save_checkpoint()
                if self._interrupted:
                    return

    def interrupt(self) -> None:
        """Have `run` return behind the running step, with a checkpoint to go on from exactly."""
        self._interrupted = True

    def _take_weights(self, directory: Path) -> None:
        """Begin with a trained model's weights, which must mean here what they meant there."""
        start = parse(read_config(directory))
        then, now = (
            {k: v for k, v in asdict(shape).items() if k not in MAY_DIFFER}
            for shape in (start, self.shape)
        )
        then |= {k: now[k] for k in MAY_GROW if then[k] < now[k]}
        if changed := [f"{k} is {v}, not {now[k]}" for k, v in then.items() if v != now[k]]:
            raise ValueError(f"start_from: in {directory} {'; '.join(changed)}")
        sides = zip(
            ("source", "target"), tokenizers(directory), (self.source, self.target), strict=True
        )
        for side, theirs, ours in sides:
            if theirs is None or vocabulary(theirs) != vocabulary(ours):
                raise ValueError(f"start_from: {directory} has another {side} vocabulary")
        checkpoint = Checkpoint.open(directory)
        trained = dict(build(start).named_parameters())
        for name, parameter in self.model.named_parameters():
            if name in trained:
                parameter.data.copy_(checkpoint.read(name))
            elif name.rpartition(".")[0].endswith(ZERO_AT_FIRST):
                parameter.data.zero_()

    def _plan(self, epoch: int) -> list[list[int]]:
        seed = self.config.seed * 1_000_003 + epoch
        return plan_epoch(self.examples, self.config.batch_tokens, seed)

    def _learn(self, batch: Batch, steps: int) -> float:
        self.network.train()
        if self.config.consistency:
            batch = batch.twice()
        batch = batch.to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, steps, self.config)
        logits, loss = self.network(
            batch.src,
            batch.tgt,
            batch.targets,
            src_lengths=batch.src_lengths,
            label_smoothing=self.config.label_smoothing,
        )
        if self.config.consistency:
            apart = disagreement(logits, batch.targets, self.shape.pad_id)
            loss = (
                loss + 0.5 * self.config.consistency * apart
            )  # the paper sums two losses, not one
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        hand_gradients_over(self.network, self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.average.update(self.model, self.step)
        round_weights(self.model, self.network)
        self.step += 1
        return float(loss.detach())

    def _evaluation_is_due(self, epoch: int) -> bool:
        if epoch == 0 or any(evaluation.epoch == epoch for evaluation in self.evaluations):
            return False
        return epoch % self.config.evaluate_every == 0 or epoch == self.config.epochs

    def _evaluate(self, epoch: int) -> Evaluation:
        """Decode the dev set with what is exported, as a server would."""
        self.export()
        units = list if self.config.target_tokens == "char" else str.split
        evaluation = evaluate(load_model(self.out, str(self.device)), self.dev, epoch, units)
        self.evaluations.append(evaluation)
        self.export()
        self.save_checkpoint()
        return evaluation

    # --- files -------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Everything needed to go on exactly."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.weights,
            "step": self.step,
            "random": random_state(self.device),
            "evaluations": [asdict(e) for e in self.evaluations],
            "config": asdict(self.config),
            "shape": asdict(self.shape),
        }
        with replacing(self.out / "checkpoint.pt") as partial:
            torch.save(state, partial)

    def resume(self) -> bool:
        """Take the directory's checkpoint up; False if there is none.

        Raises:
            ValueError: it was made with other settings or data.
        """
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, map_location="cpu", weights_only=True)
        # What a checkpoint does not know yet was as it is by default.
        then = asdict(TrainingConfig()) | state["config"] | state["shape"]
        now = asdict(self.config) | asdict(self.shape)
        changed = [f"{k} was {then.get(k)}, is {v}" for k, v in now.items() if then.get(k) != v]
        if changed:
            raise ValueError(f"{path} was made with other settings: {'; '.join(changed)}")
        self.model.load_state_dict(state["model"])
        round_weights(self.model, self.network)
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load(state["average"])
        self.step = state["step"]
        self.evaluations = [Evaluation(**e) for e in state["evaluations"]]
        set_random_state(self.device, state["random"])
        return True

    def export(self) -> None:
        """Write the averaged model as a directory that can be served."""
        (self.out / SUMS).unlink(missing_ok=True)  # it vouched for an earlier model
        tensors = {name: t.cpu().contiguous() for name, t in self.average.weights.items()}
        with replacing(self.out / "model.safetensors") as partial:
            save_file(tensors, partial)
            partial.chmod(0o644)  # the library writes for its owner only
        served = replace(self.shape, undo_label_smoothing=self.config.label_smoothing)
        write_json(self.out / "config.json", {"model_type": MODEL_TYPES[0], **asdict(served)})
        self.source.save(self.out / f"source_tokenizer{self.source.suffix}")
        self.target.save(self.out / f"target_tokenizer{self.target.suffix}")
        report = {
            "training": asdict(self.config),
            "steps": self.step,
            "train_pairs": len(self.examples),
            "evaluations": [asdict(e) for e in self.evaluations],
        }
        write_json(self.out / "training.json", report)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; moved over `path` only when all is written."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    os.replace(partial, path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def random_state(device: torch.device) -> list[Tensor]:
    """The state of the generators that dropout draws from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_state(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
