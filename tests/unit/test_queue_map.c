/* SPDX-License-Identifier: MIT */
/*
 * The map queue over the fake driver, which refuses to pin a file mapping for writing: a request
 * comes home with pinned memory that holds the file's bytes, and release() gives it all back.
 */
#include "fake_gpu.h"
#include "queue_kit.h"
#include "sys/fault.h"

static struct pen_device *gpu;

static int start_map(void)
{
	struct queue_setup setup = { .depth = 8 };

	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK_EQ(pen_device_ready(gpu, &err), 0);
	CHECK_EQ(device_enter(gpu, &err), 0);
	setup.device = gpu;
	return queue_init(&queue, &queue_map_ops, &setup, &err);
}

static void end_map(void)
{
	end_queue();
	pen_device_close(gpu);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST(a_request_lends_the_page_cache_pinned_until_released)
{
	static const struct {
		uint64_t offset;
		size_t length;
	} ranges[] = { { 0, 4096 }, { 1, 1 }, { 4095, 2 }, { 5000, 20000 }, { 99000, 1000 } };

	NEED_FAKE_GPU();
	open_file(make_file("file", 100000), PEN_READ, 0);
	CHECK_EQ(start_map(), 0);
	prepare(5, 1, false, false);
	for (int i = 0; i < 5; i++) {
		requests[i].offset = ranges[i].offset;
		requests[i].length = requests[i].room = ranges[i].length;
		requests[i].buffer = NULL;
	}
	run_requests(5);
	CHECK_EQ(full, 5);
	CHECK(fake_gpu_has("registrations", 5));
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(pattern_check(requests[i].buffer, ranges[i].length, ranges[i].offset),
			 ranges[i].length);
		queue_release(&queue, &requests[i]);
		CHECK(fake_gpu_has("registrations", (unsigned long)(4 - i)));
		queue_release(&queue, &requests[i]);
	}
	end_map();
}

TEST(a_refused_registration_comes_home_failed_and_leaves_nothing)
{
	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuMemHostRegister:2=2", 1);
	open_file(make_file("file", 100000), PEN_READ, 0);
	CHECK_EQ(start_map(), 0);
	prepare(3, 8192, false, false);
	run_requests(3);
	CHECK(failed == 1 && full == 2);
	CHECK_EQ(requests[1].result, -ENOMEM);
	CHECK(strstr(requests[1].error.hint, "ulimit -l"));
	for (int i = 0; i < 3; i++)
		queue_release(&queue, &requests[i]);
	CHECK(fake_gpu_has("registrations", 0));
	end_map();
}

static int fail_mmap(const char *name)
{
	return !strcmp(name, "mmap") ? ENOMEM : 0;
}

TEST(a_refused_mapping_comes_home_failed)
{
	NEED_FAKE_GPU();
	open_file(make_file("file", 100000), PEN_READ, 0);
	CHECK_EQ(start_map(), 0);
	prepare(3, 8192, false, false);
	sys_fault_hook = fail_mmap;
	run_requests(3);
	sys_fault_hook = NULL;
	CHECK_EQ(failed, 3);
	CHECK_EQ(requests[0].result, -ENOMEM);
	for (int i = 0; i < 3; i++)
		queue_release(&queue, &requests[i]);
	end_map();
}

TEST(a_driver_that_cannot_pin_read_only_is_refused_in_words)
{
	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_READ_ONLY_REGISTER", "0", 1);
	CHECK_EQ(start_map(), -ENOTSUP);
	CHECK(strstr(err.message, "read-only"));
	pen_device_close(gpu);
}

TEST_MAIN
