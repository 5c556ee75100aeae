/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_TUNER_H
#define ENGINE_TUNER_H
/*
 * Finds the knee of a store at run time: how large requests should be and how many should be in
 * flight. Some disks are 30 % slower with 256 MiB in flight than with 8 MiB; a striped array or a
 * network store is the other way round. So: measure, try a neighbour, come back and measure again
 * (rates drift; a neighbour must beat both the before and the after), keep what clearly pays.
 *
 *   BASE --window full--> TRY --window full--> AGAIN --window full--> TRY (once more) | BASE
 *
 * A neighbour that wins narrowly must win twice: on a busy machine luck is common. A store that is
 * fast from the start is looked at later.
 *
 * What was found is remembered per store and direction for the life of the process; the next job
 * starts there and looks around later.
 *
 * Invariants
 *   1. size * depth never exceeds `bytes_max`; size is a power of two within [size_min, size_max].
 *   2. One lane at a time runs step(); the others only add to counters. Nobody waits.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct tuner_setting {
	uint32_t size;		/* bytes of a request */
	uint32_t depth;		/* requests in flight over all lanes */
};

struct tuner {
	_Atomic uint64_t setting;	/* a tuner_setting, packed */
	uint32_t size_min, size_max, depth_max;
	uint64_t bytes_max;
	bool fixed_size, fixed_depth;
	char store[96];			/* what to remember it under; "" nothing */

	/* The window being measured. */
	_Atomic uint64_t bytes;		/* completed since the last change */
	atomic_flag busy;
	_Atomic uint64_t skip;		/* bytes to ignore after a change */
	uint64_t want;			/* bytes to measure; guarded by busy, as is all below */
	uint64_t start_ns, start_bytes;
	int phase;
	unsigned int move;		/* which neighbour is being tried */
	unsigned int wins;		/* of the neighbour being tried */
	unsigned int rejected;		/* moves in a row that did not pay */
	unsigned int rest;		/* windows to sit still once nothing pays */
	bool near;			/* it was fast from the start */
	struct tuner_setting base;
	double base_rate, try_rate;
	unsigned int steps, moves_kept;	/* for tests and the curious */
};

/* Within what it may look; a size is that of one request, 0 where there is no wish. */
struct tuner_limits {
	uint32_t size_least;	/* smaller ones are not worth it to the store */
	uint32_t size_best;	/* where an unknown store begins */
	uint32_t size_max, depth_max;
	uint64_t bytes_max;	/* in flight */
};

/* `wished` has 0 where the tuner shall decide. */
void tuner_init(struct tuner *tuner, const char *store, bool write, struct tuner_setting wished,
		struct tuner_limits limits);

struct tuner_setting tuner_get(const struct tuner *tuner);

/* A request of `bytes` came home at `now_ns`. */
void tuner_add(struct tuner *tuner, uint64_t bytes, uint64_t now_ns);

/* Remember what was found. */
void tuner_fini(struct tuner *tuner);

/* Forget everything remembered, for tests. */
void tuner_forget(void);

#endif
