/* SPDX-License-Identifier: MIT */
/*
 * The order between the caller's streams and ours. The fake driver runs queued work as late as the
 * law allows, so a job that did not wait for the caller would be overwritten by what the caller had
 * queued before. Also what jobs take from the driver, and that they take it only once.
 */
#include <errno.h>
#include <pthread.h>
#include "base/pattern.h"
#include "fake_gpu.h"
#include "mem/device.h"
#include "penstock.h"
#include "sys/cuda.h"
#include "sys/os.h"

#define SIZE ((size_t)3 << 20)
#define MARK 0xEE

static struct pen_error err;
static struct pen_device *device;
static const struct cuda_api *api;
static void *memory;
static unsigned char bytes[SIZE];
static cuda_result (*set_bytes)(cuda_pointer, unsigned char, size_t, void *);

static void *symbol(const char *name)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), *found;

	CHECK(library != NULL);
	found = dlsym(library, name);
	CHECK(found != NULL);
	dlclose(library);
	return found;
}

static int calls(const char *name)
{
	int (*count)(const char *);

	*(void **)&count = symbol("fake_cuda_calls");
	return count(name);
}

static void open_gpu(void)
{
	NEED_FAKE_GPU();
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
	CHECK_EQ(pen_device_ready(device, &err), 0);
	CHECK_EQ(device_enter(device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, SIZE, &memory, &err), 0);
	api = cuda_open(&err);
	*(void **)&set_bytes = symbol("cuMemsetD8Async");
}

static void close_gpu(void)
{
	CHECK_EQ(pen_device_free(device, memory, SIZE, &err), 0);
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

/* The caller's own work: it fills the memory, some time from now. */
static void fill_late(void *stream)
{
	CHECK_EQ(set_bytes((cuda_pointer)(uintptr_t)memory, MARK, SIZE, stream), CUDA_OK);
}

static void move(enum pen_mode direction, const char *name, void *stream)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent all = { .memory = memory, .length = SIZE };

	options.stream = stream;
	CHECK_EQ(pen_object_open(name, direction, SIZE, &all.object, &err), 0);
	if (pen_transfer(direction, device, &all, 1, &options, NULL, &err))
		fprintf(stderr, "%s: %s\n", err.operation, err.message);
	CHECK_EQ(err.code, 0);
	pen_object_close(all.object);
}

/* How much of the memory holds what the object does, once all of the caller's work is through. */
static size_t arrived(void *stream)
{
	CHECK_EQ(api->cuStreamSynchronize(stream), CUDA_OK);
	CHECK_EQ(pen_device_get(device, bytes, memory, SIZE, &err), 0);
	return pattern_check(bytes, SIZE, 0);
}

static void read_after_the_callers_work(void *stream)
{
	fill_late(stream);
	move(PEN_READ, "pattern:3M", stream);
	CHECK_EQ(arrived(stream), SIZE);
}

TEST(a_read_comes_after_the_callers_stream)
{
	void *stream;

	open_gpu();
	CHECK_EQ(api->cuStreamCreate(&stream, CUDA_STREAM_NON_BLOCKING), CUDA_OK);
	read_after_the_callers_work(stream);
	CHECK_EQ(api->cuStreamDestroy_v2(stream), CUDA_OK);
	close_gpu();
}

TEST(a_read_comes_after_the_legacy_stream)
{
	open_gpu();
	read_after_the_callers_work(PEN_STREAM_LEGACY);
	close_gpu();
}

TEST(a_read_comes_after_the_threads_own_stream)
{
	open_gpu();
	read_after_the_callers_work(PEN_STREAM_PER_THREAD);
	close_gpu();
}

/* The other way round these cases could not fail: without the option nothing is waited for. */
TEST(a_read_without_a_stream_waits_for_nobody)
{
	open_gpu();
	fill_late(PEN_STREAM_LEGACY);
	move(PEN_READ, "pattern:3M", NULL);
	CHECK_EQ(arrived(PEN_STREAM_LEGACY), 0);
	close_gpu();
}

TEST(a_write_sees_what_the_callers_streams_hold)
{
	static void *const streams[] = { PEN_STREAM_LEGACY, PEN_STREAM_PER_THREAD };
	void *source;

	open_gpu();
	CHECK_EQ(pen_device_alloc(device, SIZE, &source, &err), 0);
	pattern_fill(bytes, SIZE, 0);
	CHECK_EQ(pen_device_put(device, source, bytes, SIZE, &err), 0);
	for (int i = 0; i < 2; i++) {
		cuda_result (*copy)(cuda_pointer, cuda_pointer, size_t, void *);

		*(void **)&copy = symbol("cuMemcpyDtoDAsync_v2");
		memset(bytes, MARK, SIZE);
		CHECK_EQ(pen_device_put(device, memory, bytes, SIZE, &err), 0);
		CHECK_EQ(copy((cuda_pointer)(uintptr_t)memory, (cuda_pointer)(uintptr_t)source,
			      SIZE, streams[i]), CUDA_OK);
		/* The object fails on bytes that are not the pattern. */
		move(PEN_WRITE, "pattern:3M", streams[i]);
		CHECK_EQ(api->cuStreamSynchronize(streams[i]), CUDA_OK);
	}
	CHECK_EQ(pen_device_free(device, source, SIZE, &err), 0);
	close_gpu();
}

