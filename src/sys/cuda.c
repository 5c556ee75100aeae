/* SPDX-License-Identifier: MIT */
/* Opening the CUDA driver, and its errors in words; see cuda.h. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include "base/error.h"
#include "sys/cuda.h"
#include "sys/os.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cuda_api api;		/* these three change once, under the lock */
static struct pen_error open_error;
static bool opened;
static atomic_bool started;		/* and if so, in which process: */
static atomic_uint started_in;

__attribute__((constructor)) static void mind_forks(void)
{
	os_at_fork(OS_FORK_CUDA, &lock, NULL);
}

/* One entry per function: the name is both the field and the symbol. */
#define ENTRY(name) { #name, offsetof(struct cuda_api, name), false }
#define OPTIONAL(name) { #name, offsetof(struct cuda_api, name), true }

static const struct {
	const char *symbol;
	size_t field;
	bool optional;
} entries[] = {
	ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet),
	ENTRY(cuDeviceGetAttribute), ENTRY(cuDeviceGetPCIBusId), ENTRY(cuDevicePrimaryCtxRetain),
	ENTRY(cuDevicePrimaryCtxRelease_v2), ENTRY(cuCtxSetCurrent), ENTRY(cuCtxPushCurrent_v2),
	ENTRY(cuCtxPopCurrent_v2), ENTRY(cuMemAlloc_v2), ENTRY(cuMemFree_v2),
	ENTRY(cuMemGetInfo_v2), ENTRY(cuMemHostRegister_v2), ENTRY(cuMemHostUnregister),
	ENTRY(cuMemcpyHtoD_v2), ENTRY(cuMemcpyDtoH_v2), ENTRY(cuMemcpyHtoDAsync_v2),
	ENTRY(cuMemcpyDtoHAsync_v2), ENTRY(cuMemcpy2DAsync_v2), ENTRY(cuStreamCreate),
	ENTRY(cuStreamDestroy_v2), ENTRY(cuStreamSynchronize), ENTRY(cuStreamWaitEvent),
	ENTRY(cuEventCreate), ENTRY(cuEventDestroy_v2), ENTRY(cuEventRecord), ENTRY(cuEventQuery),
	ENTRY(cuGetErrorName), ENTRY(cuGetErrorString), OPTIONAL(cuModuleLoadData),
	OPTIONAL(cuModuleUnload), OPTIONAL(cuModuleGetFunction), OPTIONAL(cuLaunchKernel),
};

static void open_driver(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

	if (!library) {
		error_set(&open_error, -ENODEV, "open", "the NVIDIA driver", -1,
			  "libcuda.so.1 cannot be loaded");
		error_hint(&open_error, "Install the NVIDIA driver; in a container, start it with "
			   "GPU access (--gpus all)");
		return;
	}
	for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
		void *symbol = dlsym(library, entries[i].symbol);

		if (!symbol && !entries[i].optional) {
			error_set(&open_error, -ENOSYS, "open", "the NVIDIA driver", -1,
				  "libcuda.so.1 has no %s", entries[i].symbol);
			error_hint(&open_error, "Update the NVIDIA driver");
			return;
		}
		memcpy((char *)&api + entries[i].field, &symbol, sizeof(symbol));
	}
}

const struct cuda_api *cuda_open(struct pen_error *err)
{
	if (sys_fault("dlopen libcuda")) {
		error_set(err, -ENODEV, "open", "the NVIDIA driver", -1, "injected failure");
		return NULL;
	}
	pthread_mutex_lock(&lock);
	if (!opened)
		open_driver();
	opened = true;
	pthread_mutex_unlock(&lock);
	if (open_error.code) {
		if (err)
			*err = open_error;
		return NULL;
	}
	return &api;
}

cuda_result cuda_start(const struct cuda_api *cuda)
{
	if (!atomic_load(&started)) {
		atomic_store(&started_in, os_generation());
		atomic_store(&started, true);
	}
	return CUDA(cuda, cuInit, 0);
}

int cuda_say_forked(const char *object, struct pen_error *err)
{
	error_vendor(err, -ENODEV, PEN_DOMAIN_CUDA, CUDA_NOT_INITIALIZED, "use", object,
		     "CUDA was started before this process was forked");
	error_hint(err, "Start workers with the spawn method, or fork before the first use of the "
			"GPU");
	return -ENODEV;
}

int cuda_forked(const char *object, struct pen_error *err)
{
	if (!atomic_load(&started) || atomic_load(&started_in) == os_generation())
		return 0;
	return cuda_say_forked(object, err);
}

int cuda_error(const struct cuda_api *cuda, cuda_result result, const char *operation,
	       const char *object, struct pen_error *err)
{
	const char *name = "unknown error", *text = "";
	int code = -EIO;

	/* We start it before all else: so it was somebody else in our parent, torch for one. */
	if (result == CUDA_NOT_INITIALIZED)
		return cuda_say_forked(object, err);
	cuda->cuGetErrorName(result, &name);
	cuda->cuGetErrorString(result, &text);
	switch (result) {
	case CUDA_OUT_OF_MEMORY:
		code = -ENOMEM;
		break;
	case CUDA_NO_DEVICE:
	case CUDA_INVALID_DEVICE:
		code = -ENODEV;
		break;
	case CUDA_INVALID_VALUE:
		code = -EINVAL;
		break;
	case CUDA_NOT_PERMITTED:
	case CUDA_NOT_SUPPORTED:
		code = -ENOTSUP;
		break;
	}
	error_vendor(err, code, PEN_DOMAIN_CUDA, result, operation, object, "%s (%s, CUDA %d)",
		     text ? text : "", name ? name : "unknown error", result);
	if (code == -EIO)
		error_hint(err, "Look into nvidia-smi and the kernel log for what ails the driver");
	if (result == CUDA_NO_DEVICE)
		error_hint(err, "Check that nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES does "
				"not hide it");
	return code;
}
