/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_JOB_H
#define ENGINE_JOB_H
/*
 * A job runs a schedule over lanes.
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
#include "engine/groups.h"
#include "engine/lane.h"
#include "engine/schedule.h"
#include "engine/tuner.h"
#include "mem/pool.h"

/* Bytes that took one path. They are few; a lane that steps down adds one. */
struct tally {
	char path[24];
	char reason[PEN_REASON_MAX];
	_Atomic uint64_t bytes;
};

/* Copies go over one link, so lanes share one stream. Kernels begin and end slowly; those of
 * several streams fill each other's gaps. */
#define JOB_STREAMS 8u

/* A device that the job's bytes are on. */
struct job_device {
	struct pen_device *device;
	struct job_stream {
		struct device_stream stream;	/* open while it has users */
		unsigned int users;		/* lanes; guarded by the job's lock */
	} streams[JOB_STREAMS];
};

/* Behind what a stream of the caller's held at the start. */
struct job_after {
	struct pen_device *device;
	struct device_fence fence;
};

/* How the bytes of a read are coded: for each extent, or NULL. */
struct job_coded {
	const struct coding *const *codings;
	void (*free)(void *context);	/* of them; when the job has ended */
	void *context;
};

struct pen_job {
	enum pen_mode direction;
	struct pen_device *device;
	struct pen_options options;
	char *inject;			/* our copy of the caller's text */
	struct schedule *schedule;
	struct job_device devices[PLAN_DEVICES];	/* the plan's, by its numbers */
	unsigned int staging_device;	/* of these, for which staging memory is pinned */
	struct job_after *after;	/* all of it comes first */
	size_t after_count;
	bool uses_host;			/* some of the memory is the host's */
	uint64_t request_least;		/* smaller ones are not worth it to the store */
	struct pen_digests *asked;	/* our copy of options.digests */
	const struct pen_digests **digests;	/* for each object of the plan, or NULL; NULL:
						   nobody asks */
	struct piece_budget budget;
	struct tuner tuner;		/* of the path that is tuned, if any */
	_Atomic size_t next[SIDES];	/* cursor of each list */
	_Atomic uint64_t bytes_left[SIDES];	/* not taken yet; guides how much is taken */
	_Atomic uint64_t serial;
	_Atomic uint64_t injected;
	void *allocated;		/* memory that the job allocated itself; guarded by lock */
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
	atomic_int eventfd;		/* told of the same; -1: nobody has asked for it */
	struct groups arrived;		/* in memory, or with the store */
	struct groups gathered;		/* of a write: taken from memory */
	struct job_coded coded;		/* all NULL: nothing is */
	atomic_bool streamed;		/* some of it had to wait for the store */
	uint64_t warming_bytes;		/* of the report, as is what follows; set at the end */
	char cache_reason[PEN_REASON_MAX];
	struct pen_error error;
	struct tally tallies[PEN_PATHS_MAX];
	unsigned int tally_count;
	uint32_t refused_count;
	struct pen_path refused[PEN_PATHS_MAX];
	struct lane *lanes;
	unsigned int lane_count;
};

/* pen_job_start() of a read of coded bytes. After an error `coded` is the caller's still. */
int job_start_coded(struct pen_device *device, const struct pen_extent *extents, size_t count,
		    const struct pen_options *options, const struct job_coded *coded,
		    struct pen_job **job, struct pen_error *err);

/* The streams that options name: each is some GPU's, and whose, has to be said. `device` is the
 * job's. */
int job_streams_check(struct pen_device *device, const struct pen_options *options,
		      struct pen_error *err);

/* True while lanes may take new work. */
bool job_running(struct pen_job *job);

/* The first error wins; the job starts to drain. */
void job_fail(struct pen_job *job, const struct pen_error *err);

/* A lane begins, and ends, to use one of the job's streams on a device. Lane's thread, with the
 * device entered. */
int job_stream_join(struct pen_job *job, unsigned int device, unsigned int stream,
		    struct pen_error *err);
void job_stream_leave(struct pen_job *job, unsigned int device, unsigned int stream);

/* Allocate the memory that the caller left to the job, once, if it is this device's, which must be
 * ready. */
int job_allocate(struct pen_job *job, unsigned int device, struct pen_error *err);

/* The last act of a lane. */
void job_lane_ended(struct pen_job *job);

/* ---- report.c ---- */

/* Moved so far, by all lanes. */
uint64_t job_bytes(struct pen_job *job);

/* A report can be filled in if its size is set; NULL is nobody's. */
int job_report_check(const struct pen_report *report, struct pen_error *err);
/* After the last lane. */
void job_report(struct pen_job *job, struct pen_report *report);

/* The tally of a path, made on first use. */
struct tally *job_tally(struct pen_job *job, const char *path, const char *reason);

/* A path that turned out not to be had. */
void job_refused(struct pen_job *job, const char *path, const struct pen_error *why);

#endif
