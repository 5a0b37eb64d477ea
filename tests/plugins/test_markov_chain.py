"""The Markov chain, against the operator's own reference in float32 of the same rounded inputs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from builder.graphs.ops import markov_chain
from tests.plugins.kernels import DTYPES, Kernels

KINDS = {"none": 0, "vanilla": 1, "gated": 2, "rnn": 3}
POINTERS = ("base", "hidden", "bonus", "temperature", "uniforms", "noise", "w1", "w2", "proj_w", "proj_b", "conf_w")
POINTERS += ("conf_b", "ids", "q", "confidence", "workspace")
SIZES = ("batch", "steps", "vocab", "rank", "hidden_size", "conf_rows", "kind")
MARGIN = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}
"""Tokens may part where the best two logits are nearer: mixed vectors are rounded to T once."""


class Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [(name, ctypes.c_int64) for name in SIZES]


@dataclass
class Chain:
    """A chain's inputs on the device, and how it is called."""

    kind: str
    dtype: torch.dtype
    base: Tensor
    hidden: Tensor
    bonus: Tensor
    temperature: Tensor
    uniforms: Tensor
    noise: Tensor | None
    weights: list[Tensor]
    conf_w: Tensor | None
    conf_b: Tensor
    ids: Tensor = field(init=False)
    q: Tensor | None = field(init=False, default=None)
    confidence: Tensor = field(init=False)

    def arguments(self, kernels: Kernels, sample: bool) -> Arguments:
        b, s, vocab = self.base.shape
        rank = self.weights[0].shape[1] if self.weights else 0
        self.ids = torch.full((b, s), -7, device="cuda")
        self.q = torch.full((b, s, vocab), torch.nan, device="cuda") if sample else None
        self.confidence = torch.full((b, s), torch.nan, device="cuda")
        self.workspace = kernels.workspace("markov_chain", b, s, rank)
        tensors = dict(zip(("w1", "w2", "proj_w", "proj_b"), self.weights, strict=False))
        for name in ("base", "hidden", "bonus", "temperature", "uniforms", "noise", "conf_w", "conf_b", "ids", "q"):
            value = getattr(self, name)
            if value is not None:
                tensors[name] = value
        if self.conf_w is not None:
            tensors["confidence"] = self.confidence
        tensors["workspace"] = self.workspace
        with_rows = self.conf_w is not None and self.conf_w.shape[1] > self.hidden.shape[2]
        return Arguments(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            **dict(
                zip(SIZES, (b, s, vocab, rank, self.hidden.shape[2], int(with_rows), KINDS[self.kind]), strict=True)
            ),
        )

    def run(self, kernels: Kernels, sample: bool = False) -> None:
        launch(kernels, self.arguments(kernels, sample), self.dtype)

    def forced(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Corrected logits ``[b, s, V]`` and W1 rows in float32 with these tokens as those before each."""
        b, s, vocab = self.base.shape
        weights = [w.float().cpu() for w in self.weights]
        logits, rows = [], []
        noise = torch.zeros(b, s, 1) if self.noise is None else self.noise.cpu()
        # One slot at a time, the state of rnn rebuilt from the start: the reference takes its own tokens otherwise.
        for j in range(s):
            base = torch.full((b, j + 1, vocab), -1e9)
            for i in range(j):
                base[torch.arange(b), i, ids[:, i].cpu()] = 1e9
            base[:, j] = self.base[:, j].cpu()
            added = torch.cat((torch.zeros(b, j, noise.shape[2]), noise[:, j : j + 1]), dim=1)
            _, w1, _, corrected = markov_chain(
                self.kind,
                base,
                self.hidden[:, : j + 1].float().cpu(),
                self.bonus.cpu(),
                torch.zeros(b),
                torch.zeros(b, j + 1),
                added,
                weights,
            )
            logits.append(corrected[:, j])
            rows.append(w1[:, j])
        return torch.stack(logits, 1), torch.stack(rows, 1)


def launch(kernels: Kernels, arguments: Arguments, dtype: torch.dtype) -> None:
    function = kernels._library["dspark_markov_chain"]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = function(ctypes.byref(arguments), ctypes.c_int(DTYPES[dtype]), stream)
    if error:
        raise RuntimeError(f"dspark_markov_chain: CUDA error {error}")


def make(
    generator: torch.Generator,
    kind: str,
    dtype: torch.dtype,
    b: int,
    s: int,
    vocab: int,
    rank: int = 16,
    hidden_size: int = 24,
    noisy: bool = False,
    with_rows: bool = True,
) -> Chain:
    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda") * scale

    weights: list[Tensor] = []
    if kind != "none":
        weights = [random(vocab, rank), random(vocab, rank, scale=2 / rank**0.5)]
    if kind == "gated":
        weights += [random(rank, hidden_size + rank, scale=0.3), random(rank)]
    elif kind == "rnn":
        weights += [random(3 * rank, 2 * rank + hidden_size, scale=0.3), random(3 * rank)]
    with_rows = with_rows and bool(weights)
    return Chain(
        kind,
        dtype,
        random(b, s, vocab, scale=2.0),
        random(b, s, hidden_size).to(dtype),
        torch.randint(vocab, (b,), generator=generator, device="cuda"),
        torch.zeros(b, device="cuda"),
        torch.rand(b, s, generator=generator, device="cuda"),
        random(b, s, vocab) if noisy else None,
        [w.to(dtype) for w in weights],
        random(1, hidden_size + (rank if with_rows else 0)),
        random(1),
    )


def check_tokens(chain: Chain, logits: Tensor) -> None:
    """Each token is the reference's best, or as good to within rounding."""
    picked = logits.gather(2, chain.ids.cpu()[:, :, None])[:, :, 0]
    assert (logits.max(dim=2).values - picked).max() < MARGIN[chain.dtype]


def check_confidence(chain: Chain, rows: Tensor) -> None:
    assert chain.conf_w is not None
    features = chain.hidden.float().cpu()
    if chain.conf_w.shape[1] > features.shape[2]:
        features = torch.cat((features, rows), dim=2)
    want = (features.double() @ chain.conf_w.double().cpu().T)[:, :, 0] + chain.conf_b.double().cpu()
    torch.testing.assert_close(chain.confidence.double().cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("b", "s", "vocab", "rank"), [(1, 1, 37, 8), (2, 3, 1000, 16), (5, 7, 37, 16), (9, 3, 4099, 40)]
)
def test_best_tokens(
    kernels: Kernels,
    generator: torch.Generator,
    kind: str,
    dtype: torch.dtype,
    b: int,
    s: int,
    vocab: int,
    rank: int,
) -> None:
    chain = make(generator, kind, dtype, b, s, vocab, rank)
    chain.run(kernels)
    logits, rows = chain.forced(chain.ids)
    check_tokens(chain, logits)
    check_confidence(chain, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", [1, 8, 17, 33, 70])
def test_batches_and_real_sizes(kernels: Kernels, generator: torch.Generator, b: int, dtype: torch.dtype) -> None:
    chain = make(generator, "vanilla", dtype, b, 2, 49152, 256, noisy=True, with_rows=False)
    chain.run(kernels)
    logits, rows = chain.forced(chain.ids)
    check_tokens(chain, logits)
    check_confidence(chain, rows)
    if dtype == torch.float32:
        assert torch.equal(chain.ids.cpu(), logits.argmax(2))


def test_of_equals_the_lowest(kernels: Kernels, generator: torch.Generator) -> None:
    for dtype in DTYPES:
        chain = make(generator, "vanilla", dtype, 3, 3, 5000)
        chain.weights[1].zero_()
        chain.base.fill_(-3.0)
        chain.base[:, :, [4321, 77, 78]] = 2.0
        chain.run(kernels)
        assert chain.ids.tolist() == [[77] * 3] * 3
        chain.base.fill_(-torch.inf)
        chain.base[:, :, 4999] = -1e30
        chain.run(kernels)
        assert chain.ids.tolist() == [[4999] * 3] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "rank"), [(37, 8), (4099, 16), (49152, 256)])
