"""A whole step of the 8B-shaped drafter: ours, torch's, its bare products, and what bytes would take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from builder.spec import DrafterSpec
from tests.bench.arithmetic import median_ratio, summary
from tests.bench_gpu.graphs import limits_of, random_weights
from tests.bench_gpu.ort_graph import OrtGraph
from tests.bench_gpu.reference import MASKED, Inputs, TorchDrafter
from tests.bench_gpu.shapes import DRAFTER, WINDOW, Product, products, ring_bytes, weight_bytes
from tests.bench_gpu.timing import Case, call_ms, captured, copy_bandwidth, device_ms, free_bytes


@dataclass(frozen=True)
class Place:
    """Where the rows of a batch stand: `start` and `visible` ring rows of each, and its slot."""

    start: int
    visible: int
    slots: tuple[int, ...]


class Step:
    """One bound step of the draft graph: `inputs` may be set at will, `run` starts it.

    Rows on the last slot, the scratch slot, are padding: they have no context and bring none.
    """

    def __init__(
        self, graph: OrtGraph, spec: DrafterSpec, weights: Mapping[str, Tensor], state: Mapping[str, Tensor],
        batch: int, number: int,
    ) -> None:  # fmt: skip
        device, width = state["taps"].device, spec.block_size
        self.scratch = state["taps"].shape[0] - 1
        names = ("bonus", "start", "valid_len", "new_len", "slot")
        self.inputs = {name: torch.zeros(batch, dtype=torch.int64, device=device) for name in names}
        self.outputs = {
            "ids": torch.zeros(batch, width, dtype=torch.int64, device=device),
            "q": torch.zeros(batch, width, 1, device=device),
            "confidence_logits": torch.zeros(batch, width, device=device),
        }
        floats = {
            "temperature": torch.zeros(batch, device=device),
            "uniforms": torch.zeros(batch, width, device=device),
            "noise": torch.zeros(batch, width, 1, device=device),
        }
        self.place(spec, Place(1, 0, (self.scratch,) * batch))
        self.run = graph.bind({**weights, **state, **self.inputs, **self.outputs, **floats}, number)
        if device.type == "cuda":
            torch.cuda.synchronize()  # the library has a stream of its own
        # The first run may capture, and all of it happens where it harms nothing.
        self.run()

    def place(self, spec: DrafterSpec, place: Place) -> None:
        slot = torch.tensor(place.slots)
        real = slot != self.scratch
        values = {
            "bonus": 11 + torch.arange(len(slot)) % 7,
            "start": torch.where(real, place.start, 1),
            "valid_len": torch.where(real, place.visible, 0),
            "new_len": torch.where(real, min(spec.block_size + 1, place.visible), 0),
            "slot": slot,
        }
        for name, value in values.items():
            self.inputs[name].copy_(value)


def make_state(
    spec: DrafterSpec, slots: int, window: int, dtype: torch.dtype, device: str = "cuda"
) -> dict[str, Tensor]:
    """Rings and tap rows of that many slots and the scratch slot, full of random numbers."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(slots + 1, *shape, dtype=dtype, device=device, generator=generator)

    ring = (spec.num_kv_heads, window, spec.head_dim)
    rings = {f"ring_{kv}.{i}": random(*ring) for i in range(spec.num_layers) for kv in "kv"}
    return {"taps": random(spec.block_size + 1, len(spec.taps) * spec.hidden_size), **rings}


