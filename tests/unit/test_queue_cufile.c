/* SPDX-License-Identifier: MIT */
/*
 * The cuFile queue over the fake libcuda and libcufile: every flavour, both directions, and what
 * goes wrong on the way. The fakes read their environment once, so each case runs in a child of
 * its own; a case also fails if it leaves anything behind in either fake.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "io/queue.h"
#include "sys/cufile.h"
#include "sys/gds.h"
#include "sys/fault.h"
#include "test.h"

#define REQUESTS_MAX 400

/* One case's world, in the child. */
struct world {
	struct pen_device *device;
	struct pen_object object;
	char path[64];
	unsigned char *memory;		/* device */
	size_t size;
	struct queue queue;
	struct queue_request requests[REQUESTS_MAX];
	unsigned int failed, shorts, full, homes[REQUESTS_MAX];
	struct pen_error error;		/* of the last failed request */
};

static struct world world;
static int bad;

#define WANT(expression)                                                                        \
	do {                                                                                    \
		if (!(expression)) {                                                            \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #expression); \
			bad++;                                                                  \
		}                                                                               \
	} while (0)

static unsigned char byte_at(size_t offset)
{
	return (unsigned char)(offset * 31 + offset / 251);
}

static void open_world(size_t size, bool filled)
{
	struct pen_error err;
	unsigned char *bytes = malloc(size);
	const char *compat = getenv("FAKE_CUFILE_COMPAT");
	int fd;

	/* The library goes around the host, and the engine knows that it does. */
	gds_assume_real = compat && !strcmp(compat, "0");
	memset(&world, 0, sizeof(world));
	snprintf(world.path, sizeof(world.path), "/tmp/test_queue_cufile.%d", (int)getpid());
	fd = open(world.path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	for (size_t i = 0; i < size; i++)
		bytes[i] = byte_at(i);
	WANT(fd >= 0);
	if (filled)
		WANT(pwrite(fd, bytes, size, 0) == (ssize_t)size);
	world.object = (struct pen_object){ .id = 1, .name = world.path, .fd = fd,
					    .direct_fd = -1 };
	WANT(!pen_device_open("cuda:0", &world.device, &err));
	WANT(!pen_device_alloc(world.device, size, (void **)&world.memory, &err));
	world.size = size;
	if (!filled)
		WANT(!pen_device_put(world.device, world.memory, bytes, size, &err));
	free(bytes);
}

static void close_world(void)
{
	WANT(!pen_device_free(world.device, world.memory, world.size, NULL));
	pen_device_close(world.device);
	close(world.object.fd);
	unlink(world.path);
}

static int start(int transfer, unsigned int depth, struct pen_error *err)
{
	struct queue_setup setup = {
		.device = world.device, .depth = depth, .pieces = 1, .transfer = transfer,
	};

	return queue_init(&world.queue, &queue_cufile_ops, &setup, err);
}

static void prepare(unsigned int count, size_t length, size_t skip, bool write)
{
	memset(world.requests, 0, sizeof(world.requests));
	for (unsigned int i = 0; i < count; i++)
		world.requests[i] = (struct queue_request){
			.object = &world.object,
			.offset = skip + i * length,
			.length = length,
			.room = length,
			.buffer = world.memory + skip + i * length,
			.buffer_index = -1,
			.write = write,
		};
}

static void account(struct queue_request *request)
{
	WANT(request >= world.requests && request < world.requests + REQUESTS_MAX);
	WANT(++world.homes[request - world.requests] == 1);
	if (request->result) {
		world.failed++;
		world.error = request->error;
		WANT(request->error.code == request->result);
		WANT(request->error.message[0]);
	} else if (request->done < request->length) {
		world.shorts++;
	} else {
		world.full++;
	}
}

/* Send all and take all home; every one comes exactly once. */
static void run_requests(unsigned int count)
{
	struct queue_request *home[7];
	unsigned int sent = 0, taken = 0, idle = 0;

	world.failed = world.shorts = world.full = 0;
	memset(world.homes, 0, sizeof(world.homes));
	while (taken < count && idle < 10000) {
		unsigned int n;

		while (sent < count && !queue_submit(&world.queue, &world.requests[sent]))
			sent++;
		n = queue_reap(&world.queue, home, 7, 100000);
		idle = n ? 0 : idle + 1;
		for (unsigned int i = 0; i < n; i++)
			account(home[i]);
		taken += n;
	}
	WANT(taken == count);
	WANT(world.failed + world.shorts + world.full == count);
}

static void check_memory(size_t from, size_t length)
{
	unsigned char *bytes = malloc(length);
	size_t wrong = 0;

	WANT(!pen_device_get(world.device, bytes, world.memory + from, length, NULL));
	for (size_t i = 0; i < length; i++)
		wrong += bytes[i] != byte_at(from + i);
	WANT(!wrong);
	free(bytes);
}

static void check_file(size_t from, size_t length)
{
	unsigned char *bytes = malloc(length);
	size_t wrong = 0;

	WANT(pread(world.object.fd, bytes, length, (off_t)from) == (ssize_t)length);
	for (size_t i = 0; i < length; i++)
		wrong += bytes[i] != byte_at(from + i);
	WANT(!wrong);
	free(bytes);
}

static int leaks(const char *library, const char *function)
{
	void *handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
	int (*count)(char *, size_t) = NULL;
	char text[2048] = "";
	int n;

	if (!handle)
		return 0;
	*(void **)&count = dlsym(handle, function);
	n = count(text, sizeof(text));
	if (n)
		fprintf(stderr, "%s left behind: %s\n", library, text);
	return n;
}

/* Is it our fakes that the loader finds? Asked in a child: it must not load them here. */
static bool have_fakes(void)
{
	pid_t pid;
	int status = 1;

	fflush(NULL);
	pid = fork();
	if (!pid) {
		void *handle = dlopen("libcufile.so.0", RTLD_NOW);

		_exit(!handle || !dlsym(handle, "fake_cufile_leaks"));
	}
	return pid > 0 && waitpid(pid, &status, 0) == pid && !status;
}

/* Run a case with "NAME=value" settings, NULL at the end; 0 where all was well. */
static int in_child(void (*run)(int), int argument, const char *const *settings)
{
	pid_t pid;
	int status = 1;

	fflush(NULL);
	pid = fork();
	if (!pid) {
		for (; settings && *settings; settings++)
			putenv((char *)*settings);
		alarm(20);	/* a completion that never comes is a failure, not a hang */
		run(argument);
		bad += leaks("libcufile.so.0", "fake_cufile_leaks") != 0;
		bad += leaks("libcuda.so.1", "fake_cuda_leaks") != 0;
		fflush(NULL);
		_exit(bad != 0);
	}
	return pid > 0 && waitpid(pid, &status, 0) == pid ? status : -1;
}

#define CASE(run, argument, ...) \
	in_child(run, argument, (const char *const[]){ __VA_ARGS__ __VA_OPT__(,) NULL })

#define NEED_FAKES()                                                     \
	do {                                                             \
		if (!have_fakes())                                       \
			SKIP("the fake libcufile is not in the library path"); \
	} while (0)

static const int flavours[] = {
	PEN_GPU_DIRECT, PEN_GPU_DIRECT_ASYNC, PEN_GPU_BATCH, PEN_GPU_BATCH_STREAM,
};

#define EACH(i) (size_t i = 0; i < sizeof(flavours) / sizeof(flavours[0]); i++)

static void read_all(int transfer)
{
	open_world(REQUESTS_MAX * 1111 + 77, true);
	WANT(!start(transfer, 8, NULL));
	prepare(REQUESTS_MAX, 1111, 77, false);
	run_requests(REQUESTS_MAX);
	WANT(world.full == REQUESTS_MAX);
	check_memory(77, REQUESTS_MAX * 1111);
	queue_fini(&world.queue);
	close_world();
}

static void write_all(int transfer)
{
	open_world(REQUESTS_MAX * 1111 + 77, false);
	WANT(!start(transfer, 300, NULL));
	prepare(REQUESTS_MAX, 1111, 77, true);
	run_requests(REQUESTS_MAX);
	WANT(world.full == REQUESTS_MAX);
	check_file(77, REQUESTS_MAX * 1111);
	queue_fini(&world.queue);
	close_world();
}

TEST(bytes_arrive_by_every_flavour)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(read_all, flavours[i]), 0);
		CHECK_EQ(CASE(read_all, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
		CHECK_EQ(CASE(write_all, flavours[i]), 0);
		CHECK_EQ(CASE(read_all, flavours[i], "FAKE_CUDA_POLLS=0"), 0);
	}
}

