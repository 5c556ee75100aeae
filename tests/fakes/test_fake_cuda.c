/* SPDX-License-Identifier: MIT */
/*
 * Self-test of the fake libcuda.so.1: a fake that is wrong makes every test above it worthless.
 *
 *  1. Each case runs in a child of its own with its own environment, because the library reads
 *     the environment once and keeps its books for the life of the process.
 *  2. A case states the exit status it wants; a failed check ends the child with 1. Statuses
 *     98 and 99 belong to the library, and a negative status is the signal that must kill it.
 *  3. The library is opened only in the children, by name from the search path or by the path
 *     given as the first argument, and only through the symbols that real callers use.
 *  4. A case that ends well has given everything back, unless it is about leaking.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long dptr;
typedef void *handle;

struct copy2d {
	size_t src_x, src_y;
	unsigned int src_type;
	const void *src_host;
	dptr src_device;
	void *src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	unsigned int dst_type;
	void *dst_host;
	dptr dst_device;
	void *dst_array;
	size_t dst_pitch;
	size_t width, height;
};

#define SYMBOLS(X) \
	X(cuInit, unsigned int) \
	X(cuDriverGetVersion, int *) \
	X(cuDeviceGetCount, int *) \
	X(cuDeviceGet, int *, int) \
	X(cuDeviceGetName, char *, int, int) \
	X(cuDeviceGetAttribute, int *, int, int) \
	X(cuDeviceGetPCIBusId, char *, int, int) \
	X(cuDeviceGetByPCIBusId, int *, const char *) \
	X(cuDeviceTotalMem_v2, size_t *, int) \
	X(cuDevicePrimaryCtxRetain, handle *, int) \
	X(cuDevicePrimaryCtxRelease_v2, int) \
	X(cuCtxSetCurrent, handle) \
	X(cuCtxGetCurrent, handle *) \
	X(cuCtxPushCurrent_v2, handle) \
	X(cuCtxPopCurrent_v2, handle *) \
	X(cuCtxSynchronize, void) \
	X(cuMemAlloc_v2, dptr *, size_t) \
	X(cuMemFree_v2, dptr) \
	X(cuMemGetInfo_v2, size_t *, size_t *) \
	X(cuMemHostRegister_v2, void *, size_t, unsigned int) \
	X(cuMemHostUnregister, void *) \
	X(cuMemHostGetDevicePointer_v2, dptr *, void *, unsigned int) \
	X(cuMemcpyHtoDAsync_v2, dptr, const void *, size_t, handle) \
	X(cuMemcpyDtoHAsync_v2, void *, dptr, size_t, handle) \
	X(cuMemcpyDtoDAsync_v2, dptr, dptr, size_t, handle) \
	X(cuMemcpy2DAsync_v2, const struct copy2d *, handle) \
	X(cuMemcpyHtoD_v2, dptr, const void *, size_t) \
	X(cuMemcpyDtoH_v2, void *, dptr, size_t) \
	X(cuMemsetD8Async, dptr, unsigned char, size_t, handle) \
	X(cuStreamCreate, handle *, unsigned int) \
	X(cuStreamCreateWithPriority, handle *, unsigned int, int) \
	X(cuStreamDestroy_v2, handle) \
	X(cuStreamSynchronize, handle) \
	X(cuStreamQuery, handle) \
	X(cuStreamWaitEvent, handle, handle, unsigned int) \
	X(cuModuleLoadData, handle *, const void *) \
	X(cuModuleUnload, handle) \
	X(cuModuleGetFunction, handle *, handle, const char *) \
	X(cuLaunchKernel, handle, unsigned int, unsigned int, unsigned int, unsigned int, \
	  unsigned int, unsigned int, unsigned int, handle, void **, void **) \
	X(cuEventCreate, handle *, unsigned int) \
	X(cuEventDestroy_v2, handle) \
	X(cuEventRecord, handle, handle) \
	X(cuEventQuery, handle) \
	X(cuEventSynchronize, handle) \
	X(cuGetErrorName, int, const char **) \
	X(cuGetErrorString, int, const char **) \
	X(cuPointerGetAttribute, void *, int, dptr) \
	X(cuPointerGetAttributes, unsigned int, int *, void **, dptr) \
	X(cuGetProcAddress_v2, const char *, void **, int, uint64_t, int *) \
	X(fake_cuda_leaks, char *, size_t) \
	X(fake_cuda_calls, const char *)

#define X(name, ...) static int (*name)(__VA_ARGS__);
SYMBOLS(X)
#undef X

static const char *library = "libcuda.so.1";
static void *lib;
static handle ctx;

#define CHECK(cond) \
	do { \
		if (!(cond)) { \
			fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
			exit(1); \
		} \
	} while (0)
#define IS(want, call) \
	do { \
		int got_ = (call); \
		if (got_ != (want)) { \
			fprintf(stderr, "%s:%d: %s gave %d, not %d\n", __FILE__, __LINE__, #call, \
				got_, want); \
			exit(1); \
		} \
	} while (0)
#define OK(call) IS(0, call)

#define SIZE ((size_t)65536)

static void load(void)
{
	lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
#define X(name, ...) \
	name = (int (*)(__VA_ARGS__))dlsym(lib, #name); \
	CHECK(name);
	SYMBOLS(X)
#undef X
}

static void start(void)
{
	load();
	OK(cuInit(0));
	OK(cuDevicePrimaryCtxRetain(&ctx, 0));
	OK(cuCtxSetCurrent(ctx));
}

static void stop(void)
{
	char text[4096];
	int n;

	OK(cuDevicePrimaryCtxRelease_v2(0));
	n = fake_cuda_leaks(text, sizeof(text));
	if (n) {
		fprintf(stderr, "%d left behind: %s", n, text);
		exit(1);
	}
}

static unsigned char *pages(size_t n)
{
	void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

static bool all(const unsigned char *p, size_t n, unsigned char v)
{
	for (size_t i = 0; i < n; i++) {
		if (p[i] != v)
			return false;
	}
	return true;
}

/* Reads device memory without disturbing any non-blocking stream. */
static bool device_all(dptr d, size_t n, unsigned char v)
{
	unsigned char *p = malloc(n);
	bool same;

	CHECK(p);
	OK(cuMemcpyDtoH_v2(p, d, n));
	same = all(p, n, v);
	free(p);
	return same;
}

