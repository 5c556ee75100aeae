/* SPDX-License-Identifier: MIT */
/*
 * pen_job_landed(), pen_job_gathered() and pen_job_stored(): each group is told once, when and only
 * when all its bytes are where they belong. On a GPU that means that the copies have been made, not
 * that they have been queued: the fake driver makes them late.
 */
#include <errno.h>
#include <stdlib.h>
#include "base/pattern.h"
#include "fake_gpu.h"
#include "penstock.h"
#include "scratch.h"

#define GROUPS 300
#define MOST (96u << 10)

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static struct pen_job *job;
static struct pen_options options = PEN_OPTIONS_INIT;
static struct pen_report report = PEN_REPORT_INIT;
static struct pen_extent extents[GROUPS];
static unsigned char *memory;
static bool told[GROUPS];
static unsigned char seen[MOST], expected[MOST];

/* Tensors of all sizes one after the other, every seventh empty; memory has room between them. */
static void set_up(const char *device_name, const char *name)
{
	uint64_t offset = 0;

	memset(told, 0, sizeof(told));
	CHECK_EQ(pen_device_open(device_name, &device, &err), 0);
	CHECK_EQ(pen_object_open(name, PEN_READ, 0, &object, &err), 0);
	CHECK_EQ(pen_device_alloc(device, (uint64_t)GROUPS * MOST, (void **)&memory, &err), 0);
	for (uint64_t i = 0; i < GROUPS; i++) {
		uint64_t length = i % 7 ? (i * 7919) % MOST + 1 : 0;

		extents[i] = (struct pen_extent){
			.object = object, .offset = offset, .memory = memory + i * MOST,
			.length = length, .group = i,
		};
		offset += length;
	}
	options.groups = GROUPS;
}

static void tear_down(void)
{
	CHECK_EQ(pen_device_free(device, memory, (uint64_t)GROUPS * MOST, &err), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
}

/* Has it really landed, and was it not told before? */
static void check_told(uint64_t group)
{
	CHECK(group < GROUPS && !told[group]);
	told[group] = true;
	CHECK_EQ(pen_device_get(device, seen, extents[group].memory, extents[group].length,
				&err), 0);
	pattern_fill(expected, extents[group].length, extents[group].offset);
	CHECK(!memcmp(seen, expected, extents[group].length));
}

static size_t listen(void)
{
	uint64_t groups[16];
	size_t count, total = 0;

	while ((count = pen_job_landed(job, groups, 16, 30))) {
		for (size_t i = 0; i < count; i++)
			check_told(groups[i]);
		total += count;
	}
	return total;
}

static void every_group_is_told_once(const char *device_name, const char *name)
{
	set_up(device_name, name);
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, GROUPS, &options, &job, &err), 0);
	CHECK_EQ(listen(), GROUPS);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(every_group_is_told_once_on_the_host)
{
	every_group_is_told_once("host", "pattern:64M,rate=100M");
}

TEST(every_group_is_told_once_on_a_gpu)
{
	NEED_FAKE_GPU();
	every_group_is_told_once("cuda:0", "pattern:64M,rate=100M");
}

TEST(a_group_of_many_extents_is_told_after_the_last)
{
	set_up("host", "pattern:64M,rate=50M");
	for (uint64_t i = 0; i < GROUPS; i++)
		extents[i].group = i % 2;
	options.groups = 2;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, GROUPS, &options, &job, &err), 0);
	for (unsigned int left = 2; left; left--) {
		uint64_t group;

		CHECK_EQ(pen_job_landed(job, &group, 1, 30), 1);
		for (uint64_t i = group; i < GROUPS; i += 2)
			check_told(i);
	}
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(rows_of_a_strided_extent_belong_to_one_group)
{
	uint64_t group = 7;

	set_up("host", "pattern:64M");
	extents[0] = (struct pen_extent){
		.object = object, .memory = memory, .length = 1000, .rows = 5000,
		.object_pitch = 4000, .memory_pitch = 1000,
	};
	options.groups = 1;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, 1, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, &group, 1, 30), 1);
	CHECK_EQ(group, 0);
	for (uint64_t row = 0; row < 5000; row++) {
		pattern_fill(expected, 1000, row * 4000);
		CHECK(!memcmp(memory + row * 1000, expected, 1000));
	}
	CHECK_EQ(pen_job_landed(job, &group, 1, 30), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(nothing_to_read_has_landed_at_once)
{
	uint64_t groups[GROUPS];

	set_up("host", "pattern:64M");
	for (uint64_t i = 0; i < GROUPS; i++)
		extents[i].length = 0;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, GROUPS, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, groups, GROUPS, 0), GROUPS);
	CHECK_EQ(pen_job_landed(job, groups, GROUPS, 30), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(a_failed_job_tells_what_landed_and_no_more)
{
	size_t count;

	set_up("host", "pattern:64M,rate=50M");
	options.inject = "fail:5:ENXIO";
	options.request_size = 64 << 10;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, GROUPS, &options, &job, &err), 0);
	count = listen();
	CHECK(count >= GROUPS / 7 && count < GROUPS);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ENXIO);
	tear_down();
}

