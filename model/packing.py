"""Linear layers for a CPU: weights as its matrix kernels read them, or rounded to int8.

`nn.Linear` keeps its weight row by row, and at every product of a few rows the libraries behind it
rearrange that weight once more, which costs more than the product. Here that is done once, at
load. This is the one place that calls the operators for it; where torch was built without them,
or on other devices, the plain layers stay.

References:
    Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022
    (https://arxiv.org/abs/2208.07339), section 2.1 for vector-wise scales.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import MultiHeadAttention
from model.layers import BiasedOutput
from model.transformer import DecoderLayer, EncoderLayer

ROWS_HINT = 32
"""For how many rows a weight is laid out. Measured with oneDNN over 1 to 64 rows, layouts for 16 to
64 are equally good everywhere, and one for a single row is up to twice as slow with more."""

WIDE = 2**14
"""From how many outputs on a layer's products go to oneDNN, which computes faster, but whose calls
cost more. Measured in decoding steps: 512 to 2048 outputs are up to 1.5 times as fast without it,
32,000 outputs up to 1.4 times as fast with it."""

NARROW = 128
"""Under so many inputs or outputs MKL adds up a single row in another order than that row beside
others, so that its last bits depend on the company. Seen up to 64, where oneDNN's do not."""

LONG = 1024
"""With more inputs than these, oneDNN adds up a single row in another order than that row beside
others (on AMD's Zen 5 from 1280 on; on Intel's CPUs seen at 2048). It is then computed beside a row
of zeros, which takes no longer."""

INPUT_LEVELS = 127
"""Of either sign, for inputs in 8 bits."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether torch has the operators, and fast ones for this number format."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    half: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or (dtype == torch.bfloat16 and half)


def can_quantize() -> bool:
    """Whether torch has int8 kernels for this CPU."""
    return "fbgemm" in torch.backends.quantized.supported_engines


@cache
def is_intel() -> bool:
    """Whether the CPU is one that MKL has its fast kernels for."""
    said = Path("/proc/cpuinfo")
    return "GenuineIntel" in (said.read_text() if said.exists() else platform.processor())


def has_mkl() -> bool:
    """Whether torch was built with MKL, has the operators for weights that it lays out, and the CPU
    is Intel's. On others MKL takes up to two and a half times as long as oneDNN, and adds up to
    three rows in another order than more."""
    return bool(torch._C.has_mkl) and hasattr(torch.ops.mkl, "_mkl_linear") and is_intel()


def has_int8_tiles() -> bool:
    """Whether int8 products go to a matrix unit; without one, oneDNN's are the slower ones."""
    return hasattr(torch.ops.onednn, "qlinear_pointwise") and torch.cpu._is_amx_tile_supported()


@dataclass(frozen=True)
class Packing:
    """How the linear layers of a network are replaced.

    Attributes:
        make: a packed layer of a plain one, whose tensors may have any dtype.
        tied: whether the output layer that shares the table of an embedding is packed too; the
            table stays beside it.
    """

    make: Callable[[nn.Linear], nn.Module]
    tied: bool = True

    def pack(self, network: nn.Module) -> None:
        """Replace them one at a time, so that one weight at most is there twice."""
        for module in network.modules():
            if isinstance(module, BiasedOutput):
                module.join_bias()
        for attention in _self_attentions(network):
            attention.join_projections()
        for name in [name for name, _ in self._layers(network)]:
            parent, _, child = name.rpartition(".")
            holder = network.get_submodule(parent)
            setattr(holder, child, self.make(getattr(holder, child)))

    def parameters(self, network: nn.Module) -> set[str]:
        """Names of the parameters that go into packed layers, which bring them to their dtype."""
        layers = self._layers(network)
        return {f"{name}.{p}" for name, layer in layers for p, _ in layer.named_parameters()}

    def _layers(self, network: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
        tables = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear) and (self.tied or id(module.weight) not in tables):
                yield name, module


def _self_attentions(network: nn.Module) -> Iterator[MultiHeadAttention]:
    for module in network.modules():
        if isinstance(module, EncoderLayer):
            yield module.attention
        elif isinstance(module, DecoderLayer):
            yield module.self_attention


def packed_linear(linear: nn.Linear, dtype: torch.dtype) -> nn.Module:
    """A layer on the CPU by the library that suits it: see `WIDE` and `NARROW`."""
    narrow = min(linear.in_features, linear.out_features) < NARROW
    if dtype == torch.float32 and not narrow and linear.out_features < WIDE and has_mkl():
        return MklLinear(linear)
    return OneDnnLinear(linear, dtype)