TEST(batch_entries_come_home_in_any_order)
{
	NEED_FAKES();
	CHECK_EQ(CASE(read_all, PEN_GPU_BATCH, "FAKE_CUFILE_BATCH_SHUFFLE=1"), 0);
	CHECK_EQ(CASE(write_all, PEN_GPU_BATCH, "FAKE_CUFILE_BATCH_SHUFFLE=1"), 0);
}

static void deep(int transfer)
{
	open_world(REQUESTS_MAX * 64, true);
	WANT(!start(transfer, REQUESTS_MAX, NULL));
	prepare(REQUESTS_MAX, 64, 0, false);
	for (int i = 0; i < 3; i++) {
		run_requests(REQUESTS_MAX);
		WANT(world.full == REQUESTS_MAX);
	}
	check_memory(0, REQUESTS_MAX * 64);
	queue_fini(&world.queue);
	close_world();
}

TEST(more_requests_than_a_batch_holds)
{
	NEED_FAKES();
	for EACH(i)
		CHECK_EQ(CASE(deep, flavours[i], "FAKE_CUFILE_BATCH_SHUFFLE=1"), 0);
}

static void end_of_file(int transfer)
{
	open_world(3 * 4096, true);
	WANT(!start(transfer, 8, NULL));
	prepare(3, 4096, 0, false);
	WANT(!ftruncate(world.object.fd, 5000));
	run_requests(3);
	WANT(world.full == 1 && world.shorts == 2);
	WANT(world.requests[1].done == 5000 - 4096 && world.requests[2].done == 0);
	check_memory(0, 5000);
	queue_fini(&world.queue);
	close_world();
}

