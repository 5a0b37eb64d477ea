"""BlockAttention and the two CausalAttentions against plain attention in float32, and row by row to the bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from tests.plugins.kernels import DTYPES, TOLERANCE, Kernels, ints, phases, rms_norm, rope

SLOTS, EPSILON, POSITIONS = 6, 1e-6, 4096


@dataclass(frozen=True)
class Case:
    """One call: qkv ``[b, w, (h+2·kv)·d]``, state ``[SLOTS+1, kv, rows, d]``, vectors ``[b]``."""

    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    start: torch.Tensor
    slot: torch.Tensor
    heads: int
    valid_len: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.qkv.dtype

    def rows(self, index: torch.Tensor, width: int | None = None) -> Case:
        """Some rows of the batch, the first `width` of each, with state of their own."""
        return replace(
            self,
            qkv=self.qkv[index, :width].contiguous(),
            k=self.k.clone(),
            v=self.v.clone(),
            start=self.start[index],
            slot=self.slot[index],
            valid_len=None if self.valid_len is None else self.valid_len[index],
        )

    def new_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q ``[b, w, h, d]``, k and v ``[b, w, kv, d]`` in float32, rounded as a kernel keeps them."""
        batch, width, _ = self.qkv.shape
        _, kv_heads, _, head_dim = self.k.shape
        q, k, v = self.qkv.view(batch, width, -1, head_dim).split((self.heads, kv_heads, kv_heads), 2)
        position = (self.start[:, None] + torch.arange(width, device="cuda"))[:, :, None]
        cos, sin = phases(POSITIONS, head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, EPSILON), rms_norm(k, self.k_norm, EPSILON)
        q, k = (rope(x.float(), cos, sin, position).to(self.dtype).float() for x in (q, k))
        return q, k, v.float()


def make(
    generator: torch.Generator,
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    rows: int,
    start: list[int],
    width: int,
    *,
    valid_len: list[int] | None = None,
    normed: bool = True,
) -> Case:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    batch = len(start)
    return Case(
        random(batch, width, (heads + 2 * kv_heads) * head_dim),
        random(head_dim) if normed else None,
        random(head_dim) if normed else None,
        random(SLOTS + 1, kv_heads, rows, head_dim),
        random(SLOTS + 1, kv_heads, rows, head_dim),
        ints(*start),
        ints(*(b % (SLOTS + 1) for b in range(batch))),
        heads,
        None if valid_len is None else ints(*valid_len),
    )


