/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_PATHS_H
#define ENGINE_PATHS_H
/*
 * The one table of paths: what each is called, what it carries, by which queue, what it costs and
 * what comes after it where it turns out to be barred. Choosing, stepping down, the report, explain
 * and the manual's list are all read from here.
 *
 * A path goes around the page cache or through it; a job has at most one of each at work, with
 * lanes and a list of requests of their own (schedule.h).
 */
#include <stdbool.h>
#include <stdint.h>
#include "io/queue.h"
#include "penstock.h"

enum path_side { AROUND, THROUGH, SIDES };

enum path_id {
	PATH_GDS,
	PATH_CUFILE_COMPAT,
	PATH_DIRECT_URING,
	PATH_DIRECT_THREADS,
	PATH_MAPPED,
	PATH_CACHED,
	PATH_SYNTHETIC,
	PATHS,
	PATH_NONE = PATHS
};

struct path_kind {
	const char *name;
	const char *what;	/* in a line, for manuals */
	enum object_transport transport;
	enum path_side side;
	const struct queue_ops *queue;
	bool direct;		/* by the O_DIRECT descriptor */
	bool tuned;		/* size and depth are looked for while it runs (tuner.h) */
	bool seen;		/* a core sees the bytes, or can: so they can be digested */
	enum path_id down;	/* what a lane takes instead where this one is barred ... */
	bool down_unasked;	/* ... but not where somebody asked for this one by name */
	uint32_t size;		/* most bytes of one request; 0: what a piece holds */
	unsigned int lanes;	/* most that pay, where bytes go to a GPU ... */
	unsigned int lanes_host;	/* ... and to the host (docs/performance.md) */
	uint64_t lane_worth;	/* bytes that make one more lane worth its thread */
	unsigned int pieces_max;	/* of staging that a lane may hold; 0: all there are */
	unsigned int pieces_first;	/* of them, for a GPU, taken before its first request */
};

extern const struct path_kind path_kinds[PATHS];

/* A path at work: a kind, why it was taken, and what was made of its numbers for this job. */
struct path {
	const struct path_kind *kind;
	char reason[PEN_REASON_MAX];
	enum path_side side;	/* whose requests it carries; that of its kind until a step down */
	bool tuned;		/* the job's tuner serves it; also after a step down */
	int transfer;		/* the flavour of cuFile; else unused */
	uint32_t size;
	uint32_t pieces_max, pieces_first;
	unsigned int lanes;
};

#endif
