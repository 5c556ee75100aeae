/* SPDX-License-Identifier: MIT */
/*
 * What only a real GPU can show: that the engine lives in the primary context beside other code,
 * waits for the caller's stream, survives a full GPU, and that its fast paths are to be had. Every
 * case skips where there is no GPU; they pass with the fake driver too, which proves less.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include "base/pattern.h"
#include "penstock.h"
#include "sys/cuda.h"
#include "test.h"

#define MIB ((uint64_t)1 << 20)
#define FILE_SIZE (96 * MIB + 123)

static struct pen_error err;
static const struct cuda_api *cuda;
static void *context;

#define CHECK_PEN(call)                                                        \
	do {                                                                   \
		if (call) {                                                    \
			char test_text[1024];                                  \
			pen_error_format(&err, test_text, sizeof(test_text));  \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, test_text); \
			exit(1);                                               \
		}                                                              \
	} while (0)

static struct pen_device *open_gpu(void)
{
	struct pen_device *gpu;
	int count = 0;

	cuda = cuda_open(&err);
	if (!cuda)
		SKIP("there is no NVIDIA driver");
	if (cuda->cuInit(0) || cuda->cuDeviceGetCount(&count) || !count)
		SKIP("there is no GPU");
	CHECK_PEN(pen_device_open("cuda:0", &gpu, &err));
	return gpu;
}

/* Our own hold on the primary context, as torch would have. */
static void enter_context(void)
{
	cuda_device device;

	CHECK_EQ(cuda->cuDeviceGet(&device, 0), CUDA_OK);
	CHECK_EQ(cuda->cuDevicePrimaryCtxRetain(&context, device), CUDA_OK);
	CHECK_EQ(cuda->cuCtxSetCurrent(context), CUDA_OK);
}

static void leave_context(void)
{
	CHECK_EQ(cuda->cuCtxSetCurrent(NULL), CUDA_OK);
	CHECK_EQ(cuda->cuDevicePrimaryCtxRelease_v2(0), CUDA_OK);
}

static void *function(const char *name)
{
	void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);

	CHECK(symbol);
	return symbol;
}

/* In the working folder, where a build of another kind may be at the same test. */
static const char *file_name(void)
{
	static char name[32];

	snprintf(name, sizeof(name), "gpu-test-%d.bin", (int)getpid());
	return name;
}

static void remove_file(void)
{
	unlink(file_name());
}

/* A file that holds the pattern, in the page cache and on disk. */
static struct pen_object *open_file(void)
{
	static unsigned char block[1 << 20];
	struct pen_object *file;
	int fd = open(file_name(), O_RDWR | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0);
	atexit(remove_file);
	for (uint64_t at = 0; at < FILE_SIZE; at += sizeof(block)) {
		size_t length = FILE_SIZE - at < sizeof(block) ? FILE_SIZE - at : sizeof(block);

		pattern_fill(block, length, at);
		CHECK_EQ(write(fd, block, length), length);
	}
	CHECK_EQ(fdatasync(fd), 0);
	close(fd);
	CHECK_PEN(pen_object_open(file_name(), PEN_READ, 0, &file, &err));
	return file;
}

static void uncache(void)
{
	int fd = open(file_name(), O_RDONLY);

	CHECK(fd >= 0);
	CHECK_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
	close(fd);
}

/* All bytes at `memory` are those of the pattern from `offset` on. */
static void check_bytes(struct pen_device *gpu, const void *memory, uint64_t length,
			uint64_t offset)
{
	unsigned char *bytes = malloc(length);

	CHECK(bytes);
	CHECK_PEN(pen_device_get(gpu, bytes, memory, length, &err));
	CHECK_EQ(pattern_check(bytes, length, offset), length);
	free(bytes);
}

TEST(memory_of_the_caller_takes_bytes_at_any_address)
{
	struct pen_device *gpu = open_gpu();
	struct pen_extent all = { .object = open_file(), .length = FILE_SIZE };
	cuda_pointer own;

	enter_context();
	CHECK_EQ(cuda->cuMemAlloc_v2(&own, FILE_SIZE + 8192), CUDA_OK);
	for (uint64_t shift = 0; shift < 3; shift++) {
		all.memory = (void *)(uintptr_t)(own + shift * 77);
		CHECK_PEN(pen_transfer(PEN_READ, gpu, &all, 1, NULL, NULL, &err));
		check_bytes(gpu, all.memory, FILE_SIZE, 0);
	}
	pen_object_close(all.object);
	CHECK_EQ(cuda->cuMemFree_v2(own), CUDA_OK);
	leave_context();
	pen_device_close(gpu);
}