class DrafterBench:
    """The drafter's weights on the card, and one session over its graph."""

    def __init__(self, model: Path, plugins: Path | None, batches: Sequence[int], repeats: int) -> None:
        self.spec, self.batches, self.repeats = DRAFTER, batches, repeats
        self.model, self.plugins = model, plugins
        self.weights = random_weights(self.spec, limits_of(self.spec))
        self.dtype = self.weights["drafter.embed"].dtype
        self.state = make_state(self.spec, max(*batches, 8), WINDOW, self.dtype)
        before = free_bytes()
        self.graph = OrtGraph(model, plugins)
        self.steps: dict[int, Step] = {}
        self.memory = {"session": before - free_bytes()}
        for number, batch in enumerate(batches, 1):
            self.steps[batch] = Step(self.graph, self.spec, self.weights, self.state, batch, number)
            self.memory[f"batch {batch}"] = before - free_bytes()
        self._numbers = len(batches)

    def new_step(self, state: Mapping[str, Tensor], batch: int) -> Step:
        self._numbers += 1
        return Step(self.graph, self.spec, self.weights, state, batch, self._numbers)

    def measure_step(self) -> dict[str, object]:
        """Every batch with a full window; see the module."""
        bandwidth = copy_bandwidth()
        return {
            "copy_bandwidth": bandwidth,
            "weight_bytes": weight_bytes(self.spec),
            "batches": {batch: self._batch(batch, bandwidth) for batch in self.batches},
        }

    def _batch(self, batch: int, bandwidth: float) -> dict[str, object]:
        step, place = self.steps[batch], Place(WINDOW + 5, WINDOW, tuple(range(batch)))
        step.place(self.spec, place)
        torch_steps = self._torch_steps(batch, place)
        ways = device_ms({way: Case(made.replay) for way, made in torch_steps.items()}, 5)
        best = min(ways.keys() & {*MASKED}, key=lambda way: median(ways[way]))
        bare = self._bare(batch)
        graphs = {"torch": Case(torch_steps[best].replay), "bare": Case(bare.replay)}
        calls = call_ms({"ours": Case(step.run), **graphs}, self.repeats)
        eager = call_ms({"eager": Case(torch_steps[best].eager)}, max(5, self.repeats // 10))["eager"]
        device = device_ms(graphs, max(5, self.repeats // 10))
        step.run()
        torch_steps[best].replay()
        torch.cuda.synchronize()
        rings = ring_bytes(self.spec, batch, WINDOW)
        ring_ms, floor_ms = (1e3 * size / bandwidth for size in (rings, rings + weight_bytes(self.spec)))
        times = {name: summary(values) for name, values in {**calls, "eager": eager}.items()}
        print(f"  batch {batch}, ms: " + ", ".join(f"{k} {v['median']:.3f}" for k, v in times.items()), flush=True)
        return {
            "call_ms": times,
            "device_ms": {name: summary(values) for name, values in device.items()},
            "torch_attention_ms": {way: median(values) for way, values in ways.items()},
            "torch_attention": best,
            "ring_bytes": rings,
            "ring_ms": ring_ms,
            "floor_ms": floor_ms,
            "to_bare_and_ring": median_ratio(calls["ours"], [value + ring_ms for value in calls["bare"]]),
            "to_torch": median_ratio(calls["ours"], calls["torch"]),
            "floor_share": floor_ms / median(calls["ours"]),
            "same_ids": _share(step.outputs["ids"], torch_steps[best].ids),
            "confidence_difference": _difference(step.outputs["confidence_logits"], torch_steps[best].confidence),
        }

    def _torch_steps(self, batch: int, place: Place) -> dict[str, TorchStep]:
        """Torch's step by how it calls SDPA; a way that this version of torch refuses is left out."""
        made = {}
        for way in (*MASKED, "unmasked"):
            drafter = TorchDrafter(self.spec, self.weights, batch, WINDOW, way)
            try:
                made[way] = TorchStep(drafter, self.spec, self.state, place, batch)
            except RuntimeError as error:
                print(f"  torch, SDPA {way}: {error}", flush=True)
        return made

    def _bare(self, batch: int) -> BareProducts:
        return BareProducts(products(self.spec, batch), self.weights)

    def measure_device(self) -> dict[str, object]:
        """Our step without the library's wait: its launches captured from outside, timed as torch's graph is. The
        library need not stand that, so nothing else depends on it."""
        stream = torch.cuda.Stream()
        graph = OrtGraph(self.model, self.plugins, "none", stream)
        result: dict[str, object] = {}
        for number, batch in enumerate(self.batches, 1):
            step = Step(graph, self.spec, self.weights, self.state, batch, number)
            step.place(self.spec, Place(WINDOW + 5, WINDOW, tuple(range(batch))))
            torch.cuda.synchronize()
            cases = {"ours": Case(captured(step.run, stream).replay), "bare": Case(self._bare(batch).replay)}
            times = device_ms(cases, max(5, self.repeats // 10))
            result[str(batch)] = {
                **{name: summary(values) for name, values in times.items()},
                "to_bare": median_ratio(times["ours"], times["bare"]),
            }
        return {"batches": result}

    def measure_flatness(self) -> dict[str, object]:
        """Step times by ring position, by how many slots there are, and by how many of a batch's rows are in use."""
        spec, wrapped = self.spec, 5 * WINDOW + 3
        # Slots are the largest part of the card's memory here: 64 of them at a window of 2048 are 2.5 GiB.
        many = make_state(spec, 64, WINDOW, self.dtype)
        result: dict[str, object] = {}
        for batch in (1, 8):
            first, last = tuple(range(batch)), tuple(range(64 - batch, 64))
            step, wide = self.new_step(make_state(spec, 8, WINDOW, self.dtype), batch), self.new_step(many, batch)
            positions = {
                "start": Place(1, 1, first),
                "half": Place(WINDOW // 2, WINDOW // 2, first),
                "full": Place(WINDOW, WINDOW, first),
                "wrapped": Place(wrapped, WINDOW, first),
            }
            result[f"position, batch {batch}"] = self._flat({name: (step, place) for name, place in positions.items()})
            result[f"slots, batch {batch}"] = self._flat(
                {
                    "8 slots": (step, positions["wrapped"]),
                    "64 slots, first": (wide, positions["wrapped"]),
                    "64 slots, last": (wide, Place(wrapped, WINDOW, last)),
                }
            )
        idle = {
            f"{used} of 8 rows in use": (wide, Place(wrapped, WINDOW, (*range(used), *[64] * (8 - used))))
            for used in (8, 4, 1)
        }
        result["idle rows, batch 8"] = self._flat(idle)
        return result

    def _flat(self, cases: Mapping[str, tuple[Step, Place]]) -> dict[str, object]:
        made = {}
        for name, (step, place) in cases.items():
            made[name] = Case(step.run, _placing(step, self.spec, place))
        times = call_ms(made, self.repeats)
        medians = [median(values) for values in times.values()]
        return {
            "call_ms": {name: summary(values) for name, values in times.items()},
            "spread": max(medians) / min(medians) - 1,
        }


class BareProducts:
    """Products and nothing else as one CUDA graph, over the step's own weights."""

    def __init__(self, work: Sequence[Product], weights: Mapping[str, Tensor]) -> None:
        self._work: list[tuple[Tensor, Tensor, Tensor]] = []
        for product in work:
            w = weights[product.weight].t()
            x, y = w.new_empty(product.rows, product.k).normal_(), w.new_empty(product.rows, product.n)
            self._work += [(x, w, y)] * product.times
        self._graph = captured(self._multiply)

    def _multiply(self) -> None:
        for x, w, y in self._work:
            torch.mm(x, w, out=y)

    def replay(self) -> None:
        self._graph.replay()


class TorchStep:
    """Torch's step over the same tap rows and ring rows as ours: `eager`, or `replay` as a CUDA graph."""

    def __init__(
        self, drafter: TorchDrafter, spec: DrafterSpec, state: Mapping[str, Tensor], place: Place, batch: int
    ) -> None:
        rows, device = list(place.slots), state["taps"].device

        def integers(value: int) -> Tensor:
            return torch.full((batch,), value, device=device)

        for i in range(spec.num_layers):
            drafter.k[i, :batch, :, : drafter.window] = state[f"ring_k.{i}"][rows]
            drafter.v[i, :batch, :, : drafter.window] = state[f"ring_v.{i}"][rows]
        new = min(spec.block_size + 1, place.visible)
        bonus = 11 + torch.arange(batch, device=device) % 7
        taps = state["taps"][rows].clone()
        self._inputs = Inputs(bonus, integers(place.start), integers(place.visible), integers(new), taps)
        self._drafter = drafter
        self._graph = captured(self._keep)

    def _keep(self) -> None:
        self.ids, self.confidence = self.eager()  # those of the capture are what a replay fills

    @torch.inference_mode()
    def eager(self) -> tuple[Tensor, Tensor]:
        return self._drafter(self._inputs)

    def replay(self) -> None:
        self._graph.replay()


def _placing(step: Step, spec: DrafterSpec, place: Place) -> Callable[[], None]:
    return lambda: step.place(spec, place)


def _share(a: Tensor, b: Tensor) -> float:
    return (a == b).float().mean().item()


def _difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