TEST(the_end_of_the_file_is_short)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(end_of_file, flavours[i]), 0);
		CHECK_EQ(CASE(end_of_file, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
	}
}

static void one_short(int transfer)
{
	open_world(20 * 1000, true);
	WANT(!start(transfer, 4, NULL));
	prepare(20, 1000, 0, false);
	run_requests(20);
	WANT(world.shorts == 1 && world.full == 19);
	for (int i = 0; i < 20; i++)
		WANT(world.requests[i].done == 1000 || world.requests[i].done == 500);
	queue_fini(&world.queue);
	close_world();
}

TEST(a_short_transfer_comes_home_short)
{
	NEED_FAKES();
	for EACH(i)
		CHECK_EQ(CASE(one_short, flavours[i], "FAKE_CUFILE_SHORT=7"), 0);
}

/* 20 reads of which one fails; what the error says is left in world.error. */
static void one_failed(int transfer)
{
	open_world(20 * 1000, true);
	WANT(!start(transfer, 4, NULL));
	prepare(20, 1000, 0, false);
	run_requests(20);
	WANT(world.failed == 1 && world.full == 19);
	WANT(world.error.offset >= 0 && !strcmp(world.error.object, world.path));
	queue_fini(&world.queue);
	close_world();
}

static void one_failed_cufile(int transfer)
{
	one_failed(transfer);
	WANT(world.error.domain == PEN_DOMAIN_CUFILE && world.error.raw == 5013);
	WANT(world.error.code == -EFAULT);
}

static void one_failed_errno(int transfer)
{
	one_failed(transfer);
	WANT(world.error.domain == PEN_DOMAIN_ERRNO && world.error.code == -ENOSPC);
}

static void one_timed_out(int transfer)
{
	one_failed(transfer);
	WANT(world.error.code == -ETIMEDOUT);
}

