/* SPDX-License-Identifier: MIT */
#ifndef CLI_WATCH_H
#define CLI_WATCH_H
/*
 * Looking after jobs while they run: the bar moves, Ctrl-C stops them, one that fails stops the
 * others. And releasing them, so that the first cause is what is told.
 */
#include <stddef.h>
#include "penstock.h"
#include "progress.h"

#define WATCH_LOOK_SECONDS 0.05	/* between looks at the jobs */

/*
 * Wait until all jobs (some may be NULL) have ended. The bar shows `before` and what the jobs have
 * moved, by `sides`: bytes that are read and written again count once.
 */
void watch_jobs(struct pen_job *const jobs[], size_t count, struct progress *progress,
		uint64_t before, unsigned int sides);

/* Release a job and add to its sum. A failure counts more than the stop it led to. */
void watch_finish(struct pen_job *job, struct pen_report *sum, int *rc, struct pen_error *err);

#endif
