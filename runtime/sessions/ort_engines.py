"""Loading a bundle's engines into ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from runtime.errors import BundleError
from runtime.manifest import PACKED_NAME, REBUILD, Manifest
from runtime.sessions.ort_packed import packed_engines


def load_engines(path: Path, manifest: Manifest, threads: int | None) -> dict[tuple[str, int], ort.InferenceSession]:
    """Every engine of the bundle at `path`, by graph and batch. `threads` None takes one per physical core.

    The batches of a graph share one copy of its packed weights; the first load of a bundle with several batches makes
    it, in the bundle's directory ``packed`` (`runtime.sessions.ort_packed`).

    Raises:
        BundleError: an engine that the library refuses.
    """
    files = {(e.graph, e.batch): path / e.file for e in manifest.engines}
    if len(manifest.limits.batches) == 1:
        return {key: _load(file, threads) for key, file in files.items()}
    remedy = f"Remove the directory {PACKED_NAME} of the bundle: the next load makes it anew"
    with packed_engines(path, manifest) as packed:
        return {
            key: _load(packed[key], threads, optimised=True, remedy=remedy) if key in packed else _load(file, threads)
            for key, file in files.items()
        }


def _load(path: Path, threads: int | None, *, optimised: bool = False, remedy: str = REBUILD) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is not None:
        options.intra_op_num_threads = threads
    # Target, draft and seed each own a pool: without this, the last one's workers spin on the cores of the next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library has no narrower class for a model that it refuses
        raise BundleError(path, "ONNX Runtime refuses this engine", found=str(error), remedy=remedy) from error