static int violations_like(const char *what)
{
	static char text[8192];
	int n = fake_cuda_leaks(text, sizeof(text));

	if (n && strstr(text, what))
		return n;
	fprintf(stderr, "no '%s' in: %s\n", what, text);
	return 0;
}

static void t_order(void)
{
	int n, version;
	dptr d;

	load();
	OK(cuDriverGetVersion(&version));
	CHECK(version == 13000);
	IS(3, cuDeviceGetCount(&n));
	IS(3, cuMemAlloc_v2(&d, 1));
	IS(1, cuInit(1));
	OK(cuInit(0));
	OK(cuInit(0));
	IS(201, cuMemAlloc_v2(&d, 1));
	IS(201, cuCtxSynchronize());
	IS(101, cuDevicePrimaryCtxRetain(&ctx, 1));
	OK(cuDevicePrimaryCtxRetain(&ctx, 0));
	IS(201, cuMemAlloc_v2(&d, 1));
	OK(cuCtxSetCurrent(ctx));
	OK(cuMemAlloc_v2(&d, 1));
	OK(cuMemFree_v2(d));
	stop();
	IS(709, cuMemAlloc_v2(&d, 1));
	IS(201, cuCtxSetCurrent(ctx));
}

static void *t_thread_ctx(void *arg)
{
	dptr d;

	(void)arg;
	IS(201, cuMemAlloc_v2(&d, 1));
	return NULL;
}

static void t_contexts(void)
{
	handle second, seen;
	pthread_t th;
	char id[16], name[64];
	size_t bytes;
	int v;

	start();
	OK(cuDeviceGetCount(&v));
	CHECK(v == 3);
	OK(cuDevicePrimaryCtxRetain(&second, 2));
	CHECK(second != ctx);
	OK(cuCtxPushCurrent_v2(second));
	OK(cuCtxGetCurrent(&seen));
	CHECK(seen == second);
	OK(cuCtxPopCurrent_v2(&seen));
	CHECK(seen == second);
	OK(cuCtxGetCurrent(&seen));
	CHECK(seen == ctx);
	CHECK(!pthread_create(&th, NULL, t_thread_ctx, NULL));
	pthread_join(th, NULL);
	OK(cuDevicePrimaryCtxRetain(&seen, 0));
	CHECK(seen == ctx);
	OK(cuDevicePrimaryCtxRelease_v2(0));
	OK(cuCtxSynchronize());
	OK(cuDeviceGetPCIBusId(id, sizeof(id), 2));
	CHECK(!strcmp(id, "0000:12:00.0"));
	IS(1, cuDeviceGetPCIBusId(id, 12, 2));
	OK(cuDeviceGetByPCIBusId(&v, id));
	CHECK(v == 2);
	OK(cuDeviceGetName(name, sizeof(name), 1));
	OK(cuDeviceTotalMem_v2(&bytes, 1));
	CHECK(bytes == 2UL << 30);
	OK(cuDeviceGetAttribute(&v, 33, 2));
	CHECK(v == 0x12);
	OK(cuDeviceGetAttribute(&v, 41, 0));
	CHECK(v == 1);
	OK(cuDeviceGetAttribute(&v, 113, 0));
	CHECK(v == 0);
	IS(1, cuDeviceGetAttribute(&v, 148, 0));
	OK(cuDevicePrimaryCtxRelease_v2(2));
	OK(cuCtxPopCurrent_v2(&seen));
	IS(201, cuCtxPopCurrent_v2(&seen));
	stop();
}

/* The source is read at the fence: bytes changed between copy and fence are what arrives. */
static void t_late(void)
{
	unsigned char *p = pages(SIZE);
	handle s, e;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuStreamCreate(&s, 1));
	OK(cuEventCreate(&e, 2));
	memset(p, 1, SIZE);
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, s));
	OK(cuEventRecord(e, s));
	IS(600, cuEventQuery(e));
	IS(600, cuEventQuery(e));
	CHECK(device_all(d, SIZE, 0xa5));
	memset(p, 2, SIZE);
	OK(cuEventQuery(e));
	OK(cuEventQuery(e));
	CHECK(device_all(d, SIZE, 2));
	/* and in the other direction the destination stays as it was */
	memset(p, 3, SIZE);
	OK(cuMemcpyDtoHAsync_v2(p, d, SIZE, s));
	CHECK(all(p, SIZE, 3));
	IS(600, cuStreamQuery(s));
	IS(600, cuStreamQuery(s));
	CHECK(all(p, SIZE, 3));
	OK(cuStreamQuery(s));
	CHECK(all(p, SIZE, 2));
	OK(cuMemsetD8Async(d, 9, SIZE, s));
	CHECK(device_all(d, SIZE, 2));
	OK(cuCtxSynchronize());
	CHECK(device_all(d, SIZE, 9));
	OK(cuEventDestroy_v2(e));
	OK(cuStreamDestroy_v2(s));
	OK(cuMemHostUnregister(p));
	OK(cuMemFree_v2(d));
	stop();
}

