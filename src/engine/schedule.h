/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_SCHEDULE_H
#define ENGINE_SCHEDULE_H
/*
 * A schedule is a plan with a path for each of its requests. They are split into two lists, around
 * and through the page cache, each carried by a path of its own, both at the same time.
 *
 *   options.c   what was asked for, checked and filled in
 *   survey.c    what of it lies in the page cache: the two lists
 *   choose.c    a path for each list, with the reason, and a reason for each better one
 *   fit.c       sizes, lanes and staging, within the memory promise
 *
 * The plan comes first, since only it knows the requests; but how it is made depends on one choice,
 * whether GPUDirect Storage carries them: then each goes straight to one stretch of memory. Where
 * such a plan turns out to be too ragged it is made again without.
 *
 * Invariants
 *   1. Each request of the plan is in one list, once, and a list with requests has a path.
 *   2. Everything that can be refused has been when there is a schedule; no byte has moved.
 *   3. What its lanes may pin and stage, all together, fits into memory_limit.
 */
#include <stdbool.h>
#include <stdint.h>
#include "engine/paths.h"
#include "engine/plan.h"
#include "penstock.h"

#define MEMORY_LIMIT_DEFAULT ((uint64_t)128 << 20)
#define MEMORY_LIMIT_MIN ((uint64_t)64 << 10)
#define LANES_MAX 64u

static inline unsigned int at_most(unsigned int value, unsigned int limit)
{
	return value < limit ? value : limit;
}

/* Indices of the plan's requests. */
struct work {
	uint32_t *requests;
	size_t count;
	uint64_t bytes;
};

struct schedule {
	struct plan *plan;
	struct pen_device *gpu;	/* that bytes go to, or come from; the first of them; NULL: none */
	struct work work[SIDES];
	struct path paths[SIDES];
	unsigned int path_count;
	uint64_t memory_limit;
	size_t piece_size;
	bool ahead;		/* a write gathers as far ahead of the store as there is memory */
	unsigned int slots;	/* of staging, for each lane */
	uint64_t unit;		/* most bytes of one request of the plan */
	bool gds;		/* the plan is made for real GPUDirect Storage, which auto takes */
	bool uncached;		/* some of what goes through the cache is not in it */
	bool fetched;		/* so lanes fetch it before they read it */
	bool one_at_a_time;	/* CPU_GPU: each step waits for the one before */
	uint32_t refused_count;
	struct pen_path refused[PEN_PATHS_MAX];
};

/* Options with every default filled in; -EINVAL with words for what makes no sense. */
int schedule_options(const struct pen_options *given, struct pen_options *full,
		     struct pen_error *err);

/* Plan the extents and choose their paths; for `codings`, see struct plan_wishes. */
int schedule_new(enum pen_mode direction, struct pen_device *device,
		 const struct pen_extent *extents, const struct coding *const *codings,
		 size_t count, const struct pen_options *options, struct schedule **schedule,
		 struct pen_error *err);
void schedule_free(struct schedule *schedule);

/* Bytes that a lane needs beside its staging where a core has to do what kernels do (forms.c), kept
 * out of the promise for that; 0: never. */
size_t schedule_part(const struct schedule *schedule);

/* Pieces of staging that are kept for a path's lanes, so that none shall be without: also for
 * those of GDS, which stage when they have to step down. */
unsigned int schedule_pieces_kept(const struct schedule *schedule, const struct path *path);

/* ---- survey.c, for choose.c ---- */

/* Split the requests by what the page cache holds. */
void survey(struct schedule *schedule);
/* One list for everything, whatever was put where before. */
void survey_all_to(struct schedule *schedule, enum path_side side);
/* What was to go around the cache, but cannot go straight between a GPU and the store, goes
 * through it. */
void survey_straight(struct schedule *schedule);
/* How large a hole may be to be read through. */
uint64_t survey_gap(const struct pen_options *options, const struct pen_extent *extents,
		    size_t count);

/* ---- fit.c, for choose.c ---- */

/* What of the wished memory is plentiful, where so much is available; what such jobs left in the
 * pool, `kept`, is taken already and theirs to use. */
uint64_t fit_plenty(uint64_t wished, uint64_t available, uint64_t kept);
/* The memory limit in bytes: PEN_MEMORY_AUTO is what is plentiful now. */
uint64_t fit_limit(const struct pen_options *options, bool write, const struct pen_extent *extents,
		   size_t count);
/* Share out lanes and memory. -EINVAL with words where a block of the store does not fit. */
int fit(struct schedule *schedule, const struct pen_options *options, bool write,
	struct pen_error *err);

#endif