def run(kernels: Kernels, case: Case) -> torch.Tensor:
    """``[b, w, h·d]``; the causal kernel also writes the case's state."""
    batch, width, _ = case.qkv.shape
    _, kv_heads, rows, head_dim = case.k.shape
    cos, sin = phases(POSITIONS, head_dim)
    sizes = (batch, width, case.heads, kv_heads, head_dim, rows)
    out = torch.full((batch, width, case.heads * head_dim), torch.nan, dtype=case.dtype, device="cuda")
    workspace = kernels.workspace("attention", *sizes, int(case.valid_len is not None))
    valid_len = () if case.valid_len is None else (case.valid_len,)
    launch = kernels.causal_attention if case.valid_len is None else kernels.block_attention
    launch(
        case.qkv, case.q_norm, case.k_norm, cos, sin, case.k, case.v, case.start, *valid_len, case.slot, out, workspace,
        *sizes, POSITIONS, EPSILON, dtype=case.dtype,
    )  # fmt: skip
    return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q ``[w, h, d]`` over k and v ``[kv, n, d]`` where mask ``[w, n]``: ``[w, h·d]``."""
    group = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), torch.where(mask.any(0)[:, None], v, 0.0).repeat_interleave(group, 0)
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)) * q.shape[2] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def block_reference(case: Case) -> torch.Tensor:
    assert case.valid_len is not None
    q, k, v = case.new_rows()
    window, width = case.k.shape[2], q.shape[1]
    out = []
    for b in range(q.shape[0]):
        age = (case.start[b] - 1 - torch.arange(window, device="cuda")) % window
        mask = torch.cat((age < case.valid_len[b], torch.ones(width, dtype=torch.bool, device="cuda")))
        keys = torch.cat((case.k[case.slot[b]].float(), k[b].transpose(0, 1)), 1)
        values = torch.cat((case.v[case.slot[b]].float(), v[b].transpose(0, 1)), 1)
        out.append(attend(q[b], torch.where(mask[:, None], keys, 0.0), values, mask.expand(width, -1)))
    return torch.stack(out)


def causal_reference(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Results, and the K and V caches of the slots that only one row of the batch is on."""
    q, k, v = case.new_rows()
    rows, width = case.k.shape[2], q.shape[1]
    caches = case.k.clone().float(), case.v.clone().float()
    out = []
    for b in range(q.shape[0]):
        start, end = int(case.start[b]), min(int(case.start[b]) + width, rows)
        for cache, new in zip(caches, (k, v), strict=True):
            cache[case.slot[b], :, start:end] = new[b, : end - start].transpose(0, 1)
        last = start + torch.arange(width, device="cuda")
        mask = torch.arange(rows, device="cuda") <= last[:, None]
        keys, values = (cache[case.slot[b]] for cache in caches)
        out.append(attend(q[b], torch.where(mask.any(0)[:, None], keys, 0.0), values, mask))
    return torch.stack(out), *caches


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