static void t_polls(void)
{
	handle e;

	start();
	OK(cuEventCreate(&e, 0));
	OK(cuEventQuery(e));
	OK(cuEventSynchronize(e));
	OK(cuEventRecord(e, NULL));
	for (int i = 0; i < 5; i++)
		IS(600, cuEventQuery(e));
	OK(cuEventQuery(e));
	OK(cuEventDestroy_v2(e));
	stop();
}

static void t_streams(void)
{
	unsigned char *p = pages(4 * SIZE);
	handle a, b, c, e, never;
	dptr d;

	start();
	for (unsigned char i = 0; i < 4; i++)
		memset(p + i * SIZE, i + 1, SIZE);
	OK(cuMemAlloc_v2(&d, 4 * SIZE));
	OK(cuMemHostRegister_v2(p, 4 * SIZE, 0));
	OK(cuStreamCreate(&a, 1));
	OK(cuStreamCreateWithPriority(&b, 1, -3));
	OK(cuStreamCreate(&c, 0));
	OK(cuEventCreate(&e, 2));
	OK(cuEventCreate(&never, 2));
	/* a: first | e | second; b: wait e, third. Finishing b must not run the second. */
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, a));
	OK(cuEventRecord(e, a));
	OK(cuMemcpyHtoDAsync_v2(d + SIZE, p + SIZE, SIZE, a));
	OK(cuStreamWaitEvent(b, never, 0));
	OK(cuStreamWaitEvent(b, e, 0));
	OK(cuMemcpyDtoDAsync_v2(d + 2 * SIZE, d, SIZE, b));
	CHECK(device_all(d, 4 * SIZE, 0xa5));
	OK(cuStreamSynchronize(b));
	CHECK(device_all(d, SIZE, 1));
	CHECK(device_all(d + SIZE, SIZE, 0xa5));
	CHECK(device_all(d + 2 * SIZE, SIZE, 1));
	OK(cuEventQuery(e));
	/* a destroyed stream still owes its work, and an event in it still names the place */
	OK(cuEventRecord(e, a));
	OK(cuStreamDestroy_v2(a));
	CHECK(device_all(d + SIZE, SIZE, 0xa5));
	OK(cuEventSynchronize(e));
	CHECK(device_all(d + SIZE, SIZE, 2));
	/* the null stream stands behind the blocking one, so this read sees its copy */
	OK(cuMemcpyHtoDAsync_v2(d + 3 * SIZE, p + 3 * SIZE, SIZE, c));
	CHECK(device_all(d + 3 * SIZE, SIZE, 4));
	/* and the blocking stream stands behind the null stream */
	OK(cuMemsetD8Async(d, 7, SIZE, NULL));
	OK(cuMemcpyDtoHAsync_v2(p, d, SIZE, c));
	CHECK(all(p, SIZE, 1));
	OK(cuStreamSynchronize(c));
	CHECK(all(p, SIZE, 7));
	OK(cuMemcpyHtoDAsync_v2(d, p + SIZE, SIZE, c));
	OK(cuStreamSynchronize(NULL));
	OK(cuStreamQuery(c));
	CHECK(device_all(d, SIZE, 2));
	OK(cuStreamDestroy_v2(b));
	OK(cuStreamDestroy_v2(c));
	OK(cuEventDestroy_v2(e));
	OK(cuEventDestroy_v2(never));
	OK(cuMemHostUnregister(p));
	OK(cuMemFree_v2(d));
	stop();
}