TEST(a_failed_call_comes_home_failed_and_alone)
{
	NEED_FAKES();
	CHECK_EQ(CASE(one_failed_cufile, PEN_GPU_DIRECT, "FAKE_CUFILE_FAIL=cuFileRead:3=5013"), 0);
	CHECK_EQ(CASE(one_failed_errno, PEN_GPU_DIRECT, "FAKE_CUFILE_FAIL=cuFileRead:3=28"), 0);
	CHECK_EQ(CASE(one_failed_cufile, PEN_GPU_DIRECT_ASYNC,
		      "FAKE_CUFILE_FAIL=cuFileReadAsync:3=5013",
		      "FAKE_CUFILE_COMPAT=0"), 0);
	CHECK_EQ(CASE(one_failed_cufile, PEN_GPU_DIRECT_ASYNC, "FAKE_CUFILE_FAIL=stream-io:4=5013",
		      "FAKE_CUFILE_COMPAT=0"), 0);
	CHECK_EQ(CASE(one_failed_errno, PEN_GPU_DIRECT_ASYNC, "FAKE_CUFILE_FAIL=stream-io:4=28",
		      "FAKE_CUFILE_COMPAT=0"), 0);
	CHECK_EQ(CASE(one_failed_cufile, PEN_GPU_BATCH_STREAM,
		      "FAKE_CUFILE_FAIL=cuFileReadAsync:3=5013",
		      "FAKE_CUFILE_COMPAT=0"), 0);
	CHECK_EQ(CASE(one_failed_cufile, PEN_GPU_BATCH_STREAM, "FAKE_CUFILE_FAIL=stream-io:20=5013",
		      "FAKE_CUFILE_COMPAT=0"), 0);
	CHECK_EQ(CASE(one_failed_cufile, PEN_GPU_BATCH, "FAKE_CUFILE_FAIL=batch-entry:5=5013"), 0);
	CHECK_EQ(CASE(one_timed_out, PEN_GPU_BATCH, "FAKE_CUFILE_FAIL=batch-entry:5=110"), 0);
	CHECK_EQ(CASE(one_failed_errno, PEN_GPU_BATCH, "FAKE_CUFILE_FAIL=batch-entry:5=28",
		      "FAKE_CUFILE_BATCH_SHUFFLE=1"), 0);
}

/* `failing` of 20 fail, and what comes after goes well again. */
static void some_failed(int failing)
{
	int transfer = failing < 0 ? PEN_GPU_DIRECT_ASYNC : PEN_GPU_BATCH;

	open_world(20 * 1000, true);
	WANT(!start(transfer, 4, NULL));
	prepare(20, 1000, 0, false);
	run_requests(20);
	WANT(world.failed == (unsigned int)abs(failing) % 100);
	run_requests(20);
	WANT(world.full == 20);
	check_memory(0, 20 * 1000);
	queue_fini(&world.queue);
	close_world();
}

TEST(a_refused_batch_fails_whole_and_the_next_one_travels)
{
	NEED_FAKES();
	CHECK_EQ(CASE(some_failed, 4, "FAKE_CUFILE_FAIL=cuFileBatchIOSubmit:2=5035"), 0);
	/* Asking for the state once more is enough for the first, and not for the second. */
	CHECK_EQ(CASE(some_failed, 0, "FAKE_CUFILE_FAIL=cuFileBatchIOGetStatus:2=5041"), 0);
	CHECK_EQ(CASE(some_failed, 4,
		      "FAKE_CUFILE_FAIL=cuFileBatchIOGetStatus:1=5041,"
		      "cuFileBatchIOGetStatus:2=5041,cuFileBatchIOGetStatus:3=5041"), 0);
}

TEST(a_lost_fence_costs_no_request)
{
	NEED_FAKES();
	CHECK_EQ(CASE(some_failed, -100, "FAKE_CUDA_FAIL=cuEventRecord:3=999"), 0);
	CHECK_EQ(CASE(some_failed, -100, "FAKE_CUDA_FAIL=cuEventQuery:3=999"), 0);
}

/* Whatever fails for good, all requests come home and nothing is left. */
static void all_lost(int transfer)
{
	open_world(20 * 1000, true);
	WANT(!start(transfer, 4, NULL));
	prepare(20, 1000, 0, false);
	run_requests(20);
	queue_fini(&world.queue);
	close_world();
}

TEST(what_fails_for_good_brings_everything_home)
{
	NEED_FAKES();
	CHECK_EQ(CASE(all_lost, PEN_GPU_BATCH,
		      "FAKE_CUFILE_FAIL=cuFileBatchIOGetStatus:*=5041"), 0);
	CHECK_EQ(CASE(all_lost, PEN_GPU_BATCH, "FAKE_CUFILE_FAIL=cuFileBatchIOSubmit:*=5035"), 0);
	CHECK_EQ(CASE(all_lost, PEN_GPU_BATCH, "FAKE_CUFILE_FAIL=cuFileBatchIOSubmit:1=5035,"
				   "cuFileBatchIOSetUp:2+=5039"), 0);
	CHECK_EQ(CASE(all_lost, PEN_GPU_DIRECT_ASYNC,
		      "FAKE_CUFILE_FAIL=cuFileReadAsync:*=5030"), 0);
	CHECK_EQ(CASE(all_lost, PEN_GPU_BATCH_STREAM, "FAKE_CUFILE_FAIL=stream-io:*=5030"), 0);
	CHECK_EQ(CASE(all_lost, PEN_GPU_DIRECT_ASYNC, "FAKE_CUDA_FAIL=cuEventQuery:*=999"), 0);
	CHECK_EQ(CASE(all_lost, PEN_GPU_DIRECT, "FAKE_CUFILE_FAIL=cuFileRead:*=5030"), 0);
}

