/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H
/*
 * A plan is what a job will do, made once, before any I/O, by a pure function: the extents sorted,
 * neighbours merged, cut into requests, each with the copies that scatter it (or gather it).
 *
 * Invariants
 *   1. Requests are in order of (object, offset) and do not overlap, except where `placed`.
 *   2. No request crosses a multiple of `unit` of its object. So a lane may merge neighbours into
 *      one larger request at run time, but never has to cut one.
 *   3. A request of a write is either aligned at both ends or marked as an edge, and has no byte
 *      that no copy fills.
 *   4. The copies of a request together move each byte of each extent exactly once.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "penstock.h"

/* `rows` rows of `width` bytes between the request's buffer and memory. */
struct plan_copy {
	uint64_t at;		/* in the buffer, from the request's first byte */
	unsigned char *memory;
	uint64_t width;
	uint64_t rows;
	uint64_t at_pitch, memory_pitch;	/* between rows; unused where rows is 1 */
	uint64_t allocation;	/* copies with the same number may become one */
};

/* Bytes of a request that belong to one group, where somebody asks when groups are complete. */
struct plan_mark {
	uint64_t group, bytes;
};

struct plan_request {
	uint64_t offset;	/* in the object */
	uint32_t length;
	uint32_t object;	/* index into plan->objects */
	uint32_t first_copy, copy_count;
	uint32_t first_mark, mark_count;
	bool edge;		/* a write that O_DIRECT cannot do */
};

struct plan {
	struct pen_object **objects;
	size_t object_count, object_room;
	struct plan_request *requests;
	size_t request_count, request_room;
	struct plan_copy *copies;
	size_t copy_count, copy_room;
	struct plan_mark *marks;
	size_t mark_count, mark_room;
	uint64_t bytes;		/* in memory */
};

/* What stands in a plan for the first byte of memory that is allocated later. */
#define PLAN_RELATIVE ((uintptr_t)1 << 32)

struct plan_wishes {
	bool write;
	bool relative;		/* memory is an offset into what the job will allocate ... */
	uint64_t relative_size;	/* ... which will have this size */
	bool placed;		/* each request goes straight to one stretch of memory */
	bool one_memory;	/* a copy may reach from one extent's memory into the next one's; a
				   GPU refuses that where they were allocated one by one */
	uint64_t unit;		/* power of two; most bytes of one request */
	uint64_t gap;		/* read through holes up to this */
	uint64_t groups;		/* extents' groups are below this; 0: nobody asks */
};

/* 0 and a plan, or a refusal in words. */
int plan_new(const struct pen_extent *extents, size_t count, const struct plan_wishes *wishes,
	     struct plan **plan, struct pen_error *err);
void plan_free(struct plan *plan);

#endif