static void t_bounds(void)
{
	unsigned char *p = pages(2 * SIZE);
	size_t avail, total;
	dptr d, d2;

	start();
	OK(cuMemHostRegister_v2(p, 2 * SIZE, 0));
	OK(cuMemAlloc_v2(&d, 1000));
	OK(cuMemAlloc_v2(&d2, 1000));
	CHECK(d % 256 == 0 && d2 % 256 == 0);
	OK(cuMemcpyHtoDAsync_v2(d + 999, p, 1, NULL));
	OK(cuMemcpyHtoDAsync_v2(d, p, 0, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(d + 999, p, 2, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(d - 1, p, 1, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(d + 1000, p, 1, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(0, p, 1, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(d, NULL, 1, NULL));
	IS(1, cuMemcpyHtoDAsync_v2((dptr)(uintptr_t)p, p, 1, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(d, (void *)(uintptr_t)d2, 1, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(d, p, SIZE_MAX, NULL));
	IS(1, cuMemcpyDtoDAsync_v2(d, d2 + 1, 1000, NULL));
	IS(1, cuMemsetD8Async(d + 1, 0, 1000, NULL));
	IS(1, cuMemAlloc_v2(&d, 0));
	OK(cuMemGetInfo_v2(&avail, &total));
	CHECK(total == 1UL << 20 && avail == total - 2048);
	IS(2, cuMemAlloc_v2(&d, total));
	IS(2, cuMemAlloc_v2(&d, SIZE_MAX));
	OK(cuCtxSynchronize());
	OK(cuMemFree_v2(d2));
	OK(cuMemFree_v2(d));
	/* the address range is walked round many times over without running out */
	for (int i = 0; i < 1000; i++) {
		OK(cuMemAlloc_v2(&d, total));
		OK(cuMemFree_v2(d));
	}
	OK(cuMemHostUnregister(p));
	stop();
}

static void t_no_touch(void)
{
	static const struct rlimit none;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, 4096));
	setrlimit(RLIMIT_CORE, &none);
	signal(SIGSEGV, SIG_DFL);
	*(volatile char *)(uintptr_t)d = 1;
}

static void t_register(void)
{
	unsigned char *p = pages(4 * SIZE), *file, back[16];
	char path[] = "/tmp/fake_cuda_XXXXXX";
	int fd = mkstemp(path);
	dptr d, alias;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	IS(1, cuMemHostRegister_v2(p, 0, 0));
	IS(1, cuMemHostRegister_v2(NULL, SIZE, 0));
	IS(1, cuMemHostRegister_v2(p, SIZE, 0x10));
	IS(1, cuMemHostRegister_v2((void *)(uintptr_t)d, SIZE, 0));
	OK(cuMemHostRegister_v2(p, SIZE, 1));
	IS(712, cuMemHostRegister_v2(p, SIZE, 0));
	IS(712, cuMemHostRegister_v2(p + SIZE - 1, SIZE, 0));
	OK(cuMemHostRegister_v2(p + SIZE, SIZE, 2));
	IS(713, cuMemHostUnregister(p + 1));
	IS(713, cuMemHostUnregister(p + 2 * SIZE));
	OK(cuMemHostGetDevicePointer_v2(&alias, p + 5, 0));
	CHECK(alias == (dptr)(uintptr_t)(p + 5));
	/* straddling two registrations, or the end of one, is refused in both directions */
	IS(1, cuMemcpyHtoDAsync_v2(d, p + SIZE - 8, 16, NULL));
	IS(1, cuMemcpyDtoHAsync_v2(p + SIZE - 8, d, 16, NULL));
	IS(1, cuMemcpyHtoDAsync_v2(d, p + 2 * SIZE - 8, 16, NULL));
	IS(1, cuMemcpyHtoD_v2(d, p + 2 * SIZE - 8, 16));
	OK(cuMemcpyHtoDAsync_v2(d, p + SIZE - 8, 8, NULL));
	OK(cuStreamSynchronize(NULL));
	OK(cuMemHostUnregister(p));
	OK(cuMemHostUnregister(p + SIZE));
	IS(713, cuMemHostUnregister(p));
	/* a hole in the middle */
	CHECK(!munmap(p + SIZE, 4096));
	IS(1, cuMemHostRegister_v2(p, 4 * SIZE, 0));
	/* a read-only view of a file */
	CHECK(fd >= 0 && !unlink(path) && !ftruncate(fd, SIZE));
	CHECK(pwrite(fd, "penstock", 8, 0) == 8);
	file = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
	CHECK(file != MAP_FAILED);
	IS(1, cuMemHostRegister_v2(file, SIZE, 0));
	OK(cuMemHostRegister_v2(file, SIZE, 8));
	OK(cuMemcpyHtoDAsync_v2(d, file, 8, NULL));
	IS(1, cuMemcpyDtoHAsync_v2(file, d, 8, NULL));
	OK(cuMemcpyDtoH_v2(back, d, 8));
	CHECK(!memcmp(back, "penstock", 8));
	OK(cuMemHostUnregister(file));
	OK(cuMemFree_v2(d));
	stop();
}

static void t_read_only_refused(void)
{
	unsigned char *p = pages(SIZE);

	start();
	IS(801, cuMemHostRegister_v2(p, SIZE, 8));
	stop();
}

static void t_pageable(void)
{
	unsigned char *p = pages(SIZE);
	handle s;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuStreamCreate(&s, 1));
	memset(p, 1, SIZE);
	OK(cuMemsetD8Async(d, 9, SIZE, s));
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE / 2, s));
	memset(p, 2, SIZE);
	CHECK(device_all(d, SIZE / 2, 1));
	CHECK(device_all(d + SIZE / 2, SIZE / 2, 9));
	OK(cuMemcpyDtoHAsync_v2(p, d, SIZE / 2, s));
	CHECK(all(p, SIZE / 2, 1));
	OK(cuStreamDestroy_v2(s));
	OK(cuMemFree_v2(d));
	stop();
}

static void t_strict(void)
{
	unsigned char *p = pages(SIZE);
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	IS(1, cuMemcpyHtoDAsync_v2(d, p, SIZE, NULL));
	IS(1, cuMemcpyDtoHAsync_v2(p, d, SIZE, NULL));
	OK(cuMemcpyHtoD_v2(d, p, SIZE));
	CHECK(device_all(d, SIZE, 0));
	OK(cuMemFree_v2(d));
	stop();
}

/* A synchronous copy from pageable memory has read its source and may not have arrived. */
static void t_put_late(void)
{
	unsigned char *p = pages(2 * SIZE);
	handle s;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p + SIZE, SIZE, 0));
	OK(cuStreamCreate(&s, 1));
	memset(p, 5, SIZE);
	OK(cuMemcpyHtoD_v2(d, p, SIZE));
	memset(p, 6, SIZE);
	/* A stream that does not wait for the legacy one does not see it yet, */
	OK(cuMemcpyDtoHAsync_v2(p + SIZE, d, SIZE, s));
	OK(cuStreamSynchronize(s));
	CHECK(all(p + SIZE, SIZE, 0xa5));
	/* and the legacy one does. */
	OK(cuStreamSynchronize(NULL));
	OK(cuMemcpyDtoHAsync_v2(p + SIZE, d, SIZE, s));
	OK(cuStreamSynchronize(s));
	CHECK(all(p + SIZE, SIZE, 5));
	OK(cuStreamDestroy_v2(s));
	OK(cuMemHostUnregister(p + SIZE));
	OK(cuMemFree_v2(d));
	stop();
}

/* Handles 1 and 2: the legacy stream, which is also 0, and the calling thread's own. */
static void *t_other_thread(void *arg)
{
	dptr d = *(dptr *)arg;

	OK(cuCtxSetCurrent(ctx));
	/* This thread's stream is another one, and empty: it pulls nothing forward. */
	OK(cuStreamQuery((handle)2));
	OK(cuMemsetD8Async(d + SIZE, 9, SIZE, (handle)2));
	OK(cuStreamSynchronize((handle)2));
	return NULL;
}

