/* SPDX-License-Identifier: MIT */
/*
 * What jobs stage in: how much they take, register and report, and that lanes that take it together
 * neither wait for one another without need nor hang. The fake driver counts registrations.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include "fake_gpu.h"
#include "penstock.h"
#include "sys/fault.h"
#include "sys/os.h"

#define MIB ((size_t)1 << 20)
#define SIZE (64 * MIB)

static struct pen_error err;
static struct pen_device *device;
static struct pen_report report;
static void *memory;
static char name[] = "/tmp/test_staging_XXXXXX";

static int calls(const char *function)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	int (*count)(const char *);

	*(void **)&count = dlsym(library, "fake_cuda_calls");
	dlclose(library);
	return count(function);
}

static unsigned long long registered(void)
{
	unsigned long long bytes = 0;
	char text[2048], *at;

	fake_gpu_out(text, sizeof(text));
	at = strstr(text, "registrations");
	CHECK(at && sscanf(at, "registrations %*u (%llu", &bytes) == 1);
	return bytes;
}

/* A file in the page cache, the byte at each place made of its MiB. */
static void set_up(void)
{
	static char bytes[MIB];
	int file = mkstemp(name);

	CHECK(file >= 0);
	for (size_t at = 0; at < SIZE; at += MIB) {
		memset(bytes, (int)(at / MIB + 1), MIB);
		CHECK_EQ(pwrite(file, bytes, MIB, (off_t)at), MIB);
	}
	close(file);
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
}

static void open_memory(void)
{
	CHECK_EQ(pen_device_ready(device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, SIZE, &memory, &err), 0);
}