TEST(what_was_put_is_there_for_every_stream)
{
	open_gpu();
	pattern_fill(bytes, SIZE, 0);
	CHECK_EQ(pen_device_put(device, memory, bytes, SIZE, &err), 0);
	memset(bytes, 0, sizeof(bytes));
	move(PEN_WRITE, "pattern:3M", NULL);
	close_gpu();
}

/* ------------------------------------------------------------------- the device's own part -- */

TEST(a_fence_behind_the_callers_stream_holds_a_stream_back)
{
	struct device_stream stream = { NULL };
	struct device_fence behind, end = { NULL };
	void *host;
	int rc;

	open_gpu();
	CHECK_EQ(os_map_huge(SIZE, -1, &host), 0);
	CHECK_EQ(device_pin(device, host, SIZE, false, &err), 0);
	fill_late(PEN_STREAM_PER_THREAD);
	CHECK_EQ(device_fence_behind(device, PEN_STREAM_PER_THREAD, &behind, &err), 0);
	/* What is queued later does not count. */
	CHECK_EQ(set_bytes((cuda_pointer)(uintptr_t)memory, 0x11, SIZE, PEN_STREAM_PER_THREAD),
		 CUDA_OK);
	CHECK_EQ(device_stream_open(device, &stream, &err), 0);
	CHECK_EQ(device_wait(device, &stream, &behind, &err), 0);
	CHECK_EQ(device_copy(device, &stream, &(struct device_copy){ .memory = memory,
			     .host = host, .width = SIZE, .rows = 1 }, &err), 0);
	CHECK_EQ(device_mark(device, &stream, &end, &err), 0);
	while ((rc = device_poll(device, &end, &err)) == -EAGAIN)
		;
	CHECK_EQ(rc, 0);
	for (size_t i = 0; i < SIZE; i++)
		CHECK_EQ(((unsigned char *)host)[i], MARK);
	device_fence_close(device, &behind);
	device_fence_close(device, &end);
	device_stream_close(device, &stream);
	CHECK_EQ(device_unpin(device, host, &err), 0);
	CHECK_EQ(os_unmap(host, SIZE), 0);
	CHECK_EQ(api->cuStreamSynchronize(PEN_STREAM_PER_THREAD), CUDA_OK);
	close_gpu();
}

TEST(a_stream_that_is_none_is_refused_in_words)
{
	struct device_fence behind;

	open_gpu();
	CHECK(device_fence_behind(device, (void *)0x1230, &behind, &err) < 0);
	CHECK(!behind.handle && err.domain == PEN_DOMAIN_CUDA && err.message[0]);
	/* The fake has written the misuse down. */
	_exit(0);
}

TEST(a_fence_not_marked_has_passed)
{
	struct device_stream stream = { NULL };
	struct device_fence fence;

	open_gpu();
	CHECK_EQ(device_fence_open(device, &fence, &err), 0);
	CHECK_EQ(device_poll(device, &fence, &err), 0);
	CHECK_EQ(device_stream_open(device, &stream, &err), 0);
	CHECK_EQ(device_wait(device, &stream, &fence, &err), 0);
	device_stream_close(device, &stream);
	device_fence_close(device, &fence);
	close_gpu();
}

TEST_ALONE(jobs_reuse_streams_and_events)
{
	static const char *const made[] = { "cuStreamCreate", "cuEventCreate",
					    "cuStreamDestroy_v2", "cuEventDestroy_v2" };
	int before[4];

	open_gpu();
	move(PEN_READ, "pattern:3M", PEN_STREAM_LEGACY);
	for (int i = 0; i < 4; i++)
		before[i] = calls(made[i]);
	/* A fence for each request under way is what is needed, not one for each possible. */
	printf("%d streams and %d events\n", before[0], before[1]);
	CHECK(before[0] <= 2 && before[1] < 64);
	for (int job = 0; job < 20; job++)
		move(PEN_READ, "pattern:3M", PEN_STREAM_LEGACY);
	/* A busy machine may keep more of them out at once than the first job did, and a lane may
	 * come while the last one is still closing the stream. */
	CHECK(calls(made[0]) <= 4 && calls(made[1]) - before[1] <= 32);
	CHECK(!before[2] && calls(made[2]) == 0 && calls(made[3]) == 0);
	close_gpu();
}

TEST(a_stream_that_met_an_error_is_not_used_again)
{
	struct device_stream stream = { NULL };

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuStreamSynchronize:1=719", 1);
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
	CHECK_EQ(pen_device_ready(device, &err), 0);
	CHECK_EQ(device_enter(device, &err), 0);
	CHECK_EQ(device_stream_open(device, &stream, &err), 0);
	device_stream_close(device, &stream);
	CHECK_EQ(calls("cuStreamDestroy_v2"), 1);
	CHECK_EQ(device_stream_open(device, &stream, &err), 0);
	CHECK_EQ(calls("cuStreamCreate"), 2);
	device_stream_close(device, &stream);
	CHECK_EQ(calls("cuStreamDestroy_v2"), 1);
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST_MAIN