static void t_default_streams(void)
{
	unsigned char *p = pages(2 * SIZE);
	pthread_t thread;
	handle s, e;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, 2 * SIZE));
	OK(cuMemHostRegister_v2(p, 2 * SIZE, 0));
	OK(cuStreamCreate(&s, 1));
	OK(cuEventCreate(&e, 2));
	for (uintptr_t h = 1; h <= 2; h++) {
		OK(cuMemsetD8Async(d, (unsigned char)h, SIZE, (handle)h));
		OK(cuMemcpyDtoHAsync_v2(p, d, SIZE, s));
		OK(cuStreamSynchronize(s));
		CHECK(!all(p, SIZE, (unsigned char)h));
		OK(cuEventRecord(e, (handle)h));
		OK(cuStreamWaitEvent(s, e, 0));
		OK(cuMemcpyDtoHAsync_v2(p, d, SIZE, s));
		OK(cuStreamSynchronize(s));
		CHECK(all(p, SIZE, (unsigned char)h));
		IS(400, cuStreamDestroy_v2((handle)h));
	}
	OK(cuMemsetD8Async(d, 3, SIZE, (handle)2));
	CHECK(!pthread_create(&thread, NULL, t_other_thread, &d));
	pthread_join(thread, NULL);
	OK(cuMemcpyDtoHAsync_v2(p, d, 2 * SIZE, s));
	OK(cuStreamSynchronize(s));
	CHECK(all(p, SIZE, 2) && all(p + SIZE, SIZE, 9));
	/* The thread's own stream stands in order with the legacy one. */
	OK(cuStreamSynchronize((handle)1));
	CHECK(device_all(d, SIZE, 3));
	CHECK(fake_cuda_calls("cuMemsetD8Async") == 4 && fake_cuda_calls(NULL) > 20);
	OK(cuStreamDestroy_v2(s));
	OK(cuEventDestroy_v2(e));
	OK(cuMemHostUnregister(p));
	OK(cuMemFree_v2(d));
	stop();
}

/* A kernel runs late, by its twin, and what would be the end of a real context is one here. */
static void t_kernels(void)
{
	static const _Alignas(8) uint32_t image[2] = { 0xba55ed50 }, other[2];
	uint16_t *p = (uint16_t *)pages(SIZE);
	unsigned long long rows = 2, to_pitch = 12, from_pitch = 8;
	const void *from = p;
	uint32_t back[6];
	int numbers = 2;
	handle module, kernel;
	dptr d;
	void *arguments[] = { &d, &from, &numbers, &rows, &to_pitch, &from_pitch };

	start();
	IS(200, cuModuleLoadData(&module, other));
	OK(cuModuleLoadData(&module, image));
	IS(500, cuModuleGetFunction(&kernel, module, "convert_nothing"));
	OK(cuModuleGetFunction(&kernel, module, "convert_bf16_to_f32"));
	OK(cuMemHostRegister_v2(p, SIZE, 2));
	OK(cuMemAlloc_v2(&d, sizeof(back)));
	IS(1, cuLaunchKernel(kernel, 0, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL));
	OK(cuLaunchKernel(kernel, 1, 2, 1, 32, 1, 1, 0, NULL, arguments, NULL));
	for (uint16_t i = 0; i < 8; i++)
		p[i] = (uint16_t)(0x3f80 + i);
	OK(cuMemcpyDtoH_v2(back, d, sizeof(back)));
	CHECK(back[0] == 0x3f800000 && back[1] == 0x3f810000);
	CHECK(back[2] == 0xa5a5a5a5);
	CHECK(back[3] == 0x3f840000 && back[4] == 0x3f850000);
	from = (const char *)p + 1;
	OK(cuLaunchKernel(kernel, 1, 2, 1, 32, 1, 1, 0, NULL, arguments, NULL));
	IS(700, cuCtxSynchronize());
	IS(700, cuModuleUnload(module));
	IS(700, cuMemFree_v2(d));
	IS(700, cuMemHostUnregister(p));
	CHECK(fake_cuda_leaks(NULL, 0) == 2);	/* the context, and a word about the address */
}

static void t_kernels_want_mapped_memory(void)
{
	static const _Alignas(8) uint32_t image[2] = { 0xba55ed50 };
	uint16_t *p = (uint16_t *)pages(SIZE);
	unsigned long long rows = 1, pitch = 0;
	const void *from = p;
	int numbers = 2;
	handle module, kernel;
	dptr d;
	void *arguments[] = { &d, &from, &numbers, &rows, &pitch, &pitch };

	start();
	OK(cuModuleLoadData(&module, image));
	OK(cuModuleGetFunction(&kernel, module, "convert_bf16_to_f32"));
	OK(cuMemHostRegister_v2(p, SIZE, 1));
	OK(cuMemAlloc_v2(&d, 8));
	OK(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL));
	IS(700, cuCtxSynchronize());
	IS(700, cuModuleUnload(module));
	IS(700, cuMemFree_v2(d));
	IS(700, cuMemHostUnregister(p));
	CHECK(fake_cuda_leaks(NULL, 0) == 2);	/* the context, and a word about the memory */
}

