"""The linear recurrence A_j = x_j + c A_{j+1} over ragged sequences, without a loop over time.

The flat timeline is cut into blocks. Inside a block the recurrence is a product with a triangular matrix of powers of
c (or, where coefficients vary, log2(block) doubling steps); what enters a block from the right is the same recurrence
over block starts, solved recursively. Cost: O(D) memory traffic, O(log D) passes.

Invariants:
* a sequence never reads a value of another one, not even multiplied by zero;
* results equal the sequential loop up to rounding, for any lengths and any c, zero included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.objectives.segments import last_positions

BLOCK = 64


@torch.no_grad()
def discounted_suffix_sums(x: Tensor, decay: float | Tensor, offsets: Tensor) -> Tensor:
    """A_j = x_j + c A_{j+1}, A = 0 after the last entry of each sequence.

    Args:
        x: float32 or float64 `[D]`.
        decay: c, one number, or one per sequence `[B]`.
        offsets: int64 `[B+1]`.
    Returns:
        `[D]`, dtype of `x`.
    """
    if x.numel() == 0:
        return x.clone()
    blocks = _blocks(x)
    cut = torch.unique_consecutive(last_positions(offsets) // BLOCK)
    cut_local, cut_reach = _scan_blocks(blocks[cut], _coefficients(cut, decay, offsets, x.dtype))
    local, reach = torch.empty_like(blocks), blocks.new_empty(blocks.shape[0])
    runs = _runs(decay, offsets, blocks.shape[0])
    for rows, c in runs:
        _solve_blocks(blocks[rows], c, out=local[rows])
        reach[rows] = c**BLOCK
    local[cut], reach[cut] = cut_local, cut_reach[:, 0]
    carry = _carry(local, reach)
    for rows, c in runs:
        local[rows].addcmul_(carry[rows, None], _powers(c, torch.arange(BLOCK, 0, -1, device=x.device), x.dtype))
    local[cut] = cut_local + _gated(cut_reach, carry[cut, None])
    return local.reshape(-1)[: x.numel()]


def _runs(decay: float | Tensor, offsets: Tensor, blocks: int) -> list[tuple[slice, float]]:
    """(blocks, c) of neighbouring blocks of one c; those with a sequence end may be missing or have a wrong one."""
    if not isinstance(decay, Tensor) or decay.dim() == 0:
        return [(slice(0, blocks), float(decay))]
    bounds = offsets.tolist()
    whole = [(-(-start // BLOCK), (end - 1) // BLOCK) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
    return [(slice(first, last), c) for (first, last), c in zip(whole, decay.tolist(), strict=True) if first < last]


def _coefficients(rows: Tensor, decay: float | Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """c of every entry of the blocks `rows`, `[n, BLOCK]`; 0 on the last entry of each sequence and beyond the end."""
    positions = rows[:, None] * BLOCK + torch.arange(BLOCK, device=rows.device)
    sequence = torch.bucketize(positions, offsets[1:], right=True).clamp(max=offsets.numel() - 2)
    per_sequence = torch.as_tensor(decay, dtype=dtype, device=rows.device).expand(offsets.numel() - 1)
    inside = positions + 1 < offsets[1:][sequence]
    return torch.where(inside, per_sequence[sequence], 0.0)


def _scan(x: Tensor, coefficients: Tensor) -> Tensor:
    """A_j = x_j + c_j A_{j+1} with a coefficient per entry, `[n]`."""
    local, reach = _scan_blocks(_blocks(x), _blocks(coefficients))
    if local.shape[0] > 1:
        local += _gated(reach, _carry(local, reach[:, 0])[:, None])
    return local.reshape(-1)[: x.numel()]


def _solve_blocks(blocks: Tensor, decay: float, out: Tensor) -> None:
    """A if nothing enters from the right, into `out` `[n, BLOCK]`: a product with c^(i-j) at row i >= column j."""
    # TF32 and bfloat16 products keep 8 to 11 bits: where they could be switched on, the product is formed in float64.
    reduced = blocks.is_cuda or torch.get_float32_matmul_precision() != "highest"
    dtype = torch.float64 if reduced else blocks.dtype
    exponents = torch.arange(BLOCK, device=blocks.device)
    gap = exponents[:, None] - exponents
    matrix = torch.where(gap >= 0, _powers(decay, gap.clamp(min=0), dtype), 0.0)
    if reduced:
        out.copy_(blocks.double() @ matrix)
    else:
        torch.mm(blocks, matrix, out=out)


def _powers(decay: float, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.pow(torch.tensor(decay, dtype=torch.float64, device=exponents.device), exponents).to(dtype)


def _scan_blocks(x: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Doubling within rows `[n, BLOCK]`: (A if nothing enters from the right, product of c to the row's end)."""
    x, reach = x.clone(), coefficients.clone()
    step = 1
    while step < x.shape[1]:
        x[:, :-step] = x[:, :-step] + _gated(reach[:, :-step], x[:, step:])
        reach[:, :-step] = reach[:, :-step] * reach[:, step:]
        step *= 2
    return x, reach


def _carry(local: Tensor, reach: Tensor) -> Tensor:
    """A at the entry right of each block: the recurrence over block starts, moved by one; 0 right of the last."""
    starts = _scan(local[:, 0], reach) if local.shape[0] > 1 else local[:, 0]
    return torch.cat((starts[1:], starts.new_zeros(1)))


def _gated(coefficients: Tensor, x: Tensor) -> Tensor:
    """c·x, exactly 0 where c is 0, whatever x is."""
    return torch.where(coefficients == 0, torch.zeros((), dtype=x.dtype, device=x.device), coefficients * x)


def _blocks(x: Tensor) -> Tensor:
    padding = -x.numel() % BLOCK
    return torch.nn.functional.pad(x, (0, padding)).view(-1, BLOCK) if padding else x.reshape(-1, BLOCK)