TEST_SLOW(work_queued_on_the_callers_stream_comes_first)
{
	struct pen_device *gpu = open_gpu();
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent all = { .object = open_file(), .length = FILE_SIZE };
	cuda_result (*set)(cuda_pointer, unsigned char, size_t, void *);
	void *symbol = function("cuMemsetD8Async"), *stream;

	memcpy(&set, &symbol, sizeof(set));
	enter_context();
	CHECK_EQ(cuda->cuStreamCreate(&stream, CUDA_STREAM_NON_BLOCKING), CUDA_OK);
	CHECK_PEN(pen_device_alloc(gpu, FILE_SIZE, &all.memory, &err));
	options.stream = stream;
	for (int round = 0; round < 2; round++) {
		/* Enough to be at it still when the first bytes could arrive. */
		for (int i = 0; i < 1000; i++)
			CHECK_EQ(set((cuda_pointer)(uintptr_t)all.memory, 0xEE, FILE_SIZE, stream),
				 CUDA_OK);
		CHECK_PEN(pen_transfer(PEN_READ, gpu, &all, 1, &options, NULL, &err));
		check_bytes(gpu, all.memory, FILE_SIZE, 0);
		uncache();
	}
	pen_object_close(all.object);
	CHECK_EQ(cuda->cuStreamSynchronize(stream), CUDA_OK);
	CHECK_EQ(cuda->cuStreamDestroy_v2(stream), CUDA_OK);
	leave_context();
	CHECK_PEN(pen_device_free(gpu, all.memory, FILE_SIZE, &err));
	pen_device_close(gpu);
}

/* Did any byte travel by this path? */
static bool took(const struct pen_report *report, const char *path)
{
	for (uint32_t i = 0; i < report->path_count; i++)
		if (!strcmp(report->paths[i].path, path) && report->paths[i].bytes)
			return true;
	return false;
}

TEST(a_warm_file_needs_no_more_than_the_promise)
{
	struct pen_device *gpu = open_gpu();
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent all = { .object = open_file(), .length = FILE_SIZE };

	CHECK_PEN(pen_device_alloc(gpu, FILE_SIZE, &all.memory, &err));
	for (int round = 0; round < 3; round++) {
		CHECK_PEN(pen_transfer(PEN_READ, gpu, &all, 1, NULL, &report, &err));
		CHECK(took(&report, "mapped") || took(&report, "cached"));
		CHECK(report.pinned_bytes <= 128 * MIB);
		CHECK(report.lanes <= 12);
		/* Once it is up, the device costs a job nothing to speak of. */
		CHECK(!round || report.setup_seconds < 0.05);
		check_bytes(gpu, all.memory, FILE_SIZE, 0);
	}
	pen_object_close(all.object);
	CHECK_PEN(pen_device_free(gpu, all.memory, FILE_SIZE, &err));
	pen_device_close(gpu);
}

TEST(the_gpu_reads_the_page_cache_by_itself)
{
	struct pen_device *gpu = open_gpu();
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent all = { .object = open_file(), .length = FILE_SIZE };
	int attribute = 0;

	CHECK_EQ(cuda->cuDeviceGetAttribute(&attribute, CUDA_ATTRIBUTE_READ_ONLY_REGISTER, 0),
		 CUDA_OK);
	if (!attribute)
		SKIP("this GPU cannot register memory read-only");
	CHECK_PEN(pen_device_alloc(gpu, FILE_SIZE, &all.memory, &err));
	options.transfer = PEN_MAPPED;
	CHECK_PEN(pen_transfer(PEN_READ, gpu, &all, 1, &options, &report, &err));
	CHECK(took(&report, "mapped"));
	check_bytes(gpu, all.memory, FILE_SIZE, 0);
	pen_object_close(all.object);
	CHECK_PEN(pen_device_free(gpu, all.memory, FILE_SIZE, &err));
	pen_device_close(gpu);
}

TEST(strided_slices_land_row_by_row)
{
	struct pen_device *gpu = open_gpu();
	struct pen_extent slice = { .object = open_file(), .offset = 4104, .length = 1000,
				    .rows = 5000, .object_pitch = 16384, .memory_pitch = 1024 };
	uint64_t size = slice.rows * slice.memory_pitch;

	CHECK_PEN(pen_device_alloc(gpu, size, &slice.memory, &err));
	for (int round = 0; round < 2; round++) {
		CHECK_PEN(pen_transfer(PEN_READ, gpu, &slice, 1, NULL, NULL, &err));
		for (uint64_t row = 0; row < slice.rows; row += 7)
			check_bytes(gpu, (char *)slice.memory + row * slice.memory_pitch, 1000,
				    slice.offset + row * slice.object_pitch);
		uncache();
	}
	pen_object_close(slice.object);
	CHECK_PEN(pen_device_free(gpu, slice.memory, size, &err));
	pen_device_close(gpu);
}

