/* SPDX-License-Identifier: MIT */
/*
 * io_uring behind the queue's contract, with and without what it can register, and what it does
 * when the kernel refuses to take requests: they come home failed, none is lost.
 */
#include "queue_kit.h"
#include "sys/fault.h"

#define NEED_URING()                                                \
	do {                                                        \
		if (queue_uring_probe(&err))                        \
			SKIP("io_uring is not to be had here");     \
	} while (0)

static const char *failing;
static int failing_code = EPERM, failing_times = -1, failing_calls;

static int fail_named(const char *name)
{
	if (strcmp(name, failing))
		return 0;
	failing_calls++;
	return failing_times < 0 || failing_calls <= failing_times ? failing_code : 0;
}

static void fail(const char *name, int code, int times)
{
	failing = name;
	failing_code = code;
	failing_times = times;
	failing_calls = 0;
	sys_fault_hook = fail_named;
}

TEST(the_probe_says_yes_or_why_not)
{
	int rc = queue_uring_probe(&err);

	CHECK_EQ(rc, queue_uring_probe(NULL));
	CHECK(!rc || (err.code == rc && err.message[0] && err.hint[0]));
}

TEST(a_forbidden_ring_says_who_may_have_forbidden_it)
{
	fail("io_uring_setup", EPERM, -1);
	CHECK_EQ(queue_uring_probe(&err), -EPERM);
	CHECK(strstr(err.hint, "seccomp"));
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), -EPERM);
	CHECK(strstr(err.hint, "io_uring_disabled"));
	fail("io_uring_setup", ENOSYS, -1);
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), -ENOSYS);
	CHECK(err.hint[0]);
	fail("io_uring_setup", ENOMEM, -1);
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), -ENOMEM);
	CHECK(strstr(err.hint, "ulimit -l"));
	fail("malloc", ENOMEM, -1);
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), -ENOMEM);
}

/* Both directions, with the memory attached as a piece; `direct` where the store can. */
static void there_and_back(bool direct)
{
	const size_t size = 1 << 20;

	open_file(make_file("file", size), PEN_READ, 0);
	direct = direct && object->direct_fd >= 0;
	CHECK_EQ(start_queue(&queue_uring_ops, 8, NULL, NULL), 0);
	queue_attach(&queue, 0, memory, KIT_ROOM);
	prepare(128, size / 128, false, direct);
	for (int i = 0; i < 128; i += 2)
		requests[i].buffer_index = 0;
	run_requests(128);
	CHECK_EQ(full, 128);
	CHECK_EQ(pattern_check(memory, size, 0), size);
	end_queue();

	open_file(in_scratch("new"), PEN_WRITE, size);
	direct = direct && object->direct_fd >= 0;
	CHECK_EQ(start_queue(&queue_uring_ops, 8, NULL, NULL), 0);
	queue_attach(&queue, 3, memory, KIT_ROOM);
	pattern_fill(memory, size, 0);
	prepare(128, size / 128, true, direct);
	for (int i = 0; i < 128; i += 2)
		requests[i].buffer_index = 3;
	run_requests(128);
	CHECK_EQ(full, 128);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	CHECK_EQ(good_bytes(in_scratch("new")), size);
	end_queue();
}

TEST(bytes_travel_with_everything_registered)
{
	NEED_URING();
	there_and_back(true);
	there_and_back(false);
}

TEST(bytes_travel_with_nothing_registered)
{
	NEED_URING();
	fail("io_uring_register", EPERM, -1);
	there_and_back(true);
	CHECK(failing_calls >= 4);
	there_and_back(false);
}

TEST(bytes_travel_with_only_some_registered)
{
	NEED_URING();
	for (int times = 1; times < 5; times++) {
		fail("io_uring_register", ENOMEM, times);
		there_and_back(true);
	}
}

TEST(a_ring_does_not_take_the_place_of_a_standard_stream)
{
	const char *path = make_file("file", 10000);

	NEED_URING();
	close_standard_streams();
	open_file(path, PEN_READ, 0);
	fail("fcntl", EMFILE, -1);
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), -EMFILE);
	sys_fault_hook = NULL;
	CHECK(standard_streams_are_closed());
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), 0);
	CHECK(standard_streams_are_closed());
	prepare(10, 1000, false, false);
	run_requests(10);
	CHECK_EQ(full, 10);
	CHECK_EQ(pattern_check(memory, 10000, 0), 10000);
	end_queue();
	CHECK(standard_streams_are_closed());
}