def test_draws(
    kernels: Kernels, generator: torch.Generator, kind: str, dtype: torch.dtype, vocab: int, rank: int
) -> None:
    chain = make(generator, kind, dtype, 6, 3, vocab, rank)
    chain.temperature[:] = torch.tensor([0.0, 0.7, 1.0, 0.0, 1.6, 0.05])
    chain.run(kernels, sample=True)
    assert chain.q is not None
    q = chain.q.cpu()
    logits, rows = chain.forced(chain.ids)
    temperature = torch.where(chain.temperature > 0, chain.temperature, 1.0).cpu()
    want = torch.softmax(logits / temperature[:, None, None], dim=2)
    loose = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 8e-1}[dtype]
    torch.testing.assert_close(q, want, rtol=loose, atol=1e-4 if dtype == torch.float32 else 3e-2)
    torch.testing.assert_close(q.double().sum(2), torch.ones(6, 3, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    greedy = chain.temperature.cpu() == 0
    picked = logits.gather(2, chain.ids.cpu()[:, :, None])[:, :, 0]
    assert ((logits.max(dim=2).values - picked)[greedy] < MARGIN[dtype]).all()
    # The very q that comes back is what tokens were drawn from.
    cdf = q.double().cumsum(2)
    u = chain.uniforms.double().cpu() * cdf[:, :, -1]
    token = chain.ids.cpu()
    upper = cdf.gather(2, token[:, :, None])[:, :, 0]
    lower = upper - q.double().gather(2, token[:, :, None])[:, :, 0]
    assert ((lower <= u + 1e-9) & (u <= upper + 1e-9))[~greedy].all()
    check_confidence(chain, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_what_it_is_alone(kernels: Kernels, generator: torch.Generator, kind: str, dtype: torch.dtype) -> None:
    """Bit for bit, whatever the batch."""
    whole = make(generator, kind, dtype, 40, 3, 3001, 32)
    whole.temperature[::2] = 0.9
    whole.run(kernels, sample=True)
    for row in (0, 9, 39):
        cut = slice(row, row + 1)
        alone = Chain(
            kind,
            dtype,
            *(t[cut].contiguous() for t in (whole.base, whole.hidden, whole.bonus, whole.temperature, whole.uniforms)),
            None,
            whole.weights,
            whole.conf_w,
            whole.conf_b,
        )
        alone.run(kernels, sample=True)
        assert torch.equal(alone.ids[0], whole.ids[row])
        assert alone.q is not None
        assert whole.q is not None
        assert torch.equal(alone.q[0], whole.q[row])
        assert torch.equal(alone.confidence[0], whole.confidence[row])


def test_replays_with_other_inputs(kernels: Kernels, generator: torch.Generator) -> None:
    chain = make(generator, "rnn", torch.bfloat16, 4, 5, 2000)
    arguments = chain.arguments(kernels, sample=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(kernels, arguments, chain.dtype)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch(kernels, arguments, chain.dtype)
    other = make(generator, "rnn", torch.bfloat16, 4, 5, 2000)
    for mine, theirs in ((chain.base, other.base), (chain.hidden, other.hidden), (chain.bonus, other.bonus)):
        mine.copy_(theirs)
    graph.replay()
    torch.cuda.synchronize()
    found = chain.ids.clone()
    chain.run(kernels)
    assert torch.equal(found, chain.ids)


def test_refuses_what_it_cannot_do(kernels: Kernels, generator: torch.Generator) -> None:
    for rank, kind in ((12, "vanilla"), (16, "vanilla")):
        chain = make(generator, kind, torch.bfloat16, 1, 1, 50, rank)
        arguments = chain.arguments(kernels, sample=False)
        if rank == 16:
            arguments.kind = 9
        with pytest.raises(RuntimeError, match="CUDA error 1"):
            launch(kernels, arguments, chain.dtype)