/* How often the library was asked for something, since count_library() was the hook. */
static unsigned int reads, stream_reads, stream_writes;

static int count_library(const char *name)
{
	reads += !strcmp(name, "cuFileRead");
	stream_reads += !strcmp(name, "cuFileReadAsync");
	stream_writes += !strcmp(name, "cuFileWriteAsync");
	return 0;
}

/* Each request's bytes are looked at the moment it is home. */
static void in_place(int transfer)
{
	struct queue_request *home[3];
	unsigned int sent = 0, taken = 0;

	open_world(40 * 1000, true);
	WANT(!start(transfer, 4, NULL));
	prepare(40, 1000, 0, false);
	while (taken < 40 && !bad) {
		unsigned int n;

		while (sent < 40 && !queue_submit(&world.queue, &world.requests[sent]))
			sent++;
		n = queue_reap(&world.queue, home, 3, 1000000);
		for (unsigned int i = 0; i < n; i++) {
			account(home[i]);
			check_memory(home[i]->offset, 1000);
		}
		taken += n;
	}
	WANT(world.full == 40);
	queue_fini(&world.queue);
	close_world();
}

TEST(a_call_comes_home_after_its_bytes)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(in_place, flavours[i]), 0);
		CHECK_EQ(CASE(in_place, flavours[i], "FAKE_CUDA_POLLS=0"), 0);
		CHECK_EQ(CASE(in_place, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
		/* The stream is waited for then: once by another, once by closing it. */
		CHECK_EQ(CASE(in_place, flavours[i], "FAKE_CUDA_FAIL=cuEventRecord:3=999"), 0);
		CHECK_EQ(CASE(in_place, flavours[i], "FAKE_CUDA_FAIL=cuEventQuery:*=999"), 0);
		CHECK_EQ(CASE(in_place, flavours[i],
			      "FAKE_CUDA_FAIL=cuEventQuery:3=999,cuStreamCreate:2=2"), 0);
	}
}

/* Nothing says when the library is done with a read that it stages itself on a stream. */
static void not_on_a_stream(int transfer)
{
	bool streams = transfer == PEN_GPU_DIRECT_ASYNC || transfer == PEN_GPU_BATCH_STREAM;

	sys_fault_hook = count_library;
	open_world(20 * 1000, true);
	WANT(!start(transfer, 8, NULL));
	prepare(20, 1000, 0, false);
	run_requests(20);
	WANT(world.full == 20);
	check_memory(0, 20 * 1000);
	WANT(!stream_reads && (!streams || reads == 20));
	prepare(20, 1000, 0, true);
	run_requests(20);
	check_file(0, 20 * 1000);
	WANT(stream_writes == (streams ? 20 : 0));
	queue_fini(&world.queue);
	close_world();
}

static void on_a_stream(int transfer)
{
	sys_fault_hook = count_library;
	open_world(20 * 1000, true);
	WANT(!start(transfer, 8, NULL));
	prepare(20, 1000, 0, false);
	run_requests(20);
	check_memory(0, 20 * 1000);
	WANT(stream_reads == 20 && !reads);
	queue_fini(&world.queue);
	close_world();
}

TEST(a_read_that_the_library_stages_is_not_put_on_a_stream)
{
	NEED_FAKES();
	for EACH(i)
		CHECK_EQ(CASE(not_on_a_stream, flavours[i]), 0);
	CHECK_EQ(CASE(on_a_stream, PEN_GPU_DIRECT_ASYNC, "FAKE_CUFILE_COMPAT=0"), 0);
	CHECK_EQ(CASE(on_a_stream, PEN_GPU_BATCH_STREAM, "FAKE_CUFILE_COMPAT=0"), 0);
}