TEST(no_more_are_queued_than_the_depth)
{
	struct queue_request *home[8];
	unsigned int n = 0;

	NEED_URING();
	open_file(make_file("file", 10000), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), 0);
	prepare(8, 1000, false, false);
	for (int i = 0; i < 4; i++)
		CHECK_EQ(queue_submit(&queue, &requests[i]), 0);
	CHECK_EQ(queue_submit(&queue, &requests[4]), -EAGAIN);
	CHECK_EQ(queue_submit(&queue, &requests[4]), -EAGAIN);
	for (int i = 0; i < 1000 && n < 4; i++)
		n += queue_reap(&queue, home, 8, 1000000);
	CHECK_EQ(n, 4);
	prepare(8, 1000, false, false);
	run_requests(8);
	CHECK_EQ(full, 8);
	CHECK_EQ(pattern_check(memory, 8000, 0), 8000);
	end_queue();
}

TEST(the_end_of_the_file_is_short)
{
	NEED_URING();
	open_file(make_file("file", 10000), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), 0);
	prepare(3, 8000, false, false);
	run_requests(3);
	CHECK_EQ(full, 1);
	CHECK_EQ(requests[1].done, 2000);
	CHECK_EQ(requests[2].done, 0);
	end_queue();
}

TEST(a_direct_read_may_ask_for_more_than_it_needs)
{
	NEED_URING();
	open_file(make_file("file", 10000), PEN_READ, 0);
	if (object->direct_fd < 0)
		SKIP("no O_DIRECT here");
	CHECK_EQ(start_queue(&queue_uring_ops, 4, NULL, NULL), 0);
	prepare(2, 8192, false, true);
	requests[1].length = 10000 - 8192;
	requests[1].room = 4096;
	run_requests(2);
	CHECK_EQ(full, 2);
	CHECK_EQ(pattern_check(memory, 10000, 0), 10000);
	/* Not aligned: the kernel's refusal comes home as a failure. */
	prepare(1, 1000, false, true);
	requests[0].offset = 1;
	run_requests(1);
	CHECK_EQ(failed, 1);
	CHECK_EQ(requests[0].result, -EINVAL);
	end_queue();
}

TEST(a_ring_that_takes_nothing_brings_all_home_failed)
{
	NEED_URING();
	open_file(make_file("file", 1 << 20), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_uring_ops, 16, NULL, NULL), 0);
	prepare(100, 5000, false, false);
	fail("io_uring_enter", EIO, -1);
	run_requests(100);
	CHECK_EQ(failed, 100);
	CHECK_EQ(requests[99].result, -EIO);
	/* And once the kernel takes them again, all is well: nothing was left in the ring. */
	sys_fault_hook = NULL;
	prepare(100, 5000, false, false);
	run_requests(100);
	CHECK_EQ(full, 100);
	CHECK_EQ(pattern_check(memory, 500000, 0), 500000);
	end_queue();
}

TEST(a_refusal_now_and_then_costs_only_its_own_requests)
{
	NEED_URING();
	open_file(make_file("file", 1 << 20), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_uring_ops, 16, NULL, NULL), 0);
	prepare(100, 5000, false, false);
	fail("io_uring_enter", ENXIO, 1);
	run_requests(100);
	CHECK(failed >= 1 && failed <= 16);
	CHECK_EQ(full + failed, 100);
	end_queue();
}

TEST(a_busy_kernel_is_asked_again)
{
	NEED_URING();
	open_file(make_file("file", 1 << 20), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_uring_ops, 16, NULL, NULL), 0);
	for (int code = 0; code < 3; code++) {
		prepare(100, 5000, false, false);
		fail("io_uring_enter", code == 0 ? EAGAIN : code == 1 ? EINTR : EBUSY, 20);
		run_requests(100);
		CHECK_EQ(full, 100);
	}
	end_queue();
}

TEST(a_kernel_that_stays_busy_for_good_is_given_up)
{
	NEED_URING();
	open_file(make_file("file", 1 << 20), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_uring_ops, 16, NULL, NULL), 0);
	prepare(20, 5000, false, false);
	fail("io_uring_enter", EAGAIN, -1);
	/* run_requests() gives up after 2000 empty reaps of 1 ms. */
	run_requests(20);
	CHECK_EQ(failed, 20);
	end_queue();
}

TEST(more_files_than_can_be_registered_take_turns)
{
	struct pen_object *objects[80];

	NEED_URING();
	make_file("file", 100000);
	open_file(in_scratch("file"), PEN_READ, 0);
	CHECK_EQ(start_queue(&queue_uring_ops, 16, NULL, NULL), 0);
	prepare(80, 1000, false, false);
	for (int i = 0; i < 80; i++) {
		CHECK_EQ(pen_object_open(in_scratch("file"), PEN_READ, 0, &objects[i], &err), 0);
		requests[i].object = objects[i];
	}
	run_requests(80);
	CHECK_EQ(full, 80);
	CHECK_EQ(pattern_check(memory, 80000, 0), 80000);
	for (int i = 0; i < 80; i++)
		pen_object_close(objects[i]);
	end_queue();
}

TEST_MAIN
