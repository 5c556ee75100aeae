/* SPDX-License-Identifier: MIT */
/*
 * Self-test of the fake libcufile.so.0, over the fake libcuda.so.1, both found in the library
 * path. Each case runs in a child of its own, because the fakes read their environment once and
 * keep their books for the life of the process. A case states the exit status that it wants.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long dptr;

struct status {
	int err, cuda;
};

struct descr {
	int type;
	union {
		int fd;
		void *handle;
	} handle;
	const void *ops;
};

struct params {
	int mode;
	void *base;
	off_t file_offset, base_offset;
	size_t size;
	void *fh;
	int opcode;
	void *cookie;
};

struct event {
	void *cookie;
	int status;
	size_t ret;
};

#define CUDA_SYMBOLS(X)                                            \
	X(int, cuInit, unsigned int)                               \
	X(int, cuDevicePrimaryCtxRetain, void **, int)             \
	X(int, cuDevicePrimaryCtxRelease_v2, int)                  \
	X(int, cuCtxSetCurrent, void *)                            \
	X(int, cuCtxSynchronize, void)                             \
	X(int, cuMemAlloc_v2, dptr *, size_t)                      \
	X(int, cuMemFree_v2, dptr)                                 \
	X(int, cuMemcpyHtoD_v2, dptr, const void *, size_t)        \
	X(int, cuMemcpyDtoH_v2, void *, dptr, size_t)              \
	X(int, cuStreamCreate, void **, unsigned int)              \
	X(int, cuStreamDestroy_v2, void *)                         \
	X(int, cuStreamSynchronize, void *)                        \
	X(int, fake_cuda_leaks, char *, size_t)

#define CUFILE_SYMBOLS(X)                                                                      \
	X(struct status, cuFileDriverOpen, void)                                               \
	X(struct status, cuFileDriverClose_v2, void)                                           \
	X(struct status, cuFileHandleRegister, void **, struct descr *)                        \
	X(void, cuFileHandleDeregister, void *)                                                \
	X(ssize_t, cuFileRead, void *, void *, size_t, off_t, off_t)                           \
	X(ssize_t, cuFileWrite, void *, const void *, size_t, off_t, off_t)                    \
	X(struct status, cuFileStreamRegister, void *, unsigned int)                           \
	X(struct status, cuFileStreamDeregister, void *)                                       \
	X(struct status, cuFileReadAsync, void *, void *, size_t *, off_t *, off_t *,          \
	  ssize_t *, void *)                                                                   \
	X(struct status, cuFileBatchIOSetUp, void **, unsigned int)                            \
	X(struct status, cuFileBatchIOSubmit, void *, unsigned int, struct params *,           \
	  unsigned int)                                                                        \
	X(struct status, cuFileBatchIOGetStatus, void *, unsigned int, unsigned int *,         \
	  struct event *, struct timespec *)                                                   \
	X(struct status, cuFileBatchIOCancel, void *)                                          \
	X(void, cuFileBatchIODestroy, void *)                                                  \
	X(int, fake_cufile_leaks, char *, size_t)

#define X(type, name, ...) static type (*name)(__VA_ARGS__);
CUDA_SYMBOLS(X)
CUFILE_SYMBOLS(X)
#undef X

#define SIZE 10000

static void *context, *fh;
static dptr memory;
static int fd;
static unsigned char bytes[SIZE];

#define CHECK(expression)                                                                  \
	do {                                                                               \
		if (!(expression)) {                                                       \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__,         \
				#expression);                                              \
			exit(1);                                                           \
		}                                                                          \
	} while (0)

static void load(void)
{
	void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *cufile = dlopen("libcufile.so.0", RTLD_NOW);

	CHECK(cuda && cufile);
#define X(type, name, ...) CHECK((*(void **)&name = dlsym(cuda, #name)));
	CUDA_SYMBOLS(X)
#undef X
#define X(type, name, ...) CHECK((*(void **)&name = dlsym(cufile, #name)));
	CUFILE_SYMBOLS(X)
#undef X
}

static char path[] = "/tmp/test_fake_cufile.XXXXXX";

/* A file of SIZE known bytes, registered, and as much device memory. The library wants files with
 * a name, so this one keeps it until the end. */
