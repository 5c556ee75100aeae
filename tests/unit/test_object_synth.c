/* SPDX-License-Identifier: MIT */
/* Made-up stores: how they are named, and that they take as long as they say. */
#include <errno.h>
#include "base/pattern.h"
#include "io/queue.h"
#include "io/synth.h"
#include "sys/os.h"
#include "test.h"

static struct pen_object *object;
static struct pen_error err;
static struct queue queue;
static unsigned char bytes[8 << 20];

static int open_store(const char *name, enum pen_mode mode)
{
	return pen_object_open(name, mode, 0, &object, &err);
}

TEST(names_are_understood)
{
	CHECK_EQ(open_store("pattern:1000", PEN_READ), 0);
	CHECK_EQ(pen_object_size(object), 1000);
	CHECK_EQ(object->ops->transport, TRANSPORT_SYNTH);
	CHECK(synth_of(object)->pattern && !object->info.offset_align);
	pen_object_close(object);
	CHECK_EQ(open_store("pattern:1.5G,latency=5ms,rate=2GB,knee=8M", PEN_READ), 0);
	CHECK_EQ(pen_object_size(object), 3ull << 29);
	CHECK_EQ(synth_of(object)->latency_ns, 5000000);
	CHECK_EQ(synth_of(object)->rate, 2000000000);
	CHECK_EQ(synth_of(object)->knee, 8 << 20);
	pen_object_close(object);
	CHECK_EQ(open_store("null:", PEN_READ), 0);
	CHECK(pen_object_size(object) == UINT64_MAX);
	CHECK(!synth_of(object)->pattern);
	pen_object_close(object);
	CHECK_EQ(open_store("null:,latency=1us", PEN_WRITE), 0);
	CHECK_EQ(synth_of(object)->latency_ns, 1000);
	CHECK_EQ(pen_object_commit(object, &err), 0);
	pen_object_close(object);
}

TEST(junk_is_refused_with_the_form)
{
	static const char *const junk[] = {
		"pattern:", "pattern:x", "pattern:-1", "pattern:1G,", "pattern:1G,speed=3",
		"pattern:1G,latency", "pattern:1G,latency=", "pattern:1G,latency=5x",
		"pattern:1G,rate=fast", "pattern:16777216T", "null:1G", "null:latency",
		"pattern:latency=5ms", "pattern:9223372036854775808",
	};

	for (size_t i = 0; i < sizeof(junk) / sizeof(junk[0]); i++) {
		if (open_store(junk[i], PEN_READ) != -EINVAL)
			fprintf(stderr, "%s\n", junk[i]);
		CHECK(!object && err.code == -EINVAL);
		CHECK(strstr(err.hint, "pattern:SIZE") && !strcmp(err.object, junk[i]));
	}
}

static void start(void)
{
	struct queue_setup setup = { .depth = 64 };

	CHECK_EQ(queue_init(&queue, &queue_synth_ops, &setup, &err), 0);
}

/* `count` requests of `length` at once; seconds until the last is home. */
static double run(unsigned int count, size_t length, bool write)
{
	static struct queue_request requests[64];
	struct queue_request *home[64];
	uint64_t begin = os_now();
	unsigned int back = 0;

	for (unsigned int i = 0; i < count; i++) {
		requests[i] = (struct queue_request){
			.object = object, .offset = i * length, .length = length, .room = length,
			.buffer = bytes + i * length, .buffer_index = -1, .write = write,
		};
		CHECK_EQ(queue_submit(&queue, &requests[i]), 0);
	}
	while (back < count) {
		unsigned int n = queue_reap(&queue, home, 64, 10000000);

		for (unsigned int i = 0; i < n; i++)
			CHECK(!home[i]->result && home[i]->done == length);
		back += n;
	}
	return (double)(os_now() - begin) / 1e9;
}

TEST(reads_give_the_pattern_and_writes_are_checked)
{
	struct queue_request request, *home;

	CHECK_EQ(open_store("pattern:1M", PEN_READ), 0);
	start();
	run(16, 4096, false);
	CHECK_EQ(pattern_check(bytes, 16 * 4096, 0), 16 * 4096);
	run(16, 4096, true);
	bytes[5000] ^= 1;
	request = (struct queue_request){ .object = object, .offset = 4096, .length = 4096,
		.room = 4096, .buffer = bytes + 4096, .buffer_index = -1, .write = true };
	CHECK_EQ(queue_submit(&queue, &request), 0);
	CHECK_EQ(queue_reap(&queue, &home, 1, 1000000), 1);
	CHECK_EQ(request.result, -EILSEQ);
	CHECK_EQ(request.error.offset, 5000);
	queue_fini(&queue);
	pen_object_close(object);
}

TEST(null_reads_are_zeros)
{
	CHECK_EQ(open_store("null:", PEN_READ), 0);
	start();
	memset(bytes, 1, 4096);
	run(1, 4096, false);
	for (int i = 0; i < 4096; i++)
		CHECK_EQ(bytes[i], 0);
	queue_fini(&queue);
	pen_object_close(object);
}

TEST_ALONE(each_request_waits_its_latency_and_all_wait_together)
{
	double seconds;

	CHECK_EQ(open_store("pattern:1G,latency=30ms", PEN_READ), 0);
	start();
	seconds = run(1, 4096, false);
	CHECK(seconds >= 0.030 && seconds < 0.25);
	seconds = run(64, 4096, false);
	CHECK(seconds >= 0.030 && seconds < 0.25);
	CHECK_EQ(synth_of(object)->peak, 64 * 4096);
	CHECK_EQ(synth_of(object)->in_flight, 0);
	queue_fini(&queue);
	pen_object_close(object);
}

TEST_ALONE(all_requests_share_the_rate)
{
	double seconds;

	CHECK_EQ(open_store("pattern:1G,rate=80M", PEN_READ), 0);
	start();
	seconds = run(8, 1 << 20, false);
	CHECK(seconds >= 0.099 && seconds < 0.4);
	seconds = run(64, 128 << 10, false);
	CHECK(seconds >= 0.099 && seconds < 0.4);
	queue_fini(&queue);
	pen_object_close(object);
}

TEST_ALONE(beyond_the_knee_the_rate_falls)
{
	double below = 1, above;

	CHECK_EQ(open_store("pattern:1G,rate=80M,knee=4M", PEN_READ), 0);
	start();
	/* What was not slowed down by others on this machine is what counts. */
	for (int tries = 0; tries < 5 && below > 0.115; tries++)
		below = run(4, 1 << 20, false) + run(4, 1 << 20, false);
	CHECK(below >= 0.099 && below <= 0.115);
	/* The first half is within the knee, the second takes 1 / 0.7 as long. */
	above = run(8, 1 << 20, false);
	CHECK(above >= 0.119);
	queue_fini(&queue);
	pen_object_close(object);
}

TEST_MAIN
