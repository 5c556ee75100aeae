/* SPDX-License-Identifier: MIT */
/* Explaining: the same answer as a job would give, without moving a byte. */
#include "fake_gpu.h"
#include "io/object.h"
#include "scratch.h"
#include "sys/fault.h"

#define MIB (1ull << 20)

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static struct pen_explanation *answer;

static int explain(const char *device_name, const char *name, const struct pen_options *options)
{
	CHECK_EQ(pen_device_open(device_name, &device, &err), 0);
	CHECK_EQ(pen_object_open(name, PEN_READ, 0, &object, &err), 0);
	return pen_explain(object, device, options, &answer, &err);
}

static void done(void)
{
	pen_explain_free(answer);
	pen_object_close(object);
	pen_device_close(device);
}

static void check_sums(uint64_t size)
{
	uint64_t at = 0, resident = 0, bytes = 0;

	for (size_t i = 0; i < answer->range_count; i++) {
		CHECK_EQ(answer->ranges[i].offset, at);
		CHECK(answer->ranges[i].length && answer->ranges[i].path[0]);
		CHECK(answer->ranges[i].resident <= answer->ranges[i].length);
		at += answer->ranges[i].length;
		resident += answer->ranges[i].resident;
	}
	for (unsigned int i = 0; i < answer->path_count; i++) {
		CHECK(answer->paths[i].path[0] && answer->paths[i].reason[0]);
		bytes += answer->paths[i].bytes;
	}
	CHECK_EQ(at, size);
	CHECK_EQ(bytes, size);
	CHECK_EQ(answer->bytes, size);
	CHECK_EQ(answer->resident, resident);
}

TEST(a_cached_file_goes_through_the_cache)
{
	const uint64_t size = 4 * MIB + 12345;
	const char *path = make_file("file", size);

	CHECK_EQ(good_bytes(path), size);
	CHECK_EQ(explain("host", path, NULL), 0);
	check_sums(size);
	CHECK_EQ(answer->resident, size);
	CHECK_EQ(answer->range_count, 1);
	CHECK_TEXT(answer->ranges[0].path, "cached");
	CHECK_TEXT(answer->device, "host");
	CHECK_EQ(answer->memory_limit, 128 * MIB);
	CHECK(answer->lanes && answer->filesystem[0] && answer->store[0]);
	CHECK(answer->residency_by[0] && answer->queue[0]);
	done();
}

TEST(a_half_cached_file_has_a_range_of_each_kind)
{
	const char *path = make_file("file", 16 * MIB);
	static char bytes[8 << 20];
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	CHECK_EQ(pread(fd, bytes, sizeof(bytes), 8 << 20), sizeof(bytes));
	close(fd);
	CHECK_EQ(explain("host", path, NULL), 0);
	if (answer->resident != 8 * MIB || !answer->offset_alignment)
		SKIP("pages cannot be dropped or direct reads not be had here");
	check_sums(16 * MIB);
	CHECK_EQ(answer->range_count, 2);
	CHECK(!strncmp(answer->ranges[0].path, "direct-", 7));
	CHECK_TEXT(answer->ranges[1].path, "cached");
	CHECK_EQ(answer->ranges[0].resident, 0);
	CHECK_EQ(answer->ranges[1].resident, 8 * MIB);
	CHECK_EQ(answer->ranges[1].offset, 8 * MIB);
	done();
}

TEST(an_empty_file_has_nothing_to_explain)
{
	CHECK_EQ(explain("host", make_file("empty", 0), NULL), 0);
	check_sums(0);
	CHECK_EQ(answer->range_count, 0);
	done();
}

TEST(what_has_no_end_is_refused)
{
	CHECK_EQ(explain("host", "null:", NULL), -EINVAL);
	CHECK(!answer && err.message[0]);
	done();
}

TEST(a_written_object_is_refused)
{
	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_object_open(in_scratch("new"), PEN_WRITE, 100, &object, &err), 0);
	CHECK_EQ(pen_explain(object, device, NULL, &answer, &err), -EBADF);
	CHECK(err.message[0]);
	done();
}

TEST(a_type_that_cannot_be_had_is_refused_like_in_a_job)
{
	struct pen_options options = PEN_OPTIONS_INIT;

	options.transfer = PEN_GPU_DIRECT;
	CHECK_EQ(explain("host", make_file("file", 5000), &options), -ENOTSUP);
	CHECK(strstr(err.hint, "CPU_ONLY"));
	done();
}

TEST(better_ways_are_listed_with_the_reason)
{
	NEED_FAKE_GPU();
	CHECK_EQ(explain("cuda:0", make_file("file", 40 * MIB), NULL), 0);
	check_sums(40 * MIB);
	CHECK(answer->refused_count >= 1);
	CHECK_TEXT(answer->refused[0].path, "gds");
	CHECK(answer->refused[0].reason[0]);
	CHECK_TEXT(answer->device, "cuda:0");
	done();
}

static int fail_direct(const char *name)
{
	return !strcmp(name, "reopen") ? EINVAL : 0;
}

TEST(a_file_without_direct_access_says_why)
{
	const char *path = make_file("file", 100000);

	sys_fault_hook = fail_direct;
	CHECK_EQ(explain("host", path, NULL), 0);
	sys_fault_hook = NULL;
	check_sums(100000);
	CHECK_EQ(answer->offset_alignment, 0);
	CHECK(answer->refused_count && strstr(answer->refused[0].reason, "O_DIRECT"));
	done();
}

TEST_MAIN
