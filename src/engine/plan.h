/* SPDX-License-Identifier: MIT */
#ifndef ENGINE_PLAN_H
#define ENGINE_PLAN_H
/*
 * A plan is what a job will do, made once, before any I/O, by a pure function: the extents sorted,
 * neighbours merged, cut into requests, each with the copies that scatter it (or gather it).
 *
 * A copy's memory is an offset into a place. A place is one piece of memory of one device: all of
 * the host's, one extent's on a GPU (two extents that meet there may still be two allocations, and
 * no copy may reach from one into the other), or what the job will allocate, whose address nobody
 * knows yet. Constant bytes have no place at all.
 *
 * Invariants
 *   1. Requests are in order of (object, offset) and do not overlap, except where `straight`.
 *   2. No request crosses a multiple of `unit` of its object. So a lane may merge neighbours into
 *      one larger request at run time, but never has to cut one; and a chunk of at most `unit`
 *      bytes that is read or written whole lies in one request, except where `straight`. Extents
 *      that are coded are cut between their chunks instead, wherever these are; with the blocks
 *      around it such a request is no longer than `unit`.
 *   3. A request of a write has no byte that no copy fills.
 *   4. The copies of a request together move each byte of each extent exactly once.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "base/coding.h"
#include "base/form.h"
#include "penstock.h"

/* Devices of one plan. */
#define PLAN_DEVICES 32

struct plan_place {
	_Atomic uintptr_t base;	/* where it begins; 0 until the job has allocated it */
	uint32_t device;	/* index into plan->devices */
};

/* The place of constant bytes: `offset` is then the byte. */
#define PLACE_FILL UINT32_MAX

/* `rows` rows of `width` bytes between the request's buffer and memory; or, with a coding, whole
 * chunks of it in one row, whose box begins at `offset`. */
struct plan_copy {
	uint64_t at;		/* in the buffer, from the request's first byte */
	uint64_t offset;	/* in the place */
	uint64_t width;
	uint64_t rows;
	uint64_t at_pitch, memory_pitch;	/* between rows; unused where rows is 1 */
	uint32_t place;
	uint32_t form;		/* enum pen_form; `width` is of the buffer */
	const struct coding *coding;	/* or NULL */
	uint64_t chunk, chunks;	/* of the coding: the first, and how many */
};

/* The least unit of a plan with coded extents: a chunk fits, with blocks of up to 32 KiB around. */
#define PLAN_UNIT_CODED ((uint64_t)128 << 10)

/* Numbers whose form changes, and chunks, begin at the same place in a multiple of this in the
 * object and in a buffer, so that they lie well there. */
#define PLAN_FORM_ALIGN 16u

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
};

struct plan {
	struct pen_object **objects;
	size_t object_count, object_room;
	struct pen_device *devices[PLAN_DEVICES];	/* the job's own first */
	uint64_t device_bytes[PLAN_DEVICES];	/* of memory, moved */
	unsigned int device_count;
	struct plan_place *places;
	size_t place_count, place_room;
	struct plan_request *requests;
	size_t request_count, request_room;
	struct plan_copy *copies;
	size_t copy_count, copy_room;
	struct plan_mark *marks;
	size_t mark_count, mark_room;
	uint64_t bytes;		/* in memory, or constant */
	uint64_t fill_bytes;	/* of them, constant */
	uint64_t formed_bytes;	/* of the object, that are decoded or given another form */
	uint64_t coded_bytes;	/* of these, that are decoded */
};

struct plan_wishes {
	struct pen_device *device;	/* of extents that name none */
	bool write;
	uint64_t allocate;	/* not 0: the job's device will have this much, in one place, and
				   the memory of its extents is an offset into it */
	bool straight;		/* what is on a GPU travels straight between there and the store:
				   each request of it is one stretch of one place */
	uint64_t unit;		/* power of two; most bytes of one request */
	uint64_t gap;		/* read through holes up to this */
	uint64_t groups;	/* extents' groups are below this; 0: nobody asks */
	/* For each extent how its bytes are coded, or NULL; NULL: none is. A coded one is read, in
	 * one row of whole chunks; its memory is where the box begins. Codings outlive the plan. */
	const struct coding *const *codings;
};

/* 0 and a plan, or a refusal in words. */
int plan_new(const struct pen_extent *extents, size_t count, const struct plan_wishes *wishes,
	     struct plan **plan, struct pen_error *err);
void plan_free(struct plan *plan);

/* The device of a copy's memory; NULL for constant bytes. */
static inline struct pen_device *plan_device(const struct plan *plan, const struct plan_copy *copy)
{
	return copy->place == PLACE_FILL ? NULL
					 : plan->devices[plan->places[copy->place].device];
}

/* Where a copy's memory lies; not before the job has it. */
static inline unsigned char *plan_memory(const struct plan *plan, const struct plan_copy *copy)
{
	return (unsigned char *)(atomic_load_explicit(&plan->places[copy->place].base,
						      memory_order_relaxed) +
				 (uintptr_t)copy->offset);
}

/* Bytes of memory that a row of the copy takes. */
static inline uint64_t plan_memory_width(const struct plan_copy *copy)
{
	return copy->coding ? coding_bytes(copy->coding, copy->chunk, copy->chunk + copy->chunks)
			    : form_bytes(form_of(copy->form), copy->width);
}

/* Is the request one stretch of memory, no more and no less, and as it is in the object? */
bool plan_is_stretch(const struct plan *plan, uint32_t request);
/* Does that stretch go on from one request to the next? */
bool plan_stretches_on(const struct plan *plan, uint32_t last, uint32_t next);
/* Is the request one stretch of the memory of a GPU? */
bool plan_on_gpu(const struct plan *plan, uint32_t request);

#endif
