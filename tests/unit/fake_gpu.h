/* SPDX-License-Identifier: MIT */
#ifndef FAKE_GPU_H
#define FAKE_GPU_H
/*
 * For cases that need a GPU and are content with the fake one. The fake reads its settings when
 * it is loaded, so they are set in the environment before the device is opened.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include "sys/fault.h"
#include "sys/os.h"
#include "test.h"

/* Is it our fake that the loader finds? Asked in a child: it must not be loaded here yet. */
static inline bool have_fake_gpu(void)
{
	pid_t pid;
	int status = 1;

	fflush(NULL);
	pid = fork();
	if (!pid) {
		void *handle = dlopen("libcuda.so.1", RTLD_NOW);

		_exit(!handle || !dlsym(handle, "fake_cuda_leaks"));
	}
	return pid > 0 && waitpid(pid, &status, 0) == pid && !status;
}

#define NEED_FAKE_GPU()                                                     \
	do {                                                                \
		if (!have_fake_gpu())                                       \
			SKIP("the fake libcuda.so.1 is not in front");      \
	} while (0)

/* What the fake has handed out and not got back, in words; the number of things. */
static inline int fake_gpu_out(char *text, size_t size)
{
	void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	int (*count)(char *, size_t) = NULL;

	CHECK(handle != NULL);
	*(void **)&count = dlsym(handle, "fake_cuda_leaks");
	CHECK(count != NULL);
	return count(text, size);
}

/* Is `count` of `kind` ("registrations", "streams" ...) out? */
static inline bool fake_gpu_has(const char *kind, unsigned long count)
{
	char text[2048], want[64];

	fake_gpu_out(text, sizeof(text));
	snprintf(want, sizeof(want), "%s %lu", kind, count);
	if (!strstr(text, want))
		fprintf(stderr, "%s wanted: %s", want, text);
	return strstr(text, want) != NULL;
}

/*
 * The driver is kept in the middle of its start, from before the device is opened until it may go
 * on: what happens meanwhile does not depend on how fast this machine is.
 */
static atomic_bool fake_gpu_starts, fake_gpu_may_start;

static inline int fake_gpu_wait_in_start(const char *name)
{
	if (!strcmp(name, "cuInit")) {
		fake_gpu_starts = true;
		while (!fake_gpu_may_start)
			os_sleep(1000000);
	}
	return 0;
}

static inline void fake_gpu_hold_start(void)
{
	sys_fault_hook = fake_gpu_wait_in_start;
}

static inline void fake_gpu_await_start(void)
{
	while (!fake_gpu_starts)
		os_sleep(1000000);
}

static inline void fake_gpu_let_start(void)
{
	fake_gpu_may_start = true;
}

#endif
