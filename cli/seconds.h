/* SPDX-License-Identifier: MIT */
#ifndef CLI_SECONDS_H
#define CLI_SECONDS_H
/* The time as a number of seconds that only grows; two of them make a duration. */
#include <time.h>

static inline double seconds_now(void)
{
	struct timespec moment;

	clock_gettime(CLOCK_MONOTONIC, &moment);
	return (double)moment.tv_sec + (double)moment.tv_nsec / 1e9;
}

#endif
