/* SPDX-License-Identifier: MIT */
#ifndef CLI_CEILING_H
#define CLI_CEILING_H
/*
 * How fast a load could have been here at best, measured by jobs of their own right after it, each
 * with nothing to do but one hop of the way:
 *
 *	store --direct--> host memory                     for the bytes that were read directly
 *	                  pinned memory --copy--> GPU     for all bytes, where there is a GPU
 *	page cache -----> host memory (in place already)  for cached bytes, where there is none
 *
 * The hops of a load overlap, so the slowest of them is the ceiling. A load that was faster than
 * the hops alone, as can be on a store that others use, is its own ceiling.
 */
#include <stdbool.h>
#include "penstock.h"

struct ceiling {
	double store_rate, copy_rate, cache_rate;	/* bytes per second; 0: not in the way */
	double seconds;		/* the least it could take after its set-up; 0: not known */
	const char *reason;	/* why it is not known; NULL where it is, or nobody asked */
};

/* A load that has been done: what was placed where, and what its job reported. */
struct ceiling_load {
	struct pen_model *model;
	struct pen_device *device;
	bool on_host;
	const struct pen_placement *placements;	/* with offsets into `memory` */
	size_t count;
	unsigned char *memory;
	const struct pen_report *report;
};

/*
 * Measure; takes about half a second at most. What cannot be measured is left out. Tensors keep
 * their contents. -ECANCELED after a signal.
 */
int ceiling_measure(struct ceiling *ceiling, const struct ceiling_load *load);

#endif
