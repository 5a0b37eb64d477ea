"""What a bundle says of itself must fit together: of TensorRT bundles every engine, its record, and its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.bundle import open_bundle
from runtime.consistency import check_records, engines_wanted
from runtime.engine_records import EngineRecord, read_records, write_records
from runtime.errors import BundleError
from runtime.manifest import KERNELS_FILE, EngineFile, Manifest, Plugin, StateTensor, loads
from tests.examples import example_records, tensorrt_example

MakeBundle = Callable[..., Path]


def refused(path: Path, *clauses: str) -> None:
    with pytest.raises(BundleError) as caught:
        open_bundle(path, "quick")
    message = str(caught.value)
    assert "\n" not in message
    assert "Rebuild the bundle with dspark-build build --overwrite" in message
    for clause in clauses:
        assert clause in message


@pytest.mark.parametrize("kernels", [True, False])
def test_a_whole_tensorrt_bundle_opens(make_bundle: MakeBundle, kernels: bool) -> None:
    bundle = open_bundle(make_bundle(**tensorrt_example(kernels=kernels)))
    assert len(bundle.manifest.engines) == 24
    assert (KERNELS_FILE in bundle.manifest.files) is kernels
    assert check_records(bundle.manifest, bundle.path) == tuple(example_records(kernels)) == read_records(bundle.path)


def test_every_stage_batch_and_width_is_wanted(manifest: Manifest) -> None:
    rtx = replace(manifest, backend=replace(manifest.backend, name="tensorrt-rtx"))
    sizes = {
        "verify": (1, 4, 5),
        "prefill": (8,),
        "seed": (5, 8),
        "draft": (3, 4),
        "draft_sampled": (3, 4),
        "draft_noise": (3, 4),
    }
    assert engines_wanted(rtx) == [(s, n, w) for s, widths in sizes.items() for n in (1, 2) for w in widths]
    cuda = replace(manifest, backend=replace(manifest.backend, name="ort-cuda"))
    assert ("draft_sampled", 2, 0) in engines_wanted(cuda)
    assert engines_wanted(manifest) == [(g, n, 0) for g in ("target", "draft", "seed") for n in (1, 2)]


@pytest.mark.parametrize(
    "absent", [("verify", 2, 4), ("prefill", 1, 8), ("seed", 2, 8), ("draft", 1, 3), ("draft_noise", 2, 4)]
)
def test_an_engine_too_few(make_bundle: MakeBundle, absent: tuple[str, int, int]) -> None:
    parts = tensorrt_example()
    parts["engines"] = tuple(e for e in parts["engines"] if (e.graph, e.batch, e.width) != absent)  # type: ignore[attr-defined]
    stage, batch, width = absent
    expected = "key 'engines' is wrong; expected each graph for each batch and width"
    refused(make_bundle(**parts), f"{expected}; found no {stage} for batch {batch}, width {width}")


@pytest.mark.parametrize(
    "name", ["weights.json", "engines.json", KERNELS_FILE, "weights.bin", "engines/draft.b1.w3.engine"]
)
def test_a_file_too_few(make_bundle: MakeBundle, name: str) -> None:
    refused(make_bundle(**tensorrt_example(without=(name,))), "key 'files' is wrong", f"found no {name!r}")


FILE = "engines/draft.b1.w3.engine"


def of_one(**changes: object) -> Callable[[EngineRecord], EngineRecord]:
    return lambda record: replace(record, **changes) if record.file == FILE else record  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "clauses"),
    [
        *(
            (changes, ("don't tell of an engine of the bundle", "expected draft for batch 1, width 3 in " + FILE))
            for changes in ({"batch": 2}, {"stage": "seed"}, {"width": 4}, {"file": "engines/another.engine"})
        ),
        ({"engine_bytes": 5}, (f"tell of another {FILE}; expected 103 bytes; found 5",)),
    ],
)
def test_records_of_other_engines(make_bundle: MakeBundle, changes: dict[str, object], clauses: tuple[str]) -> None:
    refused(make_bundle(**tensorrt_example(alter=of_one(**changes))), "engines.json: its records ", *clauses)


def test_a_record_too_many(make_bundle: MakeBundle) -> None:
    path = make_bundle(**tensorrt_example())
    first = example_records(True)[0]
    write_records(path, [*example_records(True), replace(first, width=2, file="engines/verify.b1.w2.engine")])
    found = "expected its engines; found verify for batch 1, width 2 in engines/verify.b1.w2.engine"
    manifest = loads((path / "manifest.json").read_text())
    with pytest.raises(BundleError, match=f"its records tell of an engine that the bundle doesn't have; {found}"):
        check_records(manifest, path)


def test_damaged_records(make_bundle: MakeBundle) -> None:
    parts = tensorrt_example()
    for content, clause in (
        (b"{", "engines.json: can't be read as records of engines"),
        (b'{"engines": [{}]}', "engines.json: key 'engines[0].file' is missing"),
    ):
        files = {**parts["files"], "engines.json": content}  # type: ignore[dict-item]
        with pytest.raises(BundleError, match=r"engines\.json") as caught:
            open_bundle(make_bundle(overwrite=True, **{**parts, "files": files}))
        assert clause in str(caught.value)


def test_plugins_without_kernels_are_named(make_bundle: MakeBundle) -> None:
    parts = tensorrt_example(kernels=False, alter=of_one(plugins={"BlockAttention": 3}))
    clauses = f"has no kernels for BlockAttention and other plugins of {FILE}; expected {KERNELS_FILE}; found none"
    refused(make_bundle(**parts), clauses, "--plugins LIB")


def test_kernels_are_those_that_the_manifest_names(make_bundle: MakeBundle) -> None:
    for version in ("", "000000000000"):
        parts = {**tensorrt_example(), "plugins": (Plugin("dspark", version),)}
        refused(
            make_bundle(overwrite=True, **parts),
            "key 'plugins.dspark' is wrong; expected e98f56f907c4, of plugins/libdspark_kernels.so",
        )


def test_state_of_an_unknown_kind_or_type(make_bundle: MakeBundle) -> None:
    for tensor in (StateTensor("x", "heap", (1,), "float32"), StateTensor("x", "taps", (1,), "int4")):
        refused(make_bundle(overwrite=True, state=(tensor,)), "key 'state.x' is wrong; expected a known kind and dtype")


def test_widths_count_for_tensorrt_alone(make_bundle: MakeBundle, manifest: Manifest) -> None:
    engines = tuple(EngineFile(e.graph, e.batch, e.file, 7) for e in manifest.engines)
    refused(make_bundle(engines=engines), "key 'engines' is wrong; expected each graph for each batch; found no target")
