/* SPDX-License-Identifier: MIT */
#ifndef IO_SYNTH_H
#define IO_SYNTH_H
/*
 * A made-up store: what object_synth.c describes and queue_synth.c plays. The model is a pipe: a
 * request waits for its turn on a wire of `rate` bytes a second, then for `latency`; with more
 * than `knee` bytes in flight the wire is 30 % slower. Zero switches a term off. What it wishes
 * of requests - least, best and most bytes, resent whole, when to retry - is in its object_info,
 * as for any store: so stores that are no files can be played without one.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "io/object.h"

struct synth {
	bool pattern;			/* else zeros in, nothing out */
	uint64_t latency_ns;
	uint64_t rate;			/* bytes a second */
	uint64_t knee;			/* bytes */
	_Atomic uint64_t wire_free_ns;	/* when the wire has sent what it was given */
	_Atomic uint64_t in_flight;	/* bytes */
	_Atomic uint64_t peak;		/* most bytes ever in flight, for tests */
};

static inline struct synth *synth_of(const struct pen_object *object)
{
	return object->state;
}

#endif
