/* SPDX-License-Identifier: MIT */
/*
 * pen_job_eventfd(): a program that only ever polls, and never waits in the library, hears of every
 * group and of the end, however the job ends and whenever it begins to listen; and the descriptor
 * is silent while there is nothing to hear. The last part of each case is a wait for the job, which
 * takes the descriptor back.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include "fake_gpu.h"
#include "penstock.h"
#include "sys/fault.h"

#define GROUPS 200u
#define EACH (64u << 10)
#define TOTAL ((uint64_t)GROUPS * EACH)
#define PATIENCE_MS 60000

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static struct pen_job *job;
static struct pen_options options = PEN_OPTIONS_INIT;
static unsigned char *memory;
static int told[GROUPS];

static void start(enum pen_mode mode, const char *device_name, const char *name)
{
	struct pen_extent extents[GROUPS] = { { 0 } };

	memset(told, 0, sizeof(told));
	CHECK_EQ(pen_device_open(device_name, &device, &err), 0);
	CHECK_EQ(pen_object_open(name, mode, mode == PEN_READ ? 0 : TOTAL, &object, &err), 0);
	CHECK_EQ(pen_device_alloc(device, TOTAL, (void **)&memory, &err), 0);
	for (uint64_t i = 0; i < GROUPS; i++) {
		extents[i].object = object;
		extents[i].offset = i * EACH;
		extents[i].memory = memory + i * EACH;
		extents[i].length = EACH;
		extents[i].group = options.groups ? i : 0;
	}
	CHECK_EQ(pen_job_start(mode, device, extents, GROUPS, &options, &job, &err), 0);
}

static int finish(void)
{
	int rc = pen_job_wait(job, NULL, &err);

	CHECK_EQ(pen_device_free(device, memory, TOTAL, NULL), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
	return rc;
}

static bool readable(int fd, int patience_ms)
{
	struct pollfd one = { .fd = fd, .events = POLLIN };
	int count = poll(&one, 1, patience_ms);

	CHECK(count == 0 || (count == 1 && one.revents == POLLIN));
	return count == 1;
}

static void take(int fd)
{
	uint64_t value = 0;

	CHECK_EQ(read(fd, &value, sizeof(value)), sizeof(value));
	CHECK(value > 0);
}

static void drain(size_t (*ask)(struct pen_job *, uint64_t *, size_t, double))
{
	uint64_t groups[16];
	size_t count;

	while ((count = ask(job, groups, 16, 0)))
		for (size_t i = 0; i < count; i++) {
			CHECK(groups[i] < GROUPS);
			told[groups[i]]++;
		}
}

/* What the header says to do, and nothing else; as often as each group is to be told. */
static void loop(int fd, bool writing)
{
	bool ended = false;

	while (!ended) {
		CHECK(readable(fd, PATIENCE_MS));
		take(fd);
		/* Before the groups are asked for: what came with the end is there then. */
		ended = !pen_job_wait_for(job, 0);
		if (writing) {
			drain(pen_job_gathered);
			drain(pen_job_stored);
		} else {
			drain(pen_job_landed);
		}
	}
	for (size_t i = 0; i < GROUPS; i++)
		CHECK_EQ(told[i], writing ? 2 : 1);
}

static void every_group_and_the_end(enum pen_mode mode, const char *device_name, const char *name)
{
	options.groups = GROUPS;
	start(mode, device_name, name);
	int fd = pen_job_eventfd(job, &err);

	CHECK(fd > 2);
	loop(fd, mode != PEN_READ);
	CHECK_EQ(finish(), 0);
}

TEST(polling_hears_of_every_group_that_lands)
{
	every_group_and_the_end(PEN_READ, "host", "pattern:16M,rate=100M");
}

TEST(polling_hears_of_every_group_that_lands_on_a_gpu)
{
	NEED_FAKE_GPU();
	every_group_and_the_end(PEN_READ, "cuda:0", "pattern:16M,rate=100M");
}

TEST(polling_hears_of_every_group_that_is_written)
{
	every_group_and_the_end(PEN_WRITE, "host", "null:");
}

TEST(a_job_without_groups_tells_its_end)
{
	start(PEN_READ, "host", "pattern:16M,rate=100M");
	int fd = pen_job_eventfd(job, &err);

	CHECK(readable(fd, PATIENCE_MS));
	CHECK_EQ(pen_job_wait_for(job, 0), 0);
	CHECK_EQ(finish(), 0);
}

