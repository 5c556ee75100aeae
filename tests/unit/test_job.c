/* SPDX-License-Identifier: MIT */
/*
 * A job from the outside: watched, waited for, cancelled, reported, and with memory of its own
 * allocating. The bytes themselves are the business of tests/conform.
 */
#include <errno.h>
#include "base/pattern.h"
#include "fake_gpu.h"
#include "penstock.h"
#include "sys/fault.h"
#include "sys/os.h"

#define MIB (1ull << 20)

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static struct pen_job *job;
static struct pen_options options = PEN_OPTIONS_INIT;
static struct pen_report report = PEN_REPORT_INIT;
static void *memory;

static void open_all(const char *device_name, const char *name, uint64_t size)
{
	CHECK_EQ(pen_device_open(device_name, &device, &err), 0);
	CHECK_EQ(pen_object_open(name, PEN_READ, 0, &object, &err), 0);
	if (size)
		CHECK_EQ(pen_device_alloc(device, size, &memory, &err), 0);
}

static void close_all(uint64_t size)
{
	CHECK_EQ(pen_device_free(device, memory, size, &err), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
}

static int start(uint64_t length)
{
	struct pen_extent all = { .object = object, .memory = memory, .length = length };

	return pen_job_start(PEN_READ, device, &all, 1, &options, &job, &err);
}

TEST(the_library_knows_its_version)
{
	CHECK_TEXT(pen_version(), PEN_VERSION);
	CHECK_EQ(pen_version_number(), PEN_VERSION_NUMBER);
}

TEST(progress_grows_to_the_total)
{
	struct pen_progress now, before = { .bytes = 0 };
	unsigned int looks = 0;

	open_all("host", "pattern:32M,rate=200M", 32 * MIB);
	CHECK_EQ(start(32 * MIB), 0);
	do {
		pen_job_poll(job, &now);
		CHECK_EQ(now.total, 32 * MIB);
		CHECK(now.bytes >= before.bytes && now.bytes <= now.total);
		CHECK(now.seconds >= before.seconds);
		CHECK(now.state == PEN_RUNNING || now.state == PEN_DONE);
		before = now;
		looks++;
	} while (pen_job_wait_for(job, 0.01) == -ETIMEDOUT);
	CHECK(looks > 3);
	pen_job_poll(job, &now);
	CHECK(now.state == PEN_DONE && now.bytes == now.total);
	CHECK_EQ(pen_job_wait_for(job, 0), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(report.bytes, 32 * MIB);
	CHECK(report.seconds >= 0.15 && report.gb_per_s > 0);
	close_all(32 * MIB);
}

TEST_ALONE(waiting_for_a_time_ends_on_time)
{
	uint64_t begin;

	open_all("host", "pattern:1M,latency=300ms", MIB);
	CHECK_EQ(start(MIB), 0);
	begin = os_now();
	CHECK_EQ(pen_job_wait_for(job, 0.05), -ETIMEDOUT);
	CHECK(os_now() - begin >= 50000000 && os_now() - begin < 200000000);
	CHECK_EQ(pen_job_wait_for(job, -1), -ETIMEDOUT);
	CHECK_EQ(pen_job_wait_for(job, 30), 0);
	CHECK(os_now() - begin >= 290000000 && os_now() - begin < 2000000000);
	CHECK_EQ(pen_job_wait(job, NULL, NULL), 0);
	close_all(MIB);
}

TEST(a_wait_without_end_is_a_wait)
{
	open_all("host", "pattern:1M,latency=20ms", MIB);
	CHECK_EQ(start(MIB), 0);
	/* More seconds than a clock has. */
	CHECK_EQ(pen_job_wait_for(job, 1e30), 0);
	CHECK_EQ(pen_job_wait(job, NULL, NULL), 0);
	close_all(MIB);
}

TEST_ALONE(a_cancelled_job_comes_home_soon_and_says_so)
{
	struct pen_progress now;
	uint64_t begin;

	open_all("host", "pattern:64M,rate=20M", 64 * MIB);
	CHECK_EQ(start(64 * MIB), 0);
	CHECK_EQ(pen_job_wait_for(job, 0.05), -ETIMEDOUT);
	begin = os_now();
	pen_job_cancel(job);
	pen_job_cancel(job);
	CHECK_EQ(pen_job_wait_for(job, 20), 0);
	pen_job_poll(job, &now);
	CHECK_EQ(now.state, PEN_CANCELLED);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ECANCELED);
	CHECK(err.message[0] && report.bytes < 64 * MIB);
	/* At most what was in flight is waited for: 8 MiB of a 20 MiB/s store. */
	CHECK(os_now() - begin < 1500000000);
	close_all(64 * MIB);
}

TEST(a_job_cancelled_when_it_is_done_is_done)
{
	open_all("host", "pattern:1M", MIB);
	CHECK_EQ(start(MIB), 0);
	CHECK_EQ(pen_job_wait_for(job, 20), 0);
	pen_job_cancel(job);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(report.bytes, MIB);
	close_all(MIB);
}

TEST(a_job_with_nothing_to_do_is_done_at_once)
{
	open_all("host", "pattern:1M", MIB);
	CHECK_EQ(start(0), 0);
	CHECK_EQ(pen_job_wait_for(job, 20), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK(!report.bytes && !report.requests && !report.path_count);
	CHECK_EQ(pen_transfer(PEN_READ, device, NULL, 0, NULL, &report, &err), 0);
	close_all(MIB);
}

TEST(a_failed_job_has_words_and_a_report)
{
	struct pen_progress now;

	open_all("host", "pattern:8M", 8 * MIB);
	options.inject = "fail:2+:ENXIO";
	CHECK_EQ(start(8 * MIB), 0);
	CHECK_EQ(pen_job_wait_for(job, 20), 0);
	pen_job_poll(job, &now);
	CHECK_EQ(now.state, PEN_FAILED);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ENXIO);
	CHECK_TEXT(err.object, "pattern:8M");
	CHECK(err.offset >= 0 && err.message[0]);
	CHECK(report.bytes < 8 * MIB && report.seconds > 0);
	close_all(8 * MIB);
}

TEST(retries_are_counted)
{
	open_all("host", "pattern:8M", 8 * MIB);
	options.inject = "fail:2,short:3";
	options.request_size = MIB;
	CHECK_EQ(start(8 * MIB), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(report.retries, 2);
	CHECK_EQ(pattern_check(memory, 8 * MIB, 0), 8 * MIB);
	close_all(8 * MIB);
}

TEST(a_report_of_an_older_header_is_not_overrun)
{
	struct {
		struct pen_report report;
		unsigned char guard[16];
	} old;

	open_all("host", "pattern:1M", MIB);
	memset(&old, 0xee, sizeof(old));
	old.report.size = offsetof(struct pen_report, setup_seconds);
	CHECK_EQ(start(MIB), 0);
	CHECK_EQ(pen_job_wait(job, &old.report, &err), 0);
	CHECK_EQ(old.report.bytes, MIB);
	CHECK_EQ(old.report.size, offsetof(struct pen_report, setup_seconds));
	for (size_t i = offsetof(struct pen_report, setup_seconds); i < sizeof(old); i++)
		CHECK_EQ(((unsigned char *)&old)[i], 0xee);
	close_all(MIB);
}

TEST(a_direction_that_is_none_is_refused)
{
	struct pen_extent all = { .length = 0 };

	open_all("host", "pattern:1M", 0);
	CHECK_EQ(pen_job_start((enum pen_mode)0, device, &all, 1, NULL, &job, &err), -EINVAL);
	CHECK(!job && err.message[0]);
	CHECK_EQ(pen_job_start((enum pen_mode)4, device, &all, 1, NULL, &job, NULL), -EINVAL);
	close_all(0);
}

/* ----------------------------------------------------------------- memory of the job's own -- */

static void allocated_by_the_job(const char *device_name)
{
	static unsigned char bytes[8 << 20];
	void *got = &got;

	open_all(device_name, "pattern:8M", 0);
	options.allocate = 8 * MIB + 4096;
	options.allocated = &got;
	memory = (void *)4096;
	CHECK_EQ(start(8 * MIB), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK(got && got != &got);
	CHECK_EQ(pen_device_get(device, bytes, (char *)got + 4096, 8 * MIB, &err), 0);
	CHECK_EQ(pattern_check(bytes, 8 * MIB, 0), 8 * MIB);
	CHECK_EQ(pen_device_free(device, got, 8 * MIB + 4096, &err), 0);
	/* From the first byte on: an offset of 0 is no missing memory. */
	memory = NULL;
	CHECK_EQ(start(8 * MIB), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(pen_device_get(device, bytes, got, 8 * MIB, &err), 0);
	CHECK_EQ(pattern_check(bytes, 8 * MIB, 0), 8 * MIB);
	CHECK_EQ(pen_device_free(device, got, 8 * MIB + 4096, &err), 0);
	/* Nothing to read, and still the memory that was asked for. */
	CHECK_EQ(start(0), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK(got != NULL);
	CHECK_EQ(pen_device_free(device, got, 8 * MIB + 4096, &err), 0);
	/* After an error there is none, and none is lost. */
	options.inject = "fail:1+:ENXIO";
	CHECK_EQ(start(8 * MIB), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ENXIO);
	CHECK(!got);
	close_all(0);
}

TEST(a_job_allocates_on_the_host)
{
	allocated_by_the_job("host");
}

TEST(a_job_allocates_on_a_gpu)
{
	NEED_FAKE_GPU();
	allocated_by_the_job("cuda:0");
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST(what_does_not_fit_into_the_memory_to_allocate_is_refused)
{
	void *got = NULL;

	open_all("host", "pattern:8M", 0);
	options.allocate = 8 * MIB;
	CHECK_EQ(start(8 * MIB), -EINVAL);
	options.allocated = &got;
	memory = (void *)1;
	CHECK_EQ(start(8 * MIB), -ERANGE);
	CHECK(err.message[0] && !job && !got);
	memory = NULL;
	close_all(0);
}

TEST(a_write_has_nothing_to_allocate_for)
{
	struct pen_extent all = { .length = MIB };
	void *got = NULL;

	open_all("host", "pattern:1M", 0);
	pen_object_close(object);
	CHECK_EQ(pen_object_open("null:", PEN_WRITE, MIB, &object, &err), 0);
	all.object = object;
	options.allocate = MIB;
	options.allocated = &got;
	CHECK_EQ(pen_transfer(PEN_WRITE, device, &all, 1, &options, NULL, &err), -EINVAL);
	close_all(0);
}

TEST(a_gpu_too_small_for_the_memory_to_allocate_fails_the_job)
{
	void *got = NULL;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_MEMORY", "4M", 1);
	open_all("cuda:0", "pattern:8M", 0);
	options.allocate = 8 * MIB;
	options.allocated = &got;
	CHECK_EQ(start(8 * MIB), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ENOMEM);
	CHECK(!got && strstr(err.hint, "8388608"));
	close_all(0);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST_ALONE(start_up_and_reading_overlap)
{
	static unsigned char bytes[64 << 20];
	uint64_t begin;
	void *got;

	NEED_FAKE_GPU();
	/* The wire needs 0.64 s for these bytes, the driver 0.6 s to start. */
	setenv("FAKE_CUDA_INIT_MS", "600", 1);
	begin = os_now();
	open_all("cuda:0", "pattern:64M,rate=100M", 0);
	options.allocate = 64 * MIB;
	options.allocated = &got;
	CHECK_EQ(start(64 * MIB), 0);
	CHECK(os_now() - begin < 300000000);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	printf("setup %.3f of %.3f s\n", report.setup_seconds, report.seconds);
	CHECK(report.setup_seconds >= 0.5);
	CHECK(TEST_SLOW_BUILD || report.seconds < 0.6 + 0.64 - 0.1);
	CHECK_EQ(pen_device_get(device, bytes, got, 64 * MIB, &err), 0);
	CHECK_EQ(pattern_check(bytes, 64 * MIB, 0), 64 * MIB);
	CHECK_EQ(pen_device_free(device, got, 64 * MIB, &err), 0);
	close_all(0);
	CHECK(!fake_gpu_out(NULL, 0));
}

static int fail_first_flush(const char *name)
{
	static int flushes;

	return !strcmp(name, "fdatasync") && !flushes++ ? EIO : 0;
}

/* The kernel tells of a failed flush once: who asks second hears that all is well. */
TEST(a_flush_that_fails_while_dropping_the_cache_is_not_lost)
{
	char path[] = "/tmp/penstock-job-XXXXXX";
	struct pen_extent extent = { .length = 100000 };
	int fd = mkstemp(path);

	CHECK(fd >= 0);
	close(fd);
	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 100000, &extent.memory, &err), 0);
	CHECK_EQ(pen_object_open(path, PEN_WRITE, 100000, &extent.object, &err), 0);
	options.cache = PEN_CACHE_DROP;
	sys_fault_hook = fail_first_flush;
	CHECK_EQ(pen_transfer(PEN_WRITE, device, &extent, 1, &options, NULL, &err), -EIO);
	sys_fault_hook = NULL;
	pen_object_close(extent.object);
	CHECK_EQ(pen_device_free(device, extent.memory, 100000, &err), 0);
	pen_device_close(device);
	CHECK(!unlink(path));
}

TEST(a_memory_limit_without_end_is_no_limit)
{
	static const uint64_t limits[] = { UINT64_MAX, 1ull << 54, 1ull << 53 };

	for (size_t i = 0; i < 3; i++) {
		struct pen_extent extent = { .length = 3 << 20 };

		options = (struct pen_options)PEN_OPTIONS_INIT;
		options.memory_limit = limits[i];
		options.transfer = PEN_CPU_ASYNC_GPU;
		if (pen_device_open("cuda:0", &device, &err))
			SKIP("there is no GPU, not even a fake one");
		CHECK_EQ(pen_device_alloc(device, 3 << 20, &extent.memory, &err), 0);
		CHECK_EQ(pen_object_open("pattern:3M", PEN_READ, 0, &extent.object, &err), 0);
		CHECK_EQ(pen_transfer(PEN_READ, device, &extent, 1, &options, NULL, &err), 0);
		pen_object_close(extent.object);
		CHECK_EQ(pen_device_free(device, extent.memory, 3 << 20, &err), 0);
		pen_device_close(device);
	}
}

static long address_space(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	long pages = 0;

	CHECK(file && fscanf(file, "%ld", &pages) == 1);
	fclose(file);
	return pages;
}

TEST(memory_of_an_odd_size_is_freed_whole)
{
	long before;

	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	before = address_space();
	for (int i = 0; i < 100; i++) {
		CHECK_EQ(pen_device_alloc(device, 5000, &memory, &err), 0);
		CHECK_EQ(pen_device_free(device, memory, 5000, &err), 0);
	}
	/* A sanitizer keeps what was freed for a while, in stretches of a mebibyte. */
	CHECK(address_space() - before < (TEST_SLOW_BUILD ? 4096 : 512));
	pen_device_close(device);
}

TEST_MAIN