static void t_2d(void)
{
	unsigned char *p = pages(SIZE);
	struct copy2d c = {
		.src_x = 3, .src_y = 1, .src_type = 1, .src_host = p, .src_pitch = 100,
		.dst_type = 2, .dst_pitch = 64, .width = 10, .height = 4,
	};
	unsigned char back[64];
	dptr d;

	start();
	for (size_t i = 0; i < SIZE; i++)
		p[i] = (unsigned char)(i / 100 * 16 + i % 100);
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuMemAlloc_v2(&d, 3 * 64 + 10));
	c.dst_device = d;
	OK(cuMemcpy2DAsync_v2(&c, NULL));
	for (size_t y = 0; y < 4; y++) {
		OK(cuMemcpyDtoH_v2(back, d + 64 * y, 10));
		for (size_t x = 0; x < 10; x++)
			CHECK(back[x] == (unsigned char)((y + 1) * 16 + 3 + x));
	}
	OK(cuMemcpyDtoH_v2(back, d + 10, 54));
	CHECK(all(back, 54, 0xa5));
	c.height = 5;
	IS(1, cuMemcpy2DAsync_v2(&c, NULL));
	c.height = 4;
	c.dst_pitch = 9;
	IS(1, cuMemcpy2DAsync_v2(&c, NULL));
	c.dst_pitch = 0x80000000UL;
	IS(1, cuMemcpy2DAsync_v2(&c, NULL));
	c.dst_pitch = 64;
	c.dst_type = 3;
	IS(1, cuMemcpy2DAsync_v2(&c, NULL));
	c.dst_type = 4;
	c.src_type = 4;
	c.src_device = (dptr)(uintptr_t)p;
	c.src_host = NULL;
	OK(cuMemcpy2DAsync_v2(&c, NULL));
	OK(cuCtxSynchronize());
	OK(cuMemHostUnregister(p));
	OK(cuMemFree_v2(d));
	stop();
}

static void t_fail(void)
{
	handle e;
	dptr d[3];

	start();
	OK(cuMemAlloc_v2(&d[0], 1));
	IS(2, cuMemAlloc_v2(&d[1], 1));
	OK(cuMemAlloc_v2(&d[1], 1));
	IS(304, cuEventCreate(&e, 0));
	IS(304, cuEventCreate(&e, 0));
	OK(cuMemcpyDtoDAsync_v2(d[0], d[1], 1, NULL));
	IS(700, cuMemcpyDtoDAsync_v2(d[0], d[1], 1, NULL));
	IS(700, cuMemcpyDtoDAsync_v2(d[0], d[1], 1, NULL));
	OK(cuCtxSynchronize());
	OK(cuMemFree_v2(d[0]));
	OK(cuMemFree_v2(d[1]));
	stop();
}

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void t_delay(void)
{
	double t;
	int v;

	load();
	t = now();
	OK(cuInit(0));
	CHECK(now() - t >= 0.08);
	t = now();
	OK(cuInit(0));
	OK(cuDriverGetVersion(&v));
	CHECK(now() - t < 0.08);
	t = now();
	OK(cuDriverGetVersion(&v));
	CHECK(now() - t >= 0.05);
}

static void t_fail_late(void)
{
	unsigned char *p = pages(SIZE);
	handle s, e;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuStreamCreate(&s, 1));
	OK(cuEventCreate(&e, 2));
	for (int i = 0; i < 3; i++)
		OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, s));
	OK(cuEventRecord(e, s));
	IS(600, cuEventQuery(e));
	IS(600, cuEventQuery(e));
	IS(719, cuEventQuery(e));
	/* sticky: on every call from now on, new work included */
	IS(719, cuEventQuery(e));
	IS(719, cuEventSynchronize(e));
	IS(719, cuStreamQuery(s));
	IS(719, cuMemcpyHtoDAsync_v2(d, p, SIZE, s));
	IS(719, cuMemAlloc_v2(&d, SIZE));
	IS(719, cuCtxSynchronize());
	/* what is given back is given back, and the call still says so */
	IS(719, cuEventDestroy_v2(e));
	IS(719, cuStreamDestroy_v2(s));
	IS(719, cuMemHostUnregister(p));
	IS(719, cuMemFree_v2(d));
	stop();
	start();
	OK(cuCtxSynchronize());
	stop();
}

static void t_corrupt(void)
{
	unsigned char *p = pages(SIZE);
	size_t wrong = 0;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, NULL));
	CHECK(device_all(d, SIZE, 0));
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, NULL));
	OK(cuMemcpyDtoH_v2(p, d, SIZE));
	for (size_t i = 0; i < SIZE; i++)
		wrong += p[i] != 0;
	CHECK(wrong == 1);
	OK(cuMemHostUnregister(p));
	OK(cuMemFree_v2(d));
	stop();
}

static void t_unregister_early(void)
{
	unsigned char *p = pages(SIZE);
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, NULL));
	OK(cuMemHostUnregister(p));
	/* still mapped, so that only the registration can be the reason for what follows */
	CHECK(violations_like("cuMemHostUnregister of memory that 1 queued"));
	IS(700, cuStreamSynchronize(NULL));
}

static void t_unmap_early(void)
{
	unsigned char *p = pages(SIZE);
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, NULL));
	CHECK(!munmap(p, SIZE));
	IS(700, cuStreamSynchronize(NULL));
	CHECK(violations_like("unmapped before the copy ran"));
}

static void t_free_early(void)
{
	unsigned char *p = pages(SIZE);
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	memset(p, 1, SIZE);
	OK(cuMemcpyDtoHAsync_v2(p, d, SIZE, NULL));
	OK(cuMemFree_v2(d));
	CHECK(all(p, SIZE, 0xa5));
	CHECK(violations_like("cuMemFree of memory that 1 queued"));
	IS(1, cuMemFree_v2(d));
	CHECK(violations_like("not a live allocation"));
}

static void t_stale(void)
{
	int (*old)(dptr *, size_t);
	handle s, e;
	dptr d;

	start();
	OK(cuStreamCreate(&s, 0));
	OK(cuEventCreate(&e, 0));
	OK(cuStreamDestroy_v2(s));
	OK(cuEventDestroy_v2(e));
	IS(1, fake_cuda_leaks(NULL, 0));	/* the retained context, and nothing else */
	IS(400, cuStreamSynchronize(s));
	IS(400, cuEventQuery(e));
	IS(400, cuEventDestroy_v2(e));
	CHECK(violations_like("destroyed stream"));
	CHECK(violations_like("destroyed event"));
	old = (int (*)(dptr *, size_t))dlsym(lib, "cuMemAlloc");
	CHECK(old);
	IS(201, old(&d, 1));
	CHECK(violations_like("cuMemAlloc called by its old name"));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	IS(201, cuDevicePrimaryCtxRelease_v2(0));
}