class MklLinear(nn.Module):
    """`nn.Linear` in float32 on a weight that MKL has laid out.

    Args:
        linear: on the CPU; its weight is not kept.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS_HINT)
        self.sizes = torch.empty(1).expand(weight.shape)  # all that is read of the plain weight
        self.bias = _bias_of(linear, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``."""
        # The layout suits any number of rows; the last argument tells that it suits this one.
        rows = x.shape[:-1].numel()
        product: Tensor = torch.ops.mkl._mkl_linear(x, self.packed, self.sizes, self.bias, rows)
        return product


class OneDnnLinear(nn.Module):
    """`nn.Linear` on a weight that oneDNN has laid out.

    Args:
        linear: on the CPU; its weight is not kept.
        dtype: float32 or bfloat16.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        weight = linear.weight.detach().to(dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
        self.bias = _bias_of(linear, dtype)
        self.fewest = 2 if linear.in_features > LONG else 1

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``, same dtype."""
        return in_few_sizes(x, self._product, self.fewest)

    def _product(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, "none", [], ""
        )
        return product


class Int8Linear(nn.Module):
    """``x Wᵀ + b`` with weights in int8, a scale per output, and inputs in 7 or 8 bits.

    Every row of inputs is divided by its own largest absolute value, so that no row changes what
    another one gets, and multiplied by it again behind the product (vector-wise quantisation).

    Args:
        linear: on the CPU; its weight is not kept.
        tiles: whether the CPU's matrix unit computes the products; default where it has one and the
            layer is `WIDE`.
    """

    def __init__(self, linear: nn.Linear, tiles: bool | None = None) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        if tiles is None:
            tiles = has_int8_tiles() and len(weight) >= WIDE
        self.product = TileProduct(weight, scales) if tiles else VectorProduct(weight, scales)
        self.bias = _bias_of(linear, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``, float32."""
        # What a row of zeros becomes here, 0 / 0 in 8 bits, is multiplied by 0 again.
        largest = x.abs().amax(dim=-1, keepdim=True)
        product: Tensor = self.product(x / largest)
        if self.bias is None:
            return product.mul_(largest)
        return torch.addcmul(self.bias, product, largest, out=product)  # no new memory


class VectorProduct(nn.Module):
    """Products of inputs from -1 to 1 with int8 weights, by vector instructions.

    Args:
        weight: ``[out, in]``.
        scales: ``[out]``, what each output's weights are counted in.
    """

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            # That torch will drop its quantised tensors one day is for us to know, not for users.
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            quantized = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        # Without VNNI, sums of two products are held in 16 bits: 7-bit inputs cannot overflow them.
        self.levels = INPUT_LEVELS if torch.cpu._is_vnni_supported() else 63

    def forward(self, unit: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``, float32."""
        product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            unit, 1 / self.levels, self.levels + 1, self.packed
        )
        return product


class TileProduct(nn.Module):
    """Products of inputs from -1 to 1 with int8 weights, by a matrix unit (Intel's AMX).

    Args:
        weight: ``[out, in]``.
        scales: ``[out]``, what each output's weights are counted in.
    """

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        rounded = (weight / scales[:, None]).round_().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        # The inputs' scale is in here too: the order of two factors would vary with the rows.
        self.scales = scales / INPUT_LEVELS
        self.zeros = torch.zeros(len(scales), dtype=torch.long)

    def forward(self, unit: Tensor) -> Tensor:
        """``[..., in] -> [..., out]``, float32."""
        return in_few_sizes((unit * INPUT_LEVELS).round_().to(torch.int8), self._product)

    def _product(self, rows: Tensor) -> Tensor:
        # Behind the weight: no bias, and nothing else that is to be done to the product.
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            rows, 1.0, 0, self.packed, self.scales, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return product


def in_few_sizes(x: Tensor, product: Callable[[Tensor], Tensor], fewest: int = 1) -> Tensor:
    """``product`` of ``[..., in]``, computed for a number of rows from `round_up`, or `fewest`."""
    rows = x.shape[:-1].numel()
    spare = max(round_up(rows), fewest) - rows
    if not spare:
        return product(x)
    found = product(F.pad(x.reshape(rows, -1), (0, 0, 0, spare)))
    return found[:rows].view(*x.shape[:-1], -1)


def round_up(rows: int) -> int:
    """The number of rows to compute: one of four in each octave.

    oneDNN compiles a kernel for each number of rows that it meets, which takes as long as ten
    products, and keeps it, which takes up to a megabyte.

    >>> [round_up(rows) for rows in (0, 1, 5, 9, 17, 33, 65)]
    [0, 1, 8, 10, 20, 40, 80]
    """
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step if rows > 8 else rows and 1 << (rows - 1).bit_length()


def _bias_of(linear: nn.Linear, dtype: torch.dtype) -> nn.Parameter | None:
    bias: Tensor | None = linear.bias
    return None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