HEADS = [(4, 4), (9, 3), (8, 2)]
SHAPES = [(16, *HEADS[0]), (64, *HEADS[1]), (128, *HEADS[2])]
ODD_SHAPES = [(8, 6, 2), (80, 2, 1), (256, 4, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [*SHAPES, *ODD_SHAPES])
@pytest.mark.parametrize("width", [1, 5, 7, 8, 33])
def test_a_block_sees_its_ring_and_itself(
    kernels: Kernels,
    generator: torch.Generator,
    width: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> None:
    # An empty ring, one never full, one that wraps and whose oldest rows are not this request's, a full one, scratch.
    start, valid_len = [1, 150, 1000, 3000, 0], [0, 150, 290, 300, 0]
    case = make(generator, dtype, head_dim, heads, kv_heads, 300, start, width, valid_len=valid_len)
    case = replace(case, slot=ints(3, 0, 4, 1, SLOTS))
    age = (case.start[:, None] - 1 - torch.arange(300, device="cuda")) % 300
    for b in range(5):
        unseen = age[b] >= valid_len[b]
        case.k[case.slot[b], :, unseen] = torch.nan
        case.v[case.slot[b], :, unseen] = torch.nan
    before = case.k.clone()
    assert_close(run(kernels, case), block_reference(case), dtype)
    assert torch.equal(case.k.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [*SHAPES, *ODD_SHAPES])
@pytest.mark.parametrize("width", [1, 5, 7, 8, 33])
@pytest.mark.parametrize("normed", [False, True])
def test_a_row_sees_the_cache_up_to_itself(
    kernels: Kernels,
    generator: torch.Generator,
    normed: bool,
    width: int,
    head_dim: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> None:
    # Nothing before, a split's first and last row, far in.
    start = [0, 127, 128, 290]
    case = make(generator, dtype, head_dim, heads, kv_heads, 400, start, width, normed=normed)
    case = replace(case, slot=ints(3, 0, 4, SLOTS))
    for b, first in enumerate(start):
        case.k[case.slot[b], :, first:] = torch.nan
        case.v[case.slot[b], :, first:] = torch.nan
    want, want_k, want_v = causal_reference(case)
    assert_close(run(kernels, case), want, dtype)
    assert torch.equal(case.v.nan_to_num(), want_v.to(dtype).nan_to_num())
    assert_close(case.k.nan_to_num(), want_k.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_of_a_prompt(kernels: Kernels, generator: torch.Generator, dtype: torch.dtype) -> None:
    case = make(generator, dtype, 64, 9, 3, 1500, [900, 0], 512)
    want, _, _ = causal_reference(case)
    assert_close(run(kernels, case), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_past_the_cache_are_dropped(kernels: Kernels, generator: torch.Generator, dtype: torch.dtype) -> None:
    case = make(generator, dtype, 64, 9, 3, 40, [38], 5)
    before = case.k.clone()
    out = run(kernels, case)
    want, _, _ = causal_reference(replace(case, k=before.clone()))
    assert_close(out, want, dtype)
    assert torch.equal(case.k[0, :, :38], before[0, :, :38])
    assert torch.equal(case.k[1:], before[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_on_scratch_stays_finite(kernels: Kernels, generator: torch.Generator, dtype: torch.dtype) -> None:
    case = make(generator, dtype, 64, 9, 3, 300, [40, 0, 0, 0], 8)
    case = replace(case, slot=ints(1, SLOTS, SLOTS, SLOTS))
    want, _, _ = causal_reference(case.rows(ints(0)))
    assert_close(run(kernels, case)[:1], want, dtype)
    assert case.k[SLOTS].isfinite().all()
    assert case.v[SLOTS].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), SHAPES)
def test_a_row_gets_the_same_bits_in_any_company(
    kernels: Kernels,
    generator: torch.Generator,
    head_dim: int,
    heads: int,
    kv_heads: int,
    ring: bool,
    dtype: torch.dtype,
) -> None:
    """In float32 each row of a batch that fills the device alone, causal rows without those after them too. In 16 bits,
    where splits follow from the batch, wherever in the batch it is."""
    start = [0, 1, 64, 500, 700, 2000] * 24
    valid_len = [0, 1, 64, 400, 640, 640] * 24 if ring else None
    case = make(generator, dtype, head_dim, heads, kv_heads, 640 if ring else 2100, start, 8, valid_len=valid_len)
    # Rows of one slot write the same.
    case = replace(case, slot=torch.arange(len(start), device="cuda") % 6)
    for repeat in range(1, 24):
        case.qkv[6 * repeat : 6 * repeat + 6] = case.qkv[:6]
    together = run(kernels, case.rows(torch.arange(len(start), device="cuda")))
    for b in range(6):
        assert torch.equal(together[b], together[138 + b])
        if dtype is not torch.float32:
            continue
        assert torch.equal(run(kernels, case.rows(ints(b))), together[b : b + 1])
        for width in () if ring else (1, 3):
            assert torch.equal(run(kernels, case.rows(ints(b), width)), together[b : b + 1, :width])


def test_replays_with_other_inputs(kernels: Kernels, generator: torch.Generator) -> None:
    """Nothing of a call is fixed by its capture in a CUDA graph but addresses and sizes."""
    case = make(generator, torch.bfloat16, 128, 8, 2, 300, [40, 290], 7, valid_len=[40, 250])
    other = make(generator, torch.bfloat16, 128, 8, 2, 300, [900, 5], 7, valid_len=[300, 5])
    want = run(kernels, other)
    sizes = (2, 7, 8, 2, 128, 300)
    out = torch.zeros(2, 7, 8 * 128, dtype=torch.bfloat16, device="cuda")
    workspace = kernels.workspace("attention", *sizes, 1)
    cos, sin = phases(POSITIONS, 128)

    def launch() -> None:
        kernels.block_attention(
            case.qkv, case.q_norm, case.k_norm, cos, sin, case.k, case.v, case.start, case.valid_len, case.slot, out,
            workspace, *sizes, POSITIONS, EPSILON, dtype=torch.bfloat16,
        )  # fmt: skip

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for field in ("qkv", "q_norm", "k_norm", "k", "v", "start", "slot", "valid_len"):
        getattr(case, field).copy_(getattr(other, field))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
