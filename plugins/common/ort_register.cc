// The entry point that ONNX Runtime looks for in a library of custom operators.
#include "common/ort_op.h"

namespace dspark {
#define FOLDER(name) void register_##name(Ort::CustomOpDomain&);
#include "ort_folders.inc"
#undef FOLDER
}  // namespace dspark

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  // An older library has no such API, and nothing to make a status with either but its first version.
  if (api == nullptr) {
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, "dspark operators need ONNX Runtime 1.21 or newer");
  }
  Ort::InitApi(api);
  try {
    // Sessions keep a pointer to it, and at exit it may outlive what would release it: it is never released.
    static OrtCustomOpDomain* const domain = [] {
      Ort::CustomOpDomain made("dspark");
#define FOLDER(name) dspark::register_##name(made);
#include "ort_folders.inc"
#undef FOLDER
      return made.release();
    }();
    return api->AddCustomOpDomain(options, domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
}
