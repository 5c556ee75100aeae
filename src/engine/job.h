/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_JOB_H
#define ENGINE_JOB_H
/*
 * A job runs a path over lanes.
 *
 *   PLANNED --job_start--> RUNNING --last lane ends, job_wait--> DONE
 *                             |
 *                  job_fail, pen_job_cancel
 *                             v
 *                          DRAINING --last lane ends, job_wait--> FAILED | CANCELLED
 *
 * Invariants
 *   1. The first error wins; later ones are dropped.
 *   2. Once DRAINING no lane takes new work; all that is in flight comes home before anything
 *      is freed.
 *   3. A job belongs to the process that started it: a forked child has none of its threads, and
 *      touches neither its lock nor what it holds.
 *   4. Lanes share only what is atomic here; the data path takes no lock and allocates nothing.
 */
#include <pthread.h>
#include <stdatomic.h>
#include "base/hist.h"
#include "engine/groups.h"
#include "engine/path.h"
#include "engine/tuner.h"
#include "mem/ring.h"

/* Bytes that went one way. Ways are few; a lane that steps down adds one. */
struct tally {
	char path[24];
	char reason[PEN_REASON_MAX];
	_Atomic uint64_t bytes;
};

/* One request on its way: taken from the plan, in a ring slot or straight in memory.
 *
 *   read    QUEUED -> LANDED -> COPYING -> (home)      placed: QUEUED -> (home)
 *   write   COPYING -> COPIED -> QUEUED -> (home)      placed: COPIED -> QUEUED -> (home)
 */
enum transit_state { TRANSIT_NONE, QUEUED, LANDED, COPYING, COPIED };

struct transit {
	enum transit_state state;
	struct slot *slot;
	struct queue_request io;
	struct device_fence fence;
	uint32_t first, count;		/* requests of the plan, neighbours */
	uint64_t offset;		/* of the first */
	uint64_t length;		/* of all */
	uint64_t lead;			/* bytes in the buffer before `offset`, for alignment */
	uint64_t bytes;			/* that the user gets */
	unsigned char *buffer;		/* where `offset - lead` lies */
	bool placed;			/* straight into host memory */
	unsigned int retries;
	uint64_t born_ns;
};

struct lane {
	struct pen_job *job;
	const struct way *way;
	unsigned int index, peers;	/* among the lanes of the same way */
	pthread_t thread;
	bool started;

	/* All below belongs to the lane's thread until it has ended, except the counters. */
	struct way own_way;		/* what it uses now; differs from *way after a step down */
	struct queue queue;
	bool queue_up;
	struct ring ring;
	struct transit transits[RING_SLOTS];	/* one per slot of the ring */
	bool device_up;
	unsigned int pinned_pieces;
	struct range {
		uint32_t first, count;
	} held[2 * RING_SLOTS];		/* taken from the list, waiting for room or another way */
	unsigned int held_count;
	uint64_t waited_ns, last_wait_ns;	/* for copies: this time so far, and last time */
	bool leaving;			/* its way is barred; it goes once nothing is under way */
	struct pen_error why_leaving;
	struct tally *tally, *edge_tally;
	struct hist latency;
	uint64_t requests, retries, storage_bytes, cpu_ns;
	_Atomic uint64_t bytes;		/* read by pen_job_poll */
};

struct pen_job {
	enum pen_mode direction;
	struct pen_device *device;
	struct pen_options options;
	char *inject;			/* our copy of the caller's text */
	struct path *path;
	struct piece_budget budget;
	struct tuner tuner;		/* of the way that is tuned, if any */
	_Atomic size_t next[LISTS];	/* cursor of each list */
	_Atomic uint64_t bytes_left[LISTS];	/* not taken yet; guides how much is taken */
	_Atomic uint64_t serial;
	_Atomic uint64_t injected;
	void *allocated;		/* memory that the job allocated itself; guarded by lock */
	_Atomic intptr_t shift;		/* from the plan's addresses to real ones */
	struct device_fence after;	/* behind what the caller's stream held at the start */
	struct device_stream stream;	/* of all lanes; open while it has users */
	unsigned int stream_users;	/* guarded by lock */
	_Atomic uint64_t ready_ns;	/* when a lane's device could first take bytes */
	uint64_t start_ns;
	unsigned int generation;	/* os_generation() of the process that started it */
	atomic_int state;
	atomic_bool cancelled, failed;
	atomic_bool started;		/* all threads of lanes are there */
	atomic_uint running;		/* lanes that have not ended */
	_Atomic uint64_t end_ns;
	pthread_mutex_t lock;		/* guards error, tallies, refused, allocated */
	pthread_cond_t news;		/* the last lane has ended, or an awaited group is there */
	struct groups arrived;		/* in memory, or with the store */
	struct groups gathered;		/* of a write: taken from memory */
	struct pen_error error;
	struct tally tallies[PEN_PATHS_MAX];
	unsigned int tally_count;
	uint32_t refused_count;
	struct pen_path refused[PEN_PATHS_MAX];
	struct lane *lanes;
	unsigned int lane_count;
};

/* True while lanes may take new work. */
bool job_running(struct pen_job *job);

/* The first error wins; the job starts to drain. */
void job_fail(struct pen_job *job, const struct pen_error *err);

/* A lane begins, and ends, to use the job's stream: copies go over one link, and a stream for each
 * lane would only cost the time to make it. Lane's thread, after device_enter(). */
int job_stream_join(struct pen_job *job, struct pen_error *err);
void job_stream_leave(struct pen_job *job);

/* Allocate the memory that the caller left to the job, once. The device must be ready. */
int job_allocate(struct pen_job *job, struct pen_error *err);

/* The last act of a lane. */
void job_lane_ended(struct pen_job *job);

/* The tally of a path, made on first use. */
struct tally *job_tally(struct pen_job *job, const char *path, const char *reason);

/* A way that turned out not to be had. */
void job_refused(struct pen_job *job, const char *path, const struct pen_error *why);

/* A lane's life; lane.c. */
void *lane_run(void *lane);

#endif
