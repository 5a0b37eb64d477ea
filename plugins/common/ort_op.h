// From a launcher to an operator of ONNX Runtime: a struct that names it and runs it becomes one custom operator a
// precision, on the CUDA provider. ONNX Runtime merges those of one name into one schema, and picks by type.
#pragma once

#include <cuda_runtime.h>
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace dspark {

// Of an input or output; T is the precision that the operator is registered for.
enum class Type { T, F32, I64 };

using Allocator = std::shared_ptr<OrtAllocator>;

// The allocator of the node's device.
inline Allocator device_allocator(const OrtKernelInfo* info) {
  OrtAllocator* allocator = nullptr;
  Ort::ThrowOnError(Ort::GetApi().KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator));
  return Allocator(allocator, [](OrtAllocator* a) { Ort::GetApi().ReleaseAllocator(a); });
}

// Device memory that all operators of a stream share, for they run one after another. Blocks are kept until the last
// of those operators is gone: a captured CUDA graph remembers addresses. ONNX Runtime runs each variant once before it
// captures it, so that nothing is allocated while it captures.
class Workspace {
 public:
  static std::shared_ptr<Workspace> of(cudaStream_t stream, const Allocator& allocator) {
    static std::mutex mutex;
    static std::map<cudaStream_t, std::weak_ptr<Workspace>> all;
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Workspace> found = all[stream].lock();
    if (!found) all[stream] = found = std::make_shared<Workspace>(allocator);
    return found;
  }

  explicit Workspace(Allocator allocator) : allocator_(std::move(allocator)) {}
  ~Workspace() {
    for (void* block : blocks_) allocator_->Free(allocator_.get(), block);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* get(size_t bytes) {
    if (bytes > size_) {
      // At least twice the last, so that all blocks together are no more than twice what is used.
      const size_t size = std::max({bytes, 2 * size_, size_t{1} << 16});
      void* block = allocator_->Alloc(allocator_.get(), size);
      if (block == nullptr) throw std::runtime_error("no device memory for a workspace");
      blocks_.push_back(block);
      size_ = size;
    }
    return blocks_.empty() ? nullptr : blocks_.back();
  }

 private:
  Allocator allocator_;
  std::vector<void*> blocks_;
  size_t size_ = 0;
};

// What an operator sees of one call.
class Call {
 public:
  using Shape = std::vector<int64_t>;

  Call(OrtKernelContext* context, int dtype, const Allocator& allocator, std::shared_ptr<Workspace>& workspace)
      : context_(context), dtype_(dtype), allocator_(allocator), workspace_(workspace),
        stream_(static_cast<cudaStream_t>(context_.GetGPUComputeStream())) {}

  // As the C interface numbers precisions.
  int dtype() const { return dtype_; }
  cudaStream_t stream() const { return stream_; }
  size_t itemsize() const { return dtype_ == 0 ? 4 : 2; }

  const void* in(size_t i) const { return context_.GetInput(i).GetTensorRawData(); }
  const int64_t* in_i64(size_t i) const { return static_cast<const int64_t*>(in(i)); }
  const float* in_f32(size_t i) const { return static_cast<const float*>(in(i)); }
  Shape shape(size_t i) const { return context_.GetInput(i).GetTensorTypeAndShapeInfo().GetShape(); }

  // The shape of an input that must have `rank` dimensions.
  Shape shape(size_t i, size_t rank) const {
    Shape found = shape(i);
    if (found.size() != rank) {
      throw std::invalid_argument("input " + std::to_string(i) + " has " + std::to_string(found.size()) +
                                  " dimensions, expected " + std::to_string(rank));
    }
    return found;
  }

  void* out(size_t i, const Shape& shape) const { return context_.GetOutput(i, shape).GetTensorMutableRawData(); }
  int64_t* out_i64(size_t i, const Shape& shape) const { return static_cast<int64_t*>(out(i, shape)); }
  float* out_f32(size_t i, const Shape& shape) const { return static_cast<float*>(out(i, shape)); }

