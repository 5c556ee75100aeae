/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_PATH_H
#define ENGINE_PATH_H
/*
 * Which way each byte travels. A way is a queue, a descriptor kind and a copy style with a name
 * and a reason. A plan's requests are split into two lists, cold and hot, by what the page cache
 * holds; each list is carried by a way of its own, both at the same time:
 *
 *   cold   direct-uring | direct-threads | gds | cufile-compat | synthetic
 *   hot    cached | mapped
 *
 * Each better way that cannot be had is kept with its reason, and what to do about it.
 */
#include <stdbool.h>
#include <stdint.h>
#include "engine/plan.h"
#include "io/queue.h"
#include "penstock.h"

#define MEMORY_LIMIT_DEFAULT ((uint64_t)128 << 20)
#define MEMORY_LIMIT_MIN ((uint64_t)64 << 10)
#define LANES_MAX 64u

enum path_list { COLD, HOT, LISTS };

struct way {
	char name[24];
	char reason[PEN_REASON_MAX];
	const struct queue_ops *queue;
	enum path_list list;	/* whose requests it carries */
	bool direct;		/* through the O_DIRECT descriptor */
	int transfer;		/* the flavour of cuFile; else unused */
	bool tuned;		/* size and depth by the list's tuner */
	uint32_t size;		/* most bytes of one request */
	uint32_t pieces_max;	/* of staging memory a lane may hold */
	uint32_t pieces_first;	/* of them, taken before its first request */
	unsigned int lanes;
};

/* Indices of the plan's requests. */
struct work {
	uint32_t *requests;
	size_t count;
	uint64_t bytes;
};

struct path {
	struct plan *plan;
	struct work work[LISTS];
	struct way ways[LISTS];
	unsigned int way_count;
	uint64_t memory_limit;
	size_t piece_size;
	uint64_t unit;		/* most bytes of one request of the plan */
	bool gds;		/* the plan is made for real GPUDirect Storage, which auto takes */
	bool hot_is_cold;	/* some of the hot list is not cached, but cannot go direct */
	bool one_at_a_time;	/* CPU_GPU: each step waits for the one before */
	uint32_t refused_count;
	struct pen_path refused[PEN_PATHS_MAX];
};

/* Pieces that are kept for a way's lanes, so that none shall be without: also for those of the GDS
 * way, which stage when they have to step down. */
unsigned int path_pieces_kept(const struct path *path, const struct way *way);

/* Options with every default filled in; -EINVAL with words for what makes no sense. */
int path_options(const struct pen_options *given, struct pen_options *full, struct pen_error *err);

/* Plan the extents and choose their ways. */
int path_choose(enum pen_mode direction, struct pen_device *device,
		const struct pen_extent *extents, size_t count, const struct pen_options *options,
		struct path **path, struct pen_error *err);
void path_free(struct path *path);

#endif
