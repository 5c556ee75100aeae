/* SPDX-License-Identifier: MIT */
/*
 * Writes that let their memory go before the store has it: how far ahead they gather, what memory
 * they take for it, and what becomes of that memory afterwards.
 */
#include <errno.h>
#include <stdlib.h>
#include "engine/schedule.h"
#include "fake_gpu.h"
#include "mem/device.h"
#include "penstock.h"
#include "scratch.h"
#include "sys/cuda.h"

#define MIB ((uint64_t)1 << 20)
/* A lane may have one piece more than the last time. */
#define JITTER (4 * 4 * MIB)

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static struct pen_job *job;
static struct pen_options options = PEN_OPTIONS_INIT;
static struct pen_report report = PEN_REPORT_INIT;
static unsigned char *memory;
static uint64_t size;

/* Memory that holds the pattern, and where it shall go. */
static void set_up(const char *device_name, uint64_t bytes, const char *store)
{
	struct pen_extent all = { .length = bytes };

	size = bytes;
	CHECK_EQ(pen_device_open(device_name, &device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, size, (void **)&memory, &err), 0);
	CHECK_EQ(pen_object_open("pattern:1G", PEN_READ, 0, &all.object, &err), 0);
	all.memory = memory;
	CHECK_EQ(pen_transfer(PEN_READ, device, &all, 1, NULL, NULL, &err), 0);
	pen_object_close(all.object);
	CHECK_EQ(pen_object_open(store, PEN_WRITE, size, &object, &err), 0);
	options.groups = 1;
}

static void tear_down(void)
{
	CHECK_EQ(pen_device_free(device, memory, size, &err), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
}

static void start(void)
{
	struct pen_extent all = { .object = object, .memory = memory, .length = size };

	CHECK_EQ(pen_job_start(PEN_WRITE, device, &all, 1, &options, &job, &err), 0);
}

/* Wait until all is gathered; how much the store has by then. */
static uint64_t gather(void)
{
	struct pen_progress progress;
	uint64_t group;

	CHECK_EQ(pen_job_gathered(job, &group, 1, 60), 1);
	pen_job_poll(job, &progress);
	return progress.bytes;
}

/* Start, gather, and leave it there. What the store had by then. */
static uint64_t gathered_then_cancelled(void)
{
	uint64_t stored;

	start();
	stored = gather();
	pen_job_cancel(job);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ECANCELED);
	return stored;
}

/* The same bytes to a store that takes no time. */
static void save_quickly(void)
{
	struct pen_extent all = { .memory = memory, .length = size };

	CHECK_EQ(pen_object_open("null:", PEN_WRITE, size, &all.object, &err), 0);
	CHECK_EQ(pen_transfer(PEN_WRITE, device, &all, 1, &options, &report, &err), 0);
	pen_object_close(all.object);
}

TEST(a_gpu_is_gathered_while_the_store_is_slow)
{
	NEED_FAKE_GPU();
	set_up("cuda:0", 60 * MIB, "pattern:60M,latency=500ms");
	CHECK(gathered_then_cancelled() < size / 2);
	CHECK_EQ(report.gathering, PEN_GATHERING_AHEAD);
	tear_down();
}

/* Whoever writes through the page cache sleeps there, here for longer than usual. */
static bool sleepy;

ssize_t __real_pwrite64(int fd, const void *from, size_t length, off64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off64_t offset);
ssize_t __wrap_pwrite64(int fd, const void *from, size_t length, off64_t offset)
{
	if (sleepy)
		usleep(500000);
	return __real_pwrite64(fd, from, length, offset);
}

TEST(who_sleeps_in_the_store_gathers_first)
{
	NEED_FAKE_GPU();
	set_up("cuda:0", 60 * MIB, in_scratch("file"));
	options.transfer = PEN_CPU_CACHED_GPU;
	options.lanes = 1;
	options.request_size = 128 << 10;
	sleepy = true;
	CHECK_EQ(gathered_then_cancelled(), 0);
	tear_down();
}

TEST(one_lane_gathers_more_than_thousands_of_requests)
{
	set_up("host", 6000 * 4096, "pattern:32M,latency=500ms");
	options.lanes = 1;
	options.request_size = 4096;
	CHECK(gathered_then_cancelled() < size / 2);
	CHECK_EQ(report.gathering, PEN_GATHERING_AHEAD);
	tear_down();
}

static void little_memory_streams(const char *name)
{
	set_up(name, 48 * MIB, "pattern:48M,rate=200M");
	options.memory_limit = 8 * MIB;
	start();
	CHECK(gather() >= size - options.memory_limit);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(report.gathering, PEN_GATHERING_STREAMED);
	CHECK(report.pinned_bytes <= options.memory_limit);
	tear_down();
}

TEST(with_little_memory_the_host_streams)
{
	little_memory_streams("host");
}

TEST(with_little_memory_a_gpu_streams)
{
	NEED_FAKE_GPU();
	little_memory_streams("cuda:0");
}

