"""CUDA kernels for the operators of the ONNX domain ``dspark``, and what inference libraries need to know of them."""