static void tear_down(void)
{
	unlink(name);
	CHECK_EQ(pen_device_free(device, memory, SIZE, &err), 0);
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

/* Lanes that copy from the page cache, whatever this machine has cores. */
static struct pen_options copying(uint32_t lanes)
{
	struct pen_options options = PEN_OPTIONS_INIT;

	options.transfer = PEN_CPU_CACHED_GPU;
	options.lanes = lanes;
	return options;
}

static struct pen_job *start(const struct pen_options *options, void *to, size_t size,
			     struct pen_object **object)
{
	struct pen_extent all = { .memory = to, .length = size };
	struct pen_error why;
	struct pen_job *job;

	CHECK_EQ(pen_object_open(name, PEN_READ, 0, object, &why), 0);
	all.object = *object;
	CHECK_EQ(pen_job_start(PEN_READ, device, &all, 1, options, &job, &why), 0);
	return job;
}

static int finish(struct pen_job *job, struct pen_object *object)
{
	int rc;

	report = (struct pen_report)PEN_REPORT_INIT;
	rc = pen_job_wait(job, &report, &err);
	pen_object_close(object);
	return rc;
}

static void check_bytes(const void *from, size_t size)
{
	static unsigned char bytes[SIZE];

	CHECK_EQ(pen_device_get(device, bytes, from, size, &err), 0);
	for (size_t at = 0; at < size; at++)
		CHECK_EQ(bytes[at], at / MIB + 1);
}

static void move(const struct pen_options *options, size_t size)
{
	struct pen_object *object;
	struct pen_job *job = start(options, memory, size, &object);

	CHECK_EQ(finish(job, object), 0);
	check_bytes(memory, size);
}

TEST(what_lanes_take_at_the_start_is_registered_once)
{
	struct pen_options options = copying(6);

	NEED_FAKE_GPU();
	set_up();
	open_memory();
	for (int job = 0; job < 3; job++) {
		move(&options, SIZE);
		CHECK_EQ(calls("cuMemHostRegister_v2"), 1);
		CHECK_EQ(calls("cuStreamCreate"), 1);
		/* On a busy machine a lane may come when another has gone already. */
		CHECK(report.pinned_bytes <= 6 * 2 * 4 * MIB);
		CHECK_EQ(registered(), 6 * 2 * 4 * MIB);
	}
	tear_down();
}

TEST(lanes_take_no_more_than_they_use)
{
	static const struct {
		uint32_t lanes;
		int transfer;
		size_t size, request_size;
		uint64_t memory_limit, least, most;
	} jobs[] = {
		/* One piece is all that one request at a time needs; each lane has one kept. */
		{ 12, PEN_CPU_GPU, SIZE, 0, 0, 4 * MIB, 48 * MIB },
		/* Two requests fit into one piece. */
		{ 12, PEN_CPU_CACHED_GPU, SIZE, 64 << 10, 0, 4 * MIB, 48 * MIB },
		/* Most of these lanes find no work. */
		{ 32, PEN_CPU_CACHED_GPU, 4 * MIB, 0, 0, 4 * MIB, 32 * MIB },
		{ 1, PEN_CPU_CACHED_GPU, SIZE, 0, 0, 8 * MIB, 8 * MIB },
		{ 12, PEN_CPU_CACHED_GPU, SIZE, 0, 16 * MIB, 4 * MIB, 16 * MIB },
		{ 12, PEN_CPU_CACHED_GPU, SIZE, 0, 64 << 10, 1, 64 << 10 },
	};

	NEED_FAKE_GPU();
	set_up();
	open_memory();
	for (size_t i = 0; i < sizeof(jobs) / sizeof(jobs[0]); i++) {
		struct pen_options options = copying(jobs[i].lanes);

		options.transfer = jobs[i].transfer;
		options.cache = PEN_CACHE_KEEP;
		options.request_size = jobs[i].request_size;
		options.memory_limit = jobs[i].memory_limit;
		move(&options, jobs[i].size);
		printf("job %zu: %llu KiB\n", i, (unsigned long long)report.pinned_bytes >> 10);
		CHECK(report.pinned_bytes >= jobs[i].least && report.pinned_bytes <= jobs[i].most);
		CHECK(registered() <= jobs[i].most);
		pen_trim();
	}
	tear_down();
}

/* Cancelled before there was a device to register anything with. */
TEST(a_job_pins_what_it_may_whatever_the_last_one_left)
{
	struct pen_options large = copying(0), small = copying(1);
	struct pen_object *object;
	struct pen_job *job;

	NEED_FAKE_GPU();
	fake_gpu_hold_start();
	set_up();
	large.transfer = PEN_AUTO;
	large.cache = PEN_CACHE_KEEP;
	large.lanes = 12;
	large.allocate = SIZE;
	large.allocated = &memory;
	job = start(&large, NULL, SIZE - 4 * MIB, &object);
	usleep(100000);
	pen_job_cancel(job);
	fake_gpu_let_start();
	CHECK_EQ(finish(job, object), -ECANCELED);
	open_memory();
	small.memory_limit = 4 * MIB;
	move(&small, SIZE);
	CHECK_EQ(report.pinned_bytes, 4 * MIB);
	CHECK_EQ(registered(), 4 * MIB);
	tear_down();
}

static atomic_int threads;

static int few_threads(const char *call)
{
	return !strcmp(call, "pthread_create") && atomic_fetch_add(&threads, 1) >= 2 ? EAGAIN : 0;
}

TEST(lanes_that_could_not_start_are_not_waited_for)
{
	struct pen_options options = copying(12);

	NEED_FAKE_GPU();
	set_up();
	open_memory();
	sys_fault_hook = few_threads;
	move(&options, SIZE);
	sys_fault_hook = NULL;
	CHECK(report.lanes <= 2 && report.pinned_bytes <= 4 * 4 * MIB);
	CHECK_EQ(registered(), report.pinned_bytes);
	tear_down();
}

TEST(a_registration_that_is_refused_is_made_piece_by_piece)
{
	struct pen_options options = copying(6);

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuMemHostRegister_v2:1=2", 1);
	set_up();
	open_memory();
	move(&options, SIZE);
	/* One for all, refused, and one for each. */
	CHECK_EQ(calls("cuMemHostRegister_v2"), 1 + 6 * 2);
	CHECK_EQ(registered(), 0);
	move(&options, SIZE);
	CHECK_EQ(registered(), 6 * 2 * 4 * MIB);
	tear_down();
}

static uint64_t resident(void)
{
	unsigned long all, here = 0;
	FILE *file = fopen("/proc/self/statm", "re");

	CHECK(file && fscanf(file, "%lu %lu", &all, &here) == 2);
	fclose(file);
	return here * os_page_size();
}

static _Atomic uint64_t resident_then;

static int note_resident(const char *call)
{
	if (!strcmp(call, "cuMemHostRegister_v2"))
		atomic_store(&resident_then, resident());
	return 0;
}

/* The driver would bring the pages in one by one. */
TEST(nothing_is_registered_before_all_of_it_was_touched)
{
	struct pen_options options = copying(6);
	uint64_t before;

	NEED_FAKE_GPU();
	set_up();
	open_memory();
	before = resident();
	sys_fault_hook = note_resident;
	move(&options, SIZE);
	sys_fault_hook = NULL;
	CHECK(resident_then >= before + 6 * 2 * 4 * MIB);
	tear_down();
}

static pthread_t caller;
static atomic_int lane_mallocs;

static int slow_lane(const char *call)
{
	if (!strcmp(call, "malloc") && !pthread_equal(pthread_self(), caller) &&
	    !atomic_fetch_add(&lane_mallocs, 1))
		usleep(1500000);
	return 0;
}

/* Where all is registered already there is nothing to wait for. */
TEST_ALONE(a_slow_lane_holds_nobody_up)
{
	struct pen_options options = copying(6);
	struct pen_progress progress;
	struct pen_object *object;
	struct pen_job *job;
	uint64_t until;

	NEED_FAKE_GPU();
	set_up();
	open_memory();
	move(&options, SIZE);
	caller = pthread_self();
	sys_fault_hook = slow_lane;
	job = start(&options, memory, SIZE, &object);
	until = os_now() + 1000000000ull;
	do {
		usleep(1000);
		pen_job_poll(job, &progress);
	} while (progress.bytes < SIZE && os_now() < until);
	CHECK_EQ(progress.bytes, SIZE);
	CHECK_EQ(finish(job, object), 0);
	sys_fault_hook = NULL;
	tear_down();
}

/* The last lane closes the stream, and that may take as long as the caller's own work. */
TEST_ALONE(who_waits_a_moment_waits_a_moment)
{
	struct pen_options options = copying(2);
	struct pen_object *object;
	struct pen_job *job;
	uint64_t longest = 0;
	int rc;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_DELAY", "cuStreamSynchronize:*=1000", 1);
	set_up();
	open_memory();
	job = start(&options, memory, SIZE, &object);
	do {
		uint64_t now = os_now();

		rc = pen_job_wait_for(job, 0.01);
		if (os_now() - now > longest)
			longest = os_now() - now;
	} while (rc);
	CHECK_EQ(finish(job, object), 0);
	printf("%.3f s\n", (double)longest / 1e9);
	CHECK(longest < 700000000ull);
	tear_down();
}

/* Each device keeps what it has registered: here 64 MiB, and all of them more than 128. */
TEST(devices_do_not_take_turns_at_the_pool)
{
	enum { DEVICES = 3 };
	struct pen_options options = copying(8);
	struct pen_device *devices[DEVICES];
	void *there[DEVICES];

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_DEVICES", "3", 1);
	set_up();
	for (int i = 0; i < DEVICES; i++) {
		char gpu[16];

		snprintf(gpu, sizeof(gpu), "cuda:%d", i);
		CHECK_EQ(pen_device_open(gpu, &devices[i], &err), 0);
		CHECK_EQ(pen_device_ready(devices[i], &err), 0);
		CHECK_EQ(pen_device_alloc(devices[i], SIZE, &there[i], &err), 0);
	}
	pen_device_close(device);
	for (int round = 0; round < 3; round++)
		for (int i = 0; i < DEVICES; i++) {
			device = devices[i];
			memory = there[i];
			move(&options, SIZE);
			CHECK_EQ(calls("cuMemHostRegister_v2"), round ? DEVICES : i + 1);
		}
	for (int i = 0; i < DEVICES; i++) {
		CHECK_EQ(pen_device_free(devices[i], there[i], SIZE, &err), 0);
		pen_device_close(devices[i]);
	}
	unlink(name);
	CHECK(!fake_gpu_out(NULL, 0));
}

#define JOBS 4
#define SHARE (24 * MIB)

static void *memories[JOBS];

static void *one_of_several(void *number)
{
	size_t me = (size_t)(uintptr_t)number;
	struct pen_options options = copying(4);
	struct pen_object *object;
	struct pen_error why;
	struct pen_job *job;

	usleep((useconds_t)(me * 700));
	job = start(&options, memories[me], SHARE, &object);
	CHECK_EQ(pen_job_wait(job, NULL, &why), 0);
	pen_object_close(object);
	return NULL;
}

TEST(jobs_at_once_share_the_pool)
{
	pthread_t running[JOBS];

	NEED_FAKE_GPU();
	set_up();
	open_memory();
	for (size_t i = 0; i < JOBS; i++)
		CHECK_EQ(pen_device_alloc(device, SHARE, &memories[i], &err), 0);
	for (int round = 0; round < 10; round++) {
		for (uintptr_t i = 0; i < JOBS; i++)
			CHECK(!pthread_create(&running[i], NULL, one_of_several, (void *)i));
		for (size_t i = 0; i < JOBS; i++)
			pthread_join(running[i], NULL);
		CHECK(registered() <= 128 * MIB);
		if (round % 2)
			pen_trim();
	}
	for (size_t i = 0; i < JOBS; i++) {
		check_bytes(memories[i], SHARE);
		CHECK_EQ(pen_device_free(device, memories[i], SHARE, &err), 0);
	}
	tear_down();
}

TEST_MAIN
