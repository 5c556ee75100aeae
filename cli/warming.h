/* SPDX-License-Identifier: MIT */
#ifndef CLI_WARMING_H
#define CLI_WARMING_H
/*
 * --cache after: the engine brings what was read around the page cache into it, in the background;
 * a command that ends has to wait for that. With auto it does not begin, since a command ends
 * when its work is done.
 */
#include "penstock.h"
#include "progress.h"

struct warming {
	const char *reason;	/* the engine's, for what was read around the page cache; or "" */
	uint64_t brought, given_up;
	char why_not[PEN_REASON_MAX];
	double seconds;		/* 0: nothing was brought in */
};

/* Wait, if the job has anything brought in; -ECANCELED when interrupted. `job` must outlive it. */
int warming_finish(struct warming *warming, const struct pen_report *job,
		   struct progress *progress);

#endif