static void t_ask(void)
{
	unsigned char *p = pages(SIZE);
	int which[] = { 2, 9, 1 }, status, ordinal;
	void *fn, *owner, *data[3];
	unsigned int type;
	const char *name;
	dptr d, base;

	start();
	OK(cuGetErrorName(712, &name));
	CHECK(!strcmp(name, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"));
	OK(cuGetErrorString(1, &name));
	IS(1, cuGetErrorName(12345, &name));
	CHECK(!name);
	OK(cuGetProcAddress_v2("cuMemAlloc", &fn, 12000, 0, &status));
	CHECK(fn == (void *)cuMemAlloc_v2 && status == 0);
	OK(cuGetProcAddress_v2("cuEventQuery", &fn, 13000, 0, NULL));
	CHECK(fn == (void *)cuEventQuery);
	OK(cuGetProcAddress_v2("cuNoSuchCall", &fn, 12000, 0, &status));
	CHECK(!fn && status == 1);
	OK(cuGetProcAddress_v2("cuMemAlloc_v2", &fn, 12000, 0, &status));
	CHECK(!fn && status == 1);
	IS(1, cuGetProcAddress_v2("cuMemAlloc", &fn, 99000, 0, &status));
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuPointerGetAttribute(&type, 2, d + 7));
	CHECK(type == 2);
	OK(cuPointerGetAttribute(&base, 11, d + 7));
	CHECK(base == d);
	IS(1, cuPointerGetAttribute(&type, 2, (dptr)(uintptr_t)p));
	data[0] = &type;
	data[1] = &ordinal;
	data[2] = &owner;
	OK(cuPointerGetAttributes(3, which, data, (dptr)(uintptr_t)p));
	CHECK(type == 0 && ordinal == -2 && !owner);
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuPointerGetAttributes(3, which, data, (dptr)(uintptr_t)p));
	CHECK(type == 1 && ordinal == 0 && owner == ctx);
	OK(cuMemHostUnregister(p));
	OK(cuMemFree_v2(d));
	stop();
}

/* One of everything is left behind; unloading the library must say so in the report. */
static void t_report(void)
{
	static const char *const want[] = {
		"\"live_allocations\": 1,", "\"live_registrations\": 1,", "\"live_streams\": 1,",
		"\"live_events\": 1,", "\"retained_contexts\": 1,", "\"queued_copies\": 1,",
		"\"bytes_h2d\": 65536,", "\"bytes_d2h\": 100,", "\"pageable_sync_copies\": 1,",
		"\"pageable_copies\": 1,", "\"peak_registered_bytes\": 131072,",
		"\"violations\": 0,", "\"cuMemcpyHtoDAsync_v2\": 3", "\"leaks\": 6,",
	};
	unsigned char *p = pages(2 * SIZE);
	const char *path = getenv("FAKE_CUDA_REPORT");
	char text[8192], small[10];
	handle s, e;
	size_t n;
	FILE *f;
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, SIZE));
	OK(cuMemHostRegister_v2(p, SIZE, 0));
	OK(cuMemHostRegister_v2(p + SIZE, SIZE, 0));
	OK(cuMemHostUnregister(p + SIZE));
	OK(cuStreamCreate(&s, 1));
	OK(cuEventCreate(&e, 0));
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE / 2, s));
	OK(cuMemcpyHtoDAsync_v2(d, p + SIZE, SIZE / 2, s));
	OK(cuMemcpyDtoH_v2(text, d, 100));
	OK(cuMemcpyHtoDAsync_v2(d, p, SIZE / 2, s));
	IS(6, fake_cuda_leaks(text, sizeof(text)));
	CHECK(strstr(text, "allocations 1 (65536 bytes)") && strstr(text, "queued copies 1"));
	IS(6, fake_cuda_leaks(small, sizeof(small)));
	CHECK(strlen(small) < sizeof(small));
	CHECK(!dlclose(lib));
	f = fopen(path, "r");
	CHECK(f);
	n = fread(text, 1, sizeof(text) - 1, f);
	text[n] = 0;
	fclose(f);
	unlink(path);
	for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
		if (!strstr(text, want[i])) {
			fprintf(stderr, "no %s in %s", want[i], text);
			exit(1);
		}
	}
}

static void t_leak(void)
{
	dptr d;

	CHECK(freopen("/dev/null", "w", stderr));
	start();
	OK(cuMemAlloc_v2(&d, 1));
	exit(0);
}

static void t_abandon(void)
{
	dptr d;

	start();
	OK(cuMemAlloc_v2(&d, 1));
	OK(cuDevicePrimaryCtxRelease_v2(0));
	CHECK(violations_like("released with 1 allocations"));
}

static void t_no_leak(void)
{
	start();
	stop();
	exit(0);
}

static void t_bad_rule(void)
{
	CHECK(freopen("/dev/null", "w", stderr));
	start();
}

static void t_fork(void)
{
	int n, status;
	pid_t pid;

	start();
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		IS(3, cuDeviceGetCount(&n));
		IS(3, cuInit(0));
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
	stop();
}

#define ROUNDS 200

