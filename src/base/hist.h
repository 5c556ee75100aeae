/* SPDX-License-Identifier: MIT */
#ifndef BASE_HIST_H
#define BASE_HIST_H
/*
 * A latency histogram of fixed size: powers of two, each cut into 16 steps, so a percentile is
 * at most 6 % off whatever its magnitude. One writer; merged after the writer has ended.
 */
#include <stdint.h>

#define HIST_STEPS 16
#define HIST_BUCKETS (64 * HIST_STEPS)

struct hist {
	uint64_t count, max;
	uint32_t buckets[HIST_BUCKETS];
};

void hist_add(struct hist *hist, uint64_t value);
void hist_merge(struct hist *into, const struct hist *from);

/* The value that `share` (0..1) of all values do not exceed; 0 where there are none. */
uint64_t hist_quantile(const struct hist *hist, double share);

#endif
