/* SPDX-License-Identifier: MIT */
#ifndef SYS_CUDA_H
#define SYS_CUDA_H
/*
 * The CUDA driver API, opened at run time, so that one binary runs with and without a GPU and no
 * CUDA is needed to build. Only what the engine calls is declared, with the driver's own numbers.
 * Call through CUDA(...), which asks the fault hook first and yields a CUresult.
 */
#include <stddef.h>
#include "penstock.h"
#include "sys/fault.h"

typedef int cuda_result;	/* CUresult */
typedef int cuda_device;	/* CUdevice */
typedef unsigned long long cuda_pointer;	/* CUdeviceptr */

enum {
	CUDA_OK = 0,
	CUDA_INVALID_VALUE = 1,
	CUDA_OUT_OF_MEMORY = 2,
	CUDA_NOT_INITIALIZED = 3,
	CUDA_NO_DEVICE = 100,
	CUDA_INVALID_DEVICE = 101,
	CUDA_INVALID_IMAGE = 200,
	CUDA_NO_BINARY = 209,
	CUDA_INVALID_PTX = 218,
	CUDA_NO_PTX_COMPILER = 221,
	CUDA_UNSUPPORTED_PTX = 222,
	CUDA_PTX_DISABLED = 223,
	CUDA_NOT_FOUND = 500,
	CUDA_NOT_READY = 600,
	CUDA_ALREADY_REGISTERED = 712,
	CUDA_NOT_PERMITTED = 800,
	CUDA_NOT_SUPPORTED = 801,
	CUDA_FAULT_INJECTED = 999,	/* CUDA_ERROR_UNKNOWN: what the fault hook yields */

	CUDA_ATTRIBUTE_HOST_POINTERS = 91,
	CUDA_ATTRIBUTE_READ_ONLY_REGISTER = 113,
	CUDA_STREAM_NON_BLOCKING = 1,
	CUDA_EVENT_NO_TIMING = 2,
	CUDA_REGISTER_PORTABLE = 1,
	CUDA_REGISTER_DEVICEMAP = 2,
	CUDA_REGISTER_READ_ONLY = 8,
	CUDA_MEMORY_HOST = 1,
	CUDA_MEMORY_DEVICE = 2,
};

/* The default stream, on which the calls without "Async" work: CU_STREAM_LEGACY. */
#define CUDA_STREAM_LEGACY ((void *)1)

/* CUDA_MEMCPY2D */
struct cuda_copy_2d {
	size_t src_x, src_y;
	int src_type;
	const void *src_host;
	cuda_pointer src_device;
	void *src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	int dst_type;
	void *dst_host;
	cuda_pointer dst_device;
	void *dst_array;
	size_t dst_pitch;
	size_t width, height;
};

struct cuda_api {
	cuda_result (*cuInit)(unsigned int);
	cuda_result (*cuDriverGetVersion)(int *);
	cuda_result (*cuDeviceGetCount)(int *);
	cuda_result (*cuDeviceGet)(cuda_device *, int);
	cuda_result (*cuDeviceGetAttribute)(int *, int, cuda_device);
	cuda_result (*cuDeviceGetPCIBusId)(char *, int, cuda_device);
	cuda_result (*cuDevicePrimaryCtxRetain)(void **, cuda_device);
	cuda_result (*cuDevicePrimaryCtxRelease_v2)(cuda_device);
	cuda_result (*cuCtxSetCurrent)(void *);
	cuda_result (*cuCtxPushCurrent_v2)(void *);
	cuda_result (*cuCtxPopCurrent_v2)(void **);
	cuda_result (*cuMemAlloc_v2)(cuda_pointer *, size_t);
	cuda_result (*cuMemFree_v2)(cuda_pointer);
	cuda_result (*cuMemGetInfo_v2)(size_t *, size_t *);
	cuda_result (*cuMemHostRegister_v2)(void *, size_t, unsigned int);
	cuda_result (*cuMemHostUnregister)(void *);
	cuda_result (*cuMemcpyHtoD_v2)(cuda_pointer, const void *, size_t);
	cuda_result (*cuMemcpyDtoH_v2)(void *, cuda_pointer, size_t);
	cuda_result (*cuMemcpyHtoDAsync_v2)(cuda_pointer, const void *, size_t, void *);
	cuda_result (*cuMemcpyDtoHAsync_v2)(void *, cuda_pointer, size_t, void *);
	cuda_result (*cuMemcpy2DAsync_v2)(const struct cuda_copy_2d *, void *);
	cuda_result (*cuStreamCreate)(void **, unsigned int);
	cuda_result (*cuStreamDestroy_v2)(void *);
	cuda_result (*cuStreamSynchronize)(void *);
	cuda_result (*cuStreamWaitEvent)(void *, void *, unsigned int);
	cuda_result (*cuEventCreate)(void **, unsigned int);
	cuda_result (*cuEventDestroy_v2)(void *);
	cuda_result (*cuEventRecord)(void *, void *);
	cuda_result (*cuEventQuery)(void *);
	cuda_result (*cuGetErrorName)(cuda_result, const char **);
	cuda_result (*cuGetErrorString)(cuda_result, const char **);
	/* For kernels; NULL where the driver has them not. */
	cuda_result (*cuModuleLoadData)(void **, const void *);
	cuda_result (*cuModuleUnload)(void *);
	cuda_result (*cuModuleGetFunction)(void **, void *, const char *);
	cuda_result (*cuLaunchKernel)(void *, unsigned int, unsigned int, unsigned int,
				      unsigned int, unsigned int, unsigned int, unsigned int,
				      void *, void **, void **);
};

/* The table; opened on first use and kept. NULL with words where there is no usable driver. */
const struct cuda_api *cuda_open(struct pen_error *err);

/* cuInit, which cuts every later child off: call it through this, so that they know. */
cuda_result cuda_start(const struct cuda_api *api);

/*
 * The driver does not work in a child forked after it was started. 0, or -ENODEV with words where
 * that is so; the driver must not be called then, not even to give things back.
 */
int cuda_forked(const char *object, struct pen_error *err);
int cuda_say_forked(const char *object, struct pen_error *err);	/* only the words */

/* Call a function of the table, after the fault hook. */
#define CUDA(api, function, ...) \
	(sys_fault(#function) ? CUDA_FAULT_INJECTED : (api)->function(__VA_ARGS__))

/* Turn a CUresult into a negative errno, with words and advice. */
int cuda_error(const struct cuda_api *api, cuda_result result, const char *operation,
	       const char *object, struct pen_error *err);

#endif
