/* SPDX-License-Identifier: MIT */
/*
 * Budgets as assertions: what a job may allocate, pin, start and call. The data path allocates
 * nothing, so a job eight times as large allocates as often; malloc and calloc are counted by
 * wrapping them at link time (-Wl,--wrap), and only where lanes call them - the plan is made
 * before, on the caller's thread.
 */
#include <pthread.h>
#include <time.h>
#include "kit.h"
#include "mem/pool.h"
#include "sys/fault.h"

static atomic_uint lane_allocations, calls;
static pthread_t caller;

static void count_allocation(void)
{
	if (caller && !pthread_equal(pthread_self(), caller))
		lane_allocations++;
}

void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
	count_allocation();
	return __real_malloc(size);
}

void *__real_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_calloc(size_t count, size_t size)
{
	count_allocation();
	return __real_calloc(count, size);
}

static int count_call(const char *name)
{
	(void)name;
	calls++;
	return 0;
}

struct budget {
	struct pen_device *device;
	struct pen_options options;
	struct pen_report report;
	void *memory;
	uint64_t room;
	unsigned int allocations, calls, threads;
};

static bool set_up(struct budget *budget, const char *device, uint64_t room)
{
	*budget = (struct budget){ .options = PEN_OPTIONS_INIT, .room = room };
	caller = pthread_self();
	budget->device = kit_device(device);
	if (!budget->device)
		return false;
	OK(pen_device_alloc(budget->device, room, &budget->memory, &kit_err));
	return true;
}

static void tear_down(struct budget *budget)
{
	OK(pen_device_free(budget->device, budget->memory, budget->room, &kit_err));
	pen_device_close(budget->device);
}

static void read_object(struct budget *budget, const char *name, uint64_t size)
{
	struct pen_extent extent = { .memory = budget->memory, .length = size };
	unsigned int threads = kit_threads();
	struct pen_progress progress;
	struct pen_job *job;

	kit_at("%s, %s", pen_device_name(budget->device), name);
	OK(pen_object_open(name, PEN_READ, 0, &extent.object, &kit_err));
	lane_allocations = calls = 0;
	budget->threads = 0;
	budget->report = (struct pen_report)PEN_REPORT_INIT;
	sys_fault_hook = count_call;
	OK(pen_job_start(PEN_READ, budget->device, &extent, 1, &budget->options, &job, &kit_err));
	do {
		unsigned int now = kit_threads() - threads;

		if (now > budget->threads)
			budget->threads = now;
		usleep(500);
		pen_job_poll(job, &progress);
	} while (progress.state == PEN_RUNNING);
	OK(pen_job_wait(job, &budget->report, &kit_err));
	sys_fault_hook = NULL;
	budget->allocations = lane_allocations;
	budget->calls = calls;
	pen_object_close(extent.object);
}

/* All that a job may take is idle: how much of it one takes is a matter of chance. */
static void fill_pool(struct pen_device *device)
{
	struct piece_budget all = { .left = 32, .piece_size = PIECE_SIZE };
	struct piece *pieces[32];
	int rc;

	OK(pen_device_ready(device, &kit_err));
	OK(device_enter(device, &kit_err));
	for (int i = 0; i < 32; i++) {
		pieces[i] = piece_take(&all, PIECE_MORE, device, &rc, &kit_err);
		CHECK(pieces[i] != NULL);
		OK(piece_pin(pieces[i], &kit_err));
	}
	for (int i = 0; i < 32; i++)
		piece_put(&all, pieces[i]);
}

static void compare_allocations(const char *device, const char *small, const char *large,
				uint64_t small_size, uint64_t large_size)
{
	struct budget budget;
	unsigned int allocations;

	if (!set_up(&budget, device, large_size))
		SKIP("there is no GPU, not even a fake one");
	budget.options.lanes = 2;
	budget.options.depth = 8;
	budget.options.request_size = MIB;
	fill_pool(budget.device);
	read_object(&budget, small, small_size);
	allocations = budget.allocations;
	read_object(&budget, large, large_size);
	CHECK_EQ(budget.allocations, allocations);
	/* With nothing fixed the engine feels its way, but that is bounded too. */
	budget.options = (struct pen_options)PEN_OPTIONS_INIT;
	read_object(&budget, large, large_size);
	CHECK(budget.allocations < 64);
	tear_down(&budget);
}

TEST(lanes_allocate_no_more_for_a_larger_job)
{
	compare_allocations("host", "pattern:64M", "pattern:512M", 64 * MIB, 512 * MIB);
}

TEST(lanes_allocate_no_more_for_a_larger_job_on_a_gpu)
{
	compare_allocations("cuda:0", "pattern:32M", "pattern:256M", 32 * MIB, 256 * MIB);
}

/* Pages of this process that no file backs. */
static uint64_t anonymous_bytes(void)
{
	FILE *file = fopen("/proc/self/smaps_rollup", "re");
	unsigned long long kib = 0;
	char line[256];

	while (file && fgets(line, sizeof(line), file))
		if (sscanf(line, "Anonymous: %llu", &kib) == 1)
			break;
	if (file)
		fclose(file);
	return kib * KIB;
}

