/* SPDX-License-Identifier: MIT */
/*
 * pen_job_landed(): each tag is told once, when and only when all its bytes are where they belong.
 * On a GPU that means that the copies have been made, not that they have been queued: the fake
 * driver makes them late.
 */
#include <errno.h>
#include <stdlib.h>
#include "base/pattern.h"
#include "fake_gpu.h"
#include "penstock.h"

#define TAGS 300
#define MOST (96u << 10)

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static struct pen_job *job;
static struct pen_options options = PEN_OPTIONS_INIT;
static struct pen_report report = PEN_REPORT_INIT;
static struct pen_extent extents[TAGS];
static unsigned char *memory;
static bool told[TAGS];
static unsigned char seen[MOST], expected[MOST];

/* Tensors of all sizes one after the other, every seventh empty; memory has room between them. */
static void set_up(const char *device_name, const char *name)
{
	uint64_t offset = 0;

	memset(told, 0, sizeof(told));
	CHECK_EQ(pen_device_open(device_name, &device, &err), 0);
	CHECK_EQ(pen_object_open(name, PEN_READ, 0, &object, &err), 0);
	CHECK_EQ(pen_device_alloc(device, (uint64_t)TAGS * MOST, (void **)&memory, &err), 0);
	for (uint64_t i = 0; i < TAGS; i++) {
		uint64_t length = i % 7 ? (i * 7919) % MOST + 1 : 0;

		extents[i] = (struct pen_extent){
			.object = object, .offset = offset, .memory = memory + i * MOST,
			.length = length, .tag = i,
		};
		offset += length;
	}
	options.tags = TAGS;
}

static void tear_down(void)
{
	CHECK_EQ(pen_device_free(device, memory, (uint64_t)TAGS * MOST, &err), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
}

/* Has it really landed, and was it not told before? */
static void check_told(uint64_t tag)
{
	CHECK(tag < TAGS && !told[tag]);
	told[tag] = true;
	CHECK_EQ(pen_device_get(device, seen, extents[tag].memory, extents[tag].length, &err), 0);
	pattern_fill(expected, extents[tag].length, extents[tag].offset);
	CHECK(!memcmp(seen, expected, extents[tag].length));
}

static size_t listen(void)
{
	uint64_t tags[16];
	size_t count, total = 0;

	while ((count = pen_job_landed(job, tags, 16, 30))) {
		for (size_t i = 0; i < count; i++)
			check_told(tags[i]);
		total += count;
	}
	return total;
}

static void every_tag_is_told_once(const char *device_name, const char *name)
{
	set_up(device_name, name);
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, TAGS, &options, &job, &err), 0);
	CHECK_EQ(listen(), TAGS);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(every_tag_is_told_once_on_the_host)
{
	every_tag_is_told_once("host", "pattern:64M,rate=100M");
}

TEST(every_tag_is_told_once_on_a_gpu)
{
	NEED_FAKE_GPU();
	every_tag_is_told_once("cuda:0", "pattern:64M,rate=100M");
}

TEST(a_tag_of_many_extents_is_told_after_the_last)
{
	set_up("host", "pattern:64M,rate=50M");
	for (uint64_t i = 0; i < TAGS; i++)
		extents[i].tag = i % 2;
	options.tags = 2;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, TAGS, &options, &job, &err), 0);
	for (unsigned int left = 2; left; left--) {
		uint64_t tag;

		CHECK_EQ(pen_job_landed(job, &tag, 1, 30), 1);
		for (uint64_t i = tag; i < TAGS; i += 2)
			check_told(i);
	}
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(rows_of_a_strided_extent_belong_to_one_tag)
{
	uint64_t tag = 7;

	set_up("host", "pattern:64M");
	extents[0] = (struct pen_extent){
		.object = object, .memory = memory, .length = 1000, .rows = 5000,
		.object_pitch = 4000, .memory_pitch = 1000,
	};
	options.tags = 1;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, 1, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, &tag, 1, 30), 1);
	CHECK_EQ(tag, 0);
	for (uint64_t row = 0; row < 5000; row++) {
		pattern_fill(expected, 1000, row * 4000);
		CHECK(!memcmp(memory + row * 1000, expected, 1000));
	}
	CHECK_EQ(pen_job_landed(job, &tag, 1, 30), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(nothing_to_read_has_landed_at_once)
{
	uint64_t tags[TAGS];

	set_up("host", "pattern:64M");
	for (uint64_t i = 0; i < TAGS; i++)
		extents[i].length = 0;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, TAGS, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, tags, TAGS, 0), TAGS);
	CHECK_EQ(pen_job_landed(job, tags, TAGS, 30), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(a_failed_job_tells_what_landed_and_no_more)
{
	size_t count;

	set_up("host", "pattern:64M,rate=50M");
	options.inject = "fail:5:ENXIO";
	options.request_size = 64 << 10;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, TAGS, &options, &job, &err), 0);
	count = listen();
	CHECK(count >= TAGS / 7 && count < TAGS);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ENXIO);
	tear_down();
}

TEST(waiting_for_a_tag_ends_on_time)
{
	uint64_t tag;

	set_up("host", "pattern:64M,latency=400ms");
	options.tags = 1;
	extents[1].tag = 0;
	CHECK_EQ(pen_job_start(PEN_READ, device, &extents[1], 1, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, &tag, 1, 0.01), 0);
	CHECK_EQ(pen_job_landed(job, &tag, 1, 30), 1);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(who_did_not_ask_is_told_nothing)
{
	uint64_t tag;

	set_up("host", "pattern:64M");
	options.tags = 0;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, TAGS, &options, &job, &err), 0);
	CHECK_EQ(pen_job_landed(job, &tag, 1, 30), 0);
	CHECK_EQ(pen_job_wait(job, &report, &err), 0);
	tear_down();
}

TEST(a_tag_beyond_the_number_of_tags_is_refused)
{
	set_up("host", "pattern:64M");
	extents[5].tag = TAGS;
	CHECK_EQ(pen_job_start(PEN_READ, device, extents, TAGS, &options, &job, &err), -EINVAL);
	CHECK(strstr(err.message, "tag 300 of 300"));
	tear_down();
}

TEST(a_write_has_no_tags)
{
	struct pen_object *sink;

	set_up("host", "pattern:64M");
	CHECK_EQ(pen_object_open("null:", PEN_WRITE, 0, &sink, &err), 0);
	extents[1].object = sink;
	CHECK_EQ(pen_job_start(PEN_WRITE, device, &extents[1], 1, &options, &job, &err), -EINVAL);
	CHECK(strstr(err.message, "tags"));
	pen_object_close(sink);
	tear_down();
}

TEST_MAIN