TEST(a_full_gpu_is_an_error_with_words)
{
	struct pen_device *gpu = open_gpu();
	struct pen_extent all = { .object = open_file(), .length = FILE_SIZE };
	void *memory = NULL;

	CHECK_EQ(pen_device_alloc(gpu, (uint64_t)1 << 46, &memory, &err), -ENOMEM);
	CHECK(err.message[0] && !strcmp(err.object, "cuda:0"));
	/* And nothing is broken by it. */
	CHECK_PEN(pen_device_alloc(gpu, FILE_SIZE, &all.memory, &err));
	CHECK_PEN(pen_transfer(PEN_READ, gpu, &all, 1, NULL, NULL, &err));
	check_bytes(gpu, all.memory, FILE_SIZE, 0);
	pen_object_close(all.object);
	CHECK_PEN(pen_device_free(gpu, all.memory, FILE_SIZE, &err));
	pen_device_close(gpu);
}

TEST(a_device_opened_again_works_again)
{
	struct pen_object *file = NULL;

	for (int round = 0; round < 4; round++) {
		struct pen_device *gpu = open_gpu();
		struct pen_extent all = { .length = FILE_SIZE };

		file = file ? file : open_file();
		all.object = file;
		CHECK_PEN(pen_device_alloc(gpu, FILE_SIZE, &all.memory, &err));
		CHECK_PEN(pen_transfer(PEN_READ, gpu, &all, 1, NULL, NULL, &err));
		check_bytes(gpu, all.memory, FILE_SIZE, 0);
		CHECK_PEN(pen_device_free(gpu, all.memory, FILE_SIZE, &err));
		pen_device_close(gpu);
		if (round == 1)
			pen_trim();
	}
	pen_object_close(file);
}

TEST(every_gpu_takes_and_gives_bytes)
{
	struct pen_device *first = open_gpu();
	struct pen_object *file = open_file();
	int count = 0;

	CHECK_EQ(cuda->cuDeviceGetCount(&count), CUDA_OK);
	for (int i = 0; i < count; i++) {
		struct pen_extent all = { .object = file, .length = FILE_SIZE };
		struct pen_object *sink;
		struct pen_device *gpu;
		char name[32];

		snprintf(name, sizeof(name), "cuda:%d", i);
		CHECK_PEN(pen_device_open(name, &gpu, &err));
		CHECK_PEN(pen_device_alloc(gpu, FILE_SIZE, &all.memory, &err));
		CHECK_PEN(pen_transfer(PEN_READ, gpu, &all, 1, NULL, NULL, &err));
		check_bytes(gpu, all.memory, FILE_SIZE, 0);
		snprintf(name, sizeof(name), "pattern:%llu", (unsigned long long)FILE_SIZE);
		CHECK_PEN(pen_object_open(name, PEN_WRITE, FILE_SIZE, &sink, &err));
		all.object = sink;
		CHECK_PEN(pen_transfer(PEN_WRITE, gpu, &all, 1, NULL, NULL, &err));
		pen_object_close(sink);
		CHECK_PEN(pen_device_free(gpu, all.memory, FILE_SIZE, &err));
		pen_device_close(gpu);
	}
	pen_object_close(file);
	pen_device_close(first);
}

TEST(a_second_job_pins_nothing_new)
{
	struct pen_device *gpu = open_gpu();
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent small = { .object = open_file(), .length = MIB };
	double most = 0;

	CHECK_PEN(pen_device_ready(gpu, &err));
	CHECK_PEN(pen_device_alloc(gpu, MIB, &small.memory, &err));
	for (int i = 0; i < 50; i++) {
		CHECK_PEN(pen_transfer(PEN_READ, gpu, &small, 1, NULL, &report, &err));
		if (i >= 10 && report.seconds > most)
			most = report.seconds;
	}
	check_bytes(gpu, small.memory, MIB, 0);
	/* No timing test, only a sign of life: registering anew would cost far more each time. */
	CHECK(most < 0.25);
	pen_object_close(small.object);
	CHECK_PEN(pen_device_free(gpu, small.memory, MIB, &err));
	pen_device_close(gpu);
}

TEST_MAIN