TEST(memory_stays_within_the_default_promise)
{
	static const char *const devices[] = { "host", "cuda:0" };

	for (size_t i = 0; i < COUNT(devices); i++) {
		struct budget budget;
		uint64_t before;

		if (!set_up(&budget, devices[i], 256 * MIB))
			continue;
		/* Bring the destination in first: it is the caller's, not ours. */
		read_object(&budget, "null:,rate=100G", 256 * MIB);
		pen_trim();
		before = anonymous_bytes();
		/* A store that invites as much in flight as it can get. */
		read_object(&budget, "pattern:256M,latency=5ms", 256 * MIB);
		CHECK(budget.report.pinned_bytes <= 128 * MIB);
		if (!KIT_SANITIZED)
			CHECK(anonymous_bytes() <= before + (128 + 32) * MIB);
		tear_down(&budget);
	}
}

/* A sanitizer has threads of its own, after a fork even two. */
#define SANITIZER_THREADS (2 * TEST_SLOW_BUILD)

TEST(threads_are_the_lanes_and_no_more)
{
	static const char *const devices[] = { "host", "cuda:0" };

	for (size_t i = 0; i < COUNT(devices); i++) {
		struct budget budget;

		if (!set_up(&budget, devices[i], 64 * MIB))
			continue;
		for (uint32_t lanes = 1; lanes <= 12; lanes += 11) {
			budget.options.lanes = lanes;
			read_object(&budget, "pattern:64M,rate=500M", 64 * MIB);
			CHECK(budget.threads >= 1 && budget.threads <= lanes + SANITIZER_THREADS);
			CHECK(budget.report.lanes <= lanes);
		}
		tear_down(&budget);
		/* One that was joined may linger in /proc for a moment. */
		for (int tries = 0; kit_threads() > 1 + SANITIZER_THREADS && tries < 200; tries++)
			usleep(10000);
		CHECK(kit_threads() <= 1 + SANITIZER_THREADS);
	}
}

TEST(calls_per_gib_are_bounded)
{
	static const struct {
		const char *device;
		bool hot;
		unsigned int per_gib;	/* system and driver calls */
	} rows[] = {
		{ "host", true, 1500 }, { "host", false, 4000 },
		{ "cuda:0", true, 20000 }, { "cuda:0", false, 20000 },
	};
	const uint64_t size = 128 * MIB;
	char path[256];

	snprintf(path, sizeof(path), "%s/file", kit_folder(DISK));
	kit_pattern(path, size);
	for (size_t i = 0; i < COUNT(rows); i++) {
		struct budget budget;

		if (!set_up(&budget, rows[i].device, size))
			continue;
		for (int round = 0; round < 2; round++) {
			if (rows[i].hot)
				kit_warm(path, 0, 0);
			else
				kit_cool(path, 0, 0);
			read_object(&budget, path, size);
		}
		printf("%s, %s: %u calls for 128 MiB\n", rows[i].device,
		       rows[i].hot ? "hot" : "cold", budget.calls);
		if (rows[i].hot)
			CHECK(kit_has_path(&budget.report, "cached") ||
			      kit_has_path(&budget.report, "mapped"));
		else if (kit_has_direct() && kit_has_uring())
			CHECK(kit_has_path(&budget.report, "direct-uring"));
		else
			kit_not_run("%s, cold, by io_uring", rows[i].device);
		CHECK(budget.calls < rows[i].per_gib / 8);
		tear_down(&budget);
	}
}

static int by_value(const void *left, const void *right)
{
	double a = *(const double *)left, b = *(const double *)right;

	return a < b ? -1 : a > b;
}

TEST_ALONE(a_hot_mebibyte_costs_less_than_a_millisecond)
{
	struct budget budget;
	double seconds[50];
	char path[256];

	if (KIT_SANITIZED)
		SKIP("time means nothing under a sanitizer");
	CHECK(set_up(&budget, "host", MIB));
	snprintf(path, sizeof(path), "%s/file", kit_folder(SHM));
	kit_pattern(path, MIB);
	for (size_t i = 0; i < COUNT(seconds); i++) {
		struct pen_extent extent = { .memory = budget.memory, .length = MIB };
		struct pen_report report = PEN_REPORT_INIT;

		OK(pen_object_open(path, PEN_READ, 0, &extent.object, &kit_err));
		OK(pen_transfer(PEN_READ, budget.device, &extent, 1, NULL, &report, &kit_err));
		pen_object_close(extent.object);
		seconds[i] = report.seconds;
	}
	qsort(seconds, COUNT(seconds), sizeof(seconds[0]), by_value);
	printf("median %.0f us\n", seconds[COUNT(seconds) / 2] * 1e6);
	CHECK(seconds[COUNT(seconds) / 2] < 1e-3);
	tear_down(&budget);
}

TEST_MAIN
