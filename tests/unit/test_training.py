"""From pairs to a directory that can be served, and back from any checkpoint on the way."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import ModelError
from model.evaluation import translate
from model.families.seqserve import TransformerConfig
from model.files import SUMS
from model.loader import load_model
from model.training import (
    Progress,
    Trainer,
    TrainingConfig,
    WeightAverage,
    collate,
    disagreement,
    learning_rate,
    plan_epoch,
    read_pairs,
    split_by_source,
)

Pair = tuple[str, str]

SHAPE = {"dim": 16, "heads": 2, "hidden_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
CONFIG = TrainingConfig(
    dev_size=3, epochs=2, batch_tokens=24, warmup_steps=5, checkpoint_every=1000, seed=7
)


def reversal(count: int, longest: int = 5, letters: str = "abcdef", seed: int = 0) -> list[Pair]:
    """Distinct words and their letters in reverse."""
    draw = random.Random(seed)
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(draw.choices(letters, k=draw.randint(1, longest))))
    return [(word, " ".join(reversed(word))) for word in sorted(words)]


PAIRS = reversal(60)


def trainer(out: Path, config: TrainingConfig = CONFIG, **shape: Any) -> Trainer:
    return Trainer(PAIRS, out, {**SHAPE, **shape}, config)


# --- pairs -------------------------------------------------------------------------------------


def test_pairs_are_read_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_bytes("a\tA B\r\n\n  \nword\tW\tX\nünï\t’\n".encode())
    assert read_pairs(path) == [("a", "A B"), ("word", "W\tX"), ("ünï", "’")]


@pytest.mark.parametrize("line", ["no tab", "\tno source", "no target\t", "  \t ", "no target\t  "])
def test_a_line_that_is_no_pair_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(f"a\tA\n{line}\n")
    if not line.strip():
        assert read_pairs(path) == [("a", "A")]  # nothing but white space is a blank line
        return
    with pytest.raises(ValueError, match=r"pairs\.tsv:2: expected 'source<TAB>target'"):
        read_pairs(path)


def test_a_file_without_pairs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no pairs"):
        read_pairs(path)


def test_a_held_out_source_is_held_out_with_all_its_targets() -> None:
    pairs = [(f"s{i % 10}", f"t{i}") for i in range(35)]
    train, dev = split_by_source(pairs, 4, seed=1)
    assert sorted(train + dev) == sorted(pairs)
    held_out = {source for source, _ in dev}
    assert len(held_out) == 4
    assert not held_out & {source for source, _ in train}


def test_the_split_follows_from_the_seed_not_from_the_order_of_pairs() -> None:
    pairs = [(f"s{i}", "t") for i in range(50)]
    held_out = {source for source, _ in split_by_source(pairs, 10, seed=1)[1]}
    again = {source for source, _ in split_by_source(pairs[::-1], 10, seed=1)[1]}
    other = {source for source, _ in split_by_source(pairs, 10, seed=2)[1]}
    assert held_out == again != other


def test_something_must_be_left_to_train_on() -> None:
    with pytest.raises(ValueError, match="dev_size must be under the 2 distinct sources, got 2"):
        split_by_source([("a", "x"), ("a", "y"), ("b", "z")], 2, seed=1)


# --- batches -----------------------------------------------------------------------------------


def examples(count: int = 200) -> list[tuple[list[int], list[int]]]:
    draw = random.Random(0)
    return [([9] * draw.randint(1, 12), [9] * draw.randint(1, 9)) for _ in range(count)]


@pytest.mark.parametrize("batch_tokens", [12, 50, 10_000])
def test_batches_cover_all_examples_once_within_their_size(batch_tokens: int) -> None:
    data = examples()
    plan = plan_epoch(data, batch_tokens, seed=3)
    assert sorted(itertools.chain(*plan)) == list(range(len(data)))
    for group in plan:
        longest = max(max(map(len, data[i])) for i in group)
        assert len(group) * longest <= batch_tokens


def test_an_example_longer_than_a_batch_runs_alone() -> None:
    plan = plan_epoch([([9] * 100, [9]), ([9], [9]), ([9], [9])], 10, seed=0)
    assert sorted(map(sorted, plan)) == [[0], [1, 2]]


def test_batches_follow_from_the_seed_in_members_and_order_but_not_in_number() -> None:
    data = examples()
    plan = plan_epoch(data, 50, seed=3)
    assert plan == plan_epoch(data, 50, seed=3)
    other = plan_epoch(data, 50, seed=4)
    assert {frozenset(group) for group in plan} != {frozenset(group) for group in other}
    assert len(plan) == len(other)


def test_batches_hold_examples_of_like_length() -> None:
    data = examples(1000)
    spread = [
        max(len(data[i][0]) for i in group) - min(len(data[i][0]) for i in group)
        for group in plan_epoch(data, 100, seed=3)
    ]
    assert sum(spread) / len(spread) < 1.0


def test_the_decoder_is_fed_the_target_behind_its_start() -> None:
    batch = collate([([5, 6, 2], [7, 8, 2]), ([5, 2], [9, 2])], TransformerConfig(10, 10))
    assert batch.src.tolist() == [[5, 6, 2], [5, 2, 0]]
    assert batch.src_lengths.tolist() == [3, 2]
    assert batch.tgt.tolist() == [[1, 7, 8], [1, 9, 0]]
    assert batch.targets.tolist() == [[7, 8, 2], [9, 2, 0]]


# --- schedule, average, distance ---------------------------------------------------------------


def test_the_learning_rate_rises_linearly_then_falls_along_a_cosine() -> None:
    config = replace(CONFIG, learning_rate=2.0, warmup_steps=4)
    curve = [learning_rate(step, 24, config) for step in range(25)]
    assert curve[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert curve[14] == pytest.approx(1.0)  # half-way down
    assert curve[24] == pytest.approx(0.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(curve[4:]))
    for step in range(4, 25):
        assert curve[step] == pytest.approx(1 + math.cos(math.pi * (step - 4) / 20))


def test_warming_up_takes_at_most_a_fifth_of_a_run() -> None:
    config = replace(CONFIG, learning_rate=1.0, warmup_steps=100)
    curve = [learning_rate(step, 10, config) for step in range(10)]
    assert curve[:3] == [0.5, 1.0, 1.0]
    assert curve[9] < 0.05
    assert learning_rate(0, 1, config) == 1.0


@pytest.mark.parametrize("name", ["epochs", "batch_tokens", "dev_size", "evaluate_every"])
def test_counts_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        replace(CONFIG, **{name: 0})


def test_a_file_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_bytes(b"a\tb\nc\xff\td\n")
    with pytest.raises(ValueError, match=r"pairs\.tsv: not UTF-8 at byte 5"):
        read_pairs(path)


def test_the_weight_average_forgets_slowly_and_the_start_quickly() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(0.0)
    average = WeightAverage(layer, 0.9)
    layer.weight.data.fill_(1.0)
    average.update(layer, step=0)  # decay min(0.9, 1 / 10)
    assert average.weights["weight"].item() == pytest.approx(0.9)
    average.update(layer, step=10_000)  # decay 0.9
    assert average.weights["weight"].item() == pytest.approx(0.91)


# --- a run -------------------------------------------------------------------------------------


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


class StoppedError(Exception):
    """Stands in for a killed process."""


def run_until(run: Trainer, step: int) -> None:
    """Train, and be killed after a step, without any farewell."""

    def stop(progress: Progress) -> None:
        if progress.step == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        run.run(stop)


def test_a_resumed_run_ends_in_identical_weights(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "straight")
    straight.run()
    steps = straight.step
    assert steps > 20
    config = replace(CONFIG, checkpoint_every=5)
    run_until(trainer(tmp_path / "resumed", config), 9)
    torch.rand(5)  # another process, another random state
    first = trainer(tmp_path / "resumed", config)
    assert first.resume()
    assert first.step == 5
    run_until(first, 18)
    second = trainer(tmp_path / "resumed", config)
    assert second.resume()
    assert second.step == 15
    second.run()
    assert second.step == steps
    for ours, theirs in (
        (second.model.state_dict(), straight.model.state_dict()),
        (second.average.weights, straight.average.weights),
        (weights(tmp_path / "resumed"), weights(tmp_path / "straight")),
    ):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
    assert second.evaluations == straight.evaluations
    assert [evaluation.epoch for evaluation in second.evaluations] == [1, 2]


def test_a_finished_run_resumes_to_nothing(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.run()
    before = weights(tmp_path)
    again = trainer(tmp_path)
    assert again.resume()
    again.run()
    assert again.step == run.step
    assert again.evaluations == run.evaluations
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path).items())


def test_the_same_seed_gives_the_same_model_and_another_seed_another(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        trainer(tmp_path / name, replace(CONFIG, seed=seed, epochs=1)).run()
        found.append(weights(tmp_path / name)["encoder.norm.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_resumed_bfloat16_run_ends_in_identical_weights(tmp_path: Path) -> None:
    config = replace(CONFIG, bfloat16=True, checkpoint_every=5)
    straight = trainer(tmp_path / "straight", config)
    straight.run()
    run_until(trainer(tmp_path / "resumed", config), 9)
    resumed = trainer(tmp_path / "resumed", config)
    assert resumed.resume()
    resumed.run()
    for name, tensor in weights(tmp_path / "resumed").items():
        assert torch.equal(tensor, straight.average.weights[name]), name


def test_there_is_nothing_to_resume_in_a_new_directory(tmp_path: Path) -> None:
    assert not trainer(tmp_path).resume()


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        ({"learning_rate": 0.5}, {}, "learning_rate was 0.001, is 0.5"),
        ({"epochs": 9}, {}, "epochs was 2, is 9"),
        ({}, {"hidden_dim": 64}, "hidden_dim was 32, is 64"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], shape: dict[str, Any], message: str
) -> None:
    trainer(tmp_path).save_checkpoint()
    other = trainer(tmp_path, replace(CONFIG, **config), **shape)
    with pytest.raises(ValueError, match=message):
        other.resume()


def test_a_checkpoint_from_before_a_setting_was_there_goes_on_with_its_default(
    tmp_path: Path,
) -> None:
    trainer(tmp_path).save_checkpoint()
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["consistency"]
    torch.save(state, path)
    assert trainer(tmp_path).resume()
    with pytest.raises(ValueError, match=r"consistency was 0\.0, is 1\.0"):
        trainer(tmp_path, replace(CONFIG, consistency=1.0)).resume()


def test_a_checkpoint_cut_short_leaves_the_last_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path)
    run.save_checkpoint()
    run.step = 5

    def half(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        run.save_checkpoint()
    monkeypatch.undo()
    again = trainer(tmp_path)
    assert again.resume()
    assert again.step == 0
    again.save_checkpoint()
    assert sorted(path.name for path in tmp_path.glob("*.partial")) == []


def test_progress_counts_every_step_and_carries_each_evaluation(tmp_path: Path) -> None:
    seen: list[Progress] = []
    run = trainer(tmp_path)
    run.run(lambda progress: seen.append(replace(progress)))
    steps = [progress for progress in seen if progress.evaluation is None]
    assert [progress.step for progress in steps] == list(range(1, run.step + 1))
    assert {progress.steps for progress in seen} == {run.step}
    assert all(math.isfinite(progress.loss) for progress in steps)
    evaluations = [progress.evaluation for progress in seen if progress.evaluation]
    assert evaluations == run.evaluations
    assert all(evaluation.sources == 3 for evaluation in evaluations)


# --- bfloat16 ----------------------------------------------------------------------------------


def test_a_bfloat16_copy_computes_in_bfloat16_with_float32_positions(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, bfloat16=True))
    assert {parameter.dtype for parameter in run.network.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in run.network.buffers()} == {torch.float32}
    output, embedding = run.network.output, run.network.decoder.embedding
    assert output.weight is embedding.tokens.weight  # tied as in the model
    logits, _ = run.network(torch.tensor([[4, 5, 2]]), torch.tensor([[1, 4]]))
    assert logits.dtype == torch.bfloat16


def test_float32_weights_gather_what_bfloat16_cannot_tell(tmp_path: Path) -> None:
    config = replace(CONFIG, bfloat16=True, learning_rate=1e-6)
    run = trainer(tmp_path, config)
    name = "encoder.norm.weight"  # ones, whose bfloat16 neighbours are 0.0039 away
    run_until(run, 5)
    moved = run.model.get_parameter(name) - 1.0
    assert 0.0 < moved.abs().max() < 1e-4
    assert torch.equal(run.network.get_parameter(name), torch.ones(SHAPE["dim"]).bfloat16())


def test_the_copy_holds_the_model_s_weights_rounded(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, bfloat16=True, epochs=1))
    run.run()
    for kept, rounded in zip(run.model.parameters(), run.network.parameters(), strict=True):
        assert torch.equal(kept.bfloat16(), rounded)


def test_gradients_of_both_precisions_agree(tmp_path: Path) -> None:
    gradients = []
    for bfloat16 in (False, True):
        config = replace(CONFIG, bfloat16=bfloat16, clip_norm=1e9)
        run = trainer(tmp_path, config, dropout=0.0)
        run_until(run, 1)
        gradients.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))  # type: ignore[union-attr]
    exact, rounded = gradients
    assert rounded.dtype == torch.float32
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.999


# --- starting from a model ---------------------------------------------------------------------


def test_the_disagreement_of_two_passes_is_their_mean_divergence() -> None:
    one = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]])
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.98, 0.01, 0.01]])
    targets = torch.tensor([[5, 2, 0]] * 2)  # the third position is padding
    # 0.5 log 2 + 0.25 log 0.5 either way at the first position, nothing at the second.
    expected = 0.25 * math.log(2.0) / 2
    found = disagreement(torch.stack([one, other]).log() + 3.0, targets, pad_id=0)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_passes_that_agree_learn_as_one_pass_does(tmp_path: Path) -> None:
    once = trainer(tmp_path / "once", dropout=0.0)
    twice = trainer(tmp_path / "twice", replace(CONFIG, consistency=5.0), dropout=0.0)
    for run in (once, twice):
        run_until(run, 3)
    for mine, theirs in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_consistency_brings_passes_with_dropout_together(tmp_path: Path) -> None:
    def apart(consistency: float) -> float:
        config = replace(CONFIG, consistency=consistency, epochs=30, evaluate_every=30)
        run = trainer(tmp_path / f"{consistency}", config, dropout=0.3)
        run_until(run, 200)
        run.network.train()
        torch.manual_seed(0)
        batch = collate(run.examples, run.shape).twice()
        logits, _ = run.network(batch.src, batch.tgt, src_lengths=batch.src_lengths)
        return float(disagreement(logits, batch.targets, run.shape.pad_id).detach())

    assert apart(10.0) < 0.7 * apart(0.001)


def test_consistency_is_not_negative() -> None:
    with pytest.raises(ValueError, match="consistency must not be negative, got -1"):
        TrainingConfig(consistency=-1.0)


def test_a_run_starts_from_a_trained_model_s_weights(tmp_path: Path) -> None:
    trainer(tmp_path / "first").run()
    config = replace(CONFIG, seed=8, start_from=str(tmp_path / "first"))
    second = Trainer(PAIRS, tmp_path / "second", {**SHAPE, "dropout": 0.3}, config)
    for name, weight in weights(tmp_path / "first").items():
        assert torch.equal(second.model.get_parameter(name), weight), name
        assert torch.equal(second.average.weights[name], weight), name
    second.run()
    report = json.loads((tmp_path / "second" / "training.json").read_text())
    assert report["training"]["start_from"] == config.start_from


def test_what_is_new_in_a_model_with_a_start_changes_nothing_at_first(tmp_path: Path) -> None:
    first = trainer(tmp_path / "first")
    first.run()
    first.export()
    deeper = trainer(
        tmp_path / "deeper",
        replace(CONFIG, start_from=str(tmp_path / "first")),
        encoder_layers=SHAPE["encoder_layers"] + 1,
        decoder_layers=SHAPE["decoder_layers"] + 2,
        relative_positions=True,
    )
    start = trainer(tmp_path / "again", replace(CONFIG, start_from=str(tmp_path / "first")))
    batch = collate(deeper.examples[:8], deeper.shape)
    logits = [
        run.model.eval()(batch.src, batch.tgt, src_lengths=batch.src_lengths)[0].detach()
        for run in (start, deeper)
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-6)  # other kernels with biases
    run_until(deeper, 2)
    layer = f"encoder.layers.{SHAPE['encoder_layers']}.feed_forward.contract.weight"
    for new in (layer, "encoder.position_bias.weight", "decoder.position_bias.weight"):
        assert deeper.model.get_parameter(new).abs().max() > 0, "and it learns"
    deeper.export()
    with pytest.raises(ValueError, match="decoder_layers is 3, not 1"):
        trainer(
            tmp_path / "shallower",
            replace(CONFIG, start_from=str(tmp_path / "deeper")),
            decoder_layers=1,
        )
    with pytest.raises(ValueError, match="relative_positions is True, not False"):
        trainer(
            tmp_path / "absolute",
            replace(CONFIG, start_from=str(tmp_path / "deeper")),
            encoder_layers=deeper.shape.encoder_layers,
            decoder_layers=deeper.shape.decoder_layers,
        )


def test_a_model_that_does_not_fit_is_no_start(tmp_path: Path) -> None:
    trainer(tmp_path).export()
    config = replace(CONFIG, start_from=str(tmp_path))
    with pytest.raises(ValueError, match=r"start_from: in .* hidden_dim is 32, not 64"):
        trainer(tmp_path / "wider", config, hidden_dim=64)
    renamed = [(source.translate(str.maketrans("abc", "xyz")), target) for source, target in PAIRS]
    with pytest.raises(ValueError, match=r"start_from: .* has another source vocabulary"):
        Trainer(renamed, tmp_path / "other", SHAPE, config)
    with pytest.raises(ModelError, match="nowhere"):
        trainer(tmp_path / "new", replace(CONFIG, start_from=str(tmp_path / "nowhere")))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_learns_and_resumes_too(tmp_path: Path) -> None:
    config = replace(CONFIG, bfloat16=True)
    run = Trainer(PAIRS, tmp_path, SHAPE, config, "cuda")
    run.run()
    assert {parameter.device.type for parameter in run.model.parameters()} == {"cuda"}
    again = Trainer(PAIRS, tmp_path, SHAPE, config, "cuda")
    assert again.resume()
    assert again.step == run.step
    assert load_model(tmp_path, "cpu").spec.family == "seqserve"


# --- what comes out ----------------------------------------------------------------------------


def test_the_export_loads_and_is_the_averaged_model(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.run()
    model = load_model(tmp_path, "cpu", packed=False)
    assert model.source_tokenizer is not None
    assert model.spec.max_src == max(len(source) for source, _ in PAIRS) + 1
    for name, parameter in model.network.named_parameters():
        assert torch.equal(parameter, run.average.weights[name]), name
    report = json.loads((tmp_path / "training.json").read_text())
    assert report["steps"] == run.step
    assert report["training"]["seed"] == CONFIG.seed
    assert len(report["evaluations"]) == 2


def test_a_served_model_undoes_the_smoothing_it_was_trained_with(tmp_path: Path) -> None:
    run = trainer(tmp_path, replace(CONFIG, label_smoothing=0.2))
    run.export()
    ids = torch.tensor([[4, 5, 2]]), torch.tensor([[1, 4]])
    smoothed = run.model.eval()(*ids)[0].softmax(dim=-1)
    served = load_model(tmp_path, "cpu").network(*ids)[0].softmax(dim=-1)
    vocab = run.shape.tgt_vocab_size
    likely = smoothed > 0.25 / vocab
    again = 0.8 * served + 0.2 / vocab
    assert likely.any()
    assert torch.allclose(again[likely], smoothed[likely], rtol=0.02)
    assert not torch.allclose(served[likely], smoothed[likely], rtol=0.02)


def test_a_run_starts_from_a_model_that_undoes_smoothing(tmp_path: Path) -> None:
    trainer(tmp_path / "first", replace(CONFIG, label_smoothing=0.2), tie_output=False).export()
    config = replace(CONFIG, label_smoothing=0.0, start_from=str(tmp_path / "first"))
    second = trainer(tmp_path / "second", config, tie_output=False)
    for name, weight in weights(tmp_path / "first").items():
        assert torch.equal(second.model.get_parameter(name), weight), name
    assert type(second.model.output) is torch.nn.Linear


def test_files_of_an_export_are_readable_by_everyone(tmp_path: Path) -> None:
    trainer(tmp_path).export()
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o044 == 0o044, path.name


def test_an_export_takes_away_the_hashes_of_an_earlier_model(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    (tmp_path / SUMS).write_text(f"{'0' * 64}  model.safetensors\n")
    run.export()
    load_model(tmp_path, "cpu")


def test_weight_decay_spares_biases_and_norms(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    decays = {
        id(parameter): group["weight_decay"]
        for group in run.optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in run.model.named_parameters():
        assert (decays[id(parameter)] > 0) == (parameter.dim() == 2), name


@pytest.mark.parametrize(
    ("tokens", "pairs"),
    [
        ("char", [(word, word[::-1]) for word, _ in PAIRS]),
        (
            "sentencepiece",
            [(f"{a} {b}", f"{b} {a}") for (a, _), (b, _) in itertools.pairwise(PAIRS)],
        ),
    ],
)
def test_other_tokens_train_and_serve(tmp_path: Path, tokens: Any, pairs: list[Pair]) -> None:
    config = replace(CONFIG, source_tokens=tokens, target_tokens=tokens, epochs=1, vocab_size=300)
    Trainer(pairs, tmp_path, SHAPE, config).run()
    model = load_model(tmp_path, "cpu")
    assert all(isinstance(answer.text, str) for answer in translate(model, ["abc", "fed"]))


@pytest.mark.parametrize("relative", [False, True])
def test_a_small_task_is_learnt_to_the_last_dev_word(tmp_path: Path, relative: bool) -> None:
    pairs = reversal(330, longest=4, letters="abcd", seed=1)  # of 340 such words
    config = TrainingConfig(
        dev_size=30,
        epochs=60,
        batch_tokens=200,
        learning_rate=4e-3,
        warmup_steps=40,
        label_smoothing=0.0,
        average_decay=0.98,
        evaluate_every=60,
        seed=1,
    )
    sizes = {**SHAPE, "dim": 32, "heads": 4, "hidden_dim": 64}
    shape = {**sizes, "dropout": 0.0, "relative_positions": relative}
    run = Trainer(pairs, tmp_path, shape, config)
    run.run()
    (evaluation,) = run.evaluations
    assert (evaluation.error_rate, evaluation.token_error_rate) == (0.0, 0.0)
    answers = translate(load_model(tmp_path, "cpu"), ["abcd", "d"])
    assert [answer.text for answer in answers] == ["d c b a", "d"]


def test_a_directory_that_is_being_trained_has_nothing_to_serve_before_its_first_export(
    tmp_path: Path,
) -> None:
    trainer(tmp_path)
    with pytest.raises(ModelError):
        load_model(tmp_path, "cpu")