/* Through the engine: what a job that is over has read is there, at once, whatever the lanes. */
static void engine_reads(int transfer)
{
	static const unsigned int lane_counts[] = { 1, 4, 16 };
	const size_t size = 3 << 20;
	unsigned char *blank = calloc(1, size);
	struct pen_object *object;
	struct pen_error err;

	open_world(size, true);
	WANT(!pen_object_open(world.path, PEN_READ, 0, &object, &err));
	for (int i = 0; i < 6; i++) {
		struct pen_options options = PEN_OPTIONS_INIT;
		struct pen_report report = PEN_REPORT_INIT;
		size_t skip = i % 2 ? 777 : 0;
		struct pen_extent extent = {
			.object = object, .offset = skip, .length = size - skip,
			.memory = world.memory + skip,
		};

		options.transfer = transfer;
		options.lanes = lane_counts[i / 2];
		options.request_size = 128 << 10;
		WANT(!pen_device_put(world.device, world.memory, blank, size, &err));
		WANT(!pen_transfer(PEN_READ, world.device, &extent, 1, &options, &report, &err));
		check_memory(skip, size - skip);
		WANT(report.bytes == size - skip && report.path_count == 1);
		WANT(strstr(report.paths[0].path, "cufile-compat"));
	}
	pen_object_close(object);
	free(blank);
	cufile_trim();
	close_world();
}

TEST(a_job_by_any_flavour_ends_after_its_bytes)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(engine_reads, flavours[i]), 0);
		CHECK_EQ(CASE(engine_reads, flavours[i], "FAKE_CUDA_POLLS=0"), 0);
	}
}

static void refused_file(int transfer)
{
	open_world(20 * 1000, true);
	WANT(!start(transfer, 4, NULL));
	prepare(20, 1000, 0, false);
	run_requests(20);
	WANT(world.failed == 20 && world.error.raw == 5027);
	WANT(strstr(world.error.hint, "ID_FS_USAGE") && strstr(world.error.hint, "/run/udev"));
	queue_fini(&world.queue);
	close_world();
}

static void refused_driver(int transfer)
{
	struct pen_error err;

	open_world(1000, true);
	for (int i = 0; i < 2; i++) {
		WANT(start(transfer, 4, &err) == -ENODEV);
		WANT(err.domain == PEN_DOMAIN_CUFILE && err.raw == 5001 && err.hint[0]);
	}
	close_world();
}

TEST(refusals_have_words)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(refused_file, flavours[i], "FAKE_CUFILE_REGISTER_ERROR=5027"), 0);
		CHECK_EQ(CASE(refused_driver, flavours[i], "FAKE_CUFILE_DRIVER_ERROR=5001"), 0);
	}
}

/* More files than the queue keeps registered, all in flight at once. */
static void many_files(int transfer)
{
	struct pen_object objects[50];

	open_world(50 * 1000, true);
	WANT(!start(transfer, 50, NULL));
	prepare(50, 1000, 0, false);
	for (int i = 0; i < 50; i++) {
		objects[i] = world.object;
		objects[i].id = (uint64_t)i + 1;
		objects[i].fd = open(world.path, O_RDWR | O_CLOEXEC);
		world.requests[i].object = &objects[i];
	}
	run_requests(50);
	WANT(world.full == 50);
	check_memory(0, 50 * 1000);
	queue_fini(&world.queue);
	for (int i = 0; i < 50; i++)
		close(objects[i].fd);
	close_world();
}

TEST(files_take_turns)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(many_files, flavours[i]), 0);
		CHECK_EQ(CASE(many_files, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
	}
}

/* Two lanes on one object: a descriptor can be registered only once. */
static void two_queues(int transfer)
{
	struct queue_setup setup = { .depth = 2, .transfer = transfer };
	struct queue_request *home[1], request;
	struct queue other;
	unsigned int n = 0;

	open_world(20 * 1000, true);
	setup.device = world.device;
	WANT(!start(transfer, 4, NULL));
	WANT(!queue_init(&other, &queue_cufile_ops, &setup, NULL));
	prepare(20, 1000, 0, false);
	request = world.requests[0];
	WANT(!queue_submit(&other, &request));
	run_requests(20);
	WANT(world.full == 20);
	for (int i = 0; i < 100 && !n; i++)
		n = queue_reap(&other, home, 1, 1000000);
	WANT(n == 1 && !request.result && request.done == 1000);
	queue_fini(&other);
	run_requests(20);
	WANT(world.full == 20);
	queue_fini(&world.queue);
	close_world();
}