TEST(the_descriptor_is_silent_while_there_is_nothing_to_tell)
{
	uint64_t group;

	options.groups = GROUPS;
	start(PEN_READ, "host", "pattern:16M,latency=500ms");
	int fd = pen_job_eventfd(job, &err);

	/* On a machine that stood still for so long there is something, and it can be asked for. */
	CHECK(!readable(fd, 0) || pen_job_landed(job, &group, 1, 0) == 1);
	CHECK_EQ(finish(), 0);
}

TEST(who_asks_late_hears_at_once_and_once)
{
	options.groups = GROUPS;
	start(PEN_READ, "host", "pattern:16M");
	CHECK_EQ(pen_job_wait_for(job, 60), 0);
	int fd = pen_job_eventfd(job, &err);

	CHECK(readable(fd, 0));
	take(fd);
	CHECK(!readable(fd, 0));
	/* Asking again is no news. */
	CHECK_EQ(pen_job_eventfd(job, &err), fd);
	CHECK(!readable(fd, 0));
	drain(pen_job_landed);
	for (size_t i = 0; i < GROUPS; i++)
		CHECK_EQ(told[i], 1);
	CHECK_EQ(finish(), 0);
}

TEST(a_cancelled_job_and_a_failed_one_tell_their_end)
{
	start(PEN_READ, "host", "pattern:16M,rate=4M");
	int fd = pen_job_eventfd(job, &err);

	pen_job_cancel(job);
	CHECK(readable(fd, PATIENCE_MS));
	CHECK_EQ(pen_job_wait_for(job, 0), 0);
	CHECK_EQ(finish(), -ECANCELED);

	options.inject = "fail:3+:ENODEV";
	start(PEN_READ, "host", "pattern:16M,latency=10ms");
	fd = pen_job_eventfd(job, &err);
	CHECK(readable(fd, PATIENCE_MS));
	CHECK_EQ(pen_job_wait_for(job, 0), 0);
	CHECK_EQ(finish(), -ENODEV);
}

TEST(edges_of_epoll_are_enough)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLET };
	bool ended = false;
	int loop_fd = epoll_create1(EPOLL_CLOEXEC);

	options.groups = GROUPS;
	start(PEN_READ, "host", "pattern:16M,rate=100M");
	int fd = pen_job_eventfd(job, &err);

	CHECK_EQ(epoll_ctl(loop_fd, EPOLL_CTL_ADD, fd, &event), 0);
	while (!ended) {
		CHECK_EQ(epoll_wait(loop_fd, &event, 1, PATIENCE_MS), 1);
		take(fd);
		ended = !pen_job_wait_for(job, 0);
		drain(pen_job_landed);
	}
	for (size_t i = 0; i < GROUPS; i++)
		CHECK_EQ(told[i], 1);
	CHECK_EQ(finish(), 0);
	close(loop_fd);
}

TEST(the_descriptor_is_non_blocking_closed_by_exec_and_closed_with_the_job)
{
	uint64_t value;

	start(PEN_READ, "host", "pattern:16M");
	CHECK_EQ(pen_job_wait_for(job, 60), 0);
	int fd = pen_job_eventfd(job, &err);

	CHECK_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
	take(fd);
	CHECK(read(fd, &value, sizeof(value)) < 0 && errno == EAGAIN);
	CHECK_EQ(finish(), 0);
	CHECK(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
}

static bool refused;

/* Lanes ask for other calls at the same time, and see nothing of it. */
static int no_descriptor_at_first(const char *name)
{
	if (strcmp(name, "eventfd") || refused)
		return 0;
	refused = true;
	return EMFILE;
}

TEST(where_there_is_no_descriptor_the_job_goes_on)
{
	sys_fault_hook = no_descriptor_at_first;
	start(PEN_READ, "host", "pattern:16M,rate=100M");
	CHECK_EQ(pen_job_eventfd(job, &err), -EMFILE);
	CHECK(err.code == -EMFILE && strstr(err.hint, "ulimit -n"));
	CHECK(pen_job_eventfd(job, NULL) > 2);
	CHECK_EQ(finish(), 0);
	sys_fault_hook = NULL;
}

TEST_MAIN
