/* The calls of CUDA's driver that programs here make, by its own names. */
#include <stddef.h>
#include <stdint.h>

typedef uint64_t CUdeviceptr;
typedef void *CUstream;
typedef void *CUcontext;
typedef int CUdevice;
enum { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY };
enum { CUDA_ERROR_NOT_READY = 600, CUDA_ERROR_ILLEGAL_ADDRESS = 700, CUDA_ERROR_ALREADY_REGISTERED = 712 };

int cuInit(unsigned flags);
int cuDeviceGet(CUdevice *device, int number);
int cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
int cuCtxSetCurrent(CUcontext context);
int cuMemAlloc_v2(CUdeviceptr *memory, size_t bytes);
int cuMemFree_v2(CUdeviceptr memory);
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags);
int cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags);
int cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
int cuStreamCreate(CUstream *stream, unsigned flags);
int cuStreamQuery(CUstream stream);
int cuStreamSynchronize(CUstream stream);
int cuStreamBeginCapture_v2(CUstream stream, int mode);
int cuStreamEndCapture(CUstream stream, void **graph);
int cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr at, uint32_t value, unsigned flags);
int cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data);
