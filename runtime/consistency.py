"""Do a bundle's own statements fit together? The runtime relies on all of them, and no build writes others."""

from __future__ import annotations

from pathlib import Path

from runtime.engine_records import RECORDS_NAME, STAGES, EngineRecord, read_records
from runtime.errors import BundleError
from runtime.manifest import ITEM_BYTES, KERNELS_FILE, PLUGINS_FILE, REBUILD, WEIGHTS_NAME, EngineFile, Manifest
from runtime.tensorrt_flavours import FLAVOURS
from runtime.widths import Widths

WEIGHTS_INDEX_NAME = "weights.json"
"""Where each weight lies in ``weights.bin``, for back ends that bind them one by one."""

_GRAPHS = ("target", "draft", "seed")
_CUDA_GRAPHS = (*_GRAPHS, "draft_sampled")
_COUNTS = ("slots", "window", "max_seq_len", "prefill_chunk", "block_size")
_KINDS = ("cache", "ring", "taps")


def check_consistency(manifest: Manifest, where: Path) -> None:
    """Raise BundleError naming the first key of the manifest at `where` whose value no build writes."""
    limits, serving = manifest.limits, manifest.serving
    batches, block, threshold = limits.batches, limits.block_size, serving.confidence_threshold
    counts = {f"limits.{name}": getattr(limits, name) for name in _COUNTS} | {
        "models.vocab_size": manifest.models.vocab_size
    }
    ascending = bool(batches) and batches[0] >= 1 and list(batches) == sorted(set(batches))
    rules: tuple[tuple[str, bool, str, object], ...] = (
        ("limits.batches", ascending, "ascending numbers from 1", list(batches)),
        *((key, count >= 1, "1 or more", count) for key, count in counts.items()),
        ("limits.prefill_chunk", limits.prefill_chunk <= limits.window, "at most the window", limits.prefill_chunk),
        ("serving.max_draft", 0 <= serving.max_draft <= block, f"0 to {block}", serving.max_draft),
        ("serving.confidence_threshold", 0 <= threshold <= 1, "0 to 1", threshold),
        ("state", bool(manifest.state), "a tensor or more", "none"),
        *(
            (f"state.{t.name}", t.kind in _KINDS and t.dtype in ITEM_BYTES, "a known kind and dtype", t)
            for t in manifest.state
        ),
    )
    for key, holds, expected, found in rules:
        if not holds:
            raise _wrong(where, key, expected, found)
    # After the limits: the engines follow from them.
    present = {(engine.graph, engine.batch, engine.width) for engine in manifest.engines}
    absent = [engine for engine in engines_wanted(manifest) if engine not in present]
    if absent:
        graph, batch, width = absent[0]
        found = f"no {graph} for batch {batch}" + (f", width {width}" if width else "")
        expected = "each graph for each batch" + (" and width" if width else "")
        raise _wrong(where, "engines", expected, found)
    unlisted = [name for name in _files_wanted(manifest) if name not in manifest.files]
    if unlisted:
        raise _wrong(where, "files", "the weights and every engine", f"no {unlisted[0]!r}")
    library = KERNELS_FILE if manifest.backend.name in FLAVOURS else PLUGINS_FILE
    for plugin in manifest.plugins:
        digest = manifest.files[library].sha256
        if not plugin.version or not digest.startswith(plugin.version):
            raise _wrong(where, f"plugins.{plugin.name}", f"{digest[:12]}, of {library}", plugin.version)


def engines_wanted(manifest: Manifest) -> list[tuple[str, int, int]]:
    """(graph or stage, batch, width) of every engine that serving may call; width 0 is any."""
    name, batches = manifest.backend.name, manifest.limits.batches
    if name not in FLAVOURS:
        return [(graph, n, 0) for graph in (_CUDA_GRAPHS if name == "ort-cuda" else _GRAPHS) for n in batches]
    widths = Widths.of(manifest.limits, manifest.serving)
    return [(stage, n, width) for stage in STAGES for n in batches for width in widths.of_stage(stage)]


def check_records(manifest: Manifest, root: Path) -> tuple[EngineRecord, ...]:
    """The records of the TensorRT engines of the bundle at `root`, after checking them against its manifest.

    Raises:
        BundleError: records that can't be read, of other engines than the bundle's, or of plugins whose kernels it
            doesn't bring.
    """
    where = root / RECORDS_NAME
    records = read_records(root)
    recorded = {EngineFile(r.stage, r.batch, r.file, r.width): r for r in records}
    known = set(manifest.engines)
    for engine in manifest.engines:
        if engine not in recorded:
            raise _records(where, "don't tell of an engine of the bundle", _named(engine), "none")
    for engine, record in recorded.items():
        if engine not in known:
            raise _records(where, "tell of an engine that the bundle doesn't have", "its engines", _named(engine))
        size = manifest.files[engine.file].size
        if record.engine_bytes != size:
            raise _records(where, f"tell of another {engine.file}", f"{size} bytes", record.engine_bytes)
        if record.plugins and KERNELS_FILE not in manifest.files:
            operator = next(iter(record.plugins))
            raise BundleError(
                root,
                f"has no kernels for {operator} and other plugins of {engine.file}",
                expected=KERNELS_FILE,
                found="none",
                remedy=f"{REBUILD} --plugins LIB",
            )
    return records


def _named(engine: EngineFile) -> str:
    return f"{engine.graph} for batch {engine.batch}, width {engine.width} in {engine.file}"


def _records(where: Path, problem: str, expected: str, found: object) -> BundleError:
    return BundleError(where, f"its records {problem}", expected=expected, found=found, remedy=REBUILD)


def _files_wanted(manifest: Manifest) -> list[str]:
    name = manifest.backend.name
    wanted = [WEIGHTS_NAME, *(engine.file for engine in manifest.engines)]
    if name == "ort-cuda" or name in FLAVOURS:
        wanted.append(WEIGHTS_INDEX_NAME)
    if name in FLAVOURS:
        wanted.append(RECORDS_NAME)
    if manifest.plugins:
        wanted.append(KERNELS_FILE if name in FLAVOURS else PLUGINS_FILE)
    return wanted


def _wrong(where: Path, key: str, expected: str, found: object) -> BundleError:
    return BundleError(where, f"key {key!r} is wrong", expected=expected, found=found, remedy=REBUILD)
