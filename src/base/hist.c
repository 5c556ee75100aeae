/* SPDX-License-Identifier: MIT */
/* A latency histogram of fixed size; see hist.h. */
#include "base/hist.h"

static unsigned int bucket_of(uint64_t value)
{
	if (value < HIST_STEPS)
		return (unsigned int)value;
	unsigned int power = 63 - (unsigned int)__builtin_clzll(value);
	unsigned int step = (unsigned int)(value >> (power - 4)) & (HIST_STEPS - 1);

	return (power - 3) * HIST_STEPS + step;
}

static uint64_t bucket_top(unsigned int bucket)
{
	unsigned int power, step;

	if (bucket < HIST_STEPS)
		return bucket;
	power = bucket / HIST_STEPS + 3;
	step = bucket % HIST_STEPS;
	return ((uint64_t)(HIST_STEPS + step) << (power - 4)) + ((1ull << (power - 4)) - 1);
}

void hist_add(struct hist *hist, uint64_t value)
{
	hist->buckets[bucket_of(value)]++;
	hist->count++;
	if (value > hist->max)
		hist->max = value;
}

void hist_merge(struct hist *into, const struct hist *from)
{
	for (unsigned int i = 0; i < HIST_BUCKETS; i++)
		into->buckets[i] += from->buckets[i];
	into->count += from->count;
	if (from->max > into->max)
		into->max = from->max;
}

uint64_t hist_quantile(const struct hist *hist, double share)
{
	uint64_t want = (uint64_t)((double)hist->count * share), seen = 0;

	if (!hist->count)
		return 0;
	if (want >= hist->count)
		return hist->max;
	for (unsigned int i = 0; i < HIST_BUCKETS; i++) {
		seen += hist->buckets[i];
		if (seen > want)
			return bucket_top(i) < hist->max ? bucket_top(i) : hist->max;
	}
	return hist->max;
}
