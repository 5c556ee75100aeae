/* SPDX-License-Identifier: MIT */
/*
 * Stores that are no files, played by pattern: - what they wish of requests is kept, a request is
 * resent whole where it must be, and one that waits for its time holds up nobody.
 */
#include "kit.h"

#define SIZE (64 * MIB)

static struct pen_device *host;
static struct pen_options options = PEN_OPTIONS_INIT;
static struct pen_report report = PEN_REPORT_INIT;
static unsigned char *memory;

static struct pen_extent open_store(const char *name)
{
	struct pen_extent all = { .length = SIZE };

	host = kit_device("host");
	OK(pen_device_alloc(host, SIZE, (void **)&memory, &kit_err));
	OK(pen_object_open(name, PEN_READ, 0, &all.object, &kit_err));
	all.memory = memory;
	return all;
}

static void close_store(struct pen_extent *all)
{
	CHECK_EQ(pattern_check(memory, SIZE, 0), SIZE);
	pen_object_close(all->object);
	OK(pen_device_free(host, memory, SIZE, &kit_err));
	pen_device_close(host);
}

TEST(no_request_is_larger_than_the_store_takes)
{
	struct pen_extent all = open_store("pattern:64M,most=256K");

	OK(pen_transfer(PEN_READ, host, &all, 1, &options, &report, &kit_err));
	CHECK(report.requests >= SIZE / (256 * KIB));
	CHECK(report.request_size <= 256 * KIB);
	close_store(&all);
}

TEST(looking_for_the_best_size_begins_where_the_store_says)
{
	struct pen_extent all = open_store("pattern:64M,best=4M,latency=1ms,rate=200M");

	OK(pen_transfer(PEN_READ, host, &all, 1, &options, &report, &kit_err));
	CHECK_EQ(report.request_size, 4 * MIB);
	CHECK(report.requests < 40);
	close_store(&all);
}

TEST(a_request_that_must_be_resent_whole_is)
{
	struct pen_extent all = open_store("pattern:64M,whole=1,retry=1us");

	/* A store that takes the rest of a request would move each byte once. */
	options.inject = "short:2,short:3,short:4";
	OK(pen_transfer(PEN_READ, host, &all, 1, &options, &report, &kit_err));
	CHECK_EQ(report.retries, 3);
	CHECK(report.storage_bytes > SIZE);
	close_store(&all);
}

TEST(a_request_that_is_resent_whole_has_its_time_too)
{
	struct pen_extent all = open_store("pattern:64M,whole=1,retry=20ms");

	options.inject = "short:*";
	REFUSED(-EIO, pen_transfer(PEN_READ, host, &all, 1, &options, &report, &kit_err));
	/* 20 + 40 + 80 + 160 + 320 ms. */
	CHECK(report.seconds >= 0.6);
	pattern_fill(memory, SIZE, 0);
	close_store(&all);
}

TEST(a_request_that_comes_up_short_is_continued_elsewhere)
{
	struct pen_extent all = open_store("pattern:64M");

	options.inject = "short:2,short:3,short:4";
	OK(pen_transfer(PEN_READ, host, &all, 1, &options, &report, &kit_err));
	CHECK_EQ(report.retries, 3);
	CHECK_EQ(report.storage_bytes, SIZE);
	close_store(&all);
}

TEST_ALONE(a_request_that_waits_for_its_time_holds_up_nobody)
{
	struct pen_extent all = open_store("pattern:64M,retry=400ms,rate=2G");
	struct pen_progress progress;
	struct pen_job *job;

	/* One lane, so that whatever the waiting one holds up would be all the rest. */
	options.lanes = 1;
	options.inject = "fail:2:EIO";
	OK(pen_job_start(PEN_READ, host, &all, 1, &options, &job, &kit_err));
	CHECK_EQ(pen_job_wait_for(job, 0.25), -ETIMEDOUT);
	pen_job_poll(job, &progress);
	/* All but the one that failed is there long before its time. */
	CHECK(KIT_SANITIZED || progress.bytes >= SIZE - 8 * MIB);
	OK(pen_job_wait(job, &report, &kit_err));
	CHECK_EQ(report.retries, 1);
	CHECK(report.seconds >= 0.4 && (KIT_SANITIZED || report.seconds < 0.8));
	close_store(&all);
}

TEST_ALONE(who_waits_for_its_time_is_cancelled_at_once)
{
	struct pen_extent all = open_store("pattern:64M,retry=30s");
	struct pen_job *job;

	options.inject = "fail:*:EIO";
	OK(pen_job_start(PEN_READ, host, &all, 1, &options, &job, &kit_err));
	CHECK_EQ(pen_job_wait_for(job, 0.1), -ETIMEDOUT);
	pen_job_cancel(job);
	CHECK_EQ(pen_job_wait_for(job, 5), 0);
	REFUSED(-ECANCELED, pen_job_wait(job, &report, &kit_err));
	pattern_fill(memory, SIZE, 0);
	close_store(&all);
}

TEST(retries_end)
{
	struct pen_extent all = open_store("pattern:64M,retry=1us");

	options.inject = "fail:*:EIO";
	REFUSED(-EIO, pen_transfer(PEN_READ, host, &all, 1, &options, &report, &kit_err));
	CHECK(report.retries >= 5);
	pattern_fill(memory, SIZE, 0);
	close_store(&all);
}

TEST_MAIN
