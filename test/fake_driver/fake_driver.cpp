// test/fake_driver/fake_driver.cpp   A libcuda.so.1 without a GPU: the driver calls that cuDNN looks up before it makes a plan for a GPU that is described
// to it. Loading compiled kernels succeeds and gives handles to nothing; cuInit says that this is no driver, so that nobody goes further.
extern "C" {

namespace {
constexpr int stub_library = 34;  // CUDA_ERROR_STUB_LIBRARY
char nothing[64];
int give(void** handle) { return *handle = nothing, 0; }
}  // namespace

int cuInit(unsigned) { return stub_library; }

#define HANDLE(call) \
    int call(void** handle) { return give(handle); }
HANDLE(cuLibraryLoadData)
HANDLE(cuLibraryGetKernel)
HANDLE(cuModuleLoadData)
HANDLE(cuModuleLoadDataEx)
HANDLE(cuModuleLoadFatBinary)
HANDLE(cuModuleGetFunction)

#define CALL(call) \
    int call() { return 0; }
CALL(cuCtxGetCurrent)
CALL(cuCtxGetDevice)
CALL(cuCtxGetLimit)
CALL(cuCtxPopCurrent)
CALL(cuCtxPushCurrent)
CALL(cuDeviceGet)
CALL(cuDeviceGetAttribute)
CALL(cuDeviceGetCount)
CALL(cuDevicePrimaryCtxRelease)
CALL(cuDevicePrimaryCtxReset)
CALL(cuDevicePrimaryCtxRetain)
CALL(cuDriverGetVersion)
CALL(cuFuncGetAttribute)
CALL(cuFuncSetAttribute)
CALL(cuGetErrorName)
CALL(cuGetErrorString)
CALL(cuKernelGetAttribute)
CALL(cuKernelSetAttribute)
CALL(cuLaunchCooperativeKernel)
CALL(cuLaunchKernel)
CALL(cuLaunchKernelEx)
CALL(cuLibraryLoadFromFile)
CALL(cuLibraryUnload)
CALL(cuLinkAddData)
CALL(cuLinkAddData_v2)
CALL(cuLinkAddFile_v2)
CALL(cuLinkComplete)
CALL(cuLinkCreate)
CALL(cuLinkCreate_v2)
CALL(cuLinkDestroy)
CALL(cuMemcpyDtoH_v2)
CALL(cuModuleGetGlobal_v2)
CALL(cuModuleUnload)
CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor)
CALL(cuOccupancyMaxPotentialClusterSize)
CALL(cuStreamGetCtx)
CALL(cuStreamSynchronize)
CALL(cuTensorMapEncodeTiled)
}
