/* SPDX-License-Identifier: MIT */
#ifndef QUEUE_KIT_H
#define QUEUE_KIT_H
/*
 * What the tests of single queues share: a file object, memory for its bytes, requests that cover
 * it piece by piece, and a loop that sends them all and takes each home exactly once.
 */
#include "io/queue.h"
#include "scratch.h"
#include "sys/os.h"

#define KIT_REQUESTS 256
#define KIT_ROOM ((size_t)4 << 20)

static struct pen_object *object;
static struct queue queue;
static struct queue_request requests[KIT_REQUESTS];
static unsigned char *memory;	/* KIT_ROOM bytes, aligned for everything */
static struct pen_error err;
static unsigned int full, shorts, failed;

static inline void open_file(const char *path, enum pen_mode mode, uint64_t size)
{
	void *map;

	CHECK_EQ(pen_object_open(path, mode, size, &object, &err), 0);
	if (!memory) {
		CHECK_EQ(os_map_huge(KIT_ROOM, -1, &map), 0);
		memory = map;
	}
	memset(memory, 0xee, KIT_ROOM);
}

static inline int start_queue(const struct queue_ops *ops, unsigned int depth, const char *inject,
			      _Atomic uint64_t *injected)
{
	struct queue_setup setup = {
		.depth = depth, .pieces = 4, .inject = inject, .injected = injected,
	};

	return queue_init(&queue, ops, &setup, &err);
}

static inline void prepare(unsigned int count, size_t length, bool write, bool direct)
{
	CHECK(count <= KIT_REQUESTS && count * length <= KIT_ROOM);
	for (unsigned int i = 0; i < count; i++)
		requests[i] = (struct queue_request){
			.object = object,
			.offset = i * length,
			.length = length,
			.room = length,
			.buffer = memory + i * length,
			.buffer_index = -1,
			.write = write,
			.direct = direct,
			.serial = i + 1,
		};
}

static inline void run_requests(unsigned int count)
{
	static unsigned char homes[KIT_REQUESTS];
	struct queue_request *home[5];
	unsigned int sent = 0, taken = 0, idle = 0;

	full = shorts = failed = 0;
	memset(homes, 0, sizeof(homes));
	while (taken < count && idle < 2000) {
		unsigned int n;
		int rc = 0;

		while (sent < count && !(rc = queue_submit(&queue, &requests[sent])))
			sent++;
		CHECK(!rc || rc == -EAGAIN);
		n = queue_reap(&queue, home, 5, 1000000);
		idle = n ? 0 : idle + 1;
		for (unsigned int i = 0; i < n; i++) {
			CHECK(home[i] >= requests && home[i] < requests + count);
			CHECK_EQ(++homes[home[i] - requests], 1);
			if (home[i]->result)
				failed++;
			else if (home[i]->done < home[i]->length)
				shorts++;
			else
				full++;
			CHECK(home[i]->ended_ns >= home[i]->started_ns);
		}
		taken += n;
	}
	if (taken < count)
		fprintf(stderr, "only %u of %u requests came home\n", taken, count);
	CHECK_EQ(taken, count);
	CHECK_EQ(queue.queued, 0);
}

static inline void end_queue(void)
{
	queue_fini(&queue);
	pen_object_close(object);
	os_unmap(memory, KIT_ROOM);
	memory = NULL;
}

#endif
