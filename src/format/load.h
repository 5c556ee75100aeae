/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_LOAD_H
#define FORMAT_LOAD_H
/* What pen_load_start() hands to the engine, apart from it so that it can be looked at. */
#include <stddef.h>
#include "penstock.h"

/*
 * The extents of placements, as few as their boxes allow, each tagged with its placement. Those
 * with nothing to load have none. Free them with free(); NULL after an error.
 */
int load_extents(const struct pen_model *model, const struct pen_placement *placements,
		 size_t count, struct pen_extent **extents, size_t *extent_count,
		 struct pen_error *err);

#endif