static void begin(void)
{
	struct descr descr = { .type = 1 };

	load();
	CHECK(!cuInit(0) && !cuDevicePrimaryCtxRetain(&context, 0) && !cuCtxSetCurrent(context));
	CHECK(!cuMemAlloc_v2(&memory, SIZE));
	fd = mkstemp(path);
	CHECK(fd >= 0);
	for (size_t i = 0; i < SIZE; i++)
		bytes[i] = (unsigned char)(i * 7 + i / 256);
	CHECK(write(fd, bytes, SIZE) == SIZE);
	CHECK(!cuFileDriverOpen().err);
	descr.handle.fd = fd;
	CHECK(!cuFileHandleRegister(&fh, &descr).err);
	CHECK(!unlink(path));
}

static void end(void)
{
	cuFileHandleDeregister(fh);
	CHECK(!cuFileDriverClose_v2().err);
	CHECK(!cuMemFree_v2(memory) && !cuDevicePrimaryCtxRelease_v2(0));
	CHECK(!fake_cufile_leaks(NULL, 0) && !fake_cuda_leaks(NULL, 0));
}

/* Are `size` bytes of the file from `offset` at `at` in device memory? */
static int landed(size_t at, size_t offset, size_t size)
{
	unsigned char copy[SIZE];

	CHECK(!cuMemcpyDtoH_v2(copy, memory + at, size));
	return !memcmp(copy, bytes + offset, size);
}

static void *device(void)
{
	return (void *)(size_t)memory;
}

static void t_sync(void)
{
	begin();
	CHECK(cuFileRead(fh, device(), 3000, 17, 100) == 3000 && landed(100, 17, 3000));
	CHECK(cuFileRead(fh, device(), 5000, SIZE - 10, 0) == 10);
	CHECK(cuFileRead(fh, device(), 10, SIZE, 0) == 0);
	CHECK(cuFileRead(fh, device(), 3000, 0, SIZE - 10) == -5012);
	CHECK(!cuMemcpyHtoD_v2(memory, "hello", 5));
	CHECK(cuFileWrite(fh, device(), 5, SIZE + 100, 0) == 5);
	CHECK(pread(fd, bytes, 5, SIZE + 100) == 5 && !memcmp(bytes, "hello", 5));
	cuCtxSetCurrent(NULL);
	CHECK(cuFileRead(fh, device(), 10, 0, 0) == -5015);
	cuCtxSetCurrent(context);
	end();
}

static void t_register(void)
{
	struct descr descr = { .type = 1 };
	void *other;

	begin();
	descr.handle.fd = fd;
	CHECK(cuFileHandleRegister(&other, &descr).err == 5028);
	CHECK(fake_cufile_leaks(NULL, 0) == 1);
	end();
}

static void t_stale(void)
{
	begin();
	end();
	CHECK(cuFileRead(fh, device(), 10, 0, 0) < 0);
	CHECK(cuFileDriverClose_v2().err == 5001);
	CHECK(fake_cufile_leaks(NULL, 0) >= 1);
}

/* The numbers are read when the stream runs, and not before. */
static void t_late(void)
{
	size_t size = 1;
	off_t offset = 0, base_offset = 0;
	ssize_t moved = -77;
	void *stream;

	begin();
	CHECK(!cuStreamCreate(&stream, 1) && !cuFileStreamRegister(stream, 0).err);
	CHECK(!cuFileReadAsync(fh, device(), &size, &offset, &base_offset, &moved, stream).err);
	CHECK(moved == -77 && fake_cufile_leaks(NULL, 0) == 3);
	size = 2000;
	offset = 33;
	base_offset = 5;
	CHECK(!cuStreamSynchronize(stream));
	CHECK(moved == 2000 && landed(5, 33, 2000));
	CHECK(!cuFileStreamDeregister(stream).err && !cuStreamDestroy_v2(stream));
	end();
}