TEST(lanes_share_a_file)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(two_queues, flavours[i]), 0);
		CHECK_EQ(CASE(two_queues, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
	}
}

#define LANES 4

struct lane {
	pthread_t thread;
	int transfer;
	size_t offset;
	unsigned int full;
};

static void *run_lane(void *argument)
{
	struct lane *lane = argument;
	struct queue_setup setup = {
		.device = world.device, .depth = 4, .transfer = lane->transfer,
	};
	struct queue_request requests[25], *home[3];
	struct queue queue;
	unsigned int sent = 0, taken = 0;

	if (queue_init(&queue, &queue_cufile_ops, &setup, NULL))
		return NULL;
	for (unsigned int i = 0; i < 25; i++)
		requests[i] = (struct queue_request){
			.object = &world.object,
			.offset = lane->offset + i * 1000,
			.length = 1000,
			.room = 1000,
			.buffer = world.memory + lane->offset + i * 1000,
			.buffer_index = -1,
		};
	while (taken < 25) {
		unsigned int n;

		while (sent < 25 && !queue_submit(&queue, &requests[sent]))
			sent++;
		n = queue_reap(&queue, home, 3, 1000000);
		for (unsigned int i = 0; i < n; i++)
			lane->full += !home[i]->result && home[i]->done == 1000;
		taken += n;
	}
	queue_fini(&queue);
	return NULL;
}

static void lanes(int transfer)
{
	struct lane all[LANES];

	open_world(LANES * 25000, true);
	for (int i = 0; i < LANES; i++) {
		all[i] = (struct lane){ .transfer = transfer, .offset = (size_t)i * 25000 };
		WANT(!pthread_create(&all[i].thread, NULL, run_lane, &all[i]));
	}
	for (int i = 0; i < LANES; i++) {
		pthread_join(all[i].thread, NULL);
		WANT(all[i].full == 25);
	}
	check_memory(0, LANES * 25000);
	close_world();
}

TEST(lanes_run_at_the_same_time)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(lanes, flavours[i]), 0);
		CHECK_EQ(CASE(lanes, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
	}
}

/* A queue given up in mid-flight waits for what flies. */
static void abandoned(int transfer)
{
	open_world(20 * 1000, true);
	WANT(!start(transfer, 20, NULL));
	prepare(20, 1000, 0, false);
	for (int i = 0; i < 20; i++)
		WANT(!queue_submit(&world.queue, &world.requests[i]));
	queue_reap(&world.queue, (struct queue_request *[1]){ NULL }, 1, 0);
	queue_fini(&world.queue);
	check_memory(0, 20 * 1000);
	close_world();
}

TEST(fini_waits)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(abandoned, flavours[i]), 0);
		CHECK_EQ(CASE(abandoned, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
	}
}

static void probed(int compat)
{
	struct pen_device *host;
	struct pen_error err;
	bool found = false;

	open_world(1000, true);
	WANT(!queue_cufile_probe(&world.object, world.device, &found, &err));
	WANT(found == compat);
	WANT(!compat || strstr(err.message, "compatibility mode"));
	WANT(!pen_device_open("host", &host, NULL));
	WANT(queue_cufile_probe(&world.object, host, &found, &err) == -ENOTSUP && err.hint[0]);
	pen_device_close(host);
	world.object.fd = -1;
	WANT(queue_cufile_probe(&world.object, world.device, &found, &err) == -ENOTSUP);
	cufile_trim();
	close_world();
}

static void probe_refused(int raw)
{
	struct pen_error err;
	bool compat;

	open_world(1000, true);
	WANT(queue_cufile_probe(&world.object, world.device, &compat, &err) < 0);
	WANT(err.raw == raw && err.domain == PEN_DOMAIN_CUFILE);
	close_world();
}

TEST(the_probe_names_the_compatibility_mode)
{
	NEED_FAKES();
	CHECK_EQ(CASE(probed, 1), 0);
	/* No file of a test machine is on a drive that nvidia-fs serves. */
	CHECK_EQ(CASE(probe_refused, 5027, "FAKE_CUFILE_REGISTER_ERROR=5027"), 0);
	CHECK_EQ(CASE(probe_refused, 5001, "FAKE_CUFILE_DRIVER_ERROR=5001"), 0);
}

static unsigned long fault_at, fault_count;
static bool fault_onward;