TEST(waiting_for_a_group_ends_on_time)
{
	uint64_t group;

	set_up("host", "pattern:64M,latency=400ms");
	options.groups = 1;
	extents[1].group = 0;
	CHECK_EQ(pen_job_start(PEN_READ, device, &extents[1], 1, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, &group, 1, 0.01), 0);
	CHECK_EQ(pen_job_landed(job, &group, 1, 30), 1);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(who_did_not_ask_is_told_nothing)
{
	uint64_t group;

	set_up("host", "pattern:64M");
	options.groups = 0;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, GROUPS, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, &group, 1, 30), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(a_group_beyond_the_number_of_groups_is_refused)
{
	set_up("host", "pattern:64M");
	extents[5].group = GROUPS;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, GROUPS, &options, &job, &err), -EINVAL);
	CHECK(strstr(err.message, "group 300 of 300"));
	tear_down();
}

/* A write of the same groups to a file, from memory that holds the pattern. */
static struct pen_object *start_writing(const char *device_name, const char *name)
{
	struct pen_object *sink;

	set_up(device_name, "pattern:64M");
	CHECK_EQ(pen_transfer(PEN_READ, device, extents, GROUPS, NULL, NULL, &err), 0);
	CHECK_EQ(pen_object_open(name, PEN_WRITE, extents[GROUPS - 1].offset +
				 extents[GROUPS - 1].length, &sink, &err), 0);
	for (uint64_t i = 0; i < GROUPS; i++)
		extents[i].object = sink;
	CHECK_EQ(pen_job_start(PEN_WRITE, device, extents, GROUPS, &options, &job, &err), 0);
	return sink;
}

/* All that are gathered; each one's memory is overwritten as soon as that is told. */
static size_t overwrite_what_is_gathered(void)
{
	static unsigned char noise[MOST];
	uint64_t groups[16];
	size_t count, total = 0;

	memset(noise, 0xee, sizeof(noise));
	while ((count = pen_job_gathered(job, groups, 16, 30))) {
		for (size_t i = 0; i < count; i++) {
			uint64_t group = groups[i];

			CHECK(group < GROUPS && !told[group]);
			told[group] = true;
			CHECK_EQ(pen_device_put(device, extents[group].memory, noise,
						extents[group].length, &err), 0);
		}
		total += count;
	}
	return total;
}

static void gathered_memory_may_change(const char *device_name, const char *inject)
{
	struct pen_object *sink;
	uint64_t groups[GROUPS];
	size_t count, stored = 0;

	options.inject = inject;
	sink = start_writing(device_name, in_scratch("file"));
	CHECK_EQ(overwrite_what_is_gathered(), GROUPS);
	while ((count = pen_job_stored(job, groups, GROUPS, 30)))
		stored += count;
	CHECK_EQ(stored, GROUPS);
	CHECK_EQ(pen_job_landed(job, groups, 1, 0), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	CHECK_EQ(pen_object_commit(sink, &err), 0);
	CHECK_EQ(good_bytes(in_scratch("file")), pen_object_size(sink));
	pen_object_close(sink);
	tear_down();
}

TEST(memory_that_was_gathered_may_change_on_the_host)
{
	gathered_memory_may_change("host", NULL);
}

TEST(memory_that_was_gathered_may_change_on_a_gpu)
{
	NEED_FAKE_GPU();
	gathered_memory_may_change("cuda:0", NULL);
}

/* The path turns out to be barred when much has been gathered for it already. */
TEST(what_was_gathered_for_one_path_is_sent_by_the_next)
{
	NEED_FAKE_GPU();
	gathered_memory_may_change("cuda:0", "fail:3:EINVAL");
	gathered_memory_may_change("host", "fail:1:EINVAL,delay:2+:5ms");
	gathered_memory_may_change("cuda:0", "fail:2:EIO,fail:4:EINVAL,short:5");
}

TEST(cufile_tells_gathered_when_it_is_stored)
{
	struct pen_object *sink;
	uint64_t groups[GROUPS];
	size_t count, gathered = 0;

	NEED_FAKE_GPU();
	options.transfer = PEN_GPU_DIRECT;
	set_up("cuda:0", "pattern:64M");
	CHECK_EQ(pen_transfer(PEN_READ, device, extents, GROUPS, NULL, NULL, &err), 0);
	CHECK_EQ(pen_object_open(in_scratch("file"), PEN_WRITE, GROUPS * MOST, &sink, &err), 0);
	for (uint64_t i = 0; i < GROUPS; i++) {
		extents[i].object = sink;
		extents[i].offset = i * MOST;
	}
	CHECK_EQ(pen_job_start(PEN_WRITE, device, extents, GROUPS, &options, &job, &err), 0);
	while ((count = pen_job_gathered(job, groups, GROUPS, 30)))
		gathered += count;
	CHECK_EQ(gathered, GROUPS);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	pen_object_close(sink);
	tear_down();
}

TEST_ALONE(what_is_gathered_is_told_before_a_slow_store_has_it)
{
	uint64_t groups[GROUPS];
	struct pen_object *sink;
	size_t count, gathered = 0, stored;

	/* All of it fits into the memory limit, and the store would take two seconds. */
	sink = start_writing("host", "pattern:64M,rate=8M");
	while (gathered < GROUPS && (count = pen_job_gathered(job, groups, GROUPS, 1)))
		gathered += count;
	CHECK_EQ(gathered, GROUPS);
	stored = pen_job_stored(job, groups, GROUPS, 0);
	/* The empty ones are stored from the start. */
	CHECK(stored < GROUPS / 2);
	pen_job_cancel(job);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ECANCELED);
	CHECK(report.pinned_bytes <= 128u << 20);
	pen_object_close(sink);
	tear_down();
}

TEST_MAIN
