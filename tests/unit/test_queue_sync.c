/* SPDX-License-Identifier: MIT */
/* pread and pwrite behind the queue's contract: failed, short or full, each request home once. */
#include "queue_kit.h"
#include "sys/fault.h"

TEST(reads_come_home_full)
{
	open_file(make_file("file", 1 << 20), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_sync_ops, 8, NULL, NULL), 0);
	prepare(100, 5000, false, false);
	run_requests(100);
	CHECK_EQ(full, 100);
	CHECK_EQ(pattern_check(memory, 500000, 0), 500000);
	CHECK_EQ(memory[500000], 0xee);
	end_queue();
}

TEST(writes_come_home_full)
{
	const char *path = in_scratch("new");

	open_file(path, PEN_WRITE, 500000);
	CHECK_EQ(start_queue(&queue_sync_ops, 8, NULL, NULL), 0);
	pattern_fill(memory, 500000, 0);
	prepare(100, 5000, true, false);
	run_requests(100);
	CHECK_EQ(full, 100);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	CHECK_EQ(good_bytes(path), 500000);
	end_queue();
}

TEST(a_direct_read_may_ask_for_more_than_it_needs)
{
	open_file(make_file("file", 10000), PEN_READ, 0);
	if (object->direct_fd < 0)
		SKIP("no O_DIRECT here");
	CHECK_EQ(start_queue(&queue_sync_ops, 8, NULL, NULL), 0);
	prepare(2, 8192, false, true);
	requests[1].length = 10000 - 8192;
	requests[1].room = 4096;
	run_requests(2);
	CHECK_EQ(full, 2);
	CHECK_EQ(pattern_check(memory, 10000, 0), 10000);
	end_queue();
}

TEST(the_end_of_the_file_is_short)
{
	open_file(make_file("file", 10000), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_sync_ops, 8, NULL, NULL), 0);
	prepare(3, 8000, false, false);
	run_requests(3);
	CHECK_EQ(full, 1);
	CHECK_EQ(requests[1].done, 2000);
	CHECK_EQ(requests[2].done, 0);
	end_queue();
}

static int fail_third(const char *name)
{
	static int calls;

	return !strcmp(name, "pread") && ++calls == 3 ? EIO : 0;
}

TEST(a_failure_is_its_requests_own)
{
	open_file(make_file("file", 10000), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_sync_ops, 2, NULL, NULL), 0);
	prepare(10, 1000, false, false);
	sys_fault_hook = fail_third;
	run_requests(10);
	sys_fault_hook = NULL;
	CHECK_EQ(failed, 1);
	CHECK_EQ(full, 9);
	CHECK_EQ(requests[2].result, -EIO);
	end_queue();
}

TEST(no_more_are_queued_than_the_depth)
{
	struct queue_request *home[8];

	open_file(make_file("file", 10000), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_sync_ops, 3, NULL, NULL), 0);
	prepare(5, 1000, false, false);
	CHECK_EQ(queue_reap(&queue, home, 8, 0), 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(queue_submit(&queue, &requests[i]), 0);
	CHECK_EQ(queue_submit(&queue, &requests[3]), -EAGAIN);
	CHECK_EQ(queue_reap(&queue, home, 2, 0), 2);
	CHECK_EQ(queue_submit(&queue, &requests[3]), 0);
	CHECK_EQ(queue_reap(&queue, home, 8, 0), 2);
	end_queue();
}

TEST_MAIN