/* In compatibility mode a count is no promise: only a wait for the context that begins after it
 * brings the bytes, and one for the stream does not. */
static void t_loose(void)
{
	size_t size = 2000;
	off_t zero = 0, far = 5000;
	ssize_t first = -77, second = -77;
	void *stream;

	begin();
	CHECK(!cuStreamCreate(&stream, 1) && !cuFileStreamRegister(stream, 0).err);
	CHECK(!cuFileReadAsync(fh, device(), &size, &zero, &zero, &first, stream).err);
	CHECK(!cuStreamSynchronize(stream) && first == 2000 && !landed(0, 0, 1));
	CHECK(!cuFileReadAsync(fh, device(), &size, &far, &far, &second, stream).err);
	CHECK(second == -77 && !cuCtxSynchronize());
	CHECK(landed(0, 0, 2000) && second == 2000 && !landed(5000, 5000, 1));
	CHECK(!cuCtxSynchronize() && landed(5000, 5000, 2000));
	CHECK(!cuFileStreamDeregister(stream).err && !cuStreamDestroy_v2(stream));
	end();
}

static void t_loose_freed(void)
{
	size_t size = 2000;
	off_t zero = 0;
	ssize_t moved = -77;

	begin();
	CHECK(!cuFileReadAsync(fh, device(), &size, &zero, &zero, &moved, NULL).err);
	CHECK(!cuStreamSynchronize(NULL) && moved == 2000);
	CHECK(!cuMemFree_v2(memory) && fake_cufile_leaks(NULL, 0) == 1);
	CHECK(!cuCtxSynchronize() && fake_cufile_leaks(NULL, 0) == 2);
}

static void t_late_failure(void)
{
	size_t size = 100;
	off_t zero = 0;
	ssize_t first = 1, second = 1;
	void *stream;

	begin();
	CHECK(!cuStreamCreate(&stream, 1));
	CHECK(!cuFileReadAsync(fh, device(), &size, &zero, &zero, &first, stream).err);
	CHECK(!cuFileReadAsync(fh, device(), &size, &zero, &zero, &second, stream).err);
	CHECK(cuFileReadAsync(fh, device(), &size, &zero, &zero, &second, stream).err == 5030);
	CHECK(!cuStreamSynchronize(stream) && first == 50 && second == -5);
	CHECK(!cuStreamDestroy_v2(stream));
	end();
}

static struct params entry(size_t number)
{
	return (struct params){ .mode = 1, .base = device(), .file_offset = (off_t)(number * 10),
				.base_offset = (off_t)(number * 10), .size = 10, .fh = fh,
				.cookie = (void *)(number + 1) };
}

static void t_batch(void)
{
	struct params params[130];
	struct event events[128];
	unsigned int count = 128, told = 0;
	void *batch, *large;

	begin();
	for (size_t i = 0; i < 130; i++)
		params[i] = entry(i);
	CHECK(cuFileBatchIOSetUp(&large, 129).err == 5022);
	CHECK(!cuFileBatchIOSetUp(&batch, 128).err);
	CHECK(cuFileBatchIOSubmit(batch, 129, params, 0).err == 5022);
	CHECK(!cuFileBatchIOSubmit(batch, 128, params, 0).err);
	CHECK(!cuFileBatchIOGetStatus(batch, 0, &count, events, NULL).err && !count);
	CHECK(!landed(0, 0, 10));
	while (told < 128) {
		count = 128;
		CHECK(!cuFileBatchIOGetStatus(batch, 1, &count, events, NULL).err && count);
		for (unsigned int i = 0; i < count; i++)
			CHECK(events[i].status == 16 && events[i].ret == 10);
		told += count;
	}
	CHECK(landed(0, 0, 1280));
	cuFileBatchIODestroy(batch);
	end();
}

