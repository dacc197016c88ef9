"""Options of `seqserve train`.

They mirror `model.training.TrainingConfig` and the shape fields of the project's own family, whose
modules import torch and would make `--help` slow; a test keeps both alike.
"""

from __future__ import annotations

from service.options import Option

GRANULARITIES = ("char", "whitespace", "sentencepiece")


def _shape(name: str, kind: type, default: str, help: str) -> Option:
    return Option(name, kind, help, default, panel="Shape of the model")


def _training(
    name: str, kind: type, default: str, help: str, choices: tuple[str, ...] = ()
) -> Option:
    return Option(name, kind, help, default, panel="Training", choices=choices)


SHAPE = [
    _shape("dim", int, "256", "Width of the model; a multiple of --heads."),
    _shape("heads", int, "4", "Attention heads."),
    _shape("hidden_dim", int, "1024", "Width inside the feed-forward layers."),
    _shape("encoder_layers", int, "3", "Depth of the encoder."),
    _shape("decoder_layers", int, "3", "Depth of the decoder."),
    _shape(
        "relative_positions",
        bool,
        "",
        "Add a learned number to each self-attention score, by how far apart two tokens are.",
    ),
    _shape(
        "dropout",
        float,
        "0.1",
        "On embeddings, attention weights and residual branches in training.",
    ),
]

TRAINING = [
    _training(
        "source_tokens",
        str,
        "char",
        "What a source token is: char (a character), whitespace (a word) or sentencepiece (a "
        "learned piece).",
        GRANULARITIES,
    ),
    _training(
        "target_tokens", str, "whitespace", "What a target token is; as above.", GRANULARITIES
    ),
    _training("fold_source", bool, "", "Lower-case sources and strip their accents."),
    _training("vocab_size", int, "8000", "Bound for learned (sentencepiece) vocabularies."),
    _training("dev_size", int, "1000", "Distinct sources held out for evaluation."),
    _training("epochs", int, "20", "Passes over the data."),
    _training("batch_tokens", int, "2000", "Rows times longest side of a batch, at most."),
    _training("learning_rate", float, "0.001", "The peak, reached after --warmup-steps."),
    _training("warmup_steps", int, "1000", "Steps of rising learning rate; a cosine follows."),
    _training(
        "label_smoothing",
        float,
        "0.1",
        "Probability mass spread over the vocabulary; taken back out of what is served.",
    ),
    _training(
        "consistency",
        float,
        "0",
        "Weight of how far two passes over a batch are apart, each with its own dropout (R-Drop); "
        "0 makes one pass, anything else takes twice the time.",
    ),
    _training("weight_decay", float, "0.01", "Decoupled (AdamW), on matrices only."),
    _training("clip_norm", float, "1", "Bound on the gradient's norm."),
    _training(
        "average_decay", float, "0.9995", "Decay of the moving average of weights that is shipped."
    ),
    _training("bfloat16", bool, "", "Run the network in bfloat16; weights stay float32."),
    _training(
        "start_from",
        str,
        "",
        "Directory of a model of the same vocabularies and shape, or of fewer layers or without "
        "relative positions, whose weights to begin with.",
    ),
    _training("evaluate_every", int, "1", "Epochs between evaluations on the dev sources."),
    _training("checkpoint_every", int, "500", "Steps between checkpoints."),
    _training("seed", int, "1", "Of the split, the weights, the data's order and dropout."),
]