static int fail_kth(const char *name)
{
	/* Releasing calls have no failure that anybody could act upon. */
	if (strncmp(name, "cuFile", 6) && strncmp(name, "cuEvent", 7) &&
	    strncmp(name, "cuStream", 8) && strcmp(name, "cuCtxSynchronize") &&
	    strcmp(name, "malloc"))
		return 0;
	fault_count++;
	return fault_count == fault_at || (fault_onward && fault_count > fault_at) ? EIO : 0;
}

/* Fail the k-th call for every k, once or for good, until a run meets no failure. */
static void every_call(int transfer)
{
	struct pen_error err;

	open_world(20 * 1000, true);
	WANT(!pen_device_ready(world.device, NULL));
	for (fault_at = 1; fault_at < 500; fault_at++) {
		bool clean;

		fault_count = 0;
		prepare(20, 1000, 0, false);
		memset(&err, 0, sizeof(err));
		sys_fault_hook = fail_kth;
		if (start(transfer, 4, &err)) {
			WANT(err.code < 0 && err.message[0]);
		} else {
			run_requests(20);
			queue_fini(&world.queue);
		}
		clean = fault_count < fault_at;
		sys_fault_hook = NULL;
		cufile_trim();
		if (clean)
			break;
	}
	/* A batch makes the fewest calls. */
	WANT(fault_at > 15 && fault_at < 500 && world.full == 20);
	check_memory(0, 20 * 1000);
	close_world();
}

static void every_call_onward(int transfer)
{
	fault_onward = true;
	every_call(transfer);
}

TEST(every_call_may_fail)
{
	NEED_FAKES();
	for EACH(i) {
		CHECK_EQ(CASE(every_call, flavours[i]), 0);
		CHECK_EQ(CASE(every_call, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
		CHECK_EQ(CASE(every_call_onward, flavours[i]), 0);
		CHECK_EQ(CASE(every_call_onward, flavours[i], "FAKE_CUFILE_COMPAT=0"), 0);
	}
}

static void put_file(const char *root, const char *path, const char *text)
{
	char full[512], *slash;
	FILE *file;

	snprintf(full, sizeof(full), "%s%s", root, path);
	for (slash = strchr(full + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		mkdir(full, 0700);
		*slash = '/';
	}
	file = fopen(full, "we");
	if (file) {
		fputs(text, file);
		fclose(file);
	}
}

TEST(evidence_is_cheap_and_says_what_is_missing)
{
	char root[] = "/tmp/test_evidence.XXXXXX", reason[PEN_REASON_MAX], command[64];

	unsetenv("CUFILE_USE_PCIP2PDMA");
	unsetenv("CUFILE_ENV_PATH_JSON");
	CHECK(mkdtemp(root) != NULL);
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), -ENOTSUP);
	CHECK(strstr(reason, "nvidia-fs is not loaded") && strstr(reason, "6.2"));
	put_file(root, "/proc/sys/kernel/osrelease", "6.18.0-generic\n");
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), -ENOTSUP);
	CHECK(strstr(reason, "driver is loaded"));
	put_file(root, "/proc/driver/nvidia/version",
		 "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release\n");
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), -ENOTSUP);
	CHECK(strstr(reason, "565"));
	put_file(root, "/proc/driver/nvidia/version",
		 "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release\n");
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), -ENOTSUP);
	CHECK(strstr(reason, "no NVMe drive"));
	put_file(root, "/sys/class/nvme/nvme0", "");
	put_file(root, "/sys/module/nvme_core/parameters/multipath", "Y\n");
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), -ENOTSUP);
	CHECK(strstr(reason, "multipath"));
	put_file(root, "/sys/module/nvme_core/parameters/multipath", "N\n");
	put_file(root, "/etc/cufile.json", "{\n// \"use_pci_p2pdma\": true\n"
		 "\"use_pci_p2pdma\" : false\n}\n");
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), -ENOTSUP);
	CHECK(strstr(reason, "use_pci_p2pdma"));
	put_file(root, "/etc/cufile.json", "{\n\"use_pci_p2pdma\" : true\n}\n");
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), 0);
	put_file(root, "/etc/cufile.json", "{ }\n");
	put_file(root, "/proc/driver/nvidia-fs/version", "2.25\n");
	CHECK_EQ(gds_evidence(root, reason, sizeof(reason)), 0);
	snprintf(command, sizeof(command), "rm -r %s", root);
	CHECK_EQ(system(command), 0);
}

TEST_MAIN