  // State updated in place: output i of the shape of input `from`, of type T. Both bound to one buffer cost nothing; else
  // the state is copied first.
  void* state(size_t i, size_t from) const {
    const Shape size = shape(from);
    const void* old = in(from);
    void* state = out(i, size);
    size_t bytes = itemsize();
    for (int64_t n : size) bytes *= static_cast<size_t>(n);
    if (state != old && bytes > 0) {
      const cudaError_t error = cudaMemcpyAsync(state, old, bytes, cudaMemcpyDeviceToDevice, stream_);
      if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
    }
    return state;
  }

  // Device memory without meaning, until the end of this call's work on the stream; aligned to 256 bytes.
  void* workspace(size_t bytes) const {
    if (bytes == 0) return nullptr;
    if (!workspace_) workspace_ = Workspace::of(stream_, allocator_);
    return workspace_->get(bytes);
  }

 private:
  Ort::KernelContext context_;
  int dtype_;
  const Allocator& allocator_;
  std::shared_ptr<Workspace>& workspace_;
  cudaStream_t stream_;
};

inline ONNXTensorElementDataType onnx_type(Type type, int dtype) {
  constexpr ONNXTensorElementDataType precisions[] = {
      ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16};
  switch (type) {
    case Type::F32:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    case Type::I64:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    default:
      return precisions[dtype];
  }
}

// One node. `Op` has kName, kInputs, kOutputs (arrays of Type), a constructor from the node's attributes, and
// `int run(const Call&)`, which launches and returns a cudaError_t.
template <typename Op>
class Kernel {
 public:
  Kernel(const OrtKernelInfo* info, int dtype)
      : allocator_(device_allocator(info)), dtype_(dtype), op_(Ort::ConstKernelInfo(info)) {}

  OrtStatusPtr ComputeV2(OrtKernelContext* context) {
    try {
      const Call call(context, dtype_, allocator_, workspace_);
      const int error = op_.run(call);
      if (error == 0) return nullptr;
      return failure(cudaGetErrorString(static_cast<cudaError_t>(error)));
    } catch (const std::exception& error) {
      return failure(error.what());
    }
  }

 private:
  static OrtStatusPtr failure(const std::string& what) {
    return Ort::GetApi().CreateStatus(ORT_FAIL, (std::string("dspark::") + Op::kName + ": " + what).c_str());
  }

  Allocator allocator_;
  int dtype_;
  Op op_;
  std::shared_ptr<Workspace> workspace_;
};

template <typename Op>
class CustomOp : public Ort::CustomOpBase<CustomOp<Op>, Kernel<Op>, /*WithStatus=*/true> {
 public:
  explicit CustomOp(int dtype) : dtype_(dtype) {}

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      *kernel = new Kernel<Op>(info, dtype_);
      return nullptr;
    } catch (const std::exception& error) {
      return Ort::GetApi().CreateStatus(ORT_FAIL, (std::string("dspark::") + Op::kName + ": " + error.what()).c_str());
    }
  }

  const char* GetName() const { return Op::kName; }
  const char* GetExecutionProviderType() const { return "CUDAExecutionProvider"; }
  size_t GetInputTypeCount() const { return std::size(Op::kInputs); }
  size_t GetOutputTypeCount() const { return std::size(Op::kOutputs); }
  ONNXTensorElementDataType GetInputType(size_t i) const { return onnx_type(Op::kInputs[i], dtype_); }
  ONNXTensorElementDataType GetOutputType(size_t i) const { return onnx_type(Op::kOutputs[i], dtype_); }

 private:
  int dtype_;
};

// In every precision. The operators live as long as the library, as ONNX Runtime asks.
template <typename Op>
void register_op(Ort::CustomOpDomain& domain) {
  static const CustomOp<Op> precisions[] = {CustomOp<Op>(0), CustomOp<Op>(1), CustomOp<Op>(2)};
  for (const CustomOp<Op>& op : precisions) domain.Add(&op);
}

// Of an operator without a T.
template <typename Op>
void register_plain_op(Ort::CustomOpDomain& domain) {
  static const CustomOp<Op> only(0);
  domain.Add(&only);
}

}  // namespace dspark