static void *t_worker(void *arg)
{
	unsigned char tag = (unsigned char)(uintptr_t)arg, *p = pages(2 * SIZE);
	handle s, e;
	dptr d;
	int rc;

	OK(cuCtxSetCurrent(ctx));
	OK(cuMemHostRegister_v2(p, 2 * SIZE, 1));
	OK(cuStreamCreate(&s, 1));
	OK(cuEventCreate(&e, 2));
	for (int i = 0; i < ROUNDS; i++) {
		unsigned char v = (unsigned char)(tag * 31 + i);

		OK(cuMemAlloc_v2(&d, SIZE));
		memset(p, v, SIZE);
		OK(cuMemcpyHtoDAsync_v2(d, p, SIZE, s));
		OK(cuMemcpyDtoHAsync_v2(p + SIZE, d, SIZE, s));
		OK(cuEventRecord(e, s));
		while ((rc = cuEventQuery(e)) == 600)
			;
		OK(rc);
		CHECK(all(p + SIZE, SIZE, v));
		OK(cuMemFree_v2(d));
	}
	OK(cuEventDestroy_v2(e));
	OK(cuStreamDestroy_v2(s));
	OK(cuMemHostUnregister(p));
	munmap(p, 2 * SIZE);
	return NULL;
}

static void t_threads(void)
{
	pthread_t th[4];

	start();
	for (uintptr_t i = 0; i < 4; i++)
		CHECK(!pthread_create(&th[i], NULL, t_worker, (void *)i));
	for (int i = 0; i < 4; i++)
		pthread_join(th[i], NULL);
	stop();
}

static const struct {
	const char *name;
	void (*run)(void);
	int want;
	const char *env[3][2];
} cases[] = {
	{ "order", t_order, 0, {} },
	{ "contexts", t_contexts, 0,
	  { { "FAKE_CUDA_DEVICES", "3" }, { "FAKE_CUDA_READ_ONLY_REGISTER", "0" } } },
	{ "late", t_late, 0, {} },
	{ "polls", t_polls, 0, { { "FAKE_CUDA_POLLS", "5" } } },
	{ "streams", t_streams, 0, {} },
	{ "bounds", t_bounds, 0, { { "FAKE_CUDA_MEMORY", "1M" } } },
	{ "no touch", t_no_touch, -SIGSEGV, {} },
	{ "register", t_register, 0, {} },
	{ "read-only refused", t_read_only_refused, 0,
	  { { "FAKE_CUDA_READ_ONLY_REGISTER", "0" } } },
	{ "pageable", t_pageable, 0, {} },
	{ "strict", t_strict, 0, { { "FAKE_CUDA_STRICT", "1" } } },
	{ "put late", t_put_late, 0, { { "FAKE_CUDA_STRICT", "1" } } },
	{ "default streams", t_default_streams, 0, {} },
	{ "2d", t_2d, 0, {} },
	{ "kernels", t_kernels, 0, {} },
	{ "kernels want mapped memory", t_kernels_want_mapped_memory, 0, {} },
	{ "fail", t_fail, 0,
	  { { "FAKE_CUDA_FAIL",
	      "cuMemAlloc_v2:2=2,cuEventCreate:*=304,cuMemcpyDtoDAsync:2+=700" } } },
	{ "delay", t_delay, 0,
	  { { "FAKE_CUDA_INIT_MS", "80" }, { "FAKE_CUDA_DELAY", "cuDriverGetVersion:2=50" } } },
	{ "fail late", t_fail_late, 0, { { "FAKE_CUDA_FAIL_LATE", "2=719" } } },
	{ "corrupt", t_corrupt, 0, { { "FAKE_CUDA_CORRUPT", "3" } } },
	{ "unregister early", t_unregister_early, 0, {} },
	{ "unmap early", t_unmap_early, 0, {} },
	{ "free early", t_free_early, 0, {} },
	{ "stale", t_stale, 0, {} },
	{ "ask", t_ask, 0, {} },
	{ "report", t_report, 0, { { "FAKE_CUDA_REPORT", NULL } } },
	{ "leak", t_leak, 99, { { "FAKE_CUDA_ABORT_ON_LEAK", "1" } } },
	{ "abandon", t_abandon, 0, {} },
	{ "no leak", t_no_leak, 0, { { "FAKE_CUDA_ABORT_ON_LEAK", "1" } } },
	{ "bad rule", t_bad_rule, 98, { { "FAKE_CUDA_FAIL", "cuMemAloc:1=2" } } },
	{ "bad number", t_bad_rule, 98, { { "FAKE_CUDA_MEMORY", "lots" } } },
	{ "fork", t_fork, 0, { { "FAKE_CUDA_ABORT_ON_LEAK", "1" } } },
	{ "threads", t_threads, 0, { { "FAKE_CUDA_STRICT", "1" } } },
};

static int run_case(size_t i)
{
	char report[64];
	pid_t pid;
	int status;

	fflush(NULL);
	pid = fork();
	if (pid < 0)
		return -1000;
	if (!pid) {
		snprintf(report, sizeof(report), "/tmp/fake_cuda_report.%d", (int)getpid());
		for (int k = 0; k < 3 && cases[i].env[k][0]; k++)
			setenv(cases[i].env[k][0], cases[i].env[k][1] ? cases[i].env[k][1] : report,
			       1);
		cases[i].run();
		exit(0);
	}
	if (waitpid(pid, &status, 0) != pid)
		return -1000;
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
	static const char *const clear[] = {
		"MEMORY", "POISON", "DEVICES", "POLLS", "INIT_MS", "STRICT", "READ_ONLY_REGISTER",
		"FAIL", "DELAY", "FAIL_LATE", "CORRUPT", "REPORT", "ABORT_ON_LEAK",
	};
	int failed = 0;

	if (argc > 1)
		library = argv[1];
	for (size_t i = 0; i < sizeof(clear) / sizeof(clear[0]); i++) {
		char name[64];

		snprintf(name, sizeof(name), "FAKE_CUDA_%s", clear[i]);
		unsetenv(name);
	}
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		int got = run_case(i);

		if (got != cases[i].want) {
			printf("FAIL %s: status %d, not %d\n", cases[i].name, got, cases[i].want);
			failed++;
		} else {
			printf("ok   %s\n", cases[i].name);
		}
	}
	return failed != 0;
}
