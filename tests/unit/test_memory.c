/* SPDX-License-Identifier: MIT */
/* How much memory may still be taken, by made-up trees of /proc and /sys. */
#include "penstock.h"
#include "scratch.h"
#include "sys/memory.h"

#define GIB ((uint64_t)1 << 30)

/* A file of a made-up machine, with the folders above it. */
static void put(const char *path, const char *text)
{
	char full[700], command[800];
	FILE *file;

	snprintf(full, sizeof(full), "%s", in_scratch(path));
	snprintf(command, sizeof(command), "mkdir -p \"$(dirname '%s')\"", full);
	CHECK(!system(command));
	file = fopen(full, "w");
	CHECK(file != NULL);
	fputs(text, file);
	CHECK(!fclose(file));
}

static void put_number(const char *path, uint64_t number)
{
	char text[32];

	snprintf(text, sizeof(text), "%llu\n", (unsigned long long)number);
	put(path, text);
}

static void machine_of_8_gib(void)
{
	put("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n"
			    "MemAvailable:    8388608 kB\nSwapFree: 999999 kB\n");
}

static uint64_t available(void)
{
	in_scratch("");
	return memory_available(scratch);
}

TEST(a_machine_that_says_nothing_has_no_limit)
{
	CHECK(available() == UINT64_MAX);
}

TEST(without_groups_the_machine_has_the_say)
{
	machine_of_8_gib();
	CHECK_EQ(available(), 8 * GIB);
	put("proc/self/cgroup", "0::/user.slice\n");
	CHECK_EQ(available(), 8 * GIB);
}

TEST(the_tightest_group_on_the_way_to_the_root_holds)
{
	machine_of_8_gib();
	put("proc/self/cgroup", "0::/a/b\n");
	put("sys/fs/cgroup/a/b/memory.max", "max\n");
	put_number("sys/fs/cgroup/a/b/memory.current", GIB);
	CHECK_EQ(available(), 8 * GIB);
	put_number("sys/fs/cgroup/a/memory.max", 3 * GIB);
	put_number("sys/fs/cgroup/a/memory.current", GIB);
	CHECK_EQ(available(), 2 * GIB);
	put_number("sys/fs/cgroup/a/b/memory.max", 5 * GIB / 2);
	CHECK_EQ(available(), 3 * GIB / 2);
	/* Such a root has limits only in a container, whose own it is. */
	put_number("sys/fs/cgroup/memory.max", GIB);
	put_number("sys/fs/cgroup/memory.current", GIB / 2);
	CHECK_EQ(available(), GIB / 2);
}

/* Who is above it is slowed down until pages are given back. */
TEST(a_limit_that_only_slows_down_counts_too)
{
	machine_of_8_gib();
	put("proc/self/cgroup", "0::/a\n");
	put("sys/fs/cgroup/a/memory.max", "max\n");
	put_number("sys/fs/cgroup/a/memory.high", 3 * GIB);
	put_number("sys/fs/cgroup/a/memory.current", GIB);
	CHECK_EQ(available(), 2 * GIB);
	put_number("sys/fs/cgroup/a/memory.max", 2 * GIB);
	CHECK_EQ(available(), GIB);
}

TEST(what_a_group_has_cached_counts_as_free)
{
	machine_of_8_gib();
	put("proc/self/cgroup", "0::/\n");
	put_number("sys/fs/cgroup/memory.max", 4 * GIB);
	put_number("sys/fs/cgroup/memory.current", 4 * GIB);
	CHECK_EQ(available(), 0);
	put("sys/fs/cgroup/memory.stat", "anon 5\nfile 3000000000\nactive_file 1073741824\n"
					 "inactive_file 2147483648\nslab 7\n");
	CHECK_EQ(available(), 3 * GIB);
}

TEST(groups_of_the_first_version_count_too)
{
	machine_of_8_gib();
	put("proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/job\n0::/\n");
	put_number("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 2 * GIB);
	put_number("sys/fs/cgroup/memory/job/memory.usage_in_bytes", GIB);
	put("sys/fs/cgroup/memory/job/memory.stat",
	    "inactive_file 1\ntotal_active_file 536870912\ntotal_inactive_file 0\n");
	CHECK_EQ(available(), 3 * GIB / 2);
	/* Without a limit of its own it has one that nobody reaches. */
	put_number("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 0x7ffffffffffff000);
	CHECK_EQ(available(), 8 * GIB);
}

/* A container that sees the name it has outside finds its own group at the root. */
TEST(a_group_whose_name_is_not_found_is_looked_for_at_the_root)
{
	machine_of_8_gib();
	put("proc/self/cgroup", "4:memory:/docker/0123\n");
	put_number("sys/fs/cgroup/memory/memory.limit_in_bytes", GIB);
	put_number("sys/fs/cgroup/memory/memory.usage_in_bytes", 0);
	CHECK_EQ(available(), GIB);
}

TEST(this_machine_has_an_answer)
{
	CHECK(memory_available("") > 0 && memory_available("") < UINT64_MAX);
	CHECK(pen_memory_available() > 0 && pen_memory_available() < UINT64_MAX);
}

TEST_MAIN