/* More than any other job would leave behind, and all of it needed at once. */
static void memory_serves_again(const char *name)
{
	set_up(name, 200 * MIB, "pattern:200M,latency=500ms");
	options.memory_limit = PEN_MEMORY_AUTO;
	gathered_then_cancelled();
	CHECK(report.made_bytes >= size - 64 * MIB && report.made_bytes == report.pinned_bytes);
	CHECK_EQ(report.gathering, PEN_GATHERING_AHEAD);
	gathered_then_cancelled();
	CHECK(report.made_bytes <= JITTER && report.pinned_bytes >= size - 64 * MIB);
	/* Others neither take it nor make it go. */
	options.groups = 0;
	save_quickly();
	CHECK(report.pinned_bytes <= 128 * MIB);
	options.groups = 1;
	gathered_then_cancelled();
	CHECK(report.made_bytes <= JITTER);
	pen_trim();
	gathered_then_cancelled();
	CHECK(report.made_bytes >= size - 64 * MIB);
	tear_down();
}

TEST(memory_that_was_made_to_gather_the_host_serves_again)
{
	memory_serves_again("host");
}

TEST(memory_that_was_made_to_gather_a_gpu_serves_again)
{
	NEED_FAKE_GPU();
	memory_serves_again("cuda:0");
}

/* A store that keeps up would let it do with less, but a later one might not. */
TEST(the_first_save_makes_what_the_next_may_need)
{
	set_up("host", 300 * MIB, "null:");
	options.memory_limit = PEN_MEMORY_AUTO;
	save_quickly();
	CHECK(report.made_bytes >= size);
	save_quickly();
	CHECK(report.made_bytes <= JITTER);
	tear_down();
}

TEST(what_a_later_save_does_not_need_is_given_back)
{
	set_up("host", 200 * MIB, "pattern:200M,latency=500ms");
	options.memory_limit = PEN_MEMORY_AUTO;
	gathered_then_cancelled();
	options.memory_limit = 16 * MIB;
	save_quickly();
	CHECK(report.pinned_bytes <= 16 * MIB && !report.made_bytes);
	options.memory_limit = PEN_MEMORY_AUTO;
	gathered_then_cancelled();
	CHECK(report.made_bytes >= size - 96 * MIB);
	tear_down();
}

TEST(auto_takes_what_is_needed_and_plentiful)
{
	struct pen_extent extents[2] = { { .length = 3000 * MIB }, { .length = MIB, .rows = 100 } };

	options.memory_limit = 5;
	CHECK_EQ(fit_limit(&options, true, extents, 2), 5);
	options.memory_limit = PEN_MEMORY_AUTO;
	CHECK_EQ(fit_limit(&options, true, extents, 2), 128 * MIB);
	options.groups = 1;
	CHECK_EQ(fit_limit(&options, false, extents, 2), 128 * MIB);
	CHECK_EQ(fit_limit(&options, true, extents, 0), 128 * MIB);
	CHECK_EQ(fit_plenty(3000 * MIB, 8000 * MIB, 0), 3000 * MIB);
	CHECK_EQ(fit_plenty(3000 * MIB, 2000 * MIB, 0), 1000 * MIB);
	CHECK_EQ(fit_plenty(3000 * MIB, 2000 * MIB, 500 * MIB), 1500 * MIB);
	CHECK_EQ(fit_plenty(3000 * MIB, 0, 0), 128 * MIB);
	CHECK_EQ(fit_plenty(3000 * MIB, UINT64_MAX, UINT64_MAX / 2), 3000 * MIB);
}

static cuda_result (*set_bytes)(cuda_pointer, unsigned char, size_t, void *);

/* What the caller queued before comes first, and what he queues afterwards changes nothing: the
 * fake driver runs both as late as it may. */
TEST(work_that_is_queued_after_gathering_overwrites_nothing)
{
	const struct cuda_api *api;
	unsigned char *bytes;
	void *stream, *library;
	int fd;

	NEED_FAKE_GPU();
	set_up("cuda:0", 6 * MIB + 100, in_scratch("file"));
	api = cuda_open(&err);
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	*(void **)&set_bytes = dlsym(library, "cuMemsetD8Async");
	CHECK_EQ(device_enter(device, &err), 0);
	CHECK_EQ(api->cuStreamCreate(&stream, 1), CUDA_OK);
	CHECK_EQ(set_bytes((cuda_pointer)(uintptr_t)memory, 0x11, size, stream), CUDA_OK);
	options.stream = stream;
	start();
	gather();
	CHECK_EQ(set_bytes((cuda_pointer)(uintptr_t)memory, 0x22, size, stream), CUDA_OK);
	CHECK_EQ(api->cuStreamSynchronize(stream), CUDA_OK);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	fd = open(in_scratch("file"), O_RDONLY);
	bytes = malloc(size);
	CHECK_EQ(read(fd, bytes, size), size);
	for (uint64_t i = 0; i < size; i++)
		CHECK_EQ(bytes[i], 0x11);
	free(bytes);
	close(fd);
	CHECK_EQ(api->cuStreamDestroy_v2(stream), CUDA_OK);
	dlclose(library);
	tear_down();
}

TEST_MAIN
