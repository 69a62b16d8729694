"""The linear recurrence A_j = x_j + c A_{j+1} over ragged sequences, without a loop over time.

The flat timeline is cut into blocks of `BLOCK` entries. For one c the recurrence inside a block is a product with a
triangular matrix of powers of c. For a c per sequence it goes over a block's entries one at a time, for all blocks at
once. A block that holds the end of a sequence takes log2(BLOCK) doubling steps instead. What enters a block from the
right follows the same recurrence over the first entries of blocks, solved recursively. Cost: O(D) memory traffic,
O(log D) passes.

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
    ends = cut, cut_local[:, 0], cut_reach[:, 0]
    if isinstance(decay, Tensor) and decay.dim():
        solved, carry = _solve_each(blocks, decay, offsets, *ends)
    else:
        solved, carry = _solve_alike(blocks, float(decay), *ends)
    solved[cut] = cut_local + _gated(cut_reach, carry[cut, None])
    return solved.reshape(-1)[: x.numel()]


def _solve_alike(
    blocks: Tensor, decay: float, cut: Tensor, cut_starts: Tensor, cut_reach: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve for one c, except in the blocks `cut` where a sequence ends.

    Args:
        blocks: `[n, BLOCK]`.
        cut: int64 `[m]`, blocks that are solved already.
        cut_starts, cut_reach: `[m]`, their A at the first entry if nothing enters, and the product of their c.
    Returns:
        (A `[n, BLOCK]`, A at the entry right of each block `[n]`).
    """
    local = torch.empty_like(blocks)
    _solve_blocks(blocks, decay, out=local)
    starts, reach = local[:, 0].clone(), blocks.new_full((blocks.shape[0],), decay**BLOCK)
    starts[cut], reach[cut] = cut_starts, cut_reach
    carry = _carry(starts, reach)
    powers = _powers(decay, torch.arange(BLOCK, 0, -1, device=blocks.device), blocks.dtype)
    return local.addcmul_(carry[:, None], powers), carry


def _solve_each(
    blocks: Tensor, decay: Tensor, offsets: Tensor, cut: Tensor, cut_starts: Tensor, cut_reach: Tensor
) -> tuple[Tensor, Tensor]:
    """`_solve_alike` for a c per sequence, `decay` `[B]`: a loop over a block's entries, for all blocks at once."""
    first = torch.arange(blocks.shape[0], device=blocks.device) * BLOCK
    sequence = torch.bucketize(first, offsets[1:], right=True)
    c = decay.to(blocks.dtype)[sequence]
    # `contiguous` would return the caller's memory if there is one block.
    entries = blocks.t().clone(memory_format=torch.contiguous_format)
    starts = entries[-1].clone()
    for i in range(BLOCK - 2, -1, -1):
        starts = torch.addcmul(entries[i], c, starts)
    reach = c.double().pow(BLOCK).to(blocks.dtype)
    starts[cut], reach[cut] = cut_starts, cut_reach
    carry = following = _carry(starts, reach)
    for i in range(BLOCK - 1, -1, -1):
        following = entries[i].addcmul_(c, following)
    return entries.t().contiguous(), carry


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
        local += _gated(reach, _carry(local[:, 0], reach[:, 0])[:, None])
    return local.reshape(-1)[: x.numel()]


def _solve_blocks(blocks: Tensor, decay: float, out: Tensor) -> None:
    """A if nothing enters from the right, into `out` `[n, BLOCK]`: a product with c^(i-j) at row i >= column j."""
    # TF32 and bfloat16 products keep 8 to 11 bits: where they may be in use, the product is formed in float64.
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
    """Doubling steps within rows `[n, BLOCK]`: (A if nothing enters from the right, product of c to the row's end)."""
    x, reach = x.clone(), coefficients.clone()
    step = 1
    while step < x.shape[1]:
        x[:, :-step] = x[:, :-step] + _gated(reach[:, :-step], x[:, step:])
        reach[:, :-step] = reach[:, :-step] * reach[:, step:]
        step *= 2
    return x, reach


def _carry(starts: Tensor, reach: Tensor) -> Tensor:
    """A at the entry right of each block: the recurrence over first entries, shifted by one; 0 right of the last."""
    solved = _scan(starts, reach) if starts.numel() > 1 else starts
    return torch.cat((solved[1:], solved.new_zeros(1)))


def _gated(coefficients: Tensor, x: Tensor) -> Tensor:
    """c·x, exactly 0 where c is 0, whatever x is."""
    return torch.where(coefficients == 0, torch.zeros((), dtype=x.dtype, device=x.device), coefficients * x)


def _blocks(x: Tensor) -> Tensor:
    padding = -x.numel() % BLOCK
    return torch.nn.functional.pad(x, (0, padding)).view(-1, BLOCK) if padding else x.reshape(-1, BLOCK)