static void t_batch_failure(void)
{
	struct params params[4];
	struct event events[4];
	unsigned int count = 4;
	void *batch;

	begin();
	for (size_t i = 0; i < 4; i++)
		params[i] = entry(i);
	CHECK(!cuFileBatchIOSetUp(&batch, 4).err && !cuFileBatchIOSubmit(batch, 4, params, 0).err);
	CHECK(!cuFileBatchIOGetStatus(batch, 4, &count, events, NULL).err && count == 4);
	CHECK(events[0].status == 16 && events[0].ret == 10);
	CHECK(events[1].status == 64 && (ssize_t)events[1].ret == -5);
	CHECK(events[2].status == 32 && events[3].status == 16);
	CHECK(!cuFileBatchIOSubmit(batch, 4, params, 0).err);
	CHECK(!cuFileBatchIOCancel(batch).err);
	CHECK(!cuFileBatchIOGetStatus(batch, 4, &count, events, NULL).err && count == 4);
	CHECK(events[0].status == 8);
	cuFileBatchIODestroy(batch);
	end();
}

static void t_refused(void)
{
	struct descr descr = { .type = 1 };
	void *file;

	load();
	CHECK(cuFileDriverOpen().err == 5001);
	CHECK(cuFileHandleRegister(&file, &descr).err == 5027);
}

static void t_kth(void)
{
	begin();
	CHECK(cuFileRead(fh, device(), 10, 0, 0) == 10);
	CHECK(cuFileRead(fh, device(), 10, 0, 0) == -1 && errno == ENOSPC);
	CHECK(cuFileRead(fh, device(), 10, 0, 0) == -5013);
	CHECK(cuFileRead(fh, device(), 10, 0, 0) == -5013);
	end();
}

static void t_leak(void)
{
	begin();
	CHECK(fake_cufile_leaks(NULL, 0) == 1);
}

static const struct {
	const char *name;
	void (*run)(void);
	int want;
	const char *settings[3];
} cases[] = {
	{ "sync", t_sync, 0, { 0 } },
	{ "register twice", t_register, 0, { 0 } },
	{ "stale handle", t_stale, 0, { 0 } },
	{ "late", t_late, 0, { "FAKE_CUFILE_COMPAT=0" } },
	{ "loose", t_loose, 0, { 0 } },
	{ "loose, freed", t_loose_freed, 0, { 0 } },
	{ "late failure", t_late_failure, 0,
	  { "FAKE_CUFILE_FAIL=stream-io:2=5,cuFileReadAsync:3=5030", "FAKE_CUFILE_SHORT=1" } },
	{ "batch", t_batch, 0, { 0 } },
	{ "batch shuffled", t_batch, 0, { "FAKE_CUFILE_BATCH_SHUFFLE=1" } },
	{ "batch failure", t_batch_failure, 0,
	  { "FAKE_CUFILE_FAIL=batch-entry:2=5,batch-entry:3=110" } },
	{ "refused", t_refused, 0,
	  { "FAKE_CUFILE_DRIVER_ERROR=5001", "FAKE_CUFILE_REGISTER_ERROR=5027" } },
	{ "k-th call", t_kth, 0, { "FAKE_CUFILE_FAIL=cuFileRead:2=28,cuFileRead:3+=5013" } },
	{ "leak", t_leak, 0, { 0 } },
	{ "bad rule", t_kth, 98, { "FAKE_CUFILE_FAIL=cuFileReed:1=5" } },
	{ "bad number", t_kth, 98, { "FAKE_CUFILE_COMPAT=maybe" } },
};

static int run_case(size_t i)
{
	pid_t pid;
	int status;

	fflush(NULL);
	pid = fork();
	if (!pid) {
		for (int k = 0; k < 3 && cases[i].settings[k]; k++)
			putenv((char *)cases[i].settings[k]);
		cases[i].run();
		exit(0);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return -1;
	return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

int main(void)
{
	int failed = 0;

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		int got = run_case(i);

		printf("%s %s", got == cases[i].want ? "ok  " : "FAIL", cases[i].name);
		if (got != cases[i].want)
			printf(": status %d, not %d", got, cases[i].want);
		putchar('\n');
		failed += got != cases[i].want;
	}
	return failed != 0;
}
